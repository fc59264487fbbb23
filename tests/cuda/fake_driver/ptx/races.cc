/* See races.h. */
#include "races.h"
#include <algorithm>
#include "machine.h"

namespace ptx {
void Races::start(const Cta& cta) {
    static const bool asked = setting("FAKE_DRIVER_RACES", 1) != 0;
    wanted = asked;
    if (!wanted) return;
    const size_t count = cta.warps.size(), words_count = cta.shared.size() / 4 + 1;
    warps.assign(count, Clock(count, 0));
    for (u32 i = 0; i < count; ++i) warps[i][i] = 1;
    words.assign(words_count, {}), reads.assign(words_count * count, 0);
    counters.clear();
    for (Clock& clock : gathered) clock.assign(count, 0);
    for (Clock& clock : passed) clock.assign(count, 0);
}
void Races::take(u32 warp, const Clock& at) {
    for (u32 i = 0; i < at.size(); ++i) warps[warp][i] = std::max(warps[warp][i], at[i]);
}
void Races::leave(u32 warp, Clock& at) {
    at.resize(warps.size());
    for (u32 i = 0; i < at.size(); ++i) at[i] = std::max(at[i], warps[warp][i]);
    ++warps[warp][warp];
}

void touch(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes, bool writes) {
    Races& races = warp.cta->races;
    if (!races.wanted) return;
    const Clock& clock = races.warps[warp.index];
    const u32 count = static_cast<u32>(races.warps.size());
    for (u64 at = address / 4; at <= (address + bytes - 1) / 4; ++at) {
        Races::Word& word = races.words[at - SHARED_BASE / 4];
        u32* const reads = &races.reads[(at - SHARED_BASE / 4) * count];
        const u64 first = std::max(address, at * 4) - at * 4, end = std::min(address + bytes, at * 4 + 4) - at * 4;
        const u32 mask = (1u << end) - (1u << first);
        if (word.written > 0 && word.writer != warp.index && (word.mask & mask) != 0 && word.written > clock[word.writer])
            fail(warp, in, lane, "%s shared memory at 0x%llx, which warp %u wrote at line %u, and nothing makes one wait for the other",
                 writes ? "writes" : "reads", static_cast<long long>(at * 4), word.writer, word.write_line);
        for (u32 other = 0; writes && other < count; ++other)
            if (other != warp.index && reads[other] > clock[other])
                fail(warp, in, lane, "writes shared memory at 0x%llx, which warp %u read (at line %u or before), and nothing makes one wait for the other",
                     static_cast<long long>(at * 4), other, word.read_line);
        if (writes) word.writer = warp.index, word.mask = mask, word.written = clock[warp.index], word.write_line = in.line;
        else reads[warp.index] = clock[warp.index], word.read_line = in.line;
    }
}
}  // namespace ptx
