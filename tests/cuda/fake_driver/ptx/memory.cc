/* Loads and stores, atomics, asynchronous copies (cp.async), and barriers that count arrivals (mbarrier).
 *
 * Each access is checked: it must be aligned, and lie in shared memory of the cluster, in the kernel's parameters or in
 * memory that the driver has allocated. An asynchronous copy is made only when a lane waits for it. A lane that reads
 * without waiting therefore reads the old contents. */
#include <algorithm>
#include "forms.h"

namespace ptx {
u8* shared_at(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes) {
    std::vector<u8>& shared = warp.cta->shared;
    if (address < SHARED_BASE || address + bytes > SHARED_BASE + shared.size())
        fail(warp, in, lane, "shared memory at 0x%llx, %u bytes; the CTA's is 0x%x .. 0x%llx", static_cast<long long>(address), bytes, SHARED_BASE,
             static_cast<long long>(SHARED_BASE + shared.size()));
    if (address % bytes != 0) fail(warp, in, lane, "shared memory at 0x%llx, not aligned to %u bytes", static_cast<long long>(address), bytes);
    return shared.data() + (address - SHARED_BASE);
}
u8* shared_at(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address, u32 bytes) {
    if (cta.warps_left == 0) fail(warp, in, lane, "shared memory of CTA %u of the cluster, which has ended", cta.rank);
    std::vector<u8>& shared = cta.shared;
    if (address < SHARED_BASE || address + bytes > SHARED_BASE + shared.size() || address % bytes != 0)
        fail(warp, in, lane, "shared memory of CTA %u of the cluster at 0x%llx, %u bytes, not aligned or past its 0x%llx", cta.rank,
             static_cast<long long>(address), bytes, static_cast<long long>(SHARED_BASE + shared.size()));
    return shared.data() + (address - SHARED_BASE);
}
u8* global_at(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes) {
    Range& known = warp.cta->launch->known;
    if (address - known.start >= known.bytes || known.bytes - (address - known.start) < bytes) {
        const Range found = find_memory(address);
        if (found.bytes == 0) fail(warp, in, lane, "global memory at 0x%llx, which is not allocated", static_cast<long long>(address));
        if (found.bytes - (address - found.start) < bytes)
            fail(warp, in, lane, "global memory at 0x%llx, %u bytes, past the end of %llu bytes at 0x%llx", static_cast<long long>(address), bytes,
                 static_cast<long long>(found.bytes), static_cast<long long>(found.start));
        known = found;
    }
    if (address % bytes != 0) fail(warp, in, lane, "global memory at 0x%llx, not aligned to %u bytes", static_cast<long long>(address), bytes);
    return reinterpret_cast<u8*>(address);
}

namespace {
enum class Space { GLOBAL, SHARED, PARAM };

u8* param_at(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes) {
    std::vector<u8>& params = warp.cta->launch->params;
    if (address + bytes > params.size() || address % bytes != 0)
        fail(warp, in, lane, "parameter at %lld, %u bytes, of %zu", static_cast<long long>(address), bytes, params.size());
    return params.data() + address;
}
template <Space SPACE, Access ACCESS> u8* memory_at(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes) {
    if constexpr (SPACE == Space::GLOBAL) return global_at(warp, in, lane, address, bytes);
    else if constexpr (SPACE == Space::SHARED) {
        u8* const place = shared_at(warp, in, lane, address, bytes);
        return touch(warp, in, lane, address, bytes, ACCESS), place;
    } else return param_at(warp, in, lane, address, bytes);
}

/* Reads the three words of an address operand: a column, whether the column has 8 bytes for each lane, and an offset
 * of 31 bits. */
struct Addresses {
    u64 of[LANES];
    Addresses(Warp& warp, const u32* at) {
        const i64 offset = static_cast<i32>(at[2] << 1) >> 1;
        if (at[1]) {
            const u64* base = column<u64>(warp, at[0]);
            for (u32 i = 0; i < LANES; ++i) of[i] = base[i] + offset;
        } else {
            const u32* base = column<u32>(warp, at[0]);
            for (u32 i = 0; i < LANES; ++i) of[i] = static_cast<u32>(base[i] + offset);
        }
    }
};

// ---- loads and stores -------------------------------------------------------------------------------------------------

/* Loads COUNT items of type T, each into a register of type R, which may be wider than T. */
template <Space SPACE, class T, class R, u32 COUNT> Outcome load(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at + COUNT);
    active_lanes(warp, [&](u32 lane) {
        T items[COUNT];
        memcpy(items, memory_at<SPACE, Access::READ>(warp, in, lane, addresses.of[lane], sizeof items), sizeof items);
        for (u32 k = 0; k < COUNT; ++k) column<R>(warp, in.at[k])[lane] = static_cast<R>(items[k]);
    });
    return Outcome::NEXT;
}
template <Space SPACE, class T, class R, u32 COUNT> Outcome store(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at);
    active_lanes(warp, [&](u32 lane) {
        T items[COUNT];
        for (u32 k = 0; k < COUNT; ++k) items[k] = static_cast<T>(column<R>(warp, in.at[3 + k])[lane]);
        memcpy(memory_at<SPACE, Access::WRITE>(warp, in, lane, addresses.of[lane], sizeof items), items, sizeof items);
    });
    return Outcome::NEXT;
}
template <Space SPACE, class T, class R> Handler access(bool loads, u32 count) {
    if (count == 1) return loads ? load<SPACE, T, R, 1> : store<SPACE, T, R, 1>;
    if (count == 2) return loads ? load<SPACE, T, R, 2> : store<SPACE, T, R, 2>;
    return loads ? load<SPACE, T, R, 4> : store<SPACE, T, R, 4>;
}
/* Returns the function for items of `bytes` bytes and registers of `width` bytes; null if there is none. */
template <Space SPACE> Handler access_of(bool loads, u32 count, u32 bytes, bool is_signed, u32 width) {
    const u32 kind = bytes * 10 + width;
    if (is_signed && loads) {
        if (kind == 12) return access<SPACE, int8_t, i16>(loads, count);
        if (kind == 14) return access<SPACE, int8_t, i32>(loads, count);
        if (kind == 24) return access<SPACE, i16, i32>(loads, count);
        if (kind == 48) return access<SPACE, i32, i64>(loads, count);
    }
    switch (kind) {
        case 12: return access<SPACE, u8, u16>(loads, count);
        case 14: return access<SPACE, u8, u32>(loads, count);
        case 22: return access<SPACE, u16, u16>(loads, count);
        case 24: return access<SPACE, u16, u32>(loads, count);
        case 44: return access<SPACE, u32, u32>(loads, count);
        case 48: return access<SPACE, u32, u64>(loads, count);
        case 88: return access<SPACE, u64, u64>(loads, count);
    }
    return nullptr;
}

