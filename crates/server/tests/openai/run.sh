#!/usr/bin/env bash
# Tests `generate --serve` with the official openai client from PyPI in a venv (OPENAI_VENV), over the loopback, with the
# shipped model on the CPU. Arguments are names of tests to run; the default is all.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${OPENAI_VENV:-$PWD/../target/openai-venv}
if ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet openai
fi
cargo build --release --quiet
"$venv/bin/python" tests/openai/client.py "$PWD/../target/release/generate" "$@"
