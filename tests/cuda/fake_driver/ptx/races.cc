/* See races.h. */
#include "races.h"
#include <algorithm>
#include "machine.h"

namespace ptx {
void Races::start(const Cta& cta) {
    static const bool asked = setting("FAKE_DRIVER_RACES", 1) != 0;
    wanted = asked;
    if (!wanted) return;
    const size_t own = cta.warps.size(), count = own * cta.cluster->ctas.size(), words_count = cta.shared.size() / 4 + 1;
    first = static_cast<u32>(own) * cta.rank;
    warps.assign(own, Clock(count, 0)), fenced.assign(own, {});
    for (u32 i = 0; i < own; ++i) warps[i][first + i] = 1;
    words.assign(words_count, {}), reads.assign(words_count * count, 0);
    counters.clear(), made.clear(), reached.assign(count, 0);
    for (Clock& clock : gathered) clock.assign(count, 0);
    for (Clock& clock : passed) clock.assign(count, 0);
}
void join(Clock& to, const Clock& from) {
    to.resize(std::max(to.size(), from.size()));
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
void Races::take(u32 warp, const Clock& at) { join(warps[warp], at); }
void Races::leave(u32 warp, Clock& at) {
    join(at, warps[warp]);
    ++warps[warp][first + warp];
}

void reach(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u32 barrier) {
    if (!cta.races.wanted || &cta == warp.cta) return;
    const Clock& clock = warp.cta->races.warps[warp.index];
    const auto made = cta.races.made.find(barrier);
    if (made == cta.races.made.end() || made->second.second > clock[made->second.first])
        fail(warp, in, lane, "nothing makes it wait until CTA %u of the cluster has its mbarrier at 0x%x", cta.rank, barrier);
    const u32 self = warp.cta->races.first + warp.index;
    cta.races.reached[self] = clock[self];
}
void end(Cta& cta) {
    for (u32 i = 0; cta.races.wanted && i < cta.races.reached.size(); ++i) {
        u32 known = 0;
        for (const Clock& clock : cta.races.warps) known = std::max(known, clock[i]);
        if (cta.races.reached[i] > known)
            fail(cta.warps[0], cta.launch->entry->code.back(), 0, "it ends, and nothing makes it wait for what warp %u of the cluster did to its mbarriers", i);
    }
}

void touch(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes, bool writes) {
    touch(warp, *warp.cta, in, lane, address, bytes, writes);
}
void touch(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address, u32 bytes, bool writes) {
    Races& races = cta.races;
    if (!races.wanted) return;
    const Clock& clock = warp.cta->races.warps[warp.index];
    const u32 count = static_cast<u32>(clock.size()), self = warp.cta->races.first + warp.index;
    for (u64 at = address / 4; at <= (address + bytes - 1) / 4; ++at) {
        Races::Word& word = races.words[at - SHARED_BASE / 4];
        u32* const reads = &races.reads[(at - SHARED_BASE / 4) * count];
        const u64 first = std::max(address, at * 4) - at * 4, end = std::min(address + bytes, at * 4 + 4) - at * 4;
        const u32 mask = (1u << end) - (1u << first);
        if (word.written > 0 && word.writer != self && (word.mask & mask) != 0 && word.written > clock[word.writer])
            fail(warp, in, lane, "%s shared memory at 0x%llx, which warp %u wrote at line %u, and nothing makes one wait for the other",
                 writes ? "writes" : "reads", static_cast<long long>(at * 4), word.writer, word.write_line);
        for (u32 other = 0; writes && other < count; ++other)
            if (other != self && reads[other] > clock[other])
                fail(warp, in, lane, "writes shared memory at 0x%llx, which warp %u read (at line %u or before), and nothing makes one wait for the other",
                     static_cast<long long>(at * 4), other, word.read_line);
        if (writes) word.writer = self, word.mask = mask, word.written = clock[self], word.write_line = in.line;
        else reads[self] = clock[self], word.read_line = in.line;
    }
}
}  // namespace ptx
