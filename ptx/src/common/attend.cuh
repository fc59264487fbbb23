// Definitions that the attention kernels share: warp matrix products, asynchronous copies, page table look-ups, parts of the softmax.
#pragma once
#include "params.cuh"

#define DEVICE static __device__ __forceinline__

// ---- element types: names for the instruction set; 16-bit elements are passed as bits ----------------------------------

struct bf16 {};
struct f16 {};

DEVICE u32 pack(bf16, float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE u32 pack(f16, float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Kernels over fp8 have Fp8<T> as their type instead of T. Rows of q and out are still of T.
template <class T> struct Fp8 {};
template <class T> struct RowsOf {
    using Type = T;
};
template <class T> struct RowsOf<Fp8<T>> {
    using Type = T;
};
template <class T> DEVICE constexpr bool over_fp8(T) { return false; }
template <class T> DEVICE constexpr bool over_fp8(Fp8<T>) { return true; }
template <class T> DEVICE u32 pack(Fp8<T>, float low, float high) { return pack(T(), low, high); }

// Kernels that read the tokens of lists (attend_selected_*) have Listed<T> as their type instead of T.
template <class T> struct Listed {};
template <class T> struct RowsOf<Listed<T>> {
    using Type = T;
};
template <class T> DEVICE constexpr bool is_listed(T) { return false; }
template <class T> DEVICE constexpr bool is_listed(Listed<T>) { return true; }
template <class T> DEVICE constexpr bool over_fp8(Listed<T>) { return false; }
template <class T> DEVICE u32 pack(Listed<T>, float low, float high) { return pack(T(), low, high); }

// c[16, 8] += a[16, 16] * b[16, 8]
DEVICE void mma(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T> DEVICE void mma(Listed<T>, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(T(), c, a, b0, b1); }
template <class T> DEVICE void mma(Fp8<T>, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(T(), c, a, b0, b1); }

// Loads four 8x8 matrices of 16-bit elements. Lane i has the address of row i % 8 of matrix i / 8.
DEVICE void load_matrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void load_matrix_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements. Each lane holds one register of the matrix.
DEVICE u32 transpose(u32 r) {
    u32 t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r));
    return t;
}

// ---- memory -----------------------------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE float4 load_shared_float4(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE void store_shared_float4(u32 at, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// Copies 16 bytes from global to shared memory; writes zeros, and reads nothing, if `valid` is false.
DEVICE void copy16(u32 to, u64 from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same for bytes that are read once: they are evicted first from the L2 cache.
DEVICE void copy16_once(u32 to, u64 from, bool valid) {
    u64 first_out;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_out));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(valid ? 16 : 0), "l"(first_out) : "memory");
}
DEVICE void prefetch(u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }
DEVICE void copy4(u32 to, u64 from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads memory that no work writes while this launch runs. Loads of the plan and the tables may precede the wait.
DEVICE u32 load_u32(u64 at) {
    u32 value;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(at));
    return value;
}
DEVICE float load_float(u64 at) { return __uint_as_float(load_u32(at)); }
DEVICE uint4 load_uint4(u64 at) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
DEVICE uint2 load_uint2(u64 at) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
// Loads memory that the previous launch may write. Must follow the wait.
DEVICE u32 load_written_u32(u64 at) {
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
DEVICE uint4 load_written_uint4(u64 at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
// Loads the word that locates a token in a decode kernel: a page table word, or an entry of a list.
template <class T> DEVICE u32 load_page_word(T, u64 at) { return load_u32(at); }
template <class T> DEVICE u32 load_page_word(Listed<T>, u64 at) { return load_written_u32(at); }
// Loads floats that other CTAs of this launch wrote, past the L1 cache.
DEVICE float4 load_float4_shared(const float* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}
// The same for the address AT bytes after `from`. Leaves v unchanged if `some` is false.
template <int AT> DEVICE void load_float4_shared(float4& v, u64 from, bool some) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4+%6]; }"
                 : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w) : "l"(from), "r"(u32(some)), "n"(AT));
}
DEVICE float2 load_float2_shared(const float* at) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at));
    return v;
}
DEVICE void load_float2_shared(float2& v, u64 from, bool some) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.cg.v2.f32 {%0,%1}, [%2]; }" : "+f"(v.x), "+f"(v.y) : "l"(from), "r"(u32(some)));
}
DEVICE void store_u32(u64 at, u32 a) { asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(a) : "memory"); }
DEVICE void store_uint2(u64 at, u32 a, u32 b) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}
DEVICE void store_uint4(u64 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_float(u64 at, float a) { asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(a) : "memory"); }

