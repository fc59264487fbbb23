#!/usr/bin/env bash
# The CUDA backend's tests on a machine without a GPU, kernels and all, over a driver that runs their PTX on the CPU
# (tests/cuda/fake_driver/driver.cc). Needs .ci/cuda-stub.sh to build.
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=target/fake-driver
tests/cuda/fake_driver/build.sh
export LD_LIBRARY_PATH=$PWD/$out CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub}
# Without an error: else all tests would be skipped.
export KVARENA_GPU_ERROR=None KVARENA_REPEATS=3
seeds=${KVARENA_SEEDS:-0..8}
unset KVARENA_SEEDS
core="--features cuda,testkit"
cargo test $core --test cuda --lib --no-run

# First all tests; then what needs no Hopper, on plain kernels, which other devices run, each with the shared memory that it has; then
# warps finely mixed, with copies and products done at once; then unit tests that want a driver; and the oldest one that serves. Many
# kv heads take a minute, and run the kernels of 80.
plain="contract:: padding:: both_ends_of_f32"
few="$plain --skip many_kv_heads"
tests/cuda/fake_driver/jobs.sh <<END
FAKE_DRIVER_CAPABILITY=80 KVARENA_SEEDS=0..8 -- $core --test cuda -- contract_over_latent_rows
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- --skip contract::
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- contract:: --skip contract_over_latent_rows
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- contract_over_latent_rows
FAKE_DRIVER_CAPABILITY=80 KVARENA_SEEDS=0..8 -- $core --test cuda -- $plain --skip contract_over_latent_rows
FAKE_DRIVER_EARLY=1 FAKE_DRIVER_SLICE=50 KVARENA_SEEDS=40..45 -- $core --test cuda -- $few
FAKE_DRIVER_VERSION=12000 KVARENA_SEEDS=0..2 -- $core --test cuda -- contract:: graph:: errors::
FAKE_DRIVER_CAPABILITY=86 KVARENA_SEEDS=0..2 -- $core --test cuda -- $few
FAKE_DRIVER_CAPABILITY=89 KVARENA_SEEDS=0..2 -- $core --test cuda -- $few
FAKE_DRIVER_CAPABILITY=100 KVARENA_SEEDS=0..2 -- $core --test cuda -- $few
FAKE_DRIVER_CAPABILITY=120 KVARENA_SEEDS=0..2 -- $core --test cuda -- $few
KVARENA_REPEATS=3 -- $core --lib backend::cuda
END

# The guide's program.
cargo test --quiet $core --doc guide::gpu

# The errors of a machine without a usable GPU.
refuses() { # error, settings
    env "${@:2}" KVARENA_GPU_ERROR="Some($1)" cargo test --quiet $core --test cuda a_machine_that_cannot
}
refuses NoDriver LD_LIBRARY_PATH=
refuses "NoDevice { ordinal: 0 }" FAKE_DRIVER_DEVICES=0
refuses "DriverTooOld { version: 11080, wanted: 12000 }" FAKE_DRIVER_VERSION=11080
refuses "DeviceTooOld { capability: 75 }" FAKE_DRIVER_CAPABILITY=75
