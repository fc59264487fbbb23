#!/usr/bin/env bash
# Packs the files with which a GPU machine without a Rust toolchain tests and measures the CUDA backend:
#
#   benches/gpu/pack.sh FOLDER      on this machine: packs binaries and scripts into FOLDER
#   FOLDER/run.sh [test] [bench]    on the GPU machine: writes tables to $OUT, by default FOLDER
#
# With FLASHINFER_KIT=DIR, a folder with bench_flashinfer.py, `bench` runs the baselines in the same call and compares.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
.ci/cuda-stub.sh >/dev/null
export CUDA_LIBRARY_PATH=$PWD/target/cuda-stub
binary() { cargo "$@" --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1; }
install -s "$(binary test --release --features cuda --test cuda --no-run)" "$1/cuda_tests"
install -s "$(binary build --release --features cuda --bench gpu)" "$1/gpu_bench"
cp benches/gpu/compare.py "$1"
[ -z "${FLASHINFER_KIT:-}" ] || cp -r "$FLASHINFER_KIT" "$1/flashinfer"
cat >"$1/run.sh" <<'RUN'
#!/usr/bin/env bash
cd "$(dirname "$0")"
export OUT=${OUT:-$PWD}
set -o pipefail
failed=0
for part in "${@:-test}"; do
    case $part in
    test)
        ./cuda_tests --test-threads 1 2>&1 | tee "$OUT/tests.txt" | grep -E "FAILED|panicked|test result"
        grep -q "test result: ok" "$OUT/tests.txt" || failed=1
        # The tools run only 4 seeds of random shapes, because they make kernels a hundred times slower.
        for tool in memcheck racecheck; do
            KVARENA_SEEDS=0..4 compute-sanitizer --error-exitcode 1 --tool "$tool" ./cuda_tests --test-threads 1 contract:: staged:: \
                >"$OUT/$tool.txt" 2>&1 || failed=1
            echo "$tool: $(grep -E "SUMMARY" "$OUT/$tool.txt" || tail -1 "$OUT/$tool.txt")"
        done
        ;;
    bench)
        ./gpu_bench first ceil store copy decode shared shortq extend fp8 mla sparse plan >"$OUT/bench.txt" || failed=1
        if [ -d flashinfer ]; then
            python3 flashinfer/bench_flashinfer.py --only ceil,store,decode,prefill,cascade,fp8,mla,shortq --no-jit >"$OUT/flashinfer.txt" 2>&1
            python3 compare.py "$OUT/kvarena.json" "$OUT/flashinfer.json"
            grep -vE "^(decode|extend)" "$OUT/bench.txt"
        else
            cat "$OUT/bench.txt"
        fi
        ;;
    esac
done
exit $failed
RUN
chmod +x "$1/run.sh"
