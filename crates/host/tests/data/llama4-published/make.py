#!/usr/bin/env python3
"""Writes this folder's files: a Llama 4 of texts and images as it is published. Every second layer has experts. The
fields of the text model are in `text_config`, its tensors begin with `language_model.`, and a tensor of the vision
model is beside them.

    pip install torch transformers==5.17.0 && python3 crates/host/tests/data/llama4-published/make.py

Tokens are greedy tokens of the text model in transformers, in float32, on random seeded weights rounded to bfloat16.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4ForCausalLM, Llama4TextConfig

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import tiny

SEED = 11
CONFIG = Llama4TextConfig(
    vocab_size=128, hidden_size=64, intermediate_size=48, intermediate_size_mlp=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_chunk_size=32, interleave_moe_layer_step=2,
    num_local_experts=4, num_experts_per_tok=1, use_qk_norm=True, attn_temperature_tuning=True, floor_scale=16,
    attn_scale=0.1, max_position_embeddings=2048, tie_word_embeddings=False,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
    },
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def publish():
    """Converts the folder of the text model to the published form."""
    path = FOLDER / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["vision_model.class_embedding"] = torch.zeros(8, dtype=torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    path = FOLDER / "config.json"
    text = json.loads(path.read_text())
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    version = text.pop("transformers_version")
    config = {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 126, "eoi_token_index": 127,
        "image_token_index": 125, "model_type": "llama4", "text_config": text, "tie_word_embeddings": False,
        "transformers_version": version, "vision_config": {"hidden_size": 8, "model_type": "llama4_vision_model"},
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


torch.manual_seed(SEED)
model = Llama4ForCausalLM(CONFIG)
tiny.draw_weights(model)
tiny.save(model, FOLDER)
tiny.write_golden(
    FOLDER, Llama4ForCausalLM, SEED, common_len=20, prompt_lens=[7, 16, 31, 32, 33, 64, 100, 1], min_margin=0.01,
)
publish()
