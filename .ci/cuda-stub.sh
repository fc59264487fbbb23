#!/usr/bin/env bash
# Creates an empty libcuda under target/cuda-stub. Feature `cuda` then builds without a CUDA toolkit (see README):
#
#   .ci/cuda-stub.sh && export CUDA_LIBRARY_PATH=$PWD/target/cuda-stub
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p target/cuda-stub/lib64
echo '!<arch>' >target/cuda-stub/lib64/libcuda.a
