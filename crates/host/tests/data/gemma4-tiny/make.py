#!/usr/bin/env python3
"""Writes this folder's model and golden.json: a Gemma 4 text model without experts or per-layer embeddings. Every
other layer reads a window of 32 tokens and has 4 kv heads of 64 elements. The other layers read all tokens and have 1
kv head of 128 elements; they compute V from the product for K.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/gemma4-tiny/make.py

Tokens are greedy tokens of transformers in float32, on random seeded weights rounded to bfloat16.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 4
CONFIG = Gemma4TextConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, num_global_key_value_heads=1, global_head_dim=128, attention_k_eq_v=True,
    sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 3, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=512, max_position_embeddings=2048, final_logit_softcapping=30.0,
    tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def write_model():
    torch.manual_seed(SEED)
    model = Gemma4ForCausalLM(CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                # Gemma 4 does not divide attention's logits by sqrt(head_dim), so these norms must be smaller.
                around = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                weight.copy_(around + 0.1 * torch.randn_like(weight))
            else:
                # The embedding is tied. If it were larger, each token would be its own most likely successor.
                size = 0.5 if "embed_tokens" in name else 1.2
                weight.copy_(torch.randn_like(weight) * size / weight.shape[-1] ** 0.5)
        for layer in model.model.layers:
            layer.layer_scalar.copy_(0.8 + 0.4 * torch.rand_like(layer.layer_scalar))
    tiny.save(model, FOLDER)
    # Published checkpoints have these two fields in place of per_layer_config, which transformers writes.
    path = FOLDER / "config.json"
    config = json.loads(path.read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 128, "num_global_key_value_heads": 1}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


write_model()
tiny.write_golden(
    FOLDER, Gemma4ForCausalLM, SEED, common_len=40, prompt_lens=[7, 16, 31, 32, 33, 64, 100, 300, 1], min_margin=0.01,
)
