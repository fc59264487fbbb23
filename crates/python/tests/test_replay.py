"""`python -m kvarena.replay`: the figures of a trace, against a naive cache, and the chart."""

import json
import lzma
import random
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict

import pytest

from kvarena import replay


def naive(requests, pages, block):
    """Hit tokens and evicted pages of a cache of prefixes. Only the last page of a prefix can be evicted."""
    cached, used, free, clock, hits, evicted, unshared = OrderedDict(), {}, pages, 0, 0, 0, -1
    for length, output, ids in requests:
        computed = length + max(output - 1, 0)
        whole, wanted = computed // block, -(-computed // block)
        path = tuple(ids[: length // block]) + tuple(range(unshared, unshared - whole, -1))
        path, unshared = path[:whole], unshared - whole
        hit = 0
        while hit < (length - 1) // block and path[: hit + 1] in cached:
            hit += 1
        clock += 1
        for i in range(hit):
            used[path[: i + 1]] = clock
        lacking = max(wanted - hit - free, 0)
        if lacking > len(cached) - hit:
            continue
        hits, evicted = hits + hit * block, evicted + lacking
        for _ in range(lacking):
            parents = {key[:-1] for key in cached}
            locked = {path[: i + 1] for i in range(hit)}
            victim = min((key for key in cached if key not in parents and key not in locked), key=lambda key: used[key])
            del cached[victim]
        free += lacking - (whole - hit)
        clock += 1
        for i in range(whole):
            cached[path[: i + 1]] = None
            used[path[: i + 1]] = clock
    return hits, evicted


def trace(seed, count, block):
    rng, number = random.Random(seed), 0
    chats = []
    for _ in range(count):
        chat = list(rng.choice(chats)) if chats and rng.random() < 0.7 else []
        chat = chat[: rng.randrange(len(chat) + 1)]
        for _ in range(rng.randrange(1, 4)):
            number += 1
            chat.append(number)
        chats.append(chat)
        tail = rng.randrange(block)
        yield len(chat) * block + tail, rng.randrange(3 * block), chat + [number + 1_000_000] * (tail > 0)


@pytest.mark.parametrize("pages", [6, 20, 60, 400])
def test_figures_of_a_naive_cache(pages):
    requests = list(trace(pages, 300, 8))
    one = replay.Replay(pages, 8)
    for request in requests:
        one.serve(*request)
    assert (one.hits, one.evicted) == naive(requests, pages, 8)
    assert one.input == sum(length for length, _, _ in requests)
    assert (one.rejected > 0) == (pages == 6)
    one.tree.verify()


def test_the_sample(tmp_path, capsys):
    assert replay.SAMPLE.stat().st_size < 50_000
    chart = tmp_path / "chart.svg"
    replay.main(["--pages", "1000", "20000", "--svg", str(chart)])
    printed = capsys.readouterr().out
    assert "1,000 pages of 512 tokens" in printed and "from the cache" in printed
    lines = ElementTree.parse(chart).getroot().findall("{http://www.w3.org/2000/svg}path[@stroke-width]")
    assert len(lines) == 2


def test_plain_and_packed_traces_are_equal(tmp_path, capsys):
    requests = [dict(input_length=9, output_length=2, hash_ids=[1, last]) for last in (2, 3)]
    text = "\n".join(json.dumps(request) for request in requests) + "\n\n"
    (tmp_path / "trace.jsonl").write_text(text)
    (tmp_path / "trace.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    printed = []
    for name in ("trace.jsonl", "trace.jsonl.xz"):
        replay.main([str(tmp_path / name), "--pages", "9", "--block", "8", "--svg", str(tmp_path / "chart.svg")])
        printed.append([line for line in capsys.readouterr().out.splitlines() if "us a request" not in line])
    assert printed[0] == printed[1] and any("8 (44.4 %)" in line for line in printed[0])


def test_wrong_arguments(tmp_path, capsys):
    for wrong in ([], ["--pages", "0"], ["--pages", "x"], ["--pages", "5", "--block", "0"]):
        with pytest.raises(SystemExit):
            replay.main(wrong)
    (tmp_path / "trace").write_text("{}\n")
    with pytest.raises(KeyError, match="input_length"):
        replay.main([str(tmp_path / "trace"), "--pages", "5", "--svg", str(tmp_path / "chart.svg")])
    capsys.readouterr()
