// attend_latent_fp8_bf16_sm90a: attention over latent rows of 512 of fp8 + 64 of bf16, up to 128 heads, on compute capability 9.0.
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to bf16)
// Params:  AttendLatentFp8Params, 264 bytes    (ptx/params.cuh, src/backend/cuda/params.rs); counters: f32 [slots, 64, 2]
// Shapes:  q bf16 [tokens, q_heads, 576], out bf16 [tokens, q_heads, 512]; k: rows of 512 bytes, which are V too; rope: rows of 64;
//          plan: latent_plan.cuh; partial f32 [slots, 64, 512]
// Grid:    x = multiprocessors, block 384, 229,376 bytes of dynamic shared memory
// Needs:   q, out, k, rope and all their strides 16-byte aligned, a scale for each token; the plan made for this grid, group and window, of
//          items of 16 or 32 query rows
// Build:   ptx/build.py
#include "attend_latent_few_sm90a.cuh"

template <int ROWS> DEVICE void attend(const AttendParams& p, typename LatentFew<bf16, ROWS, true>::Shared& shared) {
    using E = LatentFew<bf16, ROWS, true>;
    extern __shared__ __align__(1024) u8 memory[];
    // Every CTA waits, those without work too: the end of this launch stands for the end of the ones before it.
    if (latent_begin(p) >= latent_end(p)) return wait_for_previous();
    if (threadIdx.x == 0) shared.init(2 * E::THREADS);
    __syncthreads();
    // A lane of each warpgroup: 504 together, which is what the CTA has at its launch. More would be waited for for ever.
    if (threadIdx.x < E::THREADS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        E::consume(p, shared_address(memory), shared, latent_begin(p), latent_end(p));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 144;");
        E::produce_fp8(p, shared_address(memory), shared, latent_begin(p), latent_end(p));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_latent_fp8_bf16_sm90a(const __grid_constant__ AttendLatentFp8Params params) {
    __shared__ union {
        LatentFew<bf16, 16, true>::Shared few;
        LatentFew<bf16, 32, true>::Shared more;
    } state;
    if (latent_width(params.attend) == 16) attend<16>(params.attend, state.few);
    else attend<32>(params.attend, state.more);
}
