// Functions of the kernels that choose tokens.
#pragma once
#include "common.cuh"

// Maps a number, except a NaN, to an unsigned integer above 0. The integers have the order of the numbers.
DEVICE u32 ordered(u16 logit) { return logit & 0x8000 ? static_cast<u16>(~logit) : logit | 0x8000u; }
DEVICE u32 ordered(float score) {
    const u32 bits = __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns the token's uniform number, which is above 0.
DEVICE float uniform(u64 key, u32 token) {
    u32 h = token * 0x9E3779B9u + static_cast<u32>(key);
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h ^= static_cast<u32>(key >> 32);
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    h ^= h >> 16;
    return static_cast<float>(h) * 0x1p-32f + 0x1p-33f;  // may round to 1, for which `gumbel` returns minus infinity
}
DEVICE float gumbel(float unit) { return -__logf(-log1pf(-unit)); }

// Returns the highest bin that, together with all higher bins, reaches `wanted`. If all bins together do not reach it, returns
// the lowest bin that is not empty. Subtracts the bins that it has passed from `wanted`.
DEVICE u32 reach(const u64 (&bins)[256], u64& wanted) {
    u32 last = 255;
    for (u32 bin = 255;; --bin) {
        if (bins[bin] > 0) last = bin;
        if (bins[bin] >= wanted) return bin;
        if (bin == 0) return last;
        wanted -= bins[bin];
    }
}
