#!/usr/bin/env python3
"""Writes this folder's model and golden.json: a Llama 4 text model without experts. Three of its four layers read chunks
of 32 tokens with rotary positions. The last layer reads all tokens without rotary positions and scales its queries by
position.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/llama4-tiny/make.py

Tokens are greedy tokens of transformers in float32, on random seeded weights rounded to bfloat16.
"""

import sys
from pathlib import Path

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 4
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
    tiny.draw_weights(model)
    tiny.save(model, FOLDER)


write_model()
tiny.write_golden(
    FOLDER, Llama4ForCausalLM, SEED, common_len=40, prompt_lens=[7, 16, 31, 32, 33, 64, 100, 300, 1], min_margin=0.02,
)
