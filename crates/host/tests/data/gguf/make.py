#!/usr/bin/env python3
"""Writes this folder's GGUF files and the expectations of `tests/gguf.rs`: tiny models of each kind whose tensors have
every quantisation, and tokenizers.

    pip install torch transformers==5.24.0 gguf==0.19.0 sentencepiece && python3 crates/host/tests/data/gguf/make.py

Logits and tokens are those of transformers in float32, which reads the same file. Tensors are those of the package
`gguf`. Blocks of types that the package cannot quantise are random bytes with scales of a useful size.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
import tiny
import tokens

RANDOM = np.random.default_rng(48)
# Q4_K and Q6_K need rows of a multiple of 256 elements.
TYPES = [Type.Q4_K, Type.Q8_0, Type.Q6_K, Type.BF16, Type.Q4_0, Type.Q5_K, Type.F16, Type.Q4_1, Type.Q5_0, Type.Q5_1,
         Type.F32]
LONG = {Type.Q4_K: (2.8e-4, 7.5), Type.Q5_K: (1.4e-4, 15.5), Type.Q6_K: (5.5e-5, None)}

LLAMA = dict(hidden_size=256, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=2048, rms_norm_eps=1e-5, initializer_range=0.05)
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
GEMMA = dict(hidden_size=256, intermediate_size=32, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1,
             head_dim=16, query_pre_attn_scalar=16, sliding_window=8, max_position_embeddings=2048, rms_norm_eps=1e-6,
             tie_word_embeddings=True)


def blocks(kind, rows, cols):
    """Returns the bytes of random rows of a K type: random scales and quants, with the middle quant near 0."""
    scale, middle = LONG[kind]
    count, size = rows * cols // 256, gguf.GGML_QUANT_SIZES[kind][1]
    data = RANDOM.integers(0, 256, (count, size), dtype=np.uint8)
    near = lambda value: (value * RANDOM.uniform(0.7, 1.3, count)).astype(np.float16).view(np.uint8).reshape(count, 2)
    if middle is None:
        data[:, 208:210] = near(scale)
    else:
        data[:, 0:2], data[:, 2:4] = near(scale), near(scale * middle)
    return data.reshape(rows, -1)


class Writer:
    """A GGUF file whose matrices have each of the types in turn."""

    def __init__(self, name, kind):
        self.path, self.kind, self.turn = FOLDER / name, kind, 0
        self.file = gguf.GGUFWriter(self.path, kind)

    def matrix(self, name, rows, cols, kind=None):
        while kind is None or (kind in LONG and cols % 256):
            kind, self.turn = TYPES[self.turn % len(TYPES)], self.turn + 1
        if kind in LONG:
            data = blocks(kind, rows, cols)
        else:
            data = gguf.quantize(RANDOM.normal(0, 1.2 / cols ** 0.5, (rows, cols)).astype(np.float32), kind)
        self.file.add_tensor(name, data, raw_dtype=kind)

    def norm(self, name, size):
        self.file.add_tensor(name, (1 + RANDOM.normal(0, 0.1, size)).astype(np.float32))

    def layer(self, index, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, **_):
        name, q, kv = f"blk.{index}.", num_attention_heads * head_dim, num_key_value_heads * head_dim
        for part, rows, cols in [
            ("attn_q", q, hidden_size), ("attn_k", kv, hidden_size), ("attn_v", kv, hidden_size),
            ("attn_output", hidden_size, q), ("ffn_gate", intermediate_size, hidden_size),
            ("ffn_up", intermediate_size, hidden_size), ("ffn_down", hidden_size, intermediate_size),
        ]:
            self.matrix(f"{name}{part}.weight", rows, cols)
        norms = ["attn_norm", "ffn_norm"]
        if self.kind == "gemma3":
            norms += ["post_attention_norm", "post_ffw_norm"]
            for part in ("attn_q_norm", "attn_k_norm"):
                self.norm(f"{name}{part}.weight", head_dim)
        for part in norms:
            self.norm(f"{name}{part}.weight", hidden_size)

    def shape(self, config):
        file = self.file
        file.add_context_length(config["max_position_embeddings"])
        file.add_embedding_length(config["hidden_size"])
        file.add_block_count(config["num_hidden_layers"])
        file.add_feed_forward_length(config["intermediate_size"])
        file.add_head_count(config["num_attention_heads"])
        file.add_head_count_kv(config["num_key_value_heads"])
        file.add_layer_norm_rms_eps(config["rms_norm_eps"])
        file.add_key_length(config["head_dim"])
        file.add_value_length(config["head_dim"])

    def tokenizer(self, metadata):
        file = self.file
        for name, value in metadata.items():
            key = f"tokenizer.ggml.{name}"
            if isinstance(value, list):
                file.add_array(key, value)
            elif isinstance(value, bool):
                file.add_bool(key, value)
            else:
                file.add_string(key, value) if isinstance(value, str) else file.add_uint32(key, value)
        begin, end = metadata["tokens"][metadata["bos_token_id"]], metadata["tokens"][metadata["eos_token_id"]]
        file.add_chat_template(
            "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")
        return f"{begin}user: hi{end}\nassistant:"

    def close(self):
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def scale_frequencies(theta, dim):
    """Returns the divisors of the frequencies that Llama 3.1's scaling implies, as the converter writes them."""
    frequencies = theta ** -(np.arange(0, dim, 2) / dim)
    turns = SCALING["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = SCALING["low_freq_factor"], SCALING["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / SCALING["factor"] + kept)).astype(np.float32)


