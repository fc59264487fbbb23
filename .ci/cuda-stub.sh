#!/usr/bin/env bash
# Makes a libcuda that feature `cuda` can be linked with on a machine without CUDA, under target/cuda-stub:
#
#   .ci/cuda-stub.sh && export CUDA_LIBRARY_PATH=$PWD/target/cuda-stub
#
# It is a static archive with one jump per function that cust_raw declares. At start it looks for the real driver
# (libcuda.so.1) and sends every function there. Without a driver every call returns CUDA_ERROR_STUB_LIBRARY (34), which
# the backend reports as `CudaError::NoDriver`. So a program linked this way starts anywhere, whereas one linked with
# the driver itself does not start without it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/cuda-stub}
mkdir -p "$out/lib64"
raw=$(cargo metadata --format-version 1 --features cuda | grep -o '"manifest_path":"[^"]*/cust_raw-[^"]*/Cargo.toml"' | head -1 | cut -d'"' -f4)
names=$(sed -n 's/^    pub fn \(cu[A-Za-z0-9_]*\)(.*/\1/p' "$(dirname "$raw")/src/cuda.rs" | sort -u)
source=$out/cuda_stub.c
{
    cat <<'C'
#include <dlfcn.h>
#include <stddef.h>
static int no_driver(void) { return 34; } /* CUDA_ERROR_STUB_LIBRARY */
#if defined(__x86_64__)
#define JUMP(n) __asm__(".text\n.globl " #n "\n.type " #n ",@function\n" #n ":\n jmp *to_" #n "(%rip)\n.size " #n ",.-" #n "\n");
#elif defined(__aarch64__)
#define JUMP(n) __asm__(".text\n.globl " #n "\n.type " #n ",%function\n" #n ":\n adrp x16, to_" #n "\n ldr x16, [x16, :lo12:to_" #n "]\n br x16\n");
#else
#error "no jump for this architecture"
#endif
#define STUB(n) void *to_##n __attribute__((visibility("hidden"))) = (void *)no_driver; JUMP(n)
C
    for name in $names; do echo "STUB($name)"; done
    echo 'static const struct { const char *name; void **to; } stubs[] = {'
    for name in $names; do echo "  {\"$name\", &to_$name},"; done
    cat <<'C'
};
__attribute__((constructor)) static void find_driver(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return;
  for (size_t i = 0; i < sizeof stubs / sizeof *stubs; i++) {
    void *found = dlsym(driver, stubs[i].name);
    if (found) *stubs[i].to = found;
  }
}
C
} >"$source"
"${CC:-cc}" -O2 -fPIC -c "$source" -o "$out/cuda_stub.o"
rm -f "$out/lib64/libcuda.a"
"${AR:-ar}" rcs "$out/lib64/libcuda.a" "$out/cuda_stub.o"
echo "$out: $(echo "$names" | wc -l) functions"
