// sum_ranks: x += the sum over ranks of y. Each rank has its y and x in the memory of its GPU and launches one kernel.
// Twin:    tests/common/twin.rs sum_ranks (the specification)
// Params:  SumRanksParams, 112 bytes
// Shapes:  see params.cuh
// Grid:    x = ceil(units / 512), at least 1 and at most SUM_BLOCKS; block 512. The same on every rank.
// Needs:   units <= capacity; inboxes and turns as src/gpu/peers.rs makes them; all ranks launch equal sums in the same order
// Build:   build.py
//
// Each rank writes its y to an inbox on every other rank's GPU, and waits for the y of the other ranks in its own inbox. A word
// of an inbox is EMPTY until a rank writes it; the reader sets it to EMPTY again. Thus each word shows whether it has arrived,
// words may arrive in any order, and the kernel needs neither barriers nor flags.
//
// Each rank has two inboxes, which it uses in turn. Two are enough: turn t uses the inboxes of turn t - 2 again. In
// turn t, a block writes only after it has received the words of turn t - 1 from every rank. A rank sends the words of
// turn t - 1 only after its kernel of turn t - 2 has ended. That kernel has read and emptied all words of its inbox.
// Blocks exchange words only with blocks of the same number. Each block counts its own turns, because short sums have
// fewer blocks.
//
// Later kernels of the stream cannot block the sum: the next one starts only after all blocks of this kernel have
// started.
#include "common.cuh"

// EMPTY is a pair of bf16 NaNs. No kernel here produces it, because the kernels round NaN to 0x7fff. The kernel sends A_NAN for
// an input pair that equals EMPTY.
#define EMPTY 0xffffffffu
#define A_NAN 0x7fff7fffu

DEVICE Eight load(u64 from) {
    Eight read;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(read.pair[0]), "=r"(read.pair[1]), "=r"(read.pair[2]), "=r"(read.pair[3])
                 : "l"(from));
    return read;
}
DEVICE void store(u64 to, const Eight& what) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(what.pair[0]), "r"(what.pair[1]), "r"(what.pair[2]), "r"(what.pair[3])
                 : "memory");
}
DEVICE void send(u64 to, const Eight& what) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(what.pair[0]), "r"(what.pair[1]), "r"(what.pair[2]),
                 "r"(what.pair[3]));
}
// Waits for the words at an address of the inbox, returns them, and sets them to EMPTY.
DEVICE Eight receive(u64 from) {
    Eight came;
    do {
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(came.pair[0]), "=r"(came.pair[1]), "=r"(came.pair[2]), "=r"(came.pair[3])
                     : "l"(from));
    } while (came.pair[0] == EMPTY || came.pair[1] == EMPTY || came.pair[2] == EMPTY || came.pair[3] == EMPTY);
    send(from, Eight{{EMPTY, EMPTY, EMPTY, EMPTY}});
    return came;
}

extern "C" __global__ void __launch_bounds__(512) sum_ranks(const __grid_constant__ SumRanksParams p) {
    let_next_start();
    wait_for_previous();
    if (blockIdx.x * 512 >= p.units) return;  // a block without units has no turn, on any rank
    const u32 first = blockIdx.x * 512 + threadIdx.x;
    u32& turns = reinterpret_cast<u32*>(p.turns)[blockIdx.x];
    const u32 turn = turns;
    // Returns the start of the part that a rank writes in the inbox of this turn, in units of 16 bytes.
    const auto part = [&](u32 from) { return static_cast<u64>(turn % 2 * p.ranks + from) * p.capacity; };

    for (u32 unit = first; unit < p.units; unit += 512 * SUM_BLOCKS) {
        Eight own = load(p.y + 16ull * unit);
#pragma unroll
        for (int i = 0; i < 4; ++i) own.pair[i] = own.pair[i] == EMPTY ? A_NAN : own.pair[i];
        for (u32 rank = 0; rank < p.ranks; ++rank)
            if (rank != p.rank) send(p.inboxes[rank] + 16 * (part(p.rank) + unit), own);
    }
    for (u32 unit = first; unit < p.units; unit += 512 * SUM_BLOCKS) {
        float x[8], y[8], sum[8];
        widen(load(p.x + 16ull * unit), x);
        // All ranks add in the order of ranks, so their sums have the same bits.
        for (u32 rank = 0; rank < p.ranks; ++rank) {
            widen(rank == p.rank ? load(p.y + 16ull * unit) : receive(p.inboxes[p.rank] + 16 * (part(rank) + unit)), y);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = rank == 0 ? y[i] : sum[i] + y[i];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += sum[i];
        store(p.x + 16ull * unit, narrowed(x));
    }
    __syncthreads();
    if (threadIdx.x == 0) turns = turn + 1;
}
