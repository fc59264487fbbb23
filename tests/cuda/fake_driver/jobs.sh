#!/usr/bin/env bash
# Runs `cargo test` jobs, as many at a time as there are cores. Each job is a process of its own, because the tests of
# one process use a device one at a time. A line of the input describes a job: its settings, "--", the arguments of
# `cargo test`. The longest jobs should come first.
set -euo pipefail
job() {
    local settings=${1%%--*} arguments=${1#*--} log start=$SECONDS
    log=$(mktemp)
    # The settings and the arguments are lists of words. The limit ends a job that hangs.
    # The grep fails a job whose filter matches no test, which cargo accepts.
    if env $settings timeout -k 5 2400 cargo test --quiet $arguments >"$log" 2>&1 && grep -q 'ok. [1-9]' "$log"; then
        printf 'ok, %s s: %s\n' "$((SECONDS - start))" "$1"
        rm "$log"
    else
        printf 'FAILED: %s\n' "$1"
        cat "$log"
        return 1
    fi
}
export -f job
xargs -P "$(nproc)" -I{} bash -c 'job "{}"'
