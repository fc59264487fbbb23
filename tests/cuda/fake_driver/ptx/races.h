/* Finds data races in shared memory, between the warps of a CTA or a cluster: one warp writes a word that another reads
 * or writes, and no synchronisation orders the two accesses. The machine runs warps in one of many possible orders.
 * With a race, another order could compute another result.
 *
 * Each warp has a vector clock: its own time, and for each other warp the latest time that is ordered before its own. A
 * warp that arrives at a barrier merges its clock into the barrier's; a warp that passes merges the barrier's clock
 * into its own. For each word, tables record which warp wrote it and which warps read it, and when. The next access
 * must be ordered after these times. Warps may write different bytes of a word; only the last write is recorded. Lanes
 * of a warp are not distinguished. Atomics race only with plain accesses. The operations of an mbarrier count as reads
 * of it, because it orders them; its initialisation is a write. */
#pragma once
#include <unordered_map>
#include <vector>
#include "program.h"

namespace ptx {
struct Cta;
using Clock = std::vector<u32>;  // a time for each warp
enum class Access : u8 { READ, WRITE, ATOMIC };

/* Raises each time of `to` to that of `from`, if that is later. */
void join(Clock& to, const Clock& from);

struct Races {
    struct Write { u32 mask : 4, warp : 6, time : 22; };  // mask: the bytes of a word
    /* Empty until the first access. */
    struct Accesses {
        std::vector<u32> times;                // [warp][word]: the warp's time at its last access
        std::vector<u32> lines;                // [warp]: the source line of its last access
    };
    bool wanted = false;
    u32 first = 0;                             // index of this CTA's first warp in clocks, which have all warps of the cluster
    std::vector<Clock> warps;                  // the clock of each warp
    std::vector<Clock> fenced;                 // each warp's clock at its last fence.mbarrier_init
    size_t stride = 0;                         // words of shared memory
    std::vector<Write> writes;                 // [word]: the last write
    std::vector<u32> lines;                    // [word]: the source line of the last write
    Accesses reads, atomics;
    std::unordered_map<u32, Clock> counters;   // the clock of each mbarrier, by address
    std::unordered_map<u32, std::pair<u32, u32>> made;  // which warp initialised each mbarrier, and at which of its times
    Clock reached;                             // times at which warps of other CTAs last used mbarriers of this CTA
    Clock gathered[16], passed[16];            // of each barrier: the merged clocks of arrivals, and the clock for warps that pass

    void start(const Cta& cta);
    /* Merges the warp's clock into `at`, and advances the warp's time. */
    void leave(u32 warp, Clock& at);
    /* Merges `at` into the warp's clock. */
    void take(u32 warp, const Clock& at);
};
/* Checks that the initialisation of another CTA's mbarrier is ordered before a warp's arrival at it, or before its
 * copy to that CTA. Records the use for `end`. */
void reach(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u32 barrier);
/* Checks at the end of a CTA that other CTAs' uses of its mbarriers are ordered before the end. */
void end(Cta& cta);
/* Records a warp's access of shared memory, of its CTA or another CTA of the cluster, and reports a race. */
void touch(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u64 address, u32 bytes, Access access);
}  // namespace ptx