def hash_of(numbers):
    """Returns the FNV-1a hash of the elements in float32."""
    found = 0xCBF29CE484222325
    for byte in numbers.astype("<f4").tobytes():
        found = (found ^ byte) * 0x100000001B3 % 2 ** 64
    return found


def expectations(writer, config, lengths):
    """Returns the hashes of all dequantised tensors, and the logits and greedy tokens of transformers."""
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
               for tensor in gguf.GGUFReader(writer.path).tensors}
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER, gguf_file=writer.path.name, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = model.state_dict()
    embedding = weights["model.embed_tokens.weight"].numpy()
    assert np.array_equal(embedding, tensors["token_embd.weight"])
    assert np.array_equal(weights["model.layers.0.mlp.up_proj.weight"].numpy(), tensors["blk.0.ffn_up.weight"])
    cases = []
    for length in lengths:
        margin = 0.0
        while margin < 0.005:
            prompt = [int(x) for x in RANDOM.integers(3, config.vocab_size, length)]
            found, margin, first = tiny.generate(model, prompt)
        print(writer.path.name, len(prompt), round(margin, 4), round(first.std().item(), 3), found[:6])
        cases.append({"prompt": prompt, "tokens": found, "logits": [round(x, 5) for x in first.tolist()]})
    used = sorted({tensor.tensor_type.name for tensor in gguf.GGUFReader(writer.path).tensors})
    hashes = {name: {"shape": list(weight.shape), "hash": hash_of(weight.numpy())} for name, weight in weights.items()
              if name != "lm_head.weight" or not config.tie_word_embeddings}
    return {"types": used, "tensors": hashes, "cases": cases}


def llama():
    _, metadata, _ = tokens.byte_level("llama-bpe")
    vocab, theta = len(metadata["tokens"]), 10000.0
    writer = Writer("llama.gguf", "llama")
    writer.shape(LLAMA)
    writer.file.add_rope_dimension_count(LLAMA["head_dim"])
    writer.file.add_rope_freq_base(theta)
    writer.file.add_vocab_size(vocab)
    chat = writer.tokenizer(metadata)
    writer.matrix("token_embd.weight", vocab, 256, Type.Q8_0)
    writer.file.add_tensor("rope_freqs.weight", scale_frequencies(theta, LLAMA["head_dim"]))
    for index in range(LLAMA["num_hidden_layers"]):
        writer.layer(index, **LLAMA)
    writer.norm("output_norm.weight", 256)
    writer.matrix("output.weight", vocab, 256, Type.Q6_K)
    writer.close()
    config = LlamaConfig(**LLAMA, vocab_size=vocab, tie_word_embeddings=False,
                         rope_parameters={"rope_type": "llama3", "rope_theta": theta, **SCALING})
    return expectations(writer, config, [1, 7, 90]) | {"chat": chat}


