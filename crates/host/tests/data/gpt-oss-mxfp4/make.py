#!/usr/bin/env python3
"""Writes this folder's files: a gpt-oss whose experts are MXFP4, as published: FP4 codes in `*_blocks`, and for each 32
of them an exponent in `*_scales`. Also writes `expected.safetensors`: bf16 values by the reference, of the first layer.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/gpt-oss-mxfp4/make.py

`edges_blocks` and `edges_scales`, which the model does not use, combine all codes with all exponents. Tokens are greedy
tokens of transformers in float32, on the dequantised weights.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 8
CONFIG = GptOssConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
    max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def write_model():
    torch.manual_seed(SEED)
    model = GptOssForCausalLM(CONFIG)
    tiny.draw_weights(model)
    quantised, expected = {}, {}
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, cols, rows = weight.shape
        blocks = torch.randint(256, (count, rows, cols // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 127, (count, rows, cols // 32), dtype=torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
        weight.data.copy_(expected[name])
    tiny.save(model, FOLDER)  # The dequantised model, for the golden tokens.
    return quantised, expected


def publish(quantised, expected):
    """Replaces the dequantised experts by their codes, and adds the edges."""
    # All codes in both halves of a byte, for each exponent. The largest products exceed bf16 and are infinite.
    codes = torch.arange(16, dtype=torch.uint8) * 15 + 15
    quantised["edges_blocks"] = codes.view(1, 1, 1, 16).expand(1, 256, 1, 16).contiguous()
    quantised["edges_scales"] = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    expected["edges"] = convert_moe_packed_tensors(quantised["edges_blocks"], quantised["edges_scales"])
    path = FOLDER / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in expected}
    save_file(kept | quantised, path, {"format": "pt"})
    expected = {name: tensor for name, tensor in expected.items() if "layers.1." not in name}
    save_file(expected, FOLDER / "expected.safetensors")
    path = FOLDER / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


quantised, expected = write_model()
tiny.write_golden(
    FOLDER, GptOssForCausalLM, SEED, common_len=20, prompt_lens=[7, 16, 33, 64, 1], min_margin=0.01,
)
publish(quantised, expected)
