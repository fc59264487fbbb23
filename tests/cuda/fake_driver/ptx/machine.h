/* The state of a launch: its CTAs and their warps. The function of an instruction takes a warp and the instruction. */
#pragma once
#include <string.h>
#include <memory>
#include "program.h"
#include "races.h"

namespace ptx {
struct Launch;
struct Cta;
struct Warp;

/* Device memory that a kernel may access. */
struct Range { u64 start, bytes; };
/* Returns the driver's allocation that contains the address; if there is none, a range of zero bytes. */
Range find_memory(u64 address);

/* A started copy (cp.async), which is made only when a lane waits for it, so that a missing wait changes results. Or an
   arrival (cp.async.mbarrier.arrive), which takes effect after the copies before it. */
struct AsyncCopy {
    u32 lanes;
    bool arrives;
    u32 bytes;
    u32 to[LANES], size[LANES], group[LANES];
    u64 from[LANES];
    const Instruction* instruction;
    Clock known;         // the clock that an arrival leaves at its barrier
};
/* A started copy of a tensor's box (cp.async.bulk.tensor) to one of the CTAs that get it. It is made when a lane waits
   at that CTA's barrier, which then counts the bytes. */
struct BoxCopy {
    Warp* asked;         // the warp that started the copy
    u32 lane;
    const Instruction* instruction;
    u32 to, barrier, rows;
    std::vector<u64> from;  // the address of each row of 128 bytes; 0: the row is outside of the tensor
    Clock known;
};
/* A started copy of shared memory to another CTA of the cluster (cp.async.bulk). Its bytes are read and written only
   when a lane waits at that CTA's barrier. A source that is overwritten too early therefore changes results. */
struct PieceCopy {
    Warp* asked;
    u32 lane;
    const Instruction* instruction;
    u32 from, to, barrier, bytes;
    Clock known;
};
/* A started product (wgmma), which is computed when its warp waits for it. */
struct AsyncProduct {
    void (*run)(Warp&, const AsyncProduct&);
    const Instruction* instruction;
    u32 group;
    bool add;
    u64 a_matrix, b_matrix;
    u32 a[4][LANES];
};

/* Lanes of a warp whose next instruction is the same. */
struct Group { u32 pc, lanes; bool blocked; };

struct Warp {
    u8* file;            // the register file: columns
    u32* predicates;
    u32 active;          // lanes that execute the instruction
    u32 pc, lanes;       // the group that runs
    u32 alive;           // lanes that have not returned
    u32 next_pc;         // the smallest `pc` of another group that is not before `pc`
    Group others[LANES];
    u32 other_count;
    u32 index;           // in its CTA
    u32 registers;       // number of registers of a lane, which setmaxnreg changes
    Cta* cta;
    bool at_barrier;     // it has arrived, and waits
    bool polled;         // it polled in its last slice
    u32 barrier_generation;
    std::vector<AsyncCopy> copies;
    u32 copy_groups[LANES];         // number of committed groups
    u32 cluster_generation[LANES];  // generation of the cluster's barrier when the lane arrived
    bool cluster_arrived[LANES];    // the lane has arrived at the cluster's barrier and has not waited yet
    std::vector<AsyncProduct> products;
    u32 product_groups;
    std::vector<u8> memory;  // owns the memory of `file` and `predicates`
};

struct Barrier { u32 arrived, expected, generation; bool any, every; bool result_any, result_every; };

/* CTAs that run together and may access each other's shared memory. */
struct Cluster {
    std::vector<Cta*> ctas;
    u32 arrived = 0, generation = 0;  // of barrier.cluster: the number of arrived lanes, and of finished phases
    Clock gathered, passed;
};

struct Cta {
    Launch* launch;
    std::shared_ptr<Cluster> cluster;
    u32 rank;            // in its cluster
    u32 index[3];
    std::vector<u8> shared;  // begins at SHARED_BASE
    std::vector<Warp> warps;
    Barrier barriers[16];
    u32 warps_left;
    u32 registers_left;  // registers that no warp has
    std::vector<BoxCopy> boxes;  // started copies to this CTA
    std::vector<PieceCopy> pieces;
    Races races;
};

struct Launch {
    const Entry* entry;
    std::vector<u8> params;
    u32 grid[3], block[3], dynamic_shared;
    Range known;         // the allocation that was accessed last
};

/* FAKE_DRIVER_EARLY: copies and products are made at once, instead of as late as allowed. */
extern const bool early;
u64 setting(const char* name, u64 otherwise);

/* A launch that has begun. `resident`: maximum number of CTAs that the device runs at once. */
class Running {
  public:
    Running(const Launch& launch, u32 resident);
    ~Running();
    /* Runs the launch and returns true at its end. If the launch polls for a while, it probably waits for another
     * device's kernel, and the function returns false. */
    bool go_on();

