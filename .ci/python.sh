#!/usr/bin/env bash
# Formatting, lints, the wheel and its tests: python, with python's random driver. Needs Python 3.11 or later.
set -euo pipefail
cd "$(dirname "$0")/../crates/python"
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0
python=""
for candidate in python3.13 python3.12 python3.11 python3 "$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done
[ -n "$python" ] || { echo "python.sh needs Python 3.11 or later"; exit 1; }
[ -x target/venv/bin/python ] || "$python" -m venv target/venv
target/venv/bin/python -m pip install --quiet --disable-pip-version-check maturin pytest numpy
export PATH=$PWD/target/venv/bin:$PATH PYO3_PYTHON=$PWD/target/venv/bin/python

cargo fmt --check
cargo clippy --all-targets -- -D warnings
rm -f target/wheels/*.whl
# A wheel with the core's assertions.
maturin build --quiet --profile dev --out target/wheels
pip install --quiet --disable-pip-version-check --force-reinstall --no-deps target/wheels/*.whl
ls -l target/wheels
# The debug allocator of Python finds writes outside its blocks, and the pattern of malloc reads of freed ones.
PYTHONMALLOC=debug MALLOC_PERTURB_=165 python -X dev -m pytest -q tests
python tests/driver.py "${PYTHON_OPERATIONS:-1e6}"
