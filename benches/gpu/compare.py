#!/usr/bin/env python3
"""Two JSON files of benchmark rows side by side: compare.py kvarena.json flashinfer.json

Rows are {section, case, impl, us, gbs | tflops, ok}, as `cargo bench --features cuda --bench gpu` writes them and the FlashInfer
baselines do. Prints each of our cases beside every kernel of theirs, and our time over that of their best.
"""
import collections, json, sys

SECTIONS = {"prefill": "extend"}  # theirs: ours


def rows(path):
    found = collections.defaultdict(dict)
    for row in json.load(open(path))["rows"]:
        section = SECTIONS.get(row["section"], row["section"])
        if row["ok"]:
            found[section, row["case"]][row["impl"]] = row
    return found


def number(row):
    return f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['us']:.2f} us"


def main():
    ours, theirs = rows(sys.argv[1]), rows(sys.argv[2])
    counts = collections.Counter()
    for (section, case), mine in ours.items():
        # Ours may say more of a case, as its layout.
        other = theirs.get((section, case)) or theirs.get((section, case.removesuffix(" PageFirst")))
        if not other:
            continue
        row, best = next(iter(mine.values())), min(r["us"] for r in other.values())
        ratio = row["us"] / best
        counts["all"] += 1
        counts["level or faster"] += ratio <= 1
        print(f"{section:7} {case:36} {number(row):>14}  {ratio:5.3f} of the best of", ", ".join(f"{k} {number(r)}" for k, r in other.items()))
    print(*(f"{name}: {count}" for name, count in counts.items()), sep=", ")


main()
