#!/usr/bin/env bash
# Tests the CUDA part of the bridge on a machine without a GPU. The driver runs kernels on the CPU
# (tests/cuda/fake_driver); cuBLAS and cuRAND compute nothing (libraries.c). candle has only the kernels of
# .ci/empty-nvcc/fill.ptx. Run .ci/cuda-stub.sh and tests/cuda/fake_driver/build.sh first.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
out=$PWD/target/candle-stand-in
mkdir -p "$out/lib64"
for library in libcublas.so.13 libcurand.so.10; do
  cc -shared -fPIC -Wall -Werror -Wl,-soname,$library -o "$out/lib64/$library" crates/candle/tests/stand_in/libraries.c
  ln -sf $library "$out/lib64/${library%.so.*}.so"
done
# The linker's arguments name these libraries, but nothing uses them.
for library in cublasLt cuda cudart nvrtc; do
  cc -shared -o "$out/lib64/lib$library.so" -x c /dev/null
done
export CUDA_HOME=$out CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub} CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000
export NVCC=$PWD/.ci/empty-nvcc/nvcc LD_LIBRARY_PATH=$out/lib64:$PWD/target/fake-driver KVARENA_GPU_ERROR=None
# The driver runs the arena's stream before a second one. If the arena lacks a wait for that stream, results differ.
export FAKE_DRIVER_STREAMS=1
# The core's jobs look for races in its kernels.
export FAKE_DRIVER_RACES=0
cd crates/candle
# The tests run one after the other, because one of them counts the copies of the process.
cargo test -p kvarena-candle --features cuda --test cuda -- --test-threads 1