// ---- atomics ----------------------------------------------------------------------------------------------------------

template <Space SPACE, class T, bool GIVES, class F> Form atomic_form(std::string opcode, F) {
    const std::string operand = " " + token<T>();
    return {std::move(opcode), GIVES ? "=" + token<T>() + " @" + operand : "@" + operand, [](Warp& warp, const Instruction& in) {
                const u32* words = in.at + GIVES;
                const Addresses addresses(warp, words);
                T operands[LANES];
                memcpy(operands, column<T>(warp, words[3]), sizeof operands);
                active_lanes(warp, [&](u32 lane) {
                    T* place = reinterpret_cast<T*>(memory_at<SPACE, Access::ATOMIC>(warp, in, lane, addresses.of[lane], sizeof(T)));
                    const T old = *place;
                    *place = F{}(old, operands[lane]);
                    if (GIVES) column<T>(warp, in.at[0])[lane] = old;
                });
                return Outcome::NEXT;
            }};
}
template <class T, class F> void add_atomic(Forms& forms, const std::string& operation, F f) {
    for (const char* order : {"", "acq_rel.gpu.", "relaxed.gpu.", "release.gpu.", "acquire.gpu."}) {
        forms.push_back(atomic_form<Space::GLOBAL, T, true>(std::string("atom.") + order + "global." + operation, f));
        forms.push_back(atomic_form<Space::GLOBAL, T, false>(std::string("red.") + order + "global." + operation, f));
    }
    forms.push_back(atomic_form<Space::SHARED, T, true>("atom.shared." + operation, f));
    forms.push_back(atomic_form<Space::SHARED, T, false>("red.shared." + operation, f));
}

