"""Tiny tokenizers in the structure that models publish, and their GGUF metadata as llama.cpp's converter writes it."""

import io
import json
import random

import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CORPUS = """The page table maps each token of a sequence to a page of the pool. A page holds the \
keys and values of 16 tokens.
When the pool is full, the engine evicts the pages that were read least recently, and their tokens are computed again.
Don't they've said that it's what we'll do? I'd say: they're right, you'm wrong! DON'T THEY'VE SAID IT'S?
fn main() { let x = 2024 + 365 * 7; println!("{x:>8}\\t{}", x as f32 / 3.14159); }
    for i in range(10):\n        print(i, end="\\r\\n")\n\n\n
Der Zähler steht auf 1234567; größere Schritte kosten mehr. L'été dernier, où étais-tu ? Ça va très bien.
Быстрая лиса прыгает через ленивую собаку. 世界のすべての人間は自由である。你好，世界！ 안녕하세요 세계 नमस्ते दुनिया مرحبا بالعالم
the quick brown fox jumps over the lazy dog, the other foxes jump over the other dogs; there then this that those these
<table><tr><td>1</td><td>22</td><td>333</td></tr></table> https://example.org/a_b-c?d=e&f=%20#g
""" * 3

PIECES = [
    "the", " the", "The", "DON'T", "don't", "they've", "'S", "I'd", "2024", " 2024", "1",
    "a1b22c333", "3.14", "½", "Ⅷ", "²",
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", "\u00a0", "\u3000", "\u200b", "\u200d",
    "\ufeff", "\ufffd", "\x00",
    "\x01", "\x7f", "▁", "▁▁", " ▁", "é", "e\u0301", "ñ", "ß", "Å", "İ", "ﬁ", "Ω", "Я", "Привет",
    "世界", "你好", "한국어", "안녕",
    "नमस्ते", "مرحبا", "שלום", "🙂", "👩\u200d👩\u200d👧", "🇪🇺", "𝔘𝔫𝔦", "\U0010fffd", "{", "}}", "();",
    "->", "...", "!!", "?!",
    "_", "__init__", "a_b", "/", "\\", "\\n", "'", "''",
    '"', "`", "~", "#", "<", ">", "<0x0A>", "<unk>", "<tr>", "</td>",
    "aaaaaaaa", "zzzz", "fox", " dogs", "pages", "MiXeD", "CamelCase",
]


def texts(special, seed):
    """Returns awkward texts: each piece between letters and alone, and random sequences of pieces."""
    draw, pieces = random.Random(seed), PIECES + special * 3
    found = ["", " ", "  two  spaces  ", " leading", "trailing ", "\nline", "line\n\n\n\nline", "".join(pieces)]
    found += [f"x{piece}y {piece}" for piece in draw.sample(pieces, 12)] + special
    found += ["".join(draw.choice(pieces) for _ in range(draw.randint(2, 14))) for _ in range(60)]
    return found


def split(pattern):
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


# As in the tokenizer.json of Llama 3, SmolLM2, GPT-2 and Mistral Nemo.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL = {
    "llama-bpe": (split(LLAMA3), True),
    "smollm": ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}, False),
    "gpt-2": (GPT2, False),
    "tekken": (split(TEKKEN), True),
}


def bos_first(token, id):
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def added(id, content, special):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **flags, "special": special}


def byte_level(pre):
    """Returns a byte-level tokenizer, its GGUF metadata and its special texts."""
    pre_tokenizer, ignores_merges = BYTE_LEVEL[pre]
    special, user = ["<|begin|>", "<|end|>", "<|eot|>"], ["<think>", "    "]
    shell = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": pre_tokenizer, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {}, "merges": [], "fuse_unk": False, "byte_fallback": False, "dropout": None,
                  "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "ignore_merges": ignores_merges},
    }
    trained = Tokenizer.from_str(json.dumps(shell))
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    trained.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    # Only `ignore_merges` reaches this token.
    tokens.append("ĠCamelCase"[1:])
    vocab = {token: id for id, token in enumerate(tokens)}
    first = len(tokens)
    tokens += special + user
    types = [NORMAL] * first + [CONTROL] * len(special) + [USER_DEFINED] * len(user)
    added_tokens = [added(first + i, token, token in special) for i, token in enumerate(special + user)]
    adds_bos = pre in ("llama-bpe", "tekken")
    whole = {**shell, "added_tokens": added_tokens,
             "post_processor": bos_first(special[0], first) if adds_bos else None,
             "model": {**shell["model"], "vocab": vocab, "merges": model["merges"]}}
    metadata = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": first, "eos_token_id": first + 1, "eot_token_id": first + 2,
    }
    # llama.cpp adds the first token with this pre-tokenizer unless the file denies it.
    if pre != "llama-bpe":
        metadata["add_bos_token"] = adds_bos
    return Tokenizer.from_str(json.dumps(whole)), metadata, special + user


def sentence_pieces(gemma):
    """Returns a SentencePiece tokenizer, its GGUF metadata and its special texts."""
    spaces = ["▁" * count for count in range(2, 8)]
    tags = ["\n\n", "\n\n\n", "\t\t", *spaces, "<table>", "</td>"] if gemma else ["<tool>"]
    control = ["<start_of_turn>", "<end_of_turn>"] if gemma else []
    names = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>", "eos_piece": "<eos>",
             "bos_piece": "<bos>"} if gemma else {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=written, model_type="bpe", vocab_size=560,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", add_dummy_prefix=not gemma,
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        user_defined_symbols=tags, control_symbols=control, minloglevel=2, **names)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    count = pieces.vocab_size()
    kind = lambda id: (UNKNOWN if pieces.is_unknown(id) else CONTROL if pieces.is_control(id) else
                       BYTE if pieces.is_byte(id) else USER_DEFINED if pieces.id_to_piece(id) in tags else NORMAL)
    tokens, types = [pieces.id_to_piece(id) for id in range(count)], [kind(id) for id in range(count)]
    scores = [pieces.get_score(id) for id in range(count)]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = generate_merges(vocab, {token: scores[id] for token, id in vocab.items()})
    added_tokens = [added(id, tokens[id], types[id] != USER_DEFINED) for id in range(count) if types[id] in (2, 3, 4)]
    to_spaces = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                 {"type": "ByteFallback"}, {"type": "Fuse"}]
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = [] if gemma else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens,
        "normalizer": escape if gemma else
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, escape]},
        "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": to_spaces + strip},
        "post_processor": bos_first(tokens[pieces.bos_id()], pieces.bos_id()),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "fuse_unk": True, "byte_fallback": True,
                  "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "ignore_merges": False},
    }
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    for text in CORPUS.splitlines():
        assert pieces.encode(text) == tokenizer.encode(text).ids[1:], text
    # The converter writes runs of spaces as they are, and gives tokens outside the merges a low score.
    metadata = {
        "model": "llama", "pre": "default", "token_type": types,
        "tokens": [token.replace("▁", " ") if kind == USER_DEFINED else token for token, kind in zip(tokens, types)],
        "scores": [-1000.0 if gemma and kind in (CONTROL, USER_DEFINED) else score
                   for score, kind in zip(scores, types)],
        "bos_token_id": pieces.bos_id(), "eos_token_id": pieces.eos_id(), "unknown_token_id": pieces.unk_id(),
        "add_bos_token": True, "add_eos_token": False,
    }
    if gemma:
        metadata |= {"padding_token_id": 0, "add_space_prefix": False, "eot_token_id": vocab["<end_of_turn>"]}
    return tokenizer, metadata, [token for token, kind in zip(tokens, types) if kind in (CONTROL, USER_DEFINED)]
