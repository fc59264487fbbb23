// Programmatic dependent launch: a kernel is set up while the one before it on the stream still ends, and waits by itself.
//
// The two instructions need compute capability 9.0. PTX for 8.0 cannot hold them: they stand in it as comments, which
// src/backend/cuda/kernels/marks.rs turns into instructions where the device has them.
#pragma once

// Waits until all work before this kernel is done, and its writes are seen. Every CTA comes here, and before that reads nothing
// but plan and page tables: the host launches such a kernel in order where they may have changed (launch.rs). A prefetch into the
// L2 cache may come before, since all that is written meanwhile is written there.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#else
    asm volatile("// pdl: wait" ::: "memory");
#endif
}

// The next kernel may be set up once every CTA of this one has come here or is done. It still waits for this one's end.
static __device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
    asm volatile("// pdl: launch dependents" ::: "memory");
#endif
}
