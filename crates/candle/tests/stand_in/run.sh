#!/usr/bin/env bash
# The GPU's half of the bridge on a machine without a GPU: over the driver that runs kernels on the CPU
# (tests/cuda/fake_driver) and a cuBLAS and a cuRAND that compute nothing (libraries.c). Of candle's own kernels there are
# only copies (.ci/empty-nvcc/fill.ptx). Needs .ci/cuda-stub.sh and the library of tests/cuda/fake_driver/build.sh.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
out=$PWD/target/candle-stand-in
mkdir -p "$out/lib64"
for library in libcublas.so.13 libcurand.so.10; do
  cc -shared -fPIC -Wall -Werror -Wl,-soname,$library -o "$out/lib64/$library" crates/candle/tests/stand_in/libraries.c
  ln -sf $library "$out/lib64/${library%.so.*}.so"
done
# Named by the linker's arguments, and not used.
for library in cublasLt cuda cudart nvrtc; do
  cc -shared -o "$out/lib64/lib$library.so" -x c /dev/null
done
export CUDA_HOME=$out CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub} CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000
export NVCC=$PWD/.ci/empty-nvcc/nvcc LD_LIBRARY_PATH=$out/lib64:$PWD/target/fake-driver KVARENA_GPU_ERROR=None
# Of two streams the arena's goes first, so that what it does not wait for comes too late.
export FAKE_DRIVER_STREAMS=1
cd crates/candle
# One after the other: a test counts the process's copies.
cargo test -p kvarena-candle --features cuda --test cuda -- --test-threads 1