  private:
    Launch launch;
    u32 resident;
    std::vector<std::unique_ptr<Cta>> ctas;
    u64 number, turns = 0;  // number of this launch among the entry's launches; passes over the running CTAs
    u64 started = 0, rounds = 0, polls = 0;
    bool did = false, polled = false;
};
/* The limits of the simulated device (FAKE_DRIVER_CAPABILITY), from the CUDA programming guide: maximum bytes of shared
   memory of a CTA, bytes of shared memory of a multiprocessor (the system reserves 1 KiB of them for each CTA), and
   threads of a multiprocessor. */
struct Device { u32 capability, cta_shared, shared, threads; };
const Device& device();
/* Shared memory of a CTA in bytes, static and dynamic. */
u32 cta_shared(const Entry& entry, u32 dynamic_shared);
/* Returns how many CTAs of the entry a multiprocessor runs at once, at most 2; 0 if one has too much shared memory. */
u32 occupancy(const Entry& entry, u32 threads, u32 dynamic_shared);

/* Prints a kernel's error and its place, and ends the process. */
[[noreturn]] void fail(const Warp& warp, const Instruction& instruction, u32 lane, const char* format, ...);

template <class T> T* column(Warp& warp, u32 offset) { return reinterpret_cast<T*>(warp.file + offset); }

/* Writes f(lane) to the column's place of each active lane. */
template <class T, class F> inline void each_lane(Warp& warp, T* to, F f) {
    if (warp.active == ~0u) {
#pragma GCC ivdep
        for (u32 i = 0; i < LANES; ++i) to[i] = f(i);
        return;
    }
    alignas(64) T all[LANES];
    for (u32 i = 0; i < LANES; ++i) all[i] = f(i);
    const u32 active = warp.active;
#pragma GCC ivdep
    for (u32 i = 0; i < LANES; ++i) to[i] = active >> i & 1 ? all[i] : to[i];
}
/* Returns the mask of the lanes for which f is true. */
template <class F> inline u32 which_lanes(F f) {
    u32 which = 0;
    for (u32 i = 0; i < LANES; ++i) which |= f(i) ? 1u << i : 0;
    return which;
}
inline void set_predicate(Warp& warp, u32 predicate, u32 value) {
    u32& to = warp.predicates[predicate];
    to = (to & ~warp.active) | (value & warp.active);
}
template <class F> inline void active_lanes(const Warp& warp, F f) {
    for (u32 rest = warp.active; rest; rest &= rest - 1) f(static_cast<u32>(__builtin_ctz(rest)));
}

/* Returns the CTA's shared memory at an address. Fails if the access is not aligned or exceeds the shared memory. */
u8* shared_at(Warp& warp, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
/* The same for another CTA of the cluster. Fails if that CTA has ended. */
u8* shared_at(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
u8* global_at(Warp& warp, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
inline void touch(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes, Access access) {
    if (warp.cta->races.wanted) touch(warp, *warp.cta, in, lane, address, bytes, access);
}
}  // namespace ptx