def llama_tied():
    """A file as older converters write it: no `vocab_size`, no head sizes, a tied embedding, linear scaling."""
    _, metadata, _ = tokens.sentence_pieces(gemma=False)
    config = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 1}
    writer = Writer("llama-tied.gguf", "llama")
    writer.shape(config)
    del writer.file.kv_data[0]["llama.attention.key_length"], writer.file.kv_data[0]["llama.attention.value_length"]
    writer.file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.file.add_rope_scaling_factor(4.0)
    chat = writer.tokenizer(metadata)
    vocab = len(metadata["tokens"])
    writer.matrix("token_embd.weight", vocab, 64, Type.F16)
    writer.layer(0, **config)
    writer.norm("output_norm.weight", 64)
    writer.close()
    config = LlamaConfig(**config, vocab_size=vocab, tie_word_embeddings=True,
                         rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    return expectations(writer, config, [30]) | {"chat": chat}


def gemma():
    _, metadata, _ = tokens.sentence_pieces(gemma=True)
    vocab = len(metadata["tokens"])
    writer = Writer("gemma3.gguf", "gemma3")
    writer.shape(GEMMA)
    writer.file.add_rope_freq_base(1e6)
    writer.file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.file.add_rope_scaling_factor(8.0)
    writer.file.add_sliding_window(GEMMA["sliding_window"])
    chat = writer.tokenizer(metadata)
    writer.matrix("token_embd.weight", vocab, 256, Type.Q8_0)
    for index in range(GEMMA["num_hidden_layers"]):
        writer.layer(index, **GEMMA)
    writer.norm("output_norm.weight", 256)
    writer.close()
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(GEMMA["num_hidden_layers"])]
    config = Gemma3TextConfig(**GEMMA, vocab_size=vocab, layer_types=kinds, rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})
    return expectations(writer, config, [1, 7, 90]) | {"chat": chat}


def encodings(name, tokenizer, metadata, special, seed):
    """Writes a file that has only a tokenizer; returns the tokens of texts, and the texts of tokens that differ."""
    writer = Writer(f"tokenizer-{name}.gguf", "gemma3" if name == "gemma" else "llama")
    writer.tokenizer(metadata)
    writer.close()
    rebuilt, cases, other = AutoTokenizer.from_pretrained(FOLDER, gguf_file=writer.path.name), [], []
    for text in tokens.texts(special, seed):
        ids = tokenizer.encode(text).ids
        decoded = tokenizer.decode(ids)
        cases.append({"text": text, "ids": ids} | ({"decoded": decoded} if decoded != text else {}))
        if rebuilt(text).input_ids != ids:
            other.append(text)
    print(f"{name}: {len(cases)} texts; transformers' conversion differs in {len(other)}: {sorted(other, key=len)[:4]}")
    return cases


def main():
    models = {"llama": llama(), "llama-tied": llama_tied(), "gemma3": gemma()}
    built = {pre: tokens.byte_level(pre) for pre in tokens.BYTE_LEVEL}
    built |= {"llama-spm": tokens.sentence_pieces(False), "gemma": tokens.sentence_pieces(True)}
    found = {name: encodings(name, *parts, seed) for seed, (name, parts) in enumerate(built.items())}
    for name, value in [("models", models), ("tokenizers", found)]:
        (FOLDER / f"{name}.json").write_text(json.dumps(value, separators=(",", ":")) + "\n")


main()
