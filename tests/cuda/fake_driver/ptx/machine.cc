/* The order in which the lanes of a warp, the warps of a CTA and the CTAs of a launch run. Only one warp runs at a
 * time, and the order is always the same.
 *
 * Lanes of a warp with the same next instruction form a group and run together. The group whose instruction comes first
 * in the text runs, so diverged lanes meet again where their paths join. An instruction that several lanes must execute
 * together waits until all of them have reached it. A warp's turn ends when all its groups wait, when it executes an
 * instruction that polls, or when it has used its slice of instructions. */
#include "machine.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <memory>

namespace ptx {
u64 setting(const char* name, u64 otherwise) {
    const char* value = getenv(name);
    return value ? strtoull(value, nullptr, 10) : otherwise;
}
const bool early = setting("FAKE_DRIVER_EARLY", 0) != 0;

namespace {
const char* text_of(const Entry& entry, u32 line) {
    if (line == 0 || line > entry.lines.size()) return "";
    const char* text = entry.lines[line - 1].c_str();
    return text + strspn(text, " \t");
}
void describe(const Warp& warp) {
    const Entry& entry = *warp.cta->launch->entry;
    auto group = [&](u32 pc, u32 lanes) {
        if (!lanes) return;
        const u32 line = pc < entry.code.size() ? entry.code[pc].line : 0;
        fprintf(stderr, "  CTA %u,%u,%u warp %u lanes %08x at line %u: %.100s\n", warp.cta->index[0], warp.cta->index[1], warp.cta->index[2],
                warp.index, lanes, line, text_of(entry, line));
    };
    group(warp.pc, warp.lanes);
    for (u32 i = 0; i < warp.other_count; ++i) group(warp.others[i].pc, warp.others[i].lanes);
}

// ---- groups of a warp -------------------------------------------------------------------------------------------------

void find_next(Warp& warp) {
    warp.next_pc = ~0u;
    for (u32 i = 0; i < warp.other_count; ++i)
        if (warp.others[i].pc >= warp.pc) warp.next_pc = std::min(warp.next_pc, warp.others[i].pc);
}
/* Stops the running group and adds it to the others. If a group has the same next instruction, the two become one. */
void set_down(Warp& warp, bool blocked) {
    if (!warp.lanes) return;
    for (u32 i = 0; i < warp.other_count; ++i)
        if (warp.others[i].pc == warp.pc) {
            warp.others[i].lanes |= warp.lanes, warp.others[i].blocked = false, warp.lanes = 0;
            return;
        }
    warp.others[warp.other_count++] = {warp.pc, warp.lanes, blocked}, warp.lanes = 0;
}
/* Continues the unblocked group with the smallest `pc` that is at least `from`. Returns whether there is one. */
bool take_up(Warp& warp, u32 from) {
    u32 best = ~0u;
    for (u32 i = 0; i < warp.other_count; ++i)
        if (!warp.others[i].blocked && warp.others[i].pc >= from && (best == ~0u || warp.others[i].pc < warp.others[best].pc)) best = i;
    if (best == ~0u) return false;
    warp.pc = warp.others[best].pc, warp.lanes = warp.others[best].lanes;
    warp.others[best] = warp.others[--warp.other_count];
    find_next(warp);
    return true;
}
bool all_here(Warp& warp, const Instruction& in) {
    u32 wanted = warp.alive;
    if (in.together == Together::MEMBERS) {
        const u32* members = column<u32>(warp, in.target);
        wanted &= members[__builtin_ctz(warp.lanes)];
    }
    return !(wanted & ~warp.lanes);
}

/* Runs a warp for a slice. Returns whether any instruction was executed. */
bool run_slice(Warp& warp, u64 slice) {
    const Entry& entry = *warp.cta->launch->entry;
    const Instruction* const code = entry.code.data();
    const u32 end = static_cast<u32>(entry.code.size());
    u8* const marks = entry.done.data();
    bool did = false;
    warp.polled = false;
    for (u32 i = 0; i < warp.other_count; ++i) warp.others[i].blocked = false;
    if (!warp.lanes && !take_up(warp, 0)) return false;
    for (; slice > 0; --slice) {
        const u32 pc = warp.pc;
        const Instruction& in = code[pc];
        const u32 guard = warp.predicates[in.guard] ^ in.flip;
        warp.active = warp.lanes & guard;
        Outcome outcome = Outcome::NEXT;
        if (in.together != Together::NONE && warp.lanes != ~0u && !all_here(warp, in)) outcome = Outcome::BLOCKED;
        else if (warp.active) outcome = in.run(warp, in), marks[pc] = 1, ++entry.instructions;
        if (outcome == Outcome::NEXT) {
            did = true;
            if (in.polls) slice = 1, warp.polled = true;
            if (++warp.pc < warp.next_pc && warp.pc < end) continue;
            if (warp.pc >= end) warp.alive &= ~warp.lanes, warp.lanes = 0;
        } else if (outcome == Outcome::JUMPED) {
            did = true;
            if (warp.lanes && warp.other_count == 0) continue;
        }
        if (!warp.lanes)  // all returned; other groups may have waited for them
            for (u32 i = 0; i < warp.other_count; ++i) warp.others[i].blocked = false;
        set_down(warp, outcome == Outcome::BLOCKED);
        if (!take_up(warp, 0)) return did;
    }
    // The group may spin until another group of the warp does something, so the later groups get a turn.
    if (warp.other_count > 0) {
        const u32 after = warp.pc + 1;
        set_down(warp, false);
        if (!take_up(warp, after)) take_up(warp, 0);
    }
    return did;
}

// ---- CTAs -------------------------------------------------------------------------------------------------------------

void start_warp(Cta& cta, u32 index) {
    const Launch& launch = *cta.launch;
    const Entry& entry = *launch.entry;
    Warp& warp = cta.warps[index];
    const u32 predicates_at = (entry.file_bytes + 63) / 64 * 64;
    warp.memory.resize(predicates_at + 4 * entry.predicates + 64);
    warp.file = warp.memory.data() + (-reinterpret_cast<u64>(warp.memory.data()) & 63);
    warp.predicates = reinterpret_cast<u32*>(warp.file + predicates_at);
    memset(warp.file + entry.constants.size(), 0xff, predicates_at - entry.constants.size());  // never zeros by chance
    memset(warp.predicates, 0xaa, 4 * entry.predicates);
    memcpy(warp.file, entry.constants.data(), entry.constants.size());
    warp.predicates[TRUE_PREDICATE] = ~0u, warp.predicates[FALSE_PREDICATE] = 0;
    const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
    for (u32 which = 0; which < u32(Special::COUNT); ++which) {
        if (entry.specials[which] == NO_COLUMN) continue;
        u32* to = column<u32>(warp, entry.specials[which]);
        for (u32 lane = 0; lane < LANES; ++lane) {
            const u32 thread = index * LANES + lane, x = launch.block[0], y = launch.block[1];
            switch (Special(which)) {
                case Special::TID_X: to[lane] = thread % x; break;
                case Special::TID_Y: to[lane] = thread / x % y; break;
                case Special::TID_Z: to[lane] = thread / x / y; break;
                case Special::NTID_X: case Special::NTID_Y: case Special::NTID_Z: to[lane] = launch.block[which - u32(Special::NTID_X)]; break;
                case Special::CTAID_X: case Special::CTAID_Y: case Special::CTAID_Z: to[lane] = cta.index[which - u32(Special::CTAID_X)]; break;
                case Special::LANEID: to[lane] = lane; break;
                case Special::WARPID: to[lane] = index; break;
                case Special::CLUSTER_RANK: to[lane] = cta.rank; break;
                case Special::CLUSTER_SIZE: to[lane] = static_cast<u32>(cta.cluster->ctas.size()); break;
                default: to[lane] = launch.grid[which - u32(Special::NCTAID_X)]; break;
            }
        }
    }
    const u32 left = threads - index * LANES;
    warp.lanes = warp.alive = left >= LANES ? ~0u : (1u << left) - 1;
    warp.pc = 0, warp.next_pc = ~0u, warp.other_count = 0, warp.index = index, warp.cta = &cta, warp.at_barrier = false;
    // ptxas gives a kernel with setmaxnreg all registers that its launch bounds allow.
    warp.registers = std::min(65536 / (entry.threads_most * entry.resident_least) / 8 * 8, 255u);
    warp.copies.clear(), warp.products.clear(), warp.product_groups = 0;
    memset(warp.copy_groups, 0, sizeof warp.copy_groups), memset(warp.cluster_arrived, 0, sizeof warp.cluster_arrived);
}
void start_cta(Cta& cta, Launch& launch, u64 number) {
    cta.launch = &launch;
    cta.index[0] = number % launch.grid[0], cta.index[1] = number / launch.grid[0] % launch.grid[1];
    cta.index[2] = static_cast<u32>(number / launch.grid[0] / launch.grid[1]);
    cta.shared.assign(launch.entry->dynamic_shared_at + launch.dynamic_shared - SHARED_BASE, 0xff);  // NaN, never zeros by chance
    memset(cta.barriers, 0, sizeof cta.barriers);
    const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
    cta.warps.resize((threads + LANES - 1) / LANES);
    cta.warps_left = static_cast<u32>(cta.warps.size()), cta.registers_left = 0;
    cta.boxes.clear(), cta.pieces.clear();
    for (u32 i = 0; i < cta.warps.size(); ++i) start_warp(cta, i);
    cta.races.start(cta);
}
bool run_cta(Cta& cta, u64 slice) {
    bool did = false;
    for (Warp& warp : cta.warps) {
        if (!warp.alive) continue;
        did |= run_slice(warp, slice);
        if (!warp.alive) --cta.warps_left, did = true;
    }
    if (cta.warps_left == 0 && did) end(cta);
    // A copy that is made after the CTA's end would write to the shared memory of a later CTA.
    auto late = [&](const auto& copies) {
        if (cta.warps_left != 0 || copies.empty()) return;
        fail(*copies[0].asked, *copies[0].instruction, copies[0].lane, "CTA %u of the cluster ended while bytes were on their way to it", cta.rank);
    };
    late(cta.boxes), late(cta.pieces);
    return did;
}
}  // namespace

void fail(const Warp& warp, const Instruction& in, u32 lane, const char* format, ...) {
    const Cta& cta = *warp.cta;
    fprintf(stderr, "%s: CTA %u,%u,%u warp %u lane %u: ", cta.launch->entry->name.c_str(), cta.index[0], cta.index[1], cta.index[2], warp.index, lane);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  line %u: %.200s\n", in.line, text_of(*cta.launch->entry, in.line));
    abort();
}

static std::vector<std::unique_ptr<Cta>> spare;
static const u64 orders = setting("FAKE_DRIVER_ORDER", 0);

Running::Running(const Launch& launch, u32 resident) : launch(launch), resident(resident) {
    number = ++launch.entry->launches;
}
Running::~Running() = default;
bool Running::go_on() {
    // Number of instructions that a warp executes before the next warp's turn. A small number interleaves the warps
    // finely.
    static const u64 slice = setting("FAKE_DRIVER_SLICE", 4096), polls_most = 1 << 21;
    // With FAKE_DRIVER_ORDER, some CTAs run in only one of 16 rounds.
    static const u64 rounds_most = (orders ? 16ull << 30 : 1ull << 30) / slice;
    const u64 count = u64(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    while (started < count || !ctas.empty()) {
        if (polled && ++polls % 32 == 0) return false;
        // The next cluster starts every 64 rounds, or if no running CTA made progress: running CTAs may wait for it.
        const u32 together = launch.entry->cluster;
        if (started < count && ctas.size() + together <= std::max(resident, together) && (ctas.empty() || !did || (rounds + polls) % 64 == 63)) {
            auto cluster = std::make_shared<Cluster>();
            for (u32 rank = 0; rank < together; ++rank) {
                if (spare.empty()) spare.push_back(std::make_unique<Cta>());
                ctas.push_back(std::move(spare.back())), spare.pop_back();
                ctas.back()->cluster = cluster, ctas.back()->rank = rank, cluster->ctas.push_back(ctas.back().get());
            }
            for (Cta* cta : cluster->ctas) start_cta(*cta, launch, started++);
        } else if (!did || (polled ? polls : ++rounds) > (polled ? polls_most : rounds_most)) {
            fprintf(stderr, "%s: %s:\n", launch.entry->name.c_str(), did ? "its warps run for ever" : "all warps wait");
            for (auto& cta : ctas)
                for (const Warp& warp : cta->warps) describe(warp);
            abort();
        }
        did = polled = false, ++turns;
        for (size_t i = 0; i < ctas.size(); ++i) {
            auto& cta = ctas[i];
            // With FAKE_DRIVER_ORDER, every third CTA gets few turns; the next launch slows different CTAs.
            const bool waits = orders && (cta->index[0] + number) % 3 == 0 && turns % 16 != 0 && cta->warps_left > 0;
            did |= waits || run_cta(*cta, slice);
            for (const Warp& warp : cta->warps) polled |= warp.alive && warp.polled;
        }
        for (size_t i = 0; i < ctas.size();) {
            bool left = false;  // a cluster's CTAs are freed together, so that an access to an ended one is detected
            for (const Cta* cta : ctas[i]->cluster->ctas) left |= cta->warps_left != 0;
            if (left) { ++i; continue; }
            spare.push_back(std::move(ctas[i])), ctas.erase(ctas.begin() + i), rounds = polls = 0;
        }
    }
    return true;
}

const Device& device() {
    static const Device devices[] = {{80, 163 << 10, 164 << 10, 2048}, {86, 99 << 10, 100 << 10, 1536}, {87, 163 << 10, 164 << 10, 1536},
                                     {89, 99 << 10, 100 << 10, 1536}, {90, 227 << 10, 228 << 10, 2048}, {100, 227 << 10, 228 << 10, 2048},
                                     {120, 99 << 10, 100 << 10, 1536}};
    static const u64 capability = setting("FAKE_DRIVER_CAPABILITY", 90);
    for (const Device& device : devices)
        if (device.capability == capability) return device;
    fprintf(stderr, "fake driver: the limits of compute capability %llu are not known\n", 0ull + capability);
    abort();
}
u32 cta_shared(const Entry& entry, u32 dynamic_shared) { return entry.dynamic_shared_at - SHARED_BASE + dynamic_shared; }
u32 occupancy(const Entry& entry, u32 threads, u32 dynamic_shared) {
    const u32 shared = cta_shared(entry, dynamic_shared);
    if (shared > device().cta_shared) return 0;
    return std::min({device().threads / std::max(threads, 1u), device().shared / (SHARED_BASE + shared), 2u});
}
}  // namespace ptx
