// Programmatic dependent launch: a kernel is set up while its predecessor on the stream ends, and waits for it.
//
// The two instructions need compute capability 9.0, so PTX for 8.0 contains them as comments. src/backend/cuda/kernels/marks.rs
// turns these into instructions if the device has them.
#pragma once

// Waits until all earlier work is done and its writes are visible. Every CTA calls it, and before it reads only plan and page
// tables; the host launches the kernel in order if these may have changed (launch.rs). A prefetch into the L2 cache may precede
// the wait, because all writes go through that cache.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#else
    asm volatile("// pdl: wait" ::: "memory");
#endif
}

// Lets the next kernel be set up once every CTA of this one has called it or has ended. The next kernel still waits for the end
// of this one.
static __device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
    asm volatile("// pdl: launch dependents" ::: "memory");
#endif
}
