// select_top: selects, for each row with lists and each kv head, the `top` positions with the greatest scores, ascending. The
// row's own position is always selected; of equal scores the later position wins. Lists of other rows become empty.
// Twin:    src/backend/cpu/labels.rs list      (the specification)
// Params:  SelectParams (src/common, src/backend/cuda/kernels/params/sparse.rs); q, tables, labels, listed, counts unused
// Shapes:  keys: see SelectParams; positions u32 [batch, kv_heads, top]
// Grid:    x = batch * kv_heads, y = maximum number of CTAs of a long list
// Needs:   keys of every position that a row with lists sees, except its own position. A row past key_chunks needs no
//          keys and selects only its own position
// Build:   ptx/build.py
#include "select.cuh"

// The list contains all keys above the least selected key, and the last ones equal to it that fit. A search for the least key
// by digits takes four passes over the keys. Therefore a sample determines candidate keys, one pass gathers these few, and the
// search runs over them. If there are too few or too many candidates, the search runs over all keys.
//
// Several CTAs gather the keys of a long list; the last one to finish its part continues with the candidates of all.
#define THREADS 512
#define WARPS 16
// Number of keys of a sample.
#define SAMPLE (4 * THREADS)
// Number of keys that justify a CTA.
#define PART 8192
// Number of positions that are listed at a time, one bit each.
#define SPAN 131072
// Number of counters of a digit: lanes use different ones, so that few wait for each other.
#define COLUMNS 8

struct Shared {
    union {
        uint4 histogram[256][COLUMNS / 4];
        u32 marks[2][SPAN / 32];  // positions whose keys are above the least key, and equal to it
    };
    u32 keys[CANDIDATES], positions[CANDIDATES];
    u32 sums[256], found[3], candidates, warp_sums[2][WARPS];
};

static_assert(sizeof(Shared) <= 66816);

// Returns the index of the lowest set bit. At least one bit is set.
DEVICE u32 lowest(u32 bits) { return __popc((bits & -bits) - 1); }

// Sources of keys: those of a row, or the candidates.
struct RowKeys {
    u64 first;
    __device__ __forceinline__ u32 at(u32 i) const { return load_written_u32(first + 4ull * i); }
};
struct SharedKeys {
    const u32* keys;
    __device__ __forceinline__ u32 at(u32 i) const { return keys[i]; }
};

// The smallest of the `wanted` greatest of `count` keys, and the number of equal keys to skip. `find_least` finds the
// key by digits of 8 bits, from the highest on. If fewer than 4 digits are needed, the others are 0.
struct Least {
    u32 key, skipped;
};
template <int DIGITS, class Keys> DEVICE Least find_least(const Keys& keys, u32 count, u32 wanted, Shared& s) {
    const u32 thread = threadIdx.x, lane = thread % 32;
    u32* const counters = reinterpret_cast<u32*>(s.histogram);
    u32 known = 0, mask = 0, equal = 0;
    for (int shift = 24; shift >= 32 - 8 * DIGITS; shift -= 8) {
        s.histogram[thread / 2][thread % 2] = {};
        __syncthreads();
#pragma unroll 4
        for (u32 i = thread; i < count; i += THREADS) {
            const u32 key = keys.at(i);
            if ((key & mask) == known) atomicAdd(&counters[(key >> shift & 255) * COLUMNS + lane % COLUMNS], 1u);
        }
        __syncthreads();
        const uint4 four = s.histogram[thread / 2][thread % 2];
        u32 sum = four.x + four.y + four.z + four.w;
        sum += __shfl_xor_sync(~0u, sum, 1);
        if (thread % 2 == 0) s.sums[thread / 2] = sum;
        __syncthreads();
        // Lane i has the digits 255 - 8 * i down to 248 - 8 * i.
        if (thread < 32) {
            u32 mine = 0;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) mine += s.sums[255 - lane * 8 - i];
            u32 above = mine;
#pragma unroll
            for (u32 i = 1; i < 32; i *= 2) {
                const u32 other = __shfl_up_sync(~0u, above, i);
                if (lane >= i) above += other;
            }
            above -= mine;
            if (above < wanted && above + mine >= wanted) {
                u32 digit = 255 - lane * 8;
                while (above + s.sums[digit] < wanted) above += s.sums[digit], --digit;
                s.found[0] = digit, s.found[1] = wanted - above, s.found[2] = s.sums[digit];
            }
        }
        __syncthreads();
        known |= s.found[0] << shift, mask |= 255u << shift;
        wanted = s.found[1], equal = s.found[2];
        // All keys with these digits are selected, whatever their other digits.
        if (wanted == equal) break;
    }
    __syncthreads();
    return {known, equal - wanted};
}

