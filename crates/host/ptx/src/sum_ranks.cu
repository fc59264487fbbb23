// sum_ranks: x += the sum over ranks of y, each rank's part in its own GPU's memory, in one kernel on each GPU.
// Twin:    src/gpu/twin.rs sum_ranks           (the specification)
// Params:  SumRanksParams, 112 bytes
// Shapes:  see params.cuh
// Grid:    x = ceil(units / 512), at most SUM_BLOCKS; block 512. The same on every rank.
// Needs:   units <= capacity; inboxes and turns as src/gpu/peers.rs makes them; every rank launches the same sums in one order
// Build:   build.py
//
// Each rank writes its y into an inbox on every other rank's GPU and waits for theirs in its own. A word of an inbox is EMPTY
// until it is written, and who has read it empties it again: so a word says itself whether it has come, words may come in any
// order, and there is no barrier and no flag.
//
// A rank has two inboxes, used in turn, and two are enough. A block writes into the one that it used two turns ago. By then it has
// ended its last turn, so words of that turn have come from every rank; and a rank sends such words only when its kernel of the
// turn before that is done, with all that it read and emptied. Blocks of one number meet each other alone, and each counts its
// turns by itself, since short sums have fewer blocks.
//
// Nothing is waited for that stands behind this kernel on its own GPU: the next one may be set up once all blocks of this one run.
#include "common.cuh"

// Two bf16 NaNs that no kernel here makes (they round to 0x7fff). Numbers that look so become such NaNs.
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
// What has come to an address of the inbox, which is empty then.
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
    if (blockIdx.x * 512 >= p.units) return;  // who sends nothing takes no turn: nobody would wait for it
    const u32 first = blockIdx.x * 512 + threadIdx.x;
    u32& turns = reinterpret_cast<u32*>(p.turns)[blockIdx.x];
    const u32 turn = turns;
    // Of the inbox of this turn, the part that a rank writes, in units of 16 bytes.
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
        // In the order of ranks, so that all of them round alike.
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