// Counts an arrival, and returns whether it is the last of `count`. The last one resets the counter.
DEVICE bool arrive_last(u32* counter, u32 count) { return atomicInc(counter, count - 1) == count - 1; }
// The same with a fence: the thread that arrives last sees all writes that the others made before they arrived.
DEVICE bool arrive_last_fenced(u32* counter, u32 count) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
    return before == count - 1;
}

// ---- page tables ------------------------------------------------------------------------------------------------------

// Where a position's page number is. Finding it takes two loads: load_directory, and load_page with the result.
struct Look {
    u32 directory;  // index of the directory word
    u32 in_leaf;    // page within the leaf
    u32 slot;       // slot within the page
};
DEVICE Look look_up(const AttendParams& p, u32 row, u32 position) {
    const u32 page = static_cast<u32>(position * p.page_magic >> 32);
    const u32 leaf = static_cast<u32>(page * p.leaf_magic >> 32);
    return {row * p.leaves_per_row + leaf, page - leaf * p.leaf_pages, position - page * p.page_size};
}
DEVICE u32 load_directory(const AttendParams& p, const Look& look) { return load_u32(p.table + 4ull * look.directory); }
DEVICE u32 load_page(const AttendParams& p, const Look& look, u32 leaf) {
    return load_u32(p.table + 4 * (p.leaf_base + static_cast<u64>(leaf) * p.leaf_pages + look.in_leaf));
}
DEVICE u64 slot_offset(const AttendParams& p, const Look& look, u32 page) {
    return page * p.page_stride + look.slot * p.slot_stride;
}

// ---- trees of drafts --------------------------------------------------------------------------------------------------

// Returns one bit for each of the 32 tokens from `begin` on: whether a query with this mask sees the token. The query
// sees all tokens before the last 64 of `kv_len`, and none from `kv_len` on.
DEVICE u32 tree_sees(uint2 mask, u32 kv_len, u32 begin) {
    const int passed = static_cast<int>(begin + 64 - kv_len), word = passed >> 5;
    const u32 old = __brev(mask.y), late = __brev(mask.x);  // bits in the order of tokens; the first is kv_len - 64, perhaps negative
    const u32 low = word < 0 ? ~0u : word == 0 ? old : word == 1 ? late : 0, high = word < -1 ? ~0u : word == -1 ? old : word == 0 ? late : 0;
    return __funnelshift_r(low, high, passed & 31);
}
DEVICE uint2 tree_mask(const AttendParams& p, u32 query_row) {
    uint2 mask;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(mask.x), "=r"(mask.y) : "l"(p.masks + 8ull * query_row));
    return mask;
}

// ---- softmax ----------------------------------------------------------------------------------------------------------

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INF __int_as_float(0xff800000)

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }

// Logits in base 2: cap(scale * s) * log2(e). tanh(x) = 1 - 2 / (exp(2 x) + 1), with an error of 1e-6 by the fast exponential.
struct Logits {
    float scale;  // without a cap: scale * log2(e); with one: 2 * log2(e) * scale / cap
    float cap;    // soft_cap * log2(e), or 0
    DEVICE Logits make(const AttendParams& p) { return make(p, p.scale); }
    DEVICE Logits make(const AttendParams& p, const float& scale) {
        const bool capped = p.soft_cap > 0.f;
        return {capped ? 2.f * LOG2_E * scale / p.soft_cap : scale * LOG2_E, p.soft_cap * LOG2_E};
    }
    __device__ __forceinline__ float capped(float s) const {
        return cap - divide_fast(2.f * cap, exp2_fast(s * scale) + 1.f);
    }
    __device__ __forceinline__ float of(float s) const { return cap > 0.f ? capped(s) : s * scale; }
};

// Adds a query head's sink to a row's complete sums, and returns the factor by which the row's output must be multiplied. `top` is
// the maximum logit to which the sums are relative, in base 2. A row without tokens is not changed.
DEVICE float enter_sink(const AttendParams& p, u32 q_head, float& top, float& sum) {
    if (p.sinks == 0 || !(sum > 0.f)) return 1.f;
    const float sink = __int_as_float(load_written_u32(p.sinks + 4ull * q_head)) * LOG2_E;
    const float above = fmaxf(top, sink), worth = exp2_fast(top - above);
    sum = sum * worth + exp2_fast(sink - above), top = above;
    return worth;
}
