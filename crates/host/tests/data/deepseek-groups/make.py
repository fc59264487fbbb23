#!/usr/bin/env python3
"""Writes this folder's model and golden.json: a DeepSeek V3 with mostly negative corrected scores, also in the kept
groups. A router that fills the scores of dropped groups with 0 then chooses experts of dropped groups.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/deepseek-groups/make.py

Tokens are greedy tokens of transformers in float32, on weights rounded to bfloat16. In each case, a reference that
fills with 0 in place of minus infinity generates other tokens.
"""

import sys
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 6
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
    tiny.draw_weights(model)
    with torch.no_grad():
        for layer in model.model.layers[CONFIG.first_k_dense_replace:]:
            # Scores are around 0.5, so most corrected scores are negative.
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(-0.9 + 0.2 * torch.randn_like(bias))
    tiny.save(model, FOLDER)


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


def check(model, case):
    assert zero_filled(lambda: tiny.generate(model, case["prompt"])[0]) != case["tokens"]


write_model()
tiny.write_golden(
    FOLDER, DeepseekV3ForCausalLM, SEED, common_len=20, prompt_lens=[7, 16, 31, 33, 48, 64, 100, 1], min_margin=0.02, check=check,
)
