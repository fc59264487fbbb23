#!/usr/bin/env python3
"""Writes this folder's files: a DeepSeek V3 with fp8 matrices, as published: e4m3 in `*.weight`, and a factor for each
block of 128 x 128 in `*.weight_scale_inv`. Also writes `expected.safetensors`: the bf16 values of the first layer.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/deepseek-fp8/make.py

Blocks at the ends of rows and columns are smaller. transformers' dequantisation rejects these, so `dequantise` follows
the definition; the script compares it with transformers on whole blocks. `edges`, which the model does not use, has all
codes of e4m3. Tokens are greedy tokens of transformers in float32, on the dequantised weights.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 9
BLOCK = 128
CONFIG = DeepseekV3Config(
    vocab_size=128, hidden_size=160, intermediate_size=144, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=48,
    first_k_dense_replace=1, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=2048,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
NOT_CONVERTED = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "gate.weight", "e_score_correction_bias")


def dequantise(codes, scales):
    rows, cols = codes.shape
    factors = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    values = (codes.float() * factors).bfloat16()
    if rows % BLOCK == 0 and cols % BLOCK == 0:
        reference = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        assert torch.equal(values.view(torch.int16), reference.view(torch.int16))
    return values


def quantise(weight):
    """Returns the codes and the factors of a matrix; the largest number of a block becomes 448."""
    rows, cols = weight.shape
    scales = torch.empty(-(-rows // BLOCK), -(-cols // BLOCK))
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        here = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = weight[here].abs().max() / 448
        codes[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def write_model():
    torch.manual_seed(SEED)
    model = DeepseekV3ForCausalLM(CONFIG)
    tiny.draw_weights(model)
    tiny.save(model, FOLDER)
    path = FOLDER / "model.safetensors"
    tensors, quantised, expected = load_file(path), {}, {}
    for name, weight in tensors.items():
        if not name.endswith(NOT_CONVERTED):
            codes, scales = quantise(weight.float())
            quantised |= {name: codes, f"{name}_scale_inv": scales}
            expected[name] = dequantise(codes, scales)
    save_file(tensors | expected, path, {"format": "pt"})  # The dequantised model, for the golden tokens.
    return tensors, quantised, expected


def publish(tensors, quantised, expected):
    """Replaces the dequantised matrices by their codes, and adds the edges."""
    # Each block contains all codes; the products underflow, round, overflow, or are not finite.
    codes = torch.arange(256, dtype=torch.uint8).repeat(256).view(256, 256).view(torch.float8_e4m3fn)
    scales = torch.tensor([[1e-38, 0.123456789], [3e36, -1.7]])
    quantised |= {"edges": codes, "edges_scale_inv": scales}
    expected["edges"] = dequantise(codes, scales)
    save_file(tensors | quantised, FOLDER / "model.safetensors", {"format": "pt"})
    expected = {name: tensor for name, tensor in expected.items() if "layers.1." not in name}
    save_file(expected, FOLDER / "expected.safetensors")
    path = FOLDER / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


written = write_model()
tiny.write_golden(
    FOLDER, DeepseekV3ForCausalLM, SEED, common_len=20, prompt_lens=[7, 16, 33, 64, 1], min_margin=0.01,
)
publish(*written)
