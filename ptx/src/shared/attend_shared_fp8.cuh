// Decode attention that reads shared spans of fp8 once: attend_shared.cuh over bytes (AttendSharedFp8Params).
//
// Items make numbers of a tile's bytes in shared memory, as attend_extend.cuh does over fp8, and tails in registers, as
// attend_decode_fp8.cuh does. What either leaves is in the same units, so that they meet as sums over 16 bits do: what a sum is relative
// to is a logit, all scales of K in it, and a sum of V has all of V's.
#pragma once
#include "attend_decode_fp8.cuh"
#include "attend_shared.cuh"

// Beside SharedTiles. A tile of 64 tokens of head_dim 128 would leave no room for its scales below 99 KB of shared memory, which
// compute capability 8.9 has.
template <int D> struct SharedFp8Tiles;
template <> struct SharedFp8Tiles<64> {
    enum { BN = 64, TOKENS = 32, STAGES = 4 };
};
template <> struct SharedFp8Tiles<128> {
    enum { BN = 32, TOKENS = 32, STAGES = 2 };
};
template <> struct SharedFp8Tiles<256> {
    enum { BN = 32, TOKENS = 16, STAGES = 2 };
};

// As attend_shared.
template <class T, int D, int NT, int BYTES> DEVICE void attend_shared_fp8(const AttendSharedFp8Params& s) {
    using Of = SharedTiles<D>;
    using Fp8Of = SharedFp8Tiles<D>;
    using Span = Extend<Gathered<Fp8<T>, 8 * NT, Of::TAILS>, D, Of::MT, 4, Fp8Of::BN>;
    using Parts = SharedDecodeParts<Fp8<T>, D, NT, Of::TAILS, Of::TILE, Of::JOINED>;
    using Tail = DecodeFp8<T, D, NT, 1, Fp8Of::TOKENS, Fp8Of::STAGES, Parts>;
    run_shared<Span, Tail, D, BYTES>(s.shared.attend);
}
