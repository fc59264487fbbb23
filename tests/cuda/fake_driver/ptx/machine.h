/* What runs: warps of CTAs of a launch. Each instruction's function takes a warp and what it has to do. */
#pragma once
#include <string.h>
#include <memory>
#include "program.h"
#include "races.h"

namespace ptx {
struct Launch;
struct Cta;
struct Warp;

/* Device memory that a kernel may touch. */
struct Range { u64 start, bytes; };
/* Memory the address lies in, of the driver's; none: zero bytes. */
Range find_memory(u64 address);

/* A copy that was begun (cp.async): done when somebody waits for it, so that whoever does not is seen. Or an arrival that is due
   when the copies before it are done (cp.async.mbarrier.arrive). */
struct AsyncCopy {
    u32 lanes;
    bool arrives;
    u32 bytes;
    u32 to[LANES], size[LANES], group[LANES];
    u64 from[LANES];
    const Instruction* instruction;
    Clock known;         // what an arrival leaves at its barrier
};
/* A box of a tensor that the copy engine was asked for (cp.async.bulk.tensor), in one CTA that gets it: done when somebody waits at that
   CTA's barrier, which then counts its bytes. */
struct BoxCopy {
    Warp* asked;         // of the CTA that asked
    u32 lane;
    const Instruction* instruction;
    u32 to, barrier, rows;
    std::vector<u64> from;  // each row of 128 bytes; 0: outside of the tensor
    Clock known;
};
/* Bytes of shared memory that the copy engine was asked to bring to another CTA of the cluster (cp.async.bulk): read and written when
   somebody waits at that CTA's barrier, so that whoever writes over them before is seen. */
struct PieceCopy {
    Warp* asked;
    u32 lane;
    const Instruction* instruction;
    u32 from, to, barrier, bytes;
    Clock known;
};
/* A product that was begun (wgmma): done when somebody waits for it. */
struct AsyncProduct {
    void (*run)(Warp&, const AsyncProduct&);
    const Instruction* instruction;
    u32 group;
    bool add;
    u64 a_matrix, b_matrix;
    u32 a[4][LANES];
};

/* Lanes of a warp that stand at one instruction. */
struct Group { u32 pc, lanes; bool blocked; };

struct Warp {
    u8* file;            // columns
    u32* predicates;
    u32 active;          // lanes that do the instruction
    u32 pc, lanes;       // the group that runs
    u32 alive;           // lanes that have not returned
    u32 next_pc;         // the smallest at or after `pc` where others stand
    Group others[LANES];
    u32 other_count;
    u32 index;           // in its CTA
    u32 registers;       // of a lane, as setmaxnreg left them
    Cta* cta;
    bool at_barrier;     // it has arrived, and waits
    bool polled;         // in its last slice
    u32 barrier_generation;
    std::vector<AsyncCopy> copies;
    u32 copy_groups[LANES];  // committed
    u32 cluster_generation[LANES];  // at which a lane arrived at its cluster's barrier
    bool cluster_arrived[LANES];    // and has not waited
    std::vector<AsyncProduct> products;
    u32 product_groups;
    std::vector<u8> memory;  // what `file` and `predicates` point into
};

struct Barrier { u32 arrived, expected, generation; bool any, every; bool result_any, result_every; };

/* CTAs that run together and may reach each other's shared memory. */
struct Cluster {
    std::vector<Cta*> ctas;
    u32 arrived = 0, generation = 0;  // lanes at barrier.cluster
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
    u32 registers_left;  // that its warps gave back
    std::vector<BoxCopy> boxes;  // on their way to it
    std::vector<PieceCopy> pieces;
    Races races;
};

struct Launch {
    const Entry* entry;
    std::vector<u8> params;
    u32 grid[3], block[3], dynamic_shared;
    Range known;         // where global memory was last touched
};

/* Whether copies and products are done as soon as they are asked for, and no longer as late as they may be. */
extern const bool early;
u64 setting(const char* name, u64 otherwise);

/* A launch under way. `resident`: most CTAs that the device holds at once. */
class Running {
  public:
    Running(const Launch& launch, u32 resident);
    ~Running();
    /* Runs until its end, which it says; or until it has polled for a while, as if it waited for another device's kernel. */
    bool go_on();

  private:
    Launch launch;
    u32 resident;
    std::vector<std::unique_ptr<Cta>> ctas;
    u64 number, turns = 0;  // among the launches of the entry; of all CTAs
    u64 started = 0, rounds = 0, polls = 0;
    bool did = false, polled = false;
};
/* The limits of the device that is pretended to be there (FAKE_DRIVER_CAPABILITY), as the CUDA programming guide lists them: bytes of
   shared memory of a CTA, and of a multiprocessor with 1 KiB of each CTA that the system takes; threads of a multiprocessor. */
struct Device { u32 capability, cta_shared, shared, threads; };
const Device& device();
/* Shared memory of a CTA in bytes, static and dynamic. */
u32 cta_shared(const Entry& entry, u32 dynamic_shared);
/* CTAs of the entry that one multiprocessor holds; 0: a CTA has too much shared memory. */
u32 occupancy(const Entry& entry, u32 threads, u32 dynamic_shared);

/* Ends the process: what a kernel did that it may not, and where. */
[[noreturn]] void fail(const Warp& warp, const Instruction& instruction, u32 lane, const char* format, ...);

template <class T> T* column(Warp& warp, u32 offset) { return reinterpret_cast<T*>(warp.file + offset); }

/* Puts f(lane) into a column, where the lane is active. */
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
/* Lanes where f is true. */
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

/* Shared memory at an address, where an access of so many bytes is whole and aligned. */
u8* shared_at(Warp& warp, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
/* The same of another CTA of the cluster, which must not have ended. */
u8* shared_at(Warp& warp, Cta& cta, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
u8* global_at(Warp& warp, const Instruction& instruction, u32 lane, u64 address, u32 bytes);
inline void touch(Warp& warp, const Instruction& in, u32 lane, u64 address, u32 bytes, bool writes) {
    if (warp.cta->races.wanted) touch(warp, *warp.cta, in, lane, address, bytes, writes);
}
}  // namespace ptx
