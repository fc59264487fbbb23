"""Trains the model of `glossary/` on `glossary.txt`: python3 train.py (needs jax and safetensors; minutes on a CPU).

A Llama of two layers memorises definitions of some words of this crate, as conversations in its own chat template. It
is a demonstration: the tests' models are in crates/host/tests/data.
"""
import json
import random
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import save_file

LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 2, 64, 192, 2, 1, 64, 10000.0, 1e-6
STEPS, BATCH, LENGTH = 1600, 8, 160
SYSTEM = ("you are a model of one hundred thousand numbers. you know what some words of kvarena mean, the part of a "
          "language model server that keeps keys and values. you answer in a sentence or two.")
QUESTIONS = ["what is {}?", "what is a {}?", "what is the {}?", "what does {} mean?", "{}?", "{}", "explain {}.",
             "tell me about the {}.", "and {}?", "and what is a {}?"]
UNKNOWN = "i do not know that word. ask me what a page, a slot, a plan, a fence, a fork or a promise is."
SPECIAL = ["<unk>", "<system>", "<user>", "<assistant>", "<end>"]

here = Path(__file__).parent
out = here / "glossary"
facts = dict(line.split(" = ") for line in (here / "glossary.txt").read_text().splitlines())


def words(text):
    return re.findall(r"[a-z]+|[^a-z\s]", text.lower())


texts = [SYSTEM, UNKNOWN, *QUESTIONS, *facts, *facts.values()]
vocab = {word: i for i, word in enumerate(SPECIAL + sorted({w for text in texts for w in words(text)} - {"{", "}"}))}
size = -(-len(vocab) // 8) * 8


def ids(text):
    return [vocab.get(word, 0) for word in words(text)]


def dialogue():
    """Returns the tokens of a conversation, and a mask of those that the model generates."""
    tokens, mask = [vocab["<system>"], *ids(SYSTEM), vocab["<end>"]], []
    mask += [0] * len(tokens)
    while len(tokens) <= LENGTH:
        word, answer = random.choice(list(facts.items()))
        if random.random() < 0.1:
            word, answer = "xyzzy", UNKNOWN  # a word that is not in the vocabulary
        question = ids(random.choice(QUESTIONS).replace("{}", word))
        question = [vocab["<user>"], *question, vocab["<end>"], vocab["<assistant>"]]
        answer = [*ids(answer), vocab["<end>"]]
        tokens += question + answer
        mask += [0] * len(question) + [1] * len(answer)
    return tokens[:LENGTH + 1], mask[:LENGTH + 1]


def init(key):
    shapes = {"model.embed_tokens.weight": (size, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        for name, shape in {
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    keys = jax.random.split(key, len(shapes))
    return {name: jnp.ones(shape) if len(shape) == 1 else jax.random.normal(k, shape) * shape[-1] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items())}


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight


def rotate(x):
    angle = jnp.arange(x.shape[1])[:, None] / THETA ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(weights, tokens):
    batch, length = tokens.shape
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        w = {name: weights[f"model.layers.{i}.{name}.weight"] for name in
             ["input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
              "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]}
        h = norm(x, w["input_layernorm"])
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj"].T).reshape(batch, length, -1, HEAD_DIM) for name in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = jnp.repeat(k, HEADS // KV_HEADS, 2), jnp.repeat(v, HEADS // KV_HEADS, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        a = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(batch, length, -1)
        x = x + a @ w["self_attn.o_proj"].T
        h = norm(x, w["post_attention_layernorm"])
        x = x + (jax.nn.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def loss(weights, tokens, mask):
    logits = jax.nn.log_softmax(forward(weights, tokens[:, :-1]))
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return -jnp.sum(right * mask[:, 1:]) / jnp.sum(mask[:, 1:])


@partial(jax.jit, donate_argnums=(0, 1, 2))
def adam(weights, m, v, t, tokens, mask):
    value, grad = jax.value_and_grad(loss)(weights, tokens, mask)
    rate = 4e-3 * jnp.minimum(t / 200, 1) * (0.5 + 0.5 * jnp.cos(jnp.pi * t / STEPS))
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grad)
    v = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, v, grad)
    step = lambda w, m, v: w - rate * (m / (1 - 0.9 ** t) / (jnp.sqrt(v / (1 - 0.98 ** t)) + 1e-8) + 0.01 * w)
    return jax.tree.map(step, weights, m, v), m, v, value


random.seed(1)
weights = init(jax.random.key(1))
m, v = jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights)
for t in range(1, STEPS + 1):
    tokens, mask = zip(*(dialogue() for _ in range(BATCH)))
    weights, m, v, value = adam(weights, m, v, t, jnp.array(tokens), jnp.array(mask))
    if t % 100 == 0:
        print(t, float(value), flush=True)

out.mkdir(exist_ok=True)
save_file({name: w.astype(jnp.bfloat16) for name, w in weights.items()}, out / "model.safetensors")
write = lambda name, value: (out / name).write_text(json.dumps(value, indent=1) + "\n")
write("config.json", {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": size,
    "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA,
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
    "eos_token_id": vocab["<end>"], "bos_token_id": None,
})
write("tokenizer.json", {
    "version": "1.0",
    "added_tokens": [{"id": vocab[s], "content": s, "single_word": False, "lstrip": True, "rstrip": True,
                      "normalized": False, "special": True} for s in SPECIAL],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"String": " :"}, "content": ":"}]},
    "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
})
write("tokenizer_config.json", {
    "chat_template": "{% if messages[0].role != 'system' %}<system> " + SYSTEM + " <end> {% endif %}"
                     "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}<assistant>",
})
