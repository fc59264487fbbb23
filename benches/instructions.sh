#!/usr/bin/env bash
# Counts the instructions of one call of each case with callgrind, and writes benches/instructions.txt, so that a review
# shows changes of cost. Given cases, it only prints their counts. Counts vary by about 1 %, because hash tables have
# random seeds. One codegen unit: with 16, LLVM's partition of the crate moves counts of untouched code by 2 to 5 %.
# Usage: benches/instructions.sh [CASE...]      Needs: valgrind.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
cargo build -q --release --bench instructions
bin=$(cargo build -q --release --bench instructions --message-format=json | sed -n 's/.*"executable":"\([^"]*instructions[^"]*\)".*/\1/p')
cases=${*:-$("$bin")}
out=$(mktemp); trap 'rm -f "$out"' EXIT
table() {
    printf '# instructions of one call, by callgrind: case, page_size, instructions\n'
    for case in $cases; do
        for page_size in 1 16; do
            # Skips the largest tree that is prefaulted (TOUCHED_MAX), which takes too long. Also skips a second page
            # size for cases that ignore the page size.
            case "$case $page_size" in "evict_100000 1" | "alloc_free 16" | nested_*" 16" | "plan_marks 16") continue ;; esac
            calls=200; case $case in evict_1000) calls=100 ;; plan* | step*) calls=64 ;; nested_*) calls=4 ;; chats*) calls=400 ;; replay) calls=4000 ;; esac
            valgrind --tool=callgrind --callgrind-out-file="${CALLGRIND_OUT:-/dev/null}" --toggle-collect='*measured*' \
                "$bin" "$case" "$page_size" "$calls" 2>"$out" >/dev/null || { cat "$out" >&2; exit 1; }
            total=$(sed -n 's/.*Collected : \([0-9]*\).*/\1/p' "$out")
            printf '%-14s %3d %9d\n' "$case" "$page_size" $((total / calls))
        done
    done
}
if [ $# -gt 0 ]; then table; else table > benches/instructions.txt; cat benches/instructions.txt; fi
