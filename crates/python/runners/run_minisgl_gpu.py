"""Compares tokens and speed on a GPU: `python run_minisgl_gpu.py CHECKOUT [MODEL]`.

Runs mini-sglang's offline benchmark with its own radix cache and with kvarena's, by turns, each in a process of its
own. The prompts have 1,024 tokens and share 512 of them in 8 groups. The pool has half the tokens that all requests
need, so requests wait and prefixes are evicted. Generation is greedy and ignores stop tokens. Without MODEL, a folder
in Hugging Face's format, the model has random weights in the shape of Qwen3-0.6B. Needs mini-sglang's requirements.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

REQUESTS, GROUPS, PROMPT, SHARED = 256, 8, 1024, 512
TURNS = ("radix", "kvarena", "kvarena", "radix") * 2
# Shape of Qwen3-0.6B.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True, "attention_bias": False,
}


def random_model(folder):
    """Writes a model with random weights, and a tokenizer of one word, which the benchmark never uses."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(1)
    hidden, heads, kv = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    dim, mlp = CONFIG["head_dim"], CONFIG["intermediate_size"]
    tensors = {"model.norm.weight": torch.ones(hidden)}

    def matrix(name, rows, cols):
        # Activations neither grow nor vanish.
        tensors[f"model.{name}.weight"] = torch.randn(rows, cols) / cols**0.5

    matrix("embed_tokens", CONFIG["vocab_size"], hidden)
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"layers.{i}."
        for name, rows, cols in (("q", heads * dim, hidden), ("k", kv * dim, hidden), ("v", kv * dim, hidden),
                                 ("o", hidden, heads * dim)):
            matrix(f"{layer}self_attn.{name}_proj", rows, cols)
        for name, rows, cols in (("gate", mlp, hidden), ("up", mlp, hidden), ("down", hidden, mlp)):
            matrix(f"{layer}mlp.{name}_proj", rows, cols)
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                           ("self_attn.q_norm", dim), ("self_attn.k_norm", dim)):
            tensors[f"model.{layer}{norm}.weight"] = torch.ones(size)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
    with open(f"{folder}/config.json", "w") as file:
        json.dump(CONFIG, file)
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="word", eos_token="word").save_pretrained(folder)


def workload():
    """Returns prompts, and the number of new tokens of each."""
    draw = random.Random(0)
    tokens = lambda count: [draw.randrange(10_000) for _ in range(count)]  # noqa: E731
    groups = [tokens(SHARED) for _ in range(GROUPS)]
    prompts = [groups[i % GROUPS] + tokens(PROMPT - SHARED) for i in range(REQUESTS)]
    return prompts, [draw.randint(100, 1024) for _ in range(REQUESTS)]


def serve(checkout, model, cache, output):
    """Runs the benchmark once, and writes the tokens and the time to `output`."""
    sys.path.insert(0, os.path.join(checkout, "python"))
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    if cache == "kvarena":
        from kvarena.adapters import minisgl  # noqa: F401: registers the cache
    prompts, new = workload()
    need = GROUPS * SHARED + sum(PROMPT - SHARED + count for count in new)
    llm = LLM(model, max_seq_len_override=4096, max_extend_tokens=16384, cuda_graph_max_bs=256, cache_type=cache,
              attention_backend="fi", num_page_override=need // 2)
    matched = []
    manager, match = llm.cache_manager, llm.cache_manager.match_req

    def counted(req):
        result = match(req)
        matched.append(result.cuda_handle.cached_len)
        return result

    manager.match_req = counted
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in new]
    matched.clear()
    begun = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - begun
    with open(output, "w") as file:
        json.dump({"tokens": [result["token_ids"] for result in results], "seconds": seconds, "pool": need // 2,
                   "matched": sum(matched)}, file)


def equal(a, b):
    """Returns the number of requests with equal tokens, and of equal leading tokens."""
    pairs = list(zip(a["tokens"], b["tokens"]))
    leading = sum(next((i for i, (x, y) in enumerate(zip(*pair)) if x != y), len(pair[0])) for pair in pairs)
    return sum(x == y for x, y in pairs), leading


def main(checkout, model=None):
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            random_model(folder)
        runs = []
        for turn, cache in enumerate(TURNS):
            output = os.path.join(folder, f"{turn}.out")
            command = [sys.executable, os.path.abspath(__file__), checkout, model or folder, cache, output]
            subprocess.run(command, check=True)
            with open(output) as file:
                runs.append(json.load(file))
            count = sum(map(len, runs[-1]["tokens"]))
            print(f"{cache}: {count} tokens, {count / runs[-1]['seconds']:.0f} tokens/s, pool of {runs[-1]['pool']}, "
                  f"{runs[-1]['matched']} tokens matched", flush=True)
    # Runs with the same cache are the reference: not all of mini-sglang's kernels and schedules are deterministic.
    total = sum(map(len, runs[0]["tokens"]))
    compared = {}
    for (one, a), (other, b) in itertools.combinations(zip(TURNS, runs), 2):
        compared.setdefault(f"{one}, {other}" if one >= other else f"{other}, {one}", []).append(equal(a, b))
    for name, counts in compared.items():
        requests, leading = map(statistics.median, zip(*counts))
        print(f"{name}: {requests:.0f} of {REQUESTS} requests equal, {leading:.0f} of {total} leading tokens "
              f"(medians of {len(counts)} pairs)")
    theirs, ours = (statistics.median(run["seconds"] for turn, run in zip(TURNS, runs) if turn == cache)
                    for cache in ("radix", "kvarena"))
    print(f"kvarena's tokens/s beside radix': {theirs / ours:.3f}")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        serve(*sys.argv[1:])
    else:
        main(*sys.argv[1:])
