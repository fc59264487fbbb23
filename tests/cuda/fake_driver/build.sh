#!/usr/bin/env bash
# Builds the driver that runs kernels on the CPU: libcuda.so.1 in the given folder, or in target/fake-driver.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../../target/fake-driver}
mkdir -p "$out/objects"
flags="-std=c++20 -O3 -march=native -ffp-contract=off -fno-math-errno -fPIC -fno-semantic-interposition -Wall -Werror"
jobs=()
for source in "$here"/driver.cc "$here"/ptx/*.cc; do
    object=$out/objects/$(basename "$source" .cc).o
    # Any object may depend on any header.
    newest=$(ls -t "$source" "$here"/ptx/*.h "$0" | head -1)
    [[ -e $object && ! $newest -nt $object ]] && continue
    "${CXX:-c++}" $flags -c "$source" -o "$object" &
    jobs+=($!)
done
for job in ${jobs[@]+"${jobs[@]}"}; do wait "$job"; done
"${CXX:-c++}" -shared -Wl,-Bsymbolic -o "$out/libcuda.so.1" "$out"/objects/*.o
