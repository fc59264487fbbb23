#!/usr/bin/env python3
"""Writes this folder's model and golden.json: a DeepSeek V3 whose corrected scores are negative in the kept groups. A
router that fills the scores of dropped groups with 0 then chooses experts of dropped groups.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/deepseek-groups/make.py

Tokens are greedy tokens of transformers in float32, on weights rounded to bfloat16. `zero_fill_differs` is true if a
reference that fills with 0 in place of minus infinity generates other tokens.
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

FOLDER = Path(__file__).resolve().parent
SEED = 6
NEW_TOKENS = 20
PROMPT_LENS = [7, 16, 31, 33, 48, 64, 100, 1]
MIN_MARGIN = 0.02
CONFIG = DeepseekV3Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    first_k_dense_replace=1, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=2048,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def write_model():
    torch.manual_seed(SEED)
    model = DeepseekV3ForCausalLM(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.1 if norm else 1.2 / weight.shape[-1] ** 0.5) + norm)
        for layer in model.model.layers[CONFIG.first_k_dense_replace:]:
            # Scores are below 1, so most corrected scores are negative.
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(-0.9 + 0.2 * torch.randn_like(bias))
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)


def generate(model, prompt):
    """Returns the new tokens, the smallest margin between the best two logits, and the first logits."""
    tokens, margin, first = list(prompt), float("inf"), None
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        first = logits if first is None else first
        best = logits.topk(2).values
        margin = min(margin, (best[0] - best[1]).item())
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):], margin, first


def zero_filled(run):
    """Runs with a router that fills with 0."""
    fill = torch.Tensor.masked_fill

    def with_zero(self, mask, value):
        return fill(self, mask, 0.0 if value == float("-inf") else value)

    forward = DeepseekV3TopkRouter.forward

    def patched(self, hidden_states):
        torch.Tensor.masked_fill = with_zero
        try:
            return forward(self, hidden_states)
        finally:
            torch.Tensor.masked_fill = fill

    DeepseekV3TopkRouter.forward = patched
    try:
        return run()
    finally:
        DeepseekV3TopkRouter.forward = forward


def main():
    write_model()
    model = DeepseekV3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()
    numbers = torch.Generator().manual_seed(SEED)
    draw = lambda count: torch.randint(CONFIG.vocab_size, (count,), generator=numbers).tolist()
    # Long prompts share a prefix, so that servers reuse it.
    front, cases = draw(20), []
    for length in PROMPT_LENS:
        while True:
            prompt = front + draw(length - len(front)) if length > len(front) else draw(length)
            tokens, margin, first = generate(model, prompt)
            if margin >= MIN_MARGIN:
                break
        zero = zero_filled(lambda: generate(model, prompt)[0])
        cases.append({
            "prompt": prompt, "tokens": tokens, "min_margin": margin,
            "first_logits_head": [round(x, 6) for x in first[:8].tolist()], "zero_fill_differs": zero != tokens,
        })
        print(length, round(margin, 4), zero != tokens)
    golden = {
        "framework": f"transformers {transformers.__version__}",
        "dtype": "float32 arithmetic on bfloat16-rounded weights", "greedy": True, "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    (FOLDER / "golden.json").write_text(json.dumps(golden) + "\n")


main()
