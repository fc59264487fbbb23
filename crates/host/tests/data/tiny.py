"""Shared code of the tiny models' make.py: random weights, greedy tokens of transformers, golden.json."""

import json
from pathlib import Path

import torch
import transformers

NEW_TOKENS = 20


def draw_weights(model):
    """Draws matrices of gain 1.2 and norms near 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.1 if norm else 1.2 / weight.shape[-1] ** 0.5) + norm)


def save(model, folder: Path):
    """Writes the model with its weights rounded to bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def generate(model, prompt):
    """Returns the new tokens, the smallest margin between the best two logits, and the first logits."""
    tokens, margin, first = list(prompt), float("inf"), None
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        first = logits if first is None else first
        best = logits.topk(2).values
        margin = min(margin, (best[0] - best[1]).item())
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):], margin, first


def write_golden(folder: Path, model_class, seed, common_len, prompt_lens, min_margin, check=lambda model, case: None):
    """Writes golden.json for the saved model: prompts of `prompt_lens` tokens, greedy tokens in float32.

    A prompt is drawn again until the best two logits differ by `min_margin` at each token. `check` checks a case.
    """
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(model.config.vocab_size, (count,), generator=numbers).tolist()
    # Long prompts share a prefix, so that servers reuse it.
    common, cases = draw(common_len), []
    for length in prompt_lens:
        while True:
            prompt = common + draw(length - common_len) if length > common_len else draw(length)
            tokens, margin, first = generate(model, prompt)
            if margin >= min_margin:
                break
        case = {
            "prompt": prompt, "tokens": tokens, "min_margin": margin,
            "first_logits_head": [round(x, 6) for x in first[:8].tolist()],
        }
        check(model, case)
        cases.append(case)
        print(length, round(margin, 4), tokens[:6])
    golden = {
        "framework": f"transformers {transformers.__version__}",
        "dtype": "float32 arithmetic on bfloat16-rounded weights", "greedy": True, "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")
