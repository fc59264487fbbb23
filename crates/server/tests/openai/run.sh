#!/usr/bin/env bash
# Tests `kvarena-server --serve` with the official openai client from PyPI in a venv (OPENAI_VENV), over the loopback,
# with the shipped model on the CPU. KVARENA_SERVER names a built program. Arguments are names of tests to run; the
# default is all.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${OPENAI_VENV:-$PWD/../target/openai-venv}
if ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet openai
fi
[ -n "${KVARENA_SERVER:-}" ] || cargo build --release --quiet
"$venv/bin/python" tests/openai/client.py "${KVARENA_SERVER:-$PWD/../target/release/kvarena-server}" "$@"
