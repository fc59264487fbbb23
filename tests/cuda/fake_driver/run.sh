#!/usr/bin/env bash
# Runs the CUDA backend's tests and kernels on a machine without a GPU, over a driver that runs their PTX on the CPU
# (tests/cuda/fake_driver/driver.cc). The build needs .ci/cuda-stub.sh.
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=target/fake-driver
tests/cuda/fake_driver/build.sh
export LD_LIBRARY_PATH=$PWD/$out CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub}
# If the driver is not found, all tests are skipped. With KVARENA_GPU_ERROR, one test then fails.
export KVARENA_GPU_ERROR=None KVARENA_REPEATS=3
seeds=${KVARENA_SEEDS:-0..4}
unset KVARENA_SEEDS
core="--features cuda,testkit"
cargo test $core --test cuda --lib --no-run

# Jobs (driver.cc describes the variables):
# * all tests, and unit tests that need a driver;
# * tests of the contract, of padding and of scales, with the kernels and the shared memory of other devices. Only
#   capability 9.0 selects kernels of its own, and 8.6, 8.9 and 12.0 have the same shared memory;
# * finely interleaved warps, with asynchronous copies and products that are done at once;
# * two orders of streams;
# * slow pinning of swap memory, and pinning that fails;
# * the oldest supported driver. It differs only in what it loads and captures, so one seed is enough.
# Tests of many kv heads take a minute a seed and use the kernels of capability 80 in every job, so one job has them.
# Jobs with $again run the kernels of other jobs, and do not look for races again. Those of $long run only with CI_FULL.
plain="contract:: padding:: both_ends_of_f32 --skip many_kv_heads"
again="FAKE_DRIVER_RACES=0 KVARENA_SEEDS"
long="
FAKE_DRIVER_VERSION=12000 $again=0..1 -- $core --test cuda -- contract:: --skip many_kv_heads
FAKE_DRIVER_CAPABILITY=89 $again=0..2 -- $core --test cuda -- $plain
FAKE_DRIVER_CAPABILITY=100 $again=0..2 -- $core --test cuda -- $plain
FAKE_DRIVER_STREAMS=2 $again=0..4 -- $core --test cuda -- --exact contract::cuda_keeps_the_contract"
tests/cuda/fake_driver/jobs.sh <<END
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- --skip contract::
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- contract:: --skip contract_over_latent_rows --skip many_kv_heads
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=0..1 -- $core --test cuda -- many_kv_heads
FAKE_DRIVER_EARLY=1 FAKE_DRIVER_SLICE=50 KVARENA_SEEDS=40..43 -- $core --test cuda -- $plain
FAKE_DRIVER_CAPABILITY=80 KVARENA_SEEDS=0..4 -- $core --test cuda -- $plain --skip contract_over_latent_rows
FAKE_DRIVER_CAPABILITY=80 KVARENA_SEEDS=0..4 -- $core --test cuda -- contract_over_latent_rows
FAKE_DRIVER_ORDER=1 KVARENA_SEEDS=$seeds -- $core --test cuda -- contract_over_latent_rows
FAKE_DRIVER_VERSION=12000 $again=0..1 -- $core --test cuda -- graph:: errors::
FAKE_DRIVER_STREAMS=1 -- $core --test cuda -- copies:: swap_memory:: move_order:: states::
FAKE_DRIVER_STREAMS=1 $again=0..4 -- $core --test cuda -- --exact contract::cuda_keeps_the_contract
FAKE_DRIVER_STREAMS=2 -- $core --test cuda -- copies:: swap_memory:: move_order:: states::
FAKE_DRIVER_PIN_MS=700 -- $core --test cuda -- opening_waits_for_no_pinning
FAKE_DRIVER_PINS=16777216 -- $core --test cuda -- --ignored memory_that_is_not_pinned
KVARENA_REPEATS=3 -- $core --lib backend::cuda${CI_FULL:+$long}
END

# Runs the guide's program.
cargo test --quiet $core --doc guide::gpu

# Checks the errors of machines that cannot run the backend.
refuses() { # error, settings
    env "${@:2}" KVARENA_GPU_ERROR="Some($1)" cargo test --quiet $core --test cuda an_unsupported_machine | grep '1 passed'
}
refuses NoDriver LD_LIBRARY_PATH=
refuses "NoDevice { ordinal: 0 }" FAKE_DRIVER_DEVICES=0
refuses "DriverTooOld { version: 11080, wanted: 12000 }" FAKE_DRIVER_VERSION=11080
refuses "DeviceTooOld { capability: 75 }" FAKE_DRIVER_CAPABILITY=75
