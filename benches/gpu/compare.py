#!/usr/bin/env python3
"""Compares two JSON files of benchmark rows: compare.py kvarena.json flashinfer.json

Rows are {section, case, impl, us, gbs | tflops, ok}, as `cargo bench --features cuda --bench gpu` and the FlashInfer
baselines write them. Compares the rows that are ok, in cases that both files have. Prints each row beside every kernel
of the baselines, and its time divided by that of the fastest baseline.
"""
import collections, json, re, sys

SECTIONS = {"extend": "prefill", "shared": "cascade"}  # ours: theirs


def theirs_of(section, case):
    """Returns the section and case of the baselines that match a case of ours."""
    case = case.removesuffix(" PageFirst")  # our name also contains the layout
    if section == "fp8":
        case = case.removeprefix("decode ").replace(" zipf ", " zipf128-32768 ").replace(" page", " 32q/8kv page")
    if section == "mla":
        case = case.replace("B", "b", 1).replace(" q1 ", " ", 1)
    if section == "shared":
        case = re.sub(r"^(b\d+) (\d+)\+(\d+)$", r"\1 shared\2 unique\3 page16", case)
        case = re.sub(r"^(b\d+) (\d+)\+(\d+)x(\d+)\+(\d+)$", r"\1 root\2 \3xgroup\4 unique\5 page16", case)
    return SECTIONS.get(section, section), case


def rows(path):
    found = collections.defaultdict(dict)
    for row in json.load(open(path))["rows"]:
        if row["ok"]:
            found[row["section"], row["case"]][row["impl"]] = row
    return found


def number(row):
    return f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['us']:.2f} us"


def main():
    ours, theirs = rows(sys.argv[1]), rows(sys.argv[2])
    counts = collections.Counter()
    for (section, case), mine in ours.items():
        other = theirs.get(theirs_of(section, case))
        if not other:
            continue
        best, beside = min(r["us"] for r in other.values()), ", ".join(f"{k} {number(r)}" for k, r in other.items())
        for kind, row in mine.items():
            ratio = row["us"] / best
            counts["all"] += 1
            counts["level or faster"] += ratio <= 1
            print(f"{section:7} {case:36} {kind:18} {number(row):>14}  {ratio:5.3f} of the best of {beside}")
    print(*(f"{name}: {count}" for name, count in counts.items()), sep=", ")


main()
