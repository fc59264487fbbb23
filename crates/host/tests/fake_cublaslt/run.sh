#!/usr/bin/env bash
# Tests the GPU code of crates/host and crates/server without a GPU, over a driver, a cublasLt and an NCCL on the CPU
# (tests/cuda/fake_driver, library.cc, nccl.cc). library.cc also replaces most kernels of crates/host. First
# run .ci/cuda-stub.sh and tests/cuda/fake_driver/build.sh.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
driver=$PWD/target/fake-driver lt=$PWD/target/fake-cublaslt nccl=$PWD/target/fake-nccl
mkdir -p "$lt" "$nccl"
# The compiler vectorises sums only if it may reorder them, as a GPU does.
"${CXX:-c++}" -std=c++17 -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math -fPIC -shared -Wall -Werror \
    -o "$lt/libcublasLt.so.13" crates/host/tests/fake_cublaslt/library.cc
"${CXX:-c++}" -std=c++17 -O3 -fPIC -shared -Wall -Werror -o "$nccl/libnccl.so.2" crates/host/tests/fake_cublaslt/nccl.cc
export CUDA_LIBRARY_PATH=${CUDA_LIBRARY_PATH:-$PWD/target/cuda-stub}
cd crates
# One command builds all packages. Separate commands would select other features of dependencies, and would rebuild the
# dependencies.
all="--features kvarena-host/cuda,kvarena-server/cuda"
export LD_LIBRARY_PATH=$driver:$lt:$nccl
cargo test $all --test 'gpu*' --no-run

# All tests; failing ranks; sums on one device and over more ranks, interleaved finely; devices without peer access; and
# the errors without a driver, a device, cublasLt or NCCL, and with an NCCL that fails. Jobs with $again run only kernels
# of the core, of gpu_sums and of gpu_kernels, and do not look for races again.
again=FAKE_DRIVER_RACES=0
check=the_gpu_generates_the_cpus_text
../tests/cuda/fake_driver/jobs.sh <<END
$again -- $all --test gpu $check
$again -- $all --test gpu -- --skip $check
 -- $all --test gpu_sums
FAKE_DRIVER_DEVICES=1 -- $all --test gpu_sums
FAKE_DRIVER_DEVICES=4 FAKE_DRIVER_SLICE=50 -- $all --test gpu_sums
 -- $all --test gpu_kernels --test gpu_delta --test gpu_states --test gpu_experts --test gpu_products --test gpu_serving
$again -- $all --test gpu_groups
$again -- $all --test gpu_sparse
$again -- $all --test gpu_ranks
FAKE_DRIVER_PEERS=0 -- $all --test gpu_sums the_report_names
LD_LIBRARY_PATH= -- $all --test gpu why_it_cannot_run
LD_LIBRARY_PATH=$lt -- $all --test gpu why_it_cannot_run
LD_LIBRARY_PATH=$driver -- $all --test gpu why_it_cannot_run
FAKE_DRIVER_DEVICES=0 LD_LIBRARY_PATH=$driver:$lt -- $all --test gpu why_it_cannot_run
LD_LIBRARY_PATH=$driver:$lt -- $all --test gpu several_gpus
FAKE_NCCL_REFUSES=1 -- $all --test gpu several_gpus
END
