#!/usr/bin/env bash
# Runs client libraries and load generators against `kvarena-server --serve` with the shipped model. Prints a line for
# each.
# Needs a release build. The script downloads the clients from PyPI into a venv (CLIENTS_VENV), so .ci/run omits it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${CLIENTS_VENV:-$PWD/../target/clients-venv}
if ! [ -x "$venv/bin/aiperf" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet openai litellm langchain-openai guidellm aiperf
fi
scratch=$(mktemp -d)
../target/release/kvarena-server --serve 127.0.0.1:0 --quiet >"$scratch/server" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -rf "$scratch"' EXIT
until grep -q '^serving ' "$scratch/server"; do sleep 0.1; done
url=$(awk '{ print $4; exit }' "$scratch/server")

# guidellm finds the tokenizer in the model's folder; aiperf needs it in the hub's cache.
ln -s "$PWD/data/glossary" "$scratch/glossary"
revision=0000000000000000000000000000000000000000
hub=$scratch/hub/models--local--glossary
mkdir -p "$hub/refs" "$hub/snapshots/$revision"
printf %s "$revision" >"$hub/refs/main"
cp data/glossary/*.json "$hub/snapshots/$revision"
export HF_HOME=$scratch HF_HUB_OFFLINE=1

failed=0
client() {
    local name=$1 begun=$SECONDS outcome=passed
    shift
    (cd "$scratch" && timeout 120 "$@") >"$scratch/$name" 2>&1 || { outcome=FAILED failed=1; tail -n 20 "$scratch/$name"; }
    printf '%-18s %s in %s s\n' "$name" "$outcome" "$((SECONDS - begun))"
}
requests=40
report='import json, sys
done = json.load(open("benchmarks.json"))["benchmarks"][0]["metrics"]["request_totals"]
sys.exit(done["successful"] != int(sys.argv[1]))'
guidellm() {
    "$venv/bin/guidellm" run --backend "kind=openai_http,target=$url" --profile kind=concurrent,streams=4 \
        --constraint "kind=max_requests,count=$requests" --data kind=synthetic_text,prompt_tokens=32,output_tokens=16
    "$venv/bin/python" -c "$report" "$requests"
}
export -f guidellm
export venv url requests report
for name in openai litellm langchain; do
    client "$name" "$venv/bin/python" "$PWD/tests/clients.py" "$name" "$url"
done
client guidellm bash -ec guidellm
client aiperf "$venv/bin/aiperf" profile -m glossary --url "$url" --endpoint-type chat --streaming --tokenizer local/glossary \
    --concurrency 8 --request-count $requests --synthetic-input-tokens-mean 32 --output-tokens-mean 16 --ui none
grep -q 'Request Error Rate.* 0\.00 ' "$scratch/aiperf" || { echo "aiperf reports errors"; failed=1; }
if command -v hey >/dev/null; then
    body='{"model":"glossary","prompt":"a page","max_tokens":8}'
    client hey hey -n 2000 -c 64 -m POST -T application/json -d "$body" "$url/v1/completions"
    grep -q '\[200\].*2000 responses' "$scratch/hey" || { echo "hey reports errors"; failed=1; }
else
    echo "hey                not run: it is not installed"
fi
kill -TERM $server
wait $server
grep '^verified' "$scratch/server"
exit $failed
