#!/usr/bin/env bash
# The CUDA backend's tests on a machine without a GPU, kernels and all, over a driver that runs their PTX on the CPU
# (tests/cuda/fake_driver/driver.cc). Needs .ci/cuda-stub.sh to build.
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=target/fake-driver
tests/cuda/fake_driver/build.sh
export LD_LIBRARY_PATH=$PWD/$out CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub}
# Without an error: else all tests would be skipped.
export KVARENA_GPU_ERROR=None KVARENA_REPEATS=3 FAKE_DRIVER_ORDER=1
KVARENA_SEEDS=${KVARENA_SEEDS:-0..25} cargo test --features cuda,testkit --test cuda
unset FAKE_DRIVER_ORDER

# Plain kernels, which other devices run, each with the shared memory that it has; and warps finely mixed, with copies and products done at
# once.
kernels() { env "${@:2}" cargo test --quiet --features cuda,testkit --test cuda -- contract:: padding:: both_ends_of_f32 $1; }
kernels "" FAKE_DRIVER_CAPABILITY=80 KVARENA_SEEDS=0..24
# Many kv heads take a minute, and run the kernels of 80.
few="--skip many_kv_heads"
for capability in 86 89 100 120; do kernels "$few" FAKE_DRIVER_CAPABILITY=$capability KVARENA_SEEDS=0..2; done
kernels "$few" FAKE_DRIVER_EARLY=1 FAKE_DRIVER_SLICE=50 KVARENA_SEEDS=40..56

# Unit tests that want a driver; and the oldest one that serves.
cargo test --quiet --features cuda,testkit --lib backend::cuda
KVARENA_SEEDS=0..5 FAKE_DRIVER_VERSION=12000 cargo test --quiet --features cuda,testkit --test cuda -- contract:: graph:: errors::

# The guide's program.
cargo test --quiet --features cuda --doc guide::gpu

# What a machine that cannot is told.
refuses() { # error, settings
    env "${@:2}" KVARENA_GPU_ERROR="Some($1)" cargo test --quiet --features cuda,testkit --test cuda a_machine_that_cannot
}
refuses NoDriver LD_LIBRARY_PATH=
refuses "NoDevice { ordinal: 0 }" FAKE_DRIVER_DEVICES=0
refuses "DriverTooOld { version: 11080, wanted: 12000 }" FAKE_DRIVER_VERSION=11080
refuses "DeviceTooOld { capability: 75 }" FAKE_DRIVER_CAPABILITY=75