// ---- asynchronous copies ----------------------------------------------------------------------------------------------

void arrive_at(Warp& warp, const Instruction& in, u32 lane, u64 address, Clock* known);
void arrive_at(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address, Clock* known);

/* Makes the started copies and arrivals of a warp for which `wanted(copy, lane)` is true, oldest first. */
template <class F> void settle(Warp& warp, F wanted) {
    for (AsyncCopy& copy : warp.copies)
        for (u32 rest = copy.lanes; rest; rest &= rest - 1) {
            const u32 lane = static_cast<u32>(__builtin_ctz(rest));
            if (!wanted(copy, lane)) continue;
            copy.lanes &= ~(1u << lane);
            if (copy.arrives) { arrive_at(warp, *copy.instruction, lane, copy.to[lane], &copy.known); continue; }
            u8* to = shared_at(warp, *copy.instruction, lane, copy.to[lane], copy.bytes);
            if (copy.size[lane] > 0) memcpy(to, global_at(warp, *copy.instruction, lane, copy.from[lane], copy.size[lane]), copy.size[lane]);
            memset(to + copy.size[lane], 0, copy.bytes - copy.size[lane]);
        }
    std::erase_if(warp.copies, [](const AsyncCopy& copy) { return copy.lanes == 0; });
}
void settle_all(Warp& warp) {
    settle(warp, [](const AsyncCopy&, u32) { return true; });
}
Outcome copy_async(Warp& warp, const Instruction& in) {
    const u32 bytes = in.number;
    const Addresses to(warp, in.at), from(warp, in.at + 3);
    const u32* sizes = in.at[6] == NO_COLUMN ? nullptr : column<u32>(warp, in.at[6]);
    AsyncCopy& copy = warp.copies.emplace_back();
    copy.lanes = warp.active, copy.arrives = false, copy.bytes = bytes, copy.instruction = &in;
    memcpy(copy.group, warp.copy_groups, sizeof copy.group);
    active_lanes(warp, [&](u32 lane) {
        const u32 size = sizes ? std::min(sizes[lane], bytes) : bytes;
        copy.to[lane] = static_cast<u32>(to.of[lane]), copy.from[lane] = from.of[lane], copy.size[lane] = size;
        shared_at(warp, in, lane, to.of[lane], bytes), touch(warp, in, lane, to.of[lane], bytes, Access::WRITE);
        if (size > 0) global_at(warp, in, lane, from.of[lane], bytes);  // the check covers bytes beyond `size`, too
    });
    if (early) settle_all(warp);
    return Outcome::NEXT;
}
Outcome commit_copies(Warp& warp, const Instruction&) {
    active_lanes(warp, [&](u32 lane) { ++warp.copy_groups[lane]; });
    return Outcome::NEXT;
}
/* Records the write of a copy that the warp has waited for, so that warps which synchronise with this warp later may
 * read it. A copy with a later arrival needs no record, because warps that wait for the arrival come after the copy. */
void touch_copied(Warp& warp, const AsyncCopy& copy, u32 lane) {
    if (!warp.cta->races.wanted) return;
    for (const AsyncCopy* later = &copy; later <= &warp.copies.back(); ++later)
        if (later->arrives && later->lanes >> lane & 1) return;
    touch(warp, *copy.instruction, lane, copy.to[lane], copy.bytes, Access::WRITE);
}
Outcome wait_copies(Warp& warp, const Instruction& in) {
    settle(warp, [&](const AsyncCopy& copy, u32 lane) {
        const bool waited = warp.active >> lane & 1 && !copy.arrives && copy.group[lane] + in.number < warp.copy_groups[lane];
        if (waited) touch_copied(warp, copy, lane);
        return waited;
    });
    return Outcome::NEXT;
}
Outcome wait_all_copies(Warp& warp, const Instruction&) {
    settle(warp, [&](const AsyncCopy& copy, u32 lane) {
        const bool waited = warp.active >> lane & 1 && !copy.arrives;
        if (waited) touch_copied(warp, copy, lane);
        return waited;
    });
    return Outcome::NEXT;
}
Outcome arrive_when_copied(Warp& warp, const Instruction& in) {
    const Addresses barrier(warp, in.at);
    AsyncCopy& copy = warp.copies.emplace_back();
    copy.lanes = warp.active, copy.arrives = true, copy.bytes = 0, copy.instruction = &in;
    for (u32 lane = 0; lane < LANES; ++lane) copy.to[lane] = static_cast<u32>(barrier.of[lane]);
    active_lanes(warp, [&](u32 lane) { touch(warp, in, lane, copy.to[lane], 8, Access::READ); });
    if (Races& races = warp.cta->races; races.wanted) races.leave(warp.index, copy.known);
    if (early) settle_all(warp);
    return Outcome::NEXT;
}
void settle_boxes(Cta& cta, u32 barrier);

