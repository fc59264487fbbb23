// Shared by attention kernels of Hopper: warpgroup matrix products, mbarriers, clusters, a ring of two tiles.
#pragma once
#include "attend.cuh"

// Descriptor of a tile in shared memory, [.., rows, 64] with swizzled rows of 128 bytes. `lead` is the number of bytes
// from one block of 64 columns to the next.
DEVICE u64 matrix_descriptor(u32 at, u32 lead) {
    return static_cast<u64>(at >> 4 & 0x3fff) | static_cast<u64>(lead >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define WG_OUT \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
    "%62,%63}"
#define WG_FOUR(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define WG_REGISTERS(c) \
    WG_FOUR(c[0]), WG_FOUR(c[1]), WG_FOUR(c[2]), WG_FOUR(c[3]), WG_FOUR(c[4]), WG_FOUR(c[5]), WG_FOUR(c[6]), WG_FOUR(c[7]), \
        WG_FOUR(c[8]), WG_FOUR(c[9]), WG_FOUR(c[10]), WG_FOUR(c[11]), WG_FOUR(c[12]), WG_FOUR(c[13]), WG_FOUR(c[14]), WG_FOUR(c[15])
// Waits until at most N groups are unfinished; c is the result of a finished one.
template <int N> DEVICE void wgmma_wait(float (&c)[16][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;" : WG_REGISTERS(c) : "n"(N) : "memory");
}
// Stores four 8x8 matrices of 16-bit elements. Lane i has the address of row i % 8 of matrix i / 8.
DEVICE void store_matrix(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// c[64, 128] = a[64, 16] * b[128, 16]^T, added to c if `add` is not 0; a is in registers.
#define WG_SCORES(type, name) \
    DEVICE void wgmma_scores(type, float (&c)[16][4], const u32 (&a)[4], u64 b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " WG_OUT \
                     ", {%64,%65,%66,%67}, %68, p, 1, 1, 0; }" : WG_REGISTERS(c) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }
// c[64, 128] += a[64, 16] * b[16, 128]; a is in registers.
#define WG_OUTPUT(type, name) \
    DEVICE void wgmma_output(type, float (&c)[16][4], const u32 (&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " WG_OUT ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" \
                     : WG_REGISTERS(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    }
WG_SCORES(bf16, "bf16")
WG_SCORES(f16, "f16")
WG_OUTPUT(bf16, "bf16")
WG_OUTPUT(f16, "f16")

// ---- mbarriers --------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// Arrives when all copies that this thread has begun are complete.
DEVICE void barrier_arrive_copied(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
DEVICE void barrier_wait(u32 at, u32 parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(at), "r"(parity)
                 : "memory");
}
DEVICE bool barrier_is_over(u32 at, u32 parity) {
    u32 is;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(is) : "r"(at), "r"(parity) : "memory");
    return is != 0;
}
// Arrives; the phase also waits for `bytes` bytes from the TMA.
DEVICE void barrier_arrive_expecting(u32 at, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes) : "memory");
}
// Named barriers for `count` threads. Threads that only arrive do not wait.
DEVICE void named_sync(u32 id, u32 count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
DEVICE void named_arrive(u32 id, u32 count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }

// ---- clusters ---------------------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Arrives at the barrier of CTA `rank` of the cluster that corresponds to `at` in this CTA. A thread calls this
// function after its last read of memory that other threads will overwrite. The arrival does not publish the thread's
// writes: `.release.cluster` would also wait for the thread's accesses to global memory.
DEVICE void barrier_arrive_of(u32 at, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(at), "r"(rank) : "memory");
}
// Makes initialised barriers visible to the other CTAs and to the TMA.
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Waits for all threads of the cluster. Afterwards, the barriers that CTAs initialised before `barriers_made` are visible.
// The wait makes no other writes visible, and it does not order arrivals at barriers of other CTAs.
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory"); }
// Returns the address in CTA `rank` of the cluster that corresponds to `at` in this CTA.
DEVICE u32 address_of(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// Copies bytes of this CTA's shared memory to another CTA, and signals their number to a barrier of that CTA. `to` and
// `barrier` come from `address_of`.
DEVICE void copy_there(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Loads a box of a tensor to the same place in both CTAs of a cluster, and signals its bytes to both barriers.
DEVICE void copy_box_to_both(u32 to, const TensorMap& map, u32 barrier, u32 column, u32 slot, u32 page, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(slot), "r"(page), "h"(static_cast<u16>(3)), "l"(policy) : "memory");
}

// A ring of two tiles between producers and consumers: tile n is in place n % 2.
struct Ring {
    u64 full[2], empty[2];
    DEVICE void init(Ring& ring, u32 fillers, u32 emptiers) {
        for (u32 n = 0; n < 2; ++n) barrier_init(shared_address(ring.full + n), fillers), barrier_init(shared_address(ring.empty + n), emptiers);
    }
    __device__ __forceinline__ void wait_full(u32 n) { barrier_wait(shared_address(full + n % 2), n / 2 % 2); }
    __device__ __forceinline__ void wait_empty(u32 n) { barrier_wait(shared_address(empty + n % 2), n / 2 % 2 ^ 1); }
    __device__ __forceinline__ bool is_empty(u32 n) { return barrier_is_over(shared_address(empty + n % 2), n / 2 % 2 ^ 1); }
    __device__ __forceinline__ void fill(u32 n) { barrier_arrive_copied(shared_address(full + n % 2)); }
    __device__ __forceinline__ void release(u32 n) {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(empty + n % 2));
    }
};
