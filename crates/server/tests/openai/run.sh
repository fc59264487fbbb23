#!/usr/bin/env bash
# `generate --serve` as its users meet it: the official openai client from PyPI, in a venv of its own (OPENAI_VENV), over
# the loopback, with the model that is shipped, on the CPU. Arguments: names of tests to run; without any, all.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${OPENAI_VENV:-$PWD/../target/openai-venv}
if ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet openai
fi
cargo build --release --quiet
"$venv/bin/python" tests/openai/client.py "$PWD/../target/release/generate" "$@"