/* Makes the copies and arrivals of all warps and of the copy engine that the barrier at `address` waits for. Called
 * when a lane tests the barrier. */
void settle_for(Cta& cta, u32 address) {
    settle_boxes(cta, address);
    for (Warp& warp : cta.warps) {
        u32 due[LANES] = {};  // for each lane: the number of entries up to its last arrival at the barrier
        bool any = false;
        for (u32 i = 0; i < warp.copies.size(); ++i) {
            const AsyncCopy& copy = warp.copies[i];
            if (!copy.arrives) continue;
            for (u32 rest = copy.lanes; rest; rest &= rest - 1) {
                const u32 lane = static_cast<u32>(__builtin_ctz(rest));
                if (copy.to[lane] == address) due[lane] = i + 1, any = true;
            }
        }
        if (!any) continue;
        const AsyncCopy* first = warp.copies.data();
        settle(warp, [&](const AsyncCopy& copy, u32 lane) { return static_cast<u32>(&copy - first) < due[lane]; });
    }
}

// ---- barriers that count arrivals ---------------------------------------------------------------------------------------

/* An mbarrier, as this machine keeps it in the 8 bytes that PTX gives it. */
struct Counter {
    u64 pending : 20, expected : 20, phase : 1, set_up : 3;
    i64 bytes : 20;
};
static_assert(sizeof(Counter) == 8);
constexpr u32 SET_UP = 5;