// Estimates from a sample the key that slightly more than `wanted` of the keys first..end equal or exceed. The sample
// has four neighbours at each of THREADS places. Neighbours may be alike, so the margin is four and a half standard
// deviations of independent samples.
DEVICE u32 guess(u64 keys, u32 first, u32 end, u32 wanted, Shared& s) {
    const u32 from = (first + 3) & ~3u, fours = (end - from) / 4;
    const uint4 some = load_written_uint4(keys + 4ull * (from + 4 * static_cast<u32>(static_cast<u64>(threadIdx.x) * fours / THREADS)));
    reinterpret_cast<uint4*>(s.keys)[threadIdx.x] = some;
    __syncthreads();
    const float mean = static_cast<float>(wanted) * SAMPLE / (end - first);
    return find_least<2>(SharedKeys{s.keys}, SAMPLE, static_cast<u32>(mean + 4.5f * sqrtf(mean) + 2.f), s).key;
}

// Returns bits first..end of four.
DEVICE u32 bits_between(u32 first, u32 end) { return (1u << min(end, 4u)) - (1u << min(first, min(end, 4u))); }

// Gathers the positions first..end whose key is at least `least`, with their keys, in any order. Returns their number; the
// first CANDIDATES are kept.
DEVICE u32 gather(u64 keys, u32 first, u32 end, u32 least, Shared& s) {
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x == 0) s.candidates = 0;
    __syncthreads();
    // A thread processes sixteen keys at a time, in groups of four.
    for (u32 begin = first & ~3u; begin < end; begin += 16 * THREADS) {
        const u32 own = begin + 4 * threadIdx.x;
        uint4 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            words[j] = {};
            if (own + j * 4 * THREADS < end) words[j] = load_written_uint4(keys + 4ull * (own + j * 4 * THREADS));
        }
        u32 hits = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 at = own + j * 4 * THREADS;
            const u32 seen = at < end ? bits_between(first > at ? first - at : 0, end - at) : 0;
            const u32 four = (words[j].x >= least) | (words[j].y >= least) << 1 | (words[j].z >= least) << 2 | (words[j].w >= least) << 3;
            hits |= (four & seen) << j * 4;
        }
        // One lane reserves places for its warp.
        u32 place = __popc(hits);
#pragma unroll
        for (u32 i = 1; i < 32; i *= 2) {
            const u32 other = __shfl_up_sync(~0u, place, i);
            if (lane >= i) place += other;
        }
        const u32 all = __shfl_sync(~0u, place, 31);
        if (all == 0) continue;
        u32 base = 0;
        if (lane == 0) base = atomicAdd(&s.candidates, all);
        place += __shfl_sync(~0u, base, 0) - __popc(hits);
        for (; hits != 0 && place < CANDIDATES; hits &= hits - 1, ++place) {
            const u32 bit = lowest(hits);
            s.positions[place] = own + bit / 4 * 4 * THREADS + bit % 4;
        }
    }
    __syncthreads();
    const u32 candidates = s.candidates;
    for (u32 i = threadIdx.x; i < min(candidates, static_cast<u32>(CANDIDATES)); i += THREADS) s.keys[i] = load_written_u32(keys + 4ull * s.positions[i]);
    __syncthreads();
    return candidates;
}

DEVICE uint2 load_gathered(u64 at) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
    return v;
}

