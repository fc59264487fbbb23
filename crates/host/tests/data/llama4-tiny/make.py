#!/usr/bin/env python3
"""Writes this folder's model and golden.json: a Llama 4 text model without experts. Three of its four layers read chunks
of 32 tokens with rotary positions. The last layer reads all tokens without them and scales its queries by position.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/llama4-tiny/make.py

Tokens are greedy tokens of transformers in float32, on random seeded weights rounded to bfloat16.
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import Llama4ForCausalLM, Llama4TextConfig

FOLDER = Path(__file__).resolve().parent
SEED = 4
NEW_TOKENS = 20
PROMPT_LENS = [7, 16, 31, 32, 33, 64, 100, 300, 1]
MIN_MARGIN = 0.02
CONFIG = Llama4TextConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, intermediate_size_mlp=256, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, attention_chunk_size=32, moe_layers=[],
    use_qk_norm=True, attn_temperature_tuning=True, floor_scale=16, attn_scale=0.1, max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def write_model():
    torch.manual_seed(SEED)
    model = Llama4ForCausalLM(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.1 if norm else 1.2 / weight.shape[-1] ** 0.5) + norm)
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


def main():
    write_model()
    model = Llama4ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()
    numbers = torch.Generator().manual_seed(SEED)
    draw = lambda count: torch.randint(CONFIG.vocab_size, (count,), generator=numbers).tolist()
    # Long prompts share a prefix, so that servers reuse it.
    front, cases = draw(40), []
    for length in PROMPT_LENS:
        while True:
            prompt = front + draw(length - len(front)) if length > len(front) else draw(length)
            tokens, margin, first = generate(model, prompt)
            if margin >= MIN_MARGIN:
                break
        cases.append({
            "prompt": prompt, "tokens": tokens, "min_margin": margin,
            "first_logits_head": [round(x, 6) for x in first[:8].tolist()],
        })
        print(length, round(margin, 4))
    golden = {
        "framework": f"transformers {transformers.__version__}",
        "dtype": "float32 arithmetic on bfloat16-rounded weights", "greedy": True, "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    (FOLDER / "golden.json").write_text(json.dumps(golden) + "\n")


main()