Counter& counter_at(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address) {
    Counter& counter = *reinterpret_cast<Counter*>(&cta == warp.cta ? shared_at(warp, in, lane, address, 8) : shared_at(warp, cta, in, lane, address, 8));
    if (counter.set_up != SET_UP) fail(warp, in, lane, "there is no mbarrier at 0x%llx", static_cast<long long>(address));
    return counter;
}
Counter& counter_at(Warp& warp, const Instruction& in, u32 lane, u64 address) { return counter_at(warp, *warp.cta, in, lane, address); }
void advance(Counter& counter) {
    if (counter.pending == 0 && counter.bytes == 0) counter.phase ^= 1, counter.pending = counter.expected;
}
/* Merges `known`, the clock of an arriving warp, into the clock of the barrier at `address`. */
void leave_at(Cta& cta, u32 address, const Clock& known) {
    Clock& left = cta.races.counters[address];
    left.resize(known.size());
    for (u32 i = 0; i < left.size(); ++i) left[i] = std::max(left[i], known[i]);
}
/* `known` is the warp's clock when it issued the arrival; null means its clock now. */
void arrive_at(Warp& warp, const Instruction& in, u32 lane, u64 address, Clock* known) { arrive_at(warp, *warp.cta, in, lane, address, known); }
void arrive_at(Warp& warp, Cta& cta, const Instruction& in, u32 lane, u64 address, Clock* known) {
    reach(warp, cta, in, lane, static_cast<u32>(address));
    if (!known) touch(warp, cta, in, lane, address, 8, Access::READ);
    if (Races& races = warp.cta->races; races.wanted) {
        Clock now;
        if (!known) races.leave(warp.index, now), known = &now;
        leave_at(cta, static_cast<u32>(address), *known);
    }
    Counter& counter = counter_at(warp, cta, in, lane, address);
    if (counter.pending == 0) fail(warp, in, lane, "more arrivals at an mbarrier than it counts");
    --counter.pending, advance(counter);
}
Outcome counter_init(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at);
    const u32* count = column<u32>(warp, in.at[3]);
    active_lanes(warp, [&](u32 lane) {
        Counter& counter = *reinterpret_cast<Counter*>(shared_at(warp, in, lane, addresses.of[lane], 8));
        touch(warp, in, lane, addresses.of[lane], 8, Access::WRITE);
        if (count[lane] == 0 || count[lane] >= 1 << 20) fail(warp, in, lane, "an mbarrier for %u arrivals", count[lane]);
        counter = {count[lane], count[lane], 0, SET_UP, 0};
        if (Races& races = warp.cta->races; races.wanted) {
            const u32 self = races.first + warp.index;
            races.made[static_cast<u32>(addresses.of[lane])] = {self, races.warps[warp.index][self]};
        }
    });
    return Outcome::NEXT;
}
Outcome counter_invalidate(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at);
    active_lanes(warp, [&](u32 lane) {
        touch(warp, in, lane, addresses.of[lane], 8, Access::WRITE);
        counter_at(warp, in, lane, addresses.of[lane]).set_up = 0;
    });
    return Outcome::NEXT;
}
Outcome counter_arrive(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at + 1);
    active_lanes(warp, [&](u32 lane) { arrive_at(warp, in, lane, addresses.of[lane], nullptr); });
    return Outcome::NEXT;
}
Outcome counter_expect(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at + 1);
    const u32* bytes = column<u32>(warp, in.at[4]);
    active_lanes(warp, [&](u32 lane) {
        Counter& counter = counter_at(warp, in, lane, addresses.of[lane]);
        counter.bytes += bytes[lane];
        arrive_at(warp, in, lane, addresses.of[lane], nullptr);
    });
    return Outcome::NEXT;
}
// ---- clusters, and the copy engine ------------------------------------------------------------------------------------

Cta& cta_of(Warp& warp, const Instruction& in, u32 lane, u32 rank) {
    const Cluster& cluster = *warp.cta->cluster;
    if (rank >= cluster.ctas.size()) fail(warp, in, lane, "there is no CTA %u in a cluster of %zu", rank, cluster.ctas.size());
    return *cluster.ctas[rank];
}
Outcome map_shared(Warp& warp, const Instruction& in) {
    const u32 *address = column<u32>(warp, in.at[1]), *rank = column<u32>(warp, in.at[2]);
    u32 there[LANES] = {};
    active_lanes(warp, [&](u32 lane) {
        shared_at(warp, in, lane, address[lane], 1), cta_of(warp, in, lane, rank[lane]);
        there[lane] = address[lane] | (rank[lane] + 1) << RANK_SHIFT;
    });
    return each_lane(warp, column<u32>(warp, in.at[0]), [&](u32 lane) { return there[lane]; }), Outcome::NEXT;
}
Outcome counter_arrive_cluster(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at + 1);
    active_lanes(warp, [&](u32 lane) {
        const u32 address = static_cast<u32>(addresses.of[lane]), rank = address >> RANK_SHIFT;
        Cta& cta = rank == 0 ? *warp.cta : cta_of(warp, in, lane, rank - 1);
        arrive_at(warp, cta, in, lane, address & ((1 << RANK_SHIFT) - 1), nullptr);
    });
    return Outcome::NEXT;
}

/* A tensor map, as this driver's cuTensorMapEncodeTiled (driver.cc) writes it: three dimensions, items of two bytes,
 * and swizzled boxes with rows of 128 bytes. */
struct Tensor {
    u64 mark, address, sizes[3], strides[2];
    u32 window[3];
};

