/* See races.h. */
#include "races.h"
#include <assert.h>
#include <algorithm>
#include "machine.h"

namespace ptx {
void Races::start(const Cta& cta) {
    static const bool asked = setting("FAKE_DRIVER_RACES", 1) != 0;
    wanted = asked;
    if (!wanted) return;
    const size_t own = cta.warps.size(), count = own * cta.cluster->ctas.size();
    assert(count < 1 << 6);  // a recorded write has 6 bits for the warp
    stride = cta.shared.size() / 4 + 1;
    first = static_cast<u32>(own) * cta.rank;
    warps.assign(own, Clock(count, 0)), fenced.assign(own, {});
    for (u32 i = 0; i < own; ++i) warps[i][first + i] = 1;
    writes.assign(stride, {}), lines.resize(stride), reads.times.clear(), atomics.times.clear();
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
    const u32 time = ++warps[warp][first + warp];
    assert(time < 1 << 22);  // a recorded write has 22 bits for the time
}

void reach(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u32 barrier) {
    if (!cta.races.wanted || &cta == warp.cta) return;
    const Clock& clock = warp.cta->races.warps[warp.index];
    const auto made = cta.races.made.find(barrier);
    if (made == cta.races.made.end() || made->second.second > clock[made->second.first])
        fail(warp, in, lane, "nothing makes the warp wait until CTA %u of the cluster has initialised its mbarrier at 0x%x", cta.rank, barrier);
    const u32 self = warp.cta->races.first + warp.index;
    cta.races.reached[self] = clock[self];
}
void end(Cta& cta) {
    for (u32 i = 0; cta.races.wanted && i < cta.races.reached.size(); ++i) {
        u32 known = 0;
        for (const Clock& clock : cta.races.warps) known = std::max(known, clock[i]);
        if (cta.races.reached[i] > known)
            fail(cta.warps[0], cta.launch->entry->code.back(), 0, "the CTA ends, and nothing makes it wait for the use of its mbarriers by warp %u of the cluster", i);
    }
}

void touch(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address, u32 bytes, Access access) {
    Races& races = cta.races;
    if (!races.wanted) return;
    const Clock& known = warp.cta->races.warps[warp.index];
    const u32* const clock = known.data();
    const u32 count = static_cast<u32>(known.size()), self = warp.cta->races.first + warp.index;
    const u64 from = address - SHARED_BASE, end = from + bytes, first = from / 4, past = (end + 3) / 4;
    const u32 first_mask = 15u << from % 4 & 15u, last_mask = 15u >> -end % 4;
    auto mask = [&](u64 at) { return (at == first ? first_mask : 15u) & (at == past - 1 ? last_mask : 15u); };
    const char* const does = access == Access::READ ? "reads" : access == Access::WRITE ? "writes" : "atomically changes";
    // A warp's clock contains its own time, so its own earlier writes never fail the check.
    for (u64 at = first; at < past; ++at)
        if (const Races::Write write = races.writes[at]; write.time > clock[write.warp] && (write.mask & mask(at)) != 0)
            fail(warp, in, lane, "%s shared memory at 0x%llx, which warp %u wrote at line %u, and nothing makes one wait for the other",
                 does, static_cast<long long>(SHARED_BASE + at * 4), write.warp, races.lines[at]);
    auto check = [&](const Races::Accesses& earlier, const char* did) {
        for (u32 other = 0; other < count && !earlier.times.empty(); ++other) {
            const u32* const times = &earlier.times[other * races.stride];
            u32 latest = 0;
            for (u64 at = first; at < past; ++at) latest = std::max(latest, times[at]);
            if (latest > clock[other])
                fail(warp, in, lane, "%s shared memory at 0x%llx, %u bytes, which warp %u %s (last at line %u), and nothing makes one wait for the other",
                     does, static_cast<long long>(address), bytes, other, did, earlier.lines[other]);
        }
    };
    if (access != Access::READ) check(races.reads, "read");
    if (access != Access::ATOMIC) check(races.atomics, "atomically changed");
    if (access == Access::WRITE) {
        for (u64 at = first; at < past; ++at) races.writes[at] = {mask(at), self, clock[self]}, races.lines[at] = in.line;
        return;
    }
    Races::Accesses& own = access == Access::READ ? races.reads : races.atomics;
    if (own.times.empty()) own.times.assign(races.stride * count, 0), own.lines.assign(count, 0);
    std::fill(&own.times[self * races.stride + first], &own.times[self * races.stride + past], clock[self]);
    own.lines[self] = in.line;
}
}  // namespace ptx
