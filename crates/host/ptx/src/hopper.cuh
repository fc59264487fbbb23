// Instructions of compute capability 9.0: products of warpgroups from shared memory, mbarriers, the TMA, clusters.
#pragma once
#include "params.cuh"

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- products of a warpgroup ------------------------------------------------------------------------------------------

// Returns the descriptor of a matrix at `at`, a multiple of 1,024. The rows have 64 columns (128 bytes), swizzled by the TMA.
DEVICE u64 matrix_descriptor(u32 at) { return static_cast<u64>(at >> 4 & 0x3fff) | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62; }
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are unfinished.
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define REGISTERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGISTERS_16 REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_32 REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPERANDS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define OPERANDS_8(c, i) OPERANDS_4(c, i), OPERANDS_4(c, i + 4)
#define OPERANDS_16(c, i) OPERANDS_8(c, i), OPERANDS_8(c, i + 8)
#define OPERANDS_32(c, i) OPERANDS_16(c, i), OPERANDS_16(c, i + 16)

// c[64, N] += a[64, 16] * b[N, 16]^T. A warp holds 16 rows of c, and each thread holds rows lane / 4 and lane / 4 + 8 of them.
// In every eight columns, the thread holds column 2 * (lane % 4) and the next one.
#define WGMMA(N, COUNT, A, B)                                                                                                     \
    DEVICE void wgmma(float (&c)[COUNT], u64 a, u64 b) {                                                                          \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS_##COUNT "}, " A ", " B ", 1, 1, 1, 0, 0;" \
                     : OPERANDS_##COUNT(c, 0)                                                                                     \
                     : "l"(a), "l"(b));                                                                                           \
    }
WGMMA(16, 8, "%8", "%9")
WGMMA(32, 16, "%16", "%17")
WGMMA(64, 32, "%32", "%33")

// ---- mbarriers --------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// Arrives, and adds `bytes` to the number of bytes that the barrier waits for.
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(at), "r"(parity)
                 : "memory");
}
// Makes newly initialised barriers visible to the TMA and to other CTAs.
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Waits at barrier `id` for `count` threads of the block.
DEVICE void named_sync(u32 id, u32 count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }

// ---- the Tensor Memory Accelerator (TMA) ------------------------------------------------------------------------------

DEVICE void fetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Copies the box at this column and row to shared memory. The barrier counts its bytes.
DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, u32 column, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map),
                 "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}
// Copies a box of a map of [rows / 8, matrices, 8, columns]. `eight` is the index of the box's first group of eight rows.
DEVICE void copy_box_of_eights(u32 to, const TensorMap& map, u32 barrier, u32 column, u32 eight) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(to), "l"(&map),
                 "r"(barrier), "r"(column), "r"(0), "r"(eight)
                 : "memory");
}

// ---- clusters ---------------------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
// Waits for all threads of all CTAs of the cluster. Their earlier writes are visible afterwards.
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory"); }
// Returns the address in CTA `rank`'s shared memory that corresponds to `at` in this CTA's.
DEVICE u32 of_rank(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
DEVICE float load_far(u32 at) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
DEVICE float4 load_far4(u32 at) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}