void settle_boxes(Cta& cta, u32 barrier) {
    for (const BoxCopy& box : cta.boxes) {
        if (box.barrier != barrier) continue;
        for (u32 row = 0; row < box.rows; ++row)
            for (u32 piece = 0; piece < 128; piece += 16) {
                u32 to = box.to + row * 128 + piece;
                to ^= (to >> 7 & 7) << 4;
                u8* const place = shared_at(*box.asked, cta, *box.instruction, box.lane, to, 16);
                if (box.from[row]) memcpy(place, reinterpret_cast<const u8*>(box.from[row] + piece), 16);
                else memset(place, 0, 16);
            }
        Counter& counter = counter_at(*box.asked, cta, *box.instruction, box.lane, barrier);
        counter.bytes -= box.rows * 128;
        if (cta.races.wanted) leave_at(cta, barrier, box.known);
        advance(counter);
    }
    std::erase_if(cta.boxes, [&](const BoxCopy& box) { return box.barrier == barrier; });
    for (const PieceCopy& piece : cta.pieces) {
        if (piece.barrier != barrier) continue;
        Warp& warp = *piece.asked;
        memcpy(shared_at(warp, cta, *piece.instruction, piece.lane, piece.to, 16), shared_at(warp, *piece.instruction, piece.lane, piece.from, 16), piece.bytes);
        Counter& counter = counter_at(warp, cta, *piece.instruction, piece.lane, barrier);
        counter.bytes -= piece.bytes;
        if (cta.races.wanted) leave_at(cta, barrier, piece.known);
        advance(counter);
    }
    std::erase_if(cta.pieces, [&](const PieceCopy& piece) { return piece.barrier == barrier; });
}
/* Operands: [to], [from], bytes, [barrier]. */
Outcome copy_piece(Warp& warp, const Instruction& in) {
    const Addresses to(warp, in.at), from(warp, in.at + 3), barrier(warp, in.at + 7);
    const u32* bytes = column<u32>(warp, in.at[6]);
    constexpr u32 PLACE = (1 << RANK_SHIFT) - 1;
    active_lanes(warp, [&](u32 lane) {
        const u32 there = static_cast<u32>(to.of[lane]), rank = there >> RANK_SHIFT;
        PieceCopy piece{&warp, lane, &in, static_cast<u32>(from.of[lane]), there & PLACE, static_cast<u32>(barrier.of[lane]) & PLACE, bytes[lane], {}};
        if (rank == 0 || barrier.of[lane] >> RANK_SHIFT != rank) fail(warp, in, lane, "the target and its barrier are not in one CTA that mapa has named");
        if (piece.bytes == 0 || piece.bytes % 16 != 0) fail(warp, in, lane, "%u bytes are copied, not a multiple of 16", piece.bytes);
        Cta& cta = cta_of(warp, in, lane, rank - 1);
        for (u32 last : {0u, piece.bytes - 16})
            shared_at(warp, in, lane, piece.from + last, 16), shared_at(warp, cta, in, lane, piece.to + last, 16);
        reach(warp, cta, in, lane, piece.barrier), counter_at(warp, cta, in, lane, piece.barrier);
        touch(warp, in, lane, piece.from, piece.bytes, Access::READ), touch(warp, cta, in, lane, piece.to, piece.bytes, Access::WRITE);
        if (Races& races = warp.cta->races; races.wanted) races.leave(warp.index, piece.known);
        cta.pieces.push_back(piece);
        if (early) settle_boxes(cta, piece.barrier);
    });
    return Outcome::NEXT;
}
/* Operands: [to], [tensor, {column, slot, page}], [barrier], mask of CTAs. */
Outcome copy_box(Warp& warp, const Instruction& in) {
    const Addresses to(warp, in.at), map(warp, in.at + 3), barrier(warp, in.at + 9);
    const u32 *column0 = column<u32>(warp, in.at[6]), *slot = column<u32>(warp, in.at[7]), *page = column<u32>(warp, in.at[8]);
    const u16* mask = column<u16>(warp, in.at[12]);
    active_lanes(warp, [&](u32 lane) {
        Tensor tensor;
        if (map.of[lane] % 64 != 0) fail(warp, in, lane, "a tensor map that is not aligned to 64 bytes");
        memcpy(&tensor, param_at(warp, in, lane, map.of[lane], 64), 64), memcpy(&tensor.window[2], param_at(warp, in, lane, map.of[lane] + 64, 4), 4);
        if (tensor.mark != 0x7e4503) fail(warp, in, lane, "that is no tensor map");
        const u32 rows = tensor.window[1];
        BoxCopy box{&warp, lane, &in, static_cast<u32>(to.of[lane]), static_cast<u32>(barrier.of[lane]), rows, {}, {}};
        if (box.to % 128 != 0) fail(warp, in, lane, "a box goes to 0x%x, not aligned to 128 bytes", box.to);
        for (u32 row = 0; row < rows; ++row) {
            const bool inside = column0[lane] + u64(64) <= tensor.sizes[0] && slot[lane] + u64(row) < tensor.sizes[1] && page[lane] < tensor.sizes[2];
            const u64 from = tensor.address + column0[lane] * u64(2) + (slot[lane] + row) * tensor.strides[0] + page[lane] * tensor.strides[1];
            box.from.push_back(inside ? from : 0);
            for (u32 piece = 0; inside && piece < 128; piece += 16) global_at(warp, in, lane, from + piece, 16);
        }
        if (mask[lane] == 0) fail(warp, in, lane, "a box for no CTA");
        for (u32 rank = 0; mask[lane] >> rank; ++rank) {
            if (!(mask[lane] >> rank & 1)) continue;
            Cta& cta = cta_of(warp, in, lane, rank);
            shared_at(warp, cta, in, lane, box.to, 128), shared_at(warp, cta, in, lane, box.to + (rows - 1) * 128, 128);
            reach(warp, cta, in, lane, box.barrier), touch(warp, cta, in, lane, box.to, rows * 128, Access::WRITE), counter_at(warp, cta, in, lane, box.barrier);
            cta.boxes.push_back(box);
        }
        Clock known;
        if (Races& races = warp.cta->races; races.wanted) races.leave(warp.index, known);
        for (u32 rank = 0; mask[lane] >> rank; ++rank)
            if (mask[lane] >> rank & 1) cta_of(warp, in, lane, rank).boxes.back().known = known;
        for (u32 rank = 0; early && mask[lane] >> rank; ++rank)
            if (mask[lane] >> rank & 1) settle_boxes(cta_of(warp, in, lane, rank), box.barrier);
    });
    return Outcome::NEXT;
}

