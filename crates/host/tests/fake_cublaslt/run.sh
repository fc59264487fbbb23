#!/usr/bin/env bash
# The GPU part of crates/host on a machine without a GPU: all but its own kernels, over a driver, a cublasLt and an NCCL
# that run on the CPU (tests/cuda/fake_driver, library.cc, nccl.cc). Needs .ci/cuda-stub.sh and the library of
# tests/cuda/fake_driver/run.sh.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
driver=$PWD/target/fake-driver lt=$PWD/target/fake-cublaslt nccl=$PWD/target/fake-nccl
mkdir -p "$lt" "$nccl"
# Sums in any order, as on a GPU, or they would not be vectors.
"${CXX:-c++}" -std=c++17 -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math -fPIC -shared -Wall -Werror \
    -o "$lt/libcublasLt.so.13" crates/host/tests/fake_cublaslt/library.cc
"${CXX:-c++}" -std=c++17 -O3 -fPIC -shared -Wall -Werror -o "$nccl/libnccl.so.2" crates/host/tests/fake_cublaslt/nccl.cc
export CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub}
cd crates
host="--release -p kvarena-host --features cuda" server="--release -p kvarena-server --features cuda"
LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test $host --test gpu_kernels --test gpu_products
LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test $server --test gpu --test gpu_sparse --test gpu_sums
# Ranks that fail: what hangs is ended.
LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test $server --test gpu_ranks --no-run
LD_LIBRARY_PATH=$driver:$lt:$nccl timeout -k 5 60 cargo test $server --test gpu_ranks -- --nocapture
# Ranks on one device, likewise.
FAKE_DRIVER_DEVICES=1 LD_LIBRARY_PATH=$driver:$lt:$nccl timeout -k 5 120 cargo test $server --test gpu_sums
# Sums over more ranks, finely mixed; and what devices that do not reach each other's memory do.
FAKE_DRIVER_DEVICES=4 FAKE_DRIVER_SLICE=50 LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test --quiet $server --test gpu_sums
FAKE_DRIVER_PEERS=0 LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test --quiet $server --test gpu_sums what_sums
# What a machine without a driver, without a device, or without cublasLt is told.
for path in "" "$lt" "$driver"; do
    LD_LIBRARY_PATH=$path cargo test --quiet $server --test gpu what_cannot_run
done
FAKE_DRIVER_DEVICES=0 LD_LIBRARY_PATH=$driver:$lt cargo test --quiet $server --test gpu what_cannot_run
# Or with no NCCL, or one that refuses.
LD_LIBRARY_PATH=$driver:$lt cargo test --quiet $server --test gpu several_gpus
FAKE_NCCL_REFUSES=1 LD_LIBRARY_PATH=$driver:$lt:$nccl cargo test --quiet $server --test gpu several_gpus
