/* Branches, barriers, and communication of the lanes of a warp. */
#include "forms.h"

namespace ptx {
namespace {
// ---- branches ---------------------------------------------------------------------------------------------------------

Outcome branch(Warp& warp, const Instruction& in) {
    const u32 stay = warp.lanes & ~warp.active;
    if (stay) {
        bool met = false;
        for (u32 i = 0; i < warp.other_count && !met; ++i)
            if (warp.others[i].pc == warp.pc + 1) warp.others[i].lanes |= stay, warp.others[i].blocked = false, met = true;
        if (!met) warp.others[warp.other_count++] = {warp.pc + 1, stay, false};
        warp.lanes = warp.active;
    }
    warp.pc = in.target;
    return Outcome::JUMPED;
}
Outcome leave(Warp& warp, const Instruction&) {
    const u32 stay = warp.lanes & ~warp.active;
    warp.alive &= ~warp.active;
    if (stay) warp.others[warp.other_count++] = {warp.pc + 1, stay, false};
    warp.lanes = 0;
    return Outcome::JUMPED;
}
Outcome trap(Warp& warp, const Instruction& in) { fail(warp, in, __builtin_ctz(warp.active), "trap"); }
Outcome nothing(Warp&, const Instruction&) { return Outcome::NEXT; }

// ---- barriers of a CTA ------------------------------------------------------------------------------------------------

Barrier& find_barrier(Warp& warp, const Instruction& in, u32 number, u32 expected) {
    if (number >= 16) fail(warp, in, 0, "there is no barrier %u", number);
    Barrier& barrier = warp.cta->barriers[number];
    if (expected % LANES != 0) fail(warp, in, 0, "barrier %u is for %u threads, no whole warps", number, expected);
    if (barrier.arrived > 0 && barrier.expected != expected)
        fail(warp, in, 0, "barrier %u is for %u threads here, for %u elsewhere", number, expected, barrier.expected);
    return barrier.expected = expected, barrier;
}
/* Opens the barrier if all expected threads have arrived. A barrier without a number of threads expects all warps of
 * the CTA that have not ended. */
void release(Warp& warp, const Instruction& in, Barrier& barrier) {
    const u32 expected = barrier.expected ? barrier.expected : warp.cta->warps_left * LANES;
    if (barrier.arrived > expected) fail(warp, in, 0, "%u threads came to a barrier for %u", barrier.arrived, expected);
    if (barrier.arrived < expected) return;
    barrier.arrived = 0, ++barrier.generation;
    if (Races& races = warp.cta->races; races.wanted) {
        const size_t number = &barrier - warp.cta->barriers;
        races.passed[number] = races.gathered[number];
    }
    barrier.result_any = barrier.any, barrier.result_every = barrier.every;
}
void come(Warp& warp, const Instruction& in, Barrier& barrier, u32 which) {
    if (barrier.arrived == 0) barrier.any = false, barrier.every = true;
    barrier.any |= (warp.alive & which) != 0, barrier.every &= !(warp.alive & ~which);
    barrier.arrived += LANES;
    if (Races& races = warp.cta->races; races.wanted) races.leave(warp.index, races.gathered[&barrier - warp.cta->barriers]);
    warp.barrier_generation = barrier.generation;
    release(warp, in, barrier);
}
u32 first_of(Warp& warp, u32 offset) { return offset == NO_COLUMN ? 0 : column<u32>(warp, offset)[__builtin_ctz(warp.active)]; }

bool pass(Warp& warp, const Instruction& in, u32 number, u32 expected, u32 which) {
    Barrier& barrier = find_barrier(warp, in, number, warp.at_barrier ? warp.cta->barriers[number & 15].expected : expected);
    if (!warp.at_barrier) come(warp, in, barrier, which), warp.at_barrier = true;
    else if (warp.barrier_generation == barrier.generation) release(warp, in, barrier);
    if (warp.barrier_generation == barrier.generation) return false;
    if (Races& races = warp.cta->races; races.wanted) races.take(warp.index, races.passed[number]);
    return warp.at_barrier = false, true;
}
Outcome sync(Warp& warp, const Instruction& in) {
    return pass(warp, in, first_of(warp, in.at[0]), first_of(warp, in.at[1]), 0) ? Outcome::NEXT : Outcome::BLOCKED;
}
Outcome arrive_only(Warp& warp, const Instruction& in) {
    come(warp, in, find_barrier(warp, in, first_of(warp, in.at[0]), first_of(warp, in.at[1])), 0);
    return Outcome::NEXT;
}
template <bool EVERY> Outcome sync_reduce(Warp& warp, const Instruction& in) {
    const u32 number = in.number;
    if (!pass(warp, in, number, 0, warp.predicates[in.at[1]])) return Outcome::BLOCKED;
    const Barrier& barrier = warp.cta->barriers[number];
    set_predicate(warp, in.at[0], (EVERY ? barrier.result_every : barrier.result_any) ? ~0u : 0);
    return Outcome::NEXT;
}

// ---- the barrier of a cluster -----------------------------------------------------------------------------------------

/* Opens the cluster's barrier if all lanes that have not ended have arrived. */
void release_cluster(Cluster& cluster) {
    u32 alive = 0;
    for (const Cta* cta : cluster.ctas)
        for (const Warp& warp : cta->warps) alive += static_cast<u32>(__builtin_popcount(warp.alive));
    if (cluster.arrived < alive) return;
    cluster.arrived = 0, ++cluster.generation, cluster.passed = cluster.gathered;
}
/* Without `.release`, an arrival publishes only the warp's clock at its last fence. */
template <bool RELEASES> Outcome arrive_cluster(Warp& warp, const Instruction& in) {
    Cluster& cluster = *warp.cta->cluster;
    active_lanes(warp, [&](u32 lane) {
        if (warp.cluster_arrived[lane]) fail(warp, in, lane, "it arrives again at its cluster's barrier, and has not waited");
        warp.cluster_arrived[lane] = true, warp.cluster_generation[lane] = cluster.generation, ++cluster.arrived;
    });
    if (Races& races = warp.cta->races; races.wanted) RELEASES ? races.leave(warp.index, cluster.gathered) : join(cluster.gathered, races.fenced[warp.index]);
    return release_cluster(cluster), Outcome::NEXT;
}
/* The instruction publishes only the warp's new mbarriers. The check of races is weaker here: it treats the instruction
 * as a release of all of the warp's earlier accesses. */
Outcome fence_mbarriers(Warp& warp, const Instruction&) {
    if (Races& races = warp.cta->races; races.wanted) races.leave(warp.index, races.fenced[warp.index]);
    return Outcome::NEXT;
}
Outcome wait_cluster(Warp& warp, const Instruction& in) {
    Cluster& cluster = *warp.cta->cluster;
    release_cluster(cluster);
    bool over = true;
    active_lanes(warp, [&](u32 lane) {
        if (!warp.cluster_arrived[lane]) fail(warp, in, lane, "it waits at its cluster's barrier, where it has not arrived");
        over &= warp.cluster_generation[lane] != cluster.generation;
    });
    if (!over) return Outcome::BLOCKED;
    active_lanes(warp, [&](u32 lane) { warp.cluster_arrived[lane] = false; });
    if (Races& races = warp.cta->races; races.wanted) races.take(warp.index, cluster.passed);
    return Outcome::NEXT;
}

// ---- registers --------------------------------------------------------------------------------------------------------

/* A warp can only take registers that other warps of its CTA have given back; it waits until there are enough. */
template <bool MORE> Outcome set_registers(Warp& warp, const Instruction& in) {
    const u32 wanted = in.number;
    if (MORE ? wanted < warp.registers : wanted > warp.registers) fail(warp, in, 0, "a lane has %u registers", warp.registers);
    u32& left = warp.cta->registers_left;
    const i32 taken = static_cast<i32>(wanted - warp.registers) * static_cast<i32>(LANES);
    if (taken > static_cast<i32>(left)) return Outcome::BLOCKED;
    left -= taken, warp.registers = wanted;
    return Outcome::NEXT;
}

// ---- lanes of a warp --------------------------------------------------------------------------------------------------

enum class Shuffle { IDX, BFLY, UP, DOWN };
template <Shuffle KIND> Outcome shuffle(Warp& warp, const Instruction& in) {
    const u32 *b = column<u32>(warp, in.at[3]), *c = column<u32>(warp, in.at[4]);
    u32 from[LANES], in_range = 0;
    memcpy(from, column<u32>(warp, in.at[2]), sizeof from);
    u32* to = column<u32>(warp, in.at[0]);
    active_lanes(warp, [&](u32 lane) {
        const u32 clamp = c[lane] & 31, segment = c[lane] >> 8 & 31, offset = b[lane] & 31;
        const u32 most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        u32 source;
        bool fits;
        if (KIND == Shuffle::IDX) source = least | (offset & ~segment), fits = source <= most;
        else if (KIND == Shuffle::BFLY) source = lane ^ offset, fits = source <= most;
        else if (KIND == Shuffle::UP) source = lane - offset, fits = static_cast<i32>(source) >= static_cast<i32>(most);
        else source = lane + offset, fits = source <= most;
        if (!fits) source = lane;
        else in_range |= 1u << lane;
        // PTX does not define the value of a lane that does not take part.
        to[lane] = warp.active >> source & 1 ? from[source] : 0xffffffff;
    });
    set_predicate(warp, in.at[1], in_range);
    return Outcome::NEXT;
}
Outcome ballot(Warp& warp, const Instruction& in) {
    const u32 which = warp.predicates[in.at[1]] & warp.active;
    each_lane(warp, column<u32>(warp, in.at[0]), [=](u32) { return which; });
    return Outcome::NEXT;
}
Outcome any(Warp& warp, const Instruction& in) {
    return set_predicate(warp, in.at[0], warp.predicates[in.at[1]] & warp.active ? ~0u : 0), Outcome::NEXT;
}
Outcome all(Warp& warp, const Instruction& in) {
    return set_predicate(warp, in.at[0], warp.active & ~warp.predicates[in.at[1]] ? 0 : ~0u), Outcome::NEXT;
}
template <class F> Outcome reduce(Warp& warp, const Instruction& in, u32 start, F f) {
    const u32* from = column<u32>(warp, in.at[1]);
    active_lanes(warp, [&](u32 lane) { start = f(start, from[lane]); });
    each_lane(warp, column<u32>(warp, in.at[0]), [=](u32) { return start; });
    return Outcome::NEXT;
}
Outcome reduce_max(Warp& warp, const Instruction& in) {
    return reduce(warp, in, 0, [](u32 x, u32 y) { return x > y ? x : y; });
}
Outcome reduce_min(Warp& warp, const Instruction& in) {
    return reduce(warp, in, ~0u, [](u32 x, u32 y) { return x < y ? x : y; });
}
Outcome reduce_add(Warp& warp, const Instruction& in) {
    return reduce(warp, in, 0, [](u32 x, u32 y) { return x + y; });
}
Outcome reduce_or(Warp& warp, const Instruction& in) {
    return reduce(warp, in, 0, [](u32 x, u32 y) { return x | y; });
}
Outcome active_mask(Warp& warp, const Instruction& in) {
    const u32 which = warp.active;
    return each_lane(warp, column<u32>(warp, in.at[0]), [=](u32) { return which; }), Outcome::NEXT;
}
}  // namespace

void add_control(Forms& forms) {
    const Together W = Together::WARP, M = Together::MEMBERS;
    forms.insert(forms.end(), {
        {"bra", "L", branch}, {"bra.uni", "L", branch}, {"ret", "", leave}, {"exit", "", leave}, {"trap", "", trap},
        {"bar.sync", "4 ?4", sync, W}, {"barrier.sync", "4 ?4", sync, W}, {"barrier.cta.sync", "4 ?4", sync, W},
        {"barrier.cta.sync.aligned", "4 ?4", sync, W}, {"barrier.sync.aligned", "4 ?4", sync, W},
        {"bar.arrive", "4 4", arrive_only, W}, {"barrier.cta.arrive", "4 4", arrive_only, W},
        {"bar.red.or.pred", "=p # p", sync_reduce<false>, W}, {"bar.red.and.pred", "=p # p", sync_reduce<true>, W},
        {"bar.warp.sync", "m", nothing, M},
        {"barrier.cluster.arrive.relaxed", "", arrive_cluster<false>}, {"barrier.cluster.wait", "", wait_cluster},
        {"barrier.cluster.arrive.release", "", arrive_cluster<true>}, {"barrier.cluster.wait.acquire", "", wait_cluster},
        {"shfl.sync.idx.b32", "=4|p 4 4 4 m", shuffle<Shuffle::IDX>, M}, {"shfl.sync.bfly.b32", "=4|p 4 4 4 m", shuffle<Shuffle::BFLY>, M},
        {"shfl.sync.up.b32", "=4|p 4 4 4 m", shuffle<Shuffle::UP>, M}, {"shfl.sync.down.b32", "=4|p 4 4 4 m", shuffle<Shuffle::DOWN>, M},
        {"vote.sync.ballot.b32", "=4 p m", ballot, M}, {"vote.sync.any.pred", "=p p m", any, M}, {"vote.sync.all.pred", "=p p m", all, M},
        {"redux.sync.max.u32", "=4 4 m", reduce_max, M}, {"redux.sync.min.u32", "=4 4 m", reduce_min, M},
        {"redux.sync.add.u32", "=4 4 m", reduce_add, M}, {"redux.sync.add.s32", "=4 4 m", reduce_add, M},
        {"redux.sync.or.b32", "=4 4 m", reduce_or, M}, {"activemask.b32", "=4", active_mask},
        // Kernels of a stream run one after the other, and all warps see each write at once.
        {"griddepcontrol.wait", "", nothing}, {"griddepcontrol.launch_dependents", "", nothing},
        {"membar.cta", "", nothing}, {"membar.gl", "", nothing}, {"membar.sys", "", nothing}, {"fence.acq_rel.gpu", "", nothing},
        {"fence.acq_rel.cta", "", nothing}, {"fence.acq_rel.sys", "", nothing}, {"fence.sc.gpu", "", nothing},
        {"fence.proxy.async.shared::cta", "", nothing}, {"fence.proxy.async", "", nothing}, {"fence.mbarrier_init.release.cluster", "", fence_mbarriers},
        {"setmaxnreg.inc.sync.aligned.u32", "#", set_registers<true>, W}, {"setmaxnreg.dec.sync.aligned.u32", "#", set_registers<false>, W},
        {"prefetch.global.L2", ".", nothing}, {"prefetch.global.L1", ".", nothing}, {"nanosleep.u32", ".", nothing},
        {"createpolicy.fractional.L2::evict_first.b64", "=8 .", [](Warp& warp, const Instruction& in) {
             return each_lane(warp, column<u64>(warp, in.at[0]), [](u32) { return u64(0); }), Outcome::NEXT;
         }},
    });
}
}  // namespace ptx