/* Returns the lanes whose barrier has finished the phase of the lane's parity. Lanes may name different barriers. */
u32 lanes_past(Warp& warp, const Instruction& in) {
    const Addresses addresses(warp, in.at + 1);
    const u32* parity = column<u32>(warp, in.at[4]);
    u32 past = 0, settled = 0;
    active_lanes(warp, [&](u32 lane) {
        const u32 address = static_cast<u32>(addresses.of[lane]);
        auto over = [&] { return counter_at(warp, in, lane, address).phase != (parity[lane] & 1); };
        if (!over() && settled != address) settle_for(*warp.cta, address), settled = address;
        if (!over()) return;
        past |= 1u << lane;
        touch(warp, in, lane, address, 8, Access::READ);
        if (Races& races = warp.cta->races; races.wanted) races.take(warp.index, races.counters[address]);
    });
    return past;
}
Outcome counter_test(Warp& warp, const Instruction& in) {
    return set_predicate(warp, in.at[0], lanes_past(warp, in)), Outcome::NEXT;
}
/* try_wait may block until the phase ends. Here it blocks until the phase has ended for at least one lane. */
Outcome counter_wait(Warp& warp, const Instruction& in) {
    const u32 past = lanes_past(warp, in);
    if (!past) return Outcome::BLOCKED;
    return set_predicate(warp, in.at[0], past), Outcome::NEXT;
}
}  // namespace

