"""Replays a trace of requests through a prefix cache: `python -m kvarena.replay [TRACE] --pages N [N ...]`.

Prints the hits and evictions of each cache size, and draws them as an SVG. A trace has a JSON object a line, in the
form of Mooncake's traces: `input_length`, `output_length`, and `hash_ids`, a number for each block of the input that
names the block and all before it. A file that ends in .xz is unpacked as a stream. Without TRACE, the sample of the
package is replayed. Requests run one after the other, so the results depend on the order alone.
"""

import argparse
import array
import json
import lzma
import sys
import time
from pathlib import Path

from kvarena import Tree

SAMPLE = Path(__file__).with_name("sample.jsonl.xz")
# Numbers above those of the trace, for blocks that no other request has.
UNSHARED = 1 << 31


def requests(path):
    """The requests of a trace: input tokens, output tokens and block numbers."""
    with lzma.open(path, "rt") if str(path).endswith(".xz") else open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                request = json.loads(line)
                yield request["input_length"], request["output_length"], request["hash_ids"]


class Replay:
    """A cache of `pages` blocks. A block is one token of the tree."""

    def __init__(self, pages, block):
        self.pages, self.block = pages, block
        self.tree = Tree(pages, prefault=False)
        self.free = array.array("i", range(pages))
        self.unshared = UNSHARED
        self.requests = self.rejected = self.input = self.hits = self.evicted = 0
        self.seconds = 0.0
        self.points = []  # (requests, hit tokens, input tokens) so far

    def serve(self, length, output, ids):
        """Serves a request alone: match, lock, evict what lacks, compute, insert, unlock."""
        # The last sampled token needs no K and V, and the last token of the input is always computed.
        computed = length + max(output - 1, 0)
        whole, wanted = computed // self.block, -(-computed // self.block)
        tokens = array.array("q", ids[: length // self.block])
        own = range(self.unshared, self.unshared + whole - len(tokens))
        matchable = tokens[: (length - 1) // self.block]
        tokens.extend(own)
        self.unshared += len(own)

        begun = time.perf_counter()
        handle, hit = self.tree.match(matchable)
        self.tree.lock(handle)
        lacking = max(wanted - hit - len(self.free), 0)
        if fits := lacking <= self.tree.evictable:
            if lacking:
                self.free.extend(self.tree.evict(lacking))
            slots = array.array("i", self.tree.slots(handle)) + self.free[len(self.free) - (whole - hit):]
            _, known = self.tree.insert(tokens, slots)
            del self.free[len(self.free) - (whole - hit):]
            self.free.extend(slots[hit:known])
        self.tree.unlock(handle)
        self.seconds += time.perf_counter() - begun

        self.requests += 1
        self.input += length
        if fits:
            self.hits += hit * self.block
            self.evicted += lacking
        else:
            self.rejected += 1

    def point(self):
        self.points.append((self.requests, self.hits, self.input))

    def report(self):
        rate = 100 * self.hits / max(self.input, 1)
        rows = [("requests", f"{self.requests:,}"), ("input tokens", f"{self.input:,}"),
                ("  from the cache", f"{self.hits:,} ({rate:.1f} %)"), ("evicted pages", f"{self.evicted:,}"),
                ("larger than the cache", f"{self.rejected:,}"),
                ("tree, us a request", f"{1e6 * self.seconds / max(self.requests, 1):.1f}")]
        print(f"{self.pages:,} pages of {self.block} tokens")
        print("\n".join(f"{name:<24}{value}" for name, value in rows), end="\n\n")


COLOURS = ["#1b6ca8", "#c8553d", "#588157", "#7b4b94", "#b8860b", "#444444"]
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 320, 50, 40


def svg(replays):
    """A chart of the hit rate so far by request: a line for each cache size."""
    most = max((replay.requests for replay in replays), default=0) or 1
    rates = [[100 * hits / max(tokens, 1) for _, hits, tokens in replay.points] for replay in replays]
    top = max(10.0, 1.1 * max((rate for line in rates for rate in line), default=0))

    def x(requests):
        return LEFT + (WIDTH - LEFT - 20) * requests / most

    def y(rate):
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * rate / top

    def text(at_x, at_y, words, anchor="middle", colour="#222"):
        return f'<text x="{at_x:.0f}" y="{at_y:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in range(5):
        rate, requests = top * i / 4, most * i / 4
        parts.append(f'<path d="M{LEFT} {y(rate):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts += [text(LEFT - 6, y(rate) + 4, f"{rate:.0f}", "end"), text(x(requests), HEIGHT - 24, f"{requests:,.0f}")]
    parts += [text(WIDTH / 2, HEIGHT - 8, "requests"), text(LEFT, 12, "input tokens from the cache so far, %", "start")]
    for i, (replay, line) in enumerate(zip(replays, rates)):
        colour = COLOURS[i % len(COLOURS)]
        path = "L".join(f"{x(point[0]):.1f} {y(rate):.1f}" for point, rate in zip(replay.points, line))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(text(WIDTH - 24, 34 + 14 * i, f"{replay.pages:,} pages", "end", colour))
    return "\n".join([*parts, "</svg>\n"])


def arguments(given):
    parser = argparse.ArgumentParser("python -m kvarena.replay", description=__doc__.split("\n\n")[1])
    parser.add_argument("trace", nargs="?", default=SAMPLE, help="JSON lines, also as .xz (default: a sample)")
    parser.add_argument("--pages", type=int, nargs="+", required=True, help="sizes of the cache, in blocks")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the trace (default: 512)")
    parser.add_argument("--most", type=int, help="replay only so many requests")
    parser.add_argument("--svg", default="replay.svg", help="file of the chart (default: replay.svg)")
    options = parser.parse_args(given)
    if min(options.pages) < 1 or options.block < 1:
        parser.error("--pages and --block are at least 1")
    return options


def main(given=None):
    options = arguments(given)
    replays = [Replay(pages, options.block) for pages in options.pages]
    for number, request in enumerate(requests(options.trace)):
        if number == options.most:
            break
        for replay in replays:
            replay.serve(*request)
            if number < 100 or number % 50 == 0:
                replay.point()
    for replay in replays:
        replay.point()
        replay.report()
    Path(options.svg).write_text(svg(replays), encoding="utf-8")
    print(f"chart: {options.svg}")


if __name__ == "__main__":
    sys.exit(main())
