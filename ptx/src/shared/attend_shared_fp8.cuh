// Decode attention that reads shared spans of fp8 once: attend_shared.cuh over quantised pools (AttendSharedFp8Params).
//
// Items widen a tile's bytes in shared memory, like attend_extend.cuh over fp8; suffixes widen them in registers, like
// attend_decode_fp8.cuh. Both apply all scales of K to the logits. The partial sums that they write contain all scales
// of V, so the sums join like those of 16-bit pools.
#pragma once
#include "attend_decode_fp8.cuh"
#include "attend_shared.cuh"

// Differences from SharedTiles. At head_dim 128, a tile of 64 tokens and its scales would exceed 99 KB of shared memory, the
// limit of compute capability 8.9.
template <int D> struct SharedFp8Tiles;

// The kernel: attend_shared over fp8. BYTES is its dynamic shared memory.
template <class T, int D, int NT, int BYTES> DEVICE void attend_shared_fp8(const AttendSharedFp8Params& s) {
    using Of = SharedTiles<D>;
    using Fp8Of = SharedFp8Tiles<D>;
    using Span = Extend<Gathered<Fp8<T>, 8 * NT, Of::SUFFIXES>, D, Of::MT, 4, Fp8Of::BN>;
    using Parts = SharedDecodeParts<Fp8<T>, D, NT, Of::SUFFIXES, Of::TILE, Of::JOINED>;
    using Suffix = DecodeFp8<T, D, NT, 1, Fp8Of::TOKENS, Fp8Of::STAGES, Parts>;
    run_shared<Span, Suffix, D, BYTES>(s.shared.attend);
}
