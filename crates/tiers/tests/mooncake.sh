#!/usr/bin/env bash
# Starts Mooncake's master and a storage node, and runs a command with the child's command in KVARENA_MOONCAKE:
#   unshare -n tests/mooncake.sh cargo test --offline -p kvarena-tiers --test remote child
# Mooncake's transfer engine listens on all addresses: `unshare -n` runs it in a network with loopback only.
# Needs Debian's libibverbs1 and librdmacm1, and a Python (PYTHON, default python3) with PyPI's
# mooncake-transfer-engine-non-cuda (0.3.13.post1 is tested).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
ip link set lo up
"$(dirname "$("$python" -c 'import sys; print(sys.executable)')")/mooncake_master" --rpc_address=127.0.0.1 \
  --rpc_port=50051 --metrics_host=127.0.0.1 --metrics_port=50052 >"$work/master.log" 2>&1 &
started=$!
trap 'kill $started 2>/dev/null || true; wait; rm -rf "$work"' EXIT
sleep 2
"$python" - >"$work/node.log" 2>&1 <<'PYTHON' &
import signal
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup('127.0.0.1:17001', 'P2PHANDSHAKE', 512 << 20, 16 << 20, 'tcp', '', '127.0.0.1:50051') == 0
print('ready', flush=True)
signal.pause()
PYTHON
started="$started $!"
for _ in $(seq 100); do
  grep -q '^ready' "$work/node.log" && break
  sleep 0.2
done
grep -q '^ready' "$work/node.log" || { tail -5 "$work"/*.log; exit 1; }
child=$(cd "$(dirname "$0")/.." && pwd)/mooncake_child.py
export KVARENA_MOONCAKE="$python $child 127.0.0.1:50051 127.0.0.1:17003 tcp"
"$@"
