/* Finds what warps of a CTA, or of a cluster, do to shared memory in no order: one writes what another reads or writes, and nothing between them makes one
 * wait for the other. The machine runs warps in one order of many; this says whether another might give something else.
 *
 * Each warp counts its own time, and knows up to which time of the others it has waited (a vector clock). Who arrives at a barrier
 * leaves there what it knows; who passes takes it. Each word of memory remembers who wrote it and who read it, and when: whoever
 * comes next must know of that time. Warps may write different bytes of a word; the last of them is remembered. Lanes of one warp are
 * not told apart. All accesses to shared memory come here, so a word has few bytes of tables: they stay in the processor's cache. */
#pragma once
#include <unordered_map>
#include <vector>
#include "program.h"

namespace ptx {
struct Cta;
using Clock = std::vector<u32>;  // a time of each warp

/* Takes what another clock knows into the first. */
void join(Clock& to, const Clock& from);

struct Races {
    struct Write { u32 mask : 4, warp : 6, time : 22; };  // mask: the bytes of a word
    bool wanted = false;
    u32 first = 0;                             // of this CTA's warps among those of its cluster, which clocks are of
    std::vector<Clock> warps;
    std::vector<Clock> fenced;                 // what each warp knew when it last made its mbarriers known to the cluster
    size_t stride = 0;                         // words of shared memory
    std::vector<Write> writes;                 // [word]: the last
    std::vector<u32> lines;                    // [word]: of the last write
    std::vector<u32> reads;                    // [warp][word]: when the warp last read it
    std::vector<u32> read_lines;               // [warp]: of the last read
    std::unordered_map<u32, Clock> counters;   // mbarriers, by their address
    std::unordered_map<u32, std::pair<u32, u32>> made;  // mbarriers: by which warp, and when
    Clock reached;                             // when other CTAs' warps last did something here
    Clock gathered[16], passed[16];            // barriers

    void start(const Cta& cta);
    /* The warp leaves what it knows; its time goes on. */
    void leave(u32 warp, Clock& at);
    void take(u32 warp, const Clock& at);
};
/* A warp arrives at an mbarrier of another CTA of the cluster, or has bytes brought to it: that must be there by then, and the CTA may not
 * end before. */
void reach(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u32 barrier);
/* The CTA ends: all that others did here came before. */
void end(Cta& cta);
/* A warp reads or writes shared memory: its CTA's, or that of another one of the cluster. */
void touch(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u64 address, u32 bytes, bool writes);
}  // namespace ptx