// Adds the candidates of this part of a list to those of the list's other parts. Returns whether this part is the last.
// If so, this CTA then has the candidates of all parts, and `candidates` is their number.
DEVICE bool join_parts(const SelectParams& params, u32 parts, u32& candidates, Shared& s) {
    const u64 all = params.gathered + 8ull * CANDIDATES * blockIdx.x;
    u32* const counters = reinterpret_cast<u32*>(params.gather_counters) + 2 * blockIdx.x;
    if (threadIdx.x == 0) s.found[0] = atomicAdd(counters, candidates);
    __syncthreads();
    const u32 own = min(candidates, static_cast<u32>(CANDIDATES)), base = min(s.found[0], static_cast<u32>(CANDIDATES));
    for (u32 i = threadIdx.x; i < min(own, CANDIDATES - base); i += THREADS) store_uint2(all + 8ull * (base + i), s.keys[i], s.positions[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        s.found[1] = arrive_last_fenced(counters + 1, parts);
        // Resets the counter for the next launch.
        if (s.found[1]) s.found[0] = atomicExch(counters, 0);
    }
    __syncthreads();
    if (!s.found[1]) return false;
    candidates = s.found[0];
    for (u32 i = threadIdx.x; i < min(candidates, static_cast<u32>(CANDIDATES)); i += THREADS) {
        const uint2 one = load_gathered(all + 8ull * i);
        s.keys[i] = one.x, s.positions[i] = one.y;
    }
    __syncthreads();
    return true;
}

// Lists the positions marked in `words` words of `s.marks`, from `begin` on: those whose keys are above the least key,
// and those with equal keys after the first `skipped`. `more` and `same` count both kinds so far.
DEVICE void list_marked(u64 list, u32 begin, u32 words, u32 skipped, u32& more, u32& same, Shared& s) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 per = (words + THREADS - 1) / THREADS, from = min(words, thread * per), to = min(words, from + per);
    u32 mores = 0, sames = 0;
    for (u32 i = from; i < to; ++i) mores += __popc(s.marks[0][i]), sames += __popc(s.marks[1][i]);
    u32 before_more = mores, before_same = sames;
#pragma unroll
    for (u32 i = 1; i < 32; i *= 2) {
        const u32 a = __shfl_up_sync(~0u, before_more, i), b = __shfl_up_sync(~0u, before_same, i);
        if (lane >= i) before_more += a, before_same += b;
    }
    if (lane == 31) s.warp_sums[0][warp] = before_more, s.warp_sums[1][warp] = before_same;
    __syncthreads();
    before_more += more - mores, before_same += same - sames;
    for (u32 i = 0; i < WARPS; ++i) {
        if (i < warp) before_more += s.warp_sums[0][i], before_same += s.warp_sums[1][i];
        more += s.warp_sums[0][i], same += s.warp_sums[1][i];
    }
    for (u32 i = from; i < to; ++i) {
        const u32 above = s.marks[0][i], equal = s.marks[1][i];
        for (u32 left = above | equal; left != 0; left &= left - 1) {
            const u32 bit = lowest(left);
            const u32 taken = before_same > skipped ? before_same - skipped : 0;  // number of equal ones listed before
            const bool is_more = above >> bit & 1;
            if (is_more || before_same >= skipped) store_u32(list + 4ull * (before_more + taken), begin + i * 32 + bit);
            is_more ? ++before_more : ++before_same;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select_top(const __grid_constant__ SelectParams params) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const AttendParams& p = params.attend;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 index = blockIdx.x / p.kv_heads, head = blockIdx.x % p.kv_heads;
    const Seeing row = seeing(p, index);
    const Chunks chunks = chunks_of(params, index);
    wait_for_previous();
    let_next_start();
    const u64 list = params.positions + 4ull * blockIdx.x * params.top;
    u32 chosen = 0;
    if (row.lists) {
        const u32 first = chunks.end <= params.key_chunks ? row.first : row.own, end = row.own, count = end - first;
        const u32 wanted = min(params.top - 1, count);
        const u64 keys = keys_of(params, chunks, head);
        const RowKeys row_keys{keys + 4ull * first};
        const bool all = wanted == count;
        const bool some = !all && wanted > 0;
        u32 candidates = CANDIDATES + 1;
        Least least = {};
        if (some && wanted <= CANDIDATES / 2) {
            const u32 parts = min((count + PART - 1) / PART, gridDim.y), part = (count + parts - 1) / parts;
            if (blockIdx.y >= parts) return;
            const u32 from = first + blockIdx.y * part, to = min(end, from + part);
            candidates = gather(keys, from, to, count <= CANDIDATES ? 0 : guess(keys, first, end, wanted, s), s);
            if (parts > 1 && !join_parts(params, parts, candidates, s)) return;
        } else if (blockIdx.y > 0) {
            return;
        }
        if (some) {
            if (candidates < wanted) candidates = CANDIDATES + 1;
            least = candidates <= CANDIDATES ? find_least<4>(SharedKeys{s.keys}, candidates, wanted, s) : find_least<4>(row_keys, count, wanted, s);
        }
        u32 more = 0, same = 0;
        for (u32 begin = first; begin < end && wanted > 0; begin += SPAN) {
            const u32 some = min(end - begin, static_cast<u32>(SPAN)), words = (some + 31) / 32;
            if (candidates <= CANDIDATES) {
                for (u32 i = thread; i < words; i += THREADS) s.marks[0][i] = s.marks[1][i] = 0;
                __syncthreads();
                for (u32 i = thread; i < candidates; i += THREADS) {
                    const u32 key = s.keys[i], at = s.positions[i] - begin;
                    if (key >= least.key && at < some) atomicOr(&s.marks[key == least.key][at / 32], 1u << at % 32);
                }
            } else {
                for (u32 word = warp; word < words; word += WARPS) {
                    const u32 at = word * 32 + lane;
                    const u32 key = at < some && !all ? load_written_u32(keys + 4ull * (begin + at)) : 0;
                    const u32 above = __ballot_sync(~0u, at < some && (all || key > least.key));
                    const u32 equal = __ballot_sync(~0u, at < some && !all && key == least.key);
                    if (lane == 0) s.marks[0][word] = above, s.marks[1][word] = equal;
                }
            }
            __syncthreads();
            list_marked(list, begin, words, least.skipped, more, same, s);
        }
        chosen = wanted;
        if (thread == 0) store_u32(list + 4ull * chosen, row.own);
        ++chosen;
    } else if (blockIdx.y > 0) {
        return;
    }
    for (u32 i = chosen + thread; i < params.top; i += THREADS) store_u32(list + 4ull * i, NO_POSITION);
}
