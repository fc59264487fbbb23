// Programmatic dependent launch: a kernel is set up while its predecessor on the stream ends. Then it waits for the
// predecessor.
//
// The two instructions need compute capability 9.0, so PTX for capability 8.0 contains them as comments.
// src/backend/cuda/kernels/marks.rs turns these comments into instructions if the device supports them.
#pragma once

// Waits until all earlier work is done and its writes are visible. Every CTA must call it. Before the call, a CTA may only read
// the plan and the page tables; if these may have changed, the host launches the kernel without PDL (launch.rs). A prefetch into
// the L2 cache may also precede the call, because all writes go through that cache.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#else
    asm volatile("// pdl: wait" ::: "memory");
#endif
}

// Allows the setup of the next kernel after every CTA of this kernel has called this function or has ended. The next kernel
// still waits for the end of this one.
static __device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
    asm volatile("// pdl: launch dependents" ::: "memory");
#endif
}