bool load_or_store(const std::string& opcode, u32 width, Form& form) {
    const bool loads = opcode.starts_with("ld.");
    u32 count = 1, bytes = 0;
    bool is_signed = false;
    Space space{};
    bool has_space = false;
    for (size_t at = 3; at <= opcode.size();) {
        const size_t end = std::min(opcode.find('.', at), opcode.size());
        const std::string part = opcode.substr(at, end - at);
        at = end + 1;
        if (part == "global" || part == "shared" || part == "shared::cta" || part == "param") {
            has_space = true, space = part == "global" ? Space::GLOBAL : part == "param" ? Space::PARAM : Space::SHARED;
        } else if (part == "v2" || part == "v4") {
            count = static_cast<u32>(part[1] - '0');
        } else if (part.size() >= 2 && std::string("usbf").find(part[0]) != std::string::npos && isdigit(part[1])) {
            is_signed = part[0] == 's', bytes = static_cast<u32>(std::stoi(part.substr(1))) / 8;
        } else if (part != "nc" && part != "cg" && part != "ca" && part != "cs" && part != "cv" && part != "wb" && part != "wt" && part != "volatile" &&
                   part != "relaxed" && part != "acquire" && part != "release" && part != "gpu" && part != "cta" && part != "sys" &&
                   !part.starts_with("L1::") && !part.starts_with("L2::")) {
            return false;
        }
    }
    if (!has_space || (space == Space::PARAM && !loads)) return false;
    form.run = space == Space::GLOBAL   ? access_of<Space::GLOBAL>(loads, count, bytes, is_signed, width)
               : space == Space::SHARED ? access_of<Space::SHARED>(loads, count, bytes, is_signed, width)
                                        : access_of<Space::PARAM>(loads, count, bytes, is_signed, width);
    const std::string data = std::to_string(width) + (count > 1 ? "*" + std::to_string(count) : "");
    form.operands = loads ? "=" + data + " @" : "@ " + data;
    return form.run != nullptr;
}

void add_memory(Forms& forms) {
    for (const char* type : {"u32", "s32"}) add_atomic<u32>(forms, std::string("add.") + type, [](u32 x, u32 y) { return x + y; });
    add_atomic<u32>(forms, "inc.u32", [](u32 x, u32 y) { return x >= y ? 0 : x + 1; });
    add_atomic<u32>(forms, "max.u32", [](u32 x, u32 y) { return x > y ? x : y; });
    add_atomic<u32>(forms, "min.u32", [](u32 x, u32 y) { return x < y ? x : y; });
    add_atomic<u32>(forms, "or.b32", [](u32 x, u32 y) { return x | y; });
    add_atomic<u32>(forms, "and.b32", [](u32 x, u32 y) { return x & y; });
    add_atomic<u32>(forms, "exch.b32", [](u32, u32 y) { return y; });
    add_atomic<float>(forms, "add.f32", [](float x, float y) { return x + y; });
    add_atomic<u64>(forms, "add.u64", [](u64 x, u64 y) { return x + y; });
    add_atomic<u64>(forms, "max.u64", [](u64 x, u64 y) { return x > y ? x : y; });
    add_atomic<u64>(forms, "exch.b64", [](u64, u64 y) { return y; });
    for (const char* kind : {"cp.async.cg.shared.global", "cp.async.ca.shared.global", "cp.async.cg.shared.global.L2::128B", "cp.async.ca.shared.global.L2::128B"})
        forms.push_back({kind, "@ @ # ?4", copy_async});
    forms.push_back({"cp.async.cg.shared.global.L2::cache_hint", "@ @ # 4 .", copy_async});
    for (const char* state : {"", ".shared", ".shared::cta"}) {
        const std::string at = std::string(state) + ".b64";
        forms.insert(forms.end(), {
            {"cp.async.mbarrier.arrive.noinc" + at, "@", arrive_when_copied},
            {"mbarrier.init" + at, "@ 4", counter_init},
            {"mbarrier.inval" + at, "@", counter_invalidate},
            {"mbarrier.arrive" + at, "=8 @", counter_arrive},
            {"mbarrier.arrive.expect_tx" + at, "=8 @ 4", counter_expect},
            {"mbarrier.test_wait.parity" + at, "=p @ 4", counter_test},
            {"mbarrier.try_wait.parity" + at, "=p @ 4", counter_wait},
        });
    }
    forms.insert(forms.end(), {
        {"mapa.shared::cluster.u32", "=4 4 4", map_shared},
        {"mbarrier.arrive.shared::cluster.b64", "=8 @", counter_arrive_cluster},
        {"cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint", "@ T @ 2 .", copy_box},
        {"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", "@ @ 4 @", copy_piece},
        {"cp.async.commit_group", "", commit_copies},
        {"cp.async.wait_group", "#", wait_copies},
        {"cp.async.wait_all", "", wait_all_copies},
    });
}
}  // namespace ptx
