/* A libnccl.so.2 for ranks of one process, over tests/cuda/fake_driver: a rank's call waits in its stream until all ranks have come to
 * theirs; then it is done for all at once. Ranks that ask for different things end the program.
 *
 * FAKE_NCCL_REFUSES=1: connects nobody. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

namespace {
enum { OK = 0, INVALID_USAGE = 5 };
enum { I32 = 2, BF16 = 9 };

struct Group;
struct Rank { Group* group; int number; };
/* Without padding: the driver looks for addresses in all of it. */
struct Request {
    Rank* rank;
    uint64_t sums;
    char* at;
    uint64_t count;
    int type, root;
};
/* What each rank has come with, and whether it may go on. Used by one thread at a time: the driver's lock is held. */
struct Group {
    std::vector<const Request*> came;
    std::vector<bool> goes_on;
};

float widen(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    return memcpy(&wide, &bits, 4), wide;
}
uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
void sum(const std::vector<const Request*>& ranks) {
    for (uint64_t i = 0; i < ranks[0]->count; ++i) {
        float all = 0;
        for (const Request* rank : ranks) all += widen(reinterpret_cast<uint16_t*>(rank->at)[i]);
        for (const Request* rank : ranks) reinterpret_cast<uint16_t*>(rank->at)[i] = narrow(all);
    }
}
void broadcast(const std::vector<const Request*>& ranks) {
    const Request* root = ranks[ranks[0]->root];
    for (const Request* rank : ranks)
        if (rank != root) memcpy(rank->at, root->at, 4 * root->count);
}

/* The driver asks this of a rank's oldest work. */
bool ready(const void* params) {
    const Request* request = static_cast<const Request*>(params);
    Group& group = *request->rank->group;
    const int number = request->rank->number;
    if (group.goes_on[number]) return true;
    group.came[number] = request;
    for (const Request* other : group.came) {
        if (!other) return false;
        if (other->sums != request->sums || other->count != request->count || other->root != request->root) {
            fprintf(stderr, "fake nccl: ranks %d and %d ask for different things\n", number, other->rank->number);
            abort();
        }
    }
    request->sums ? sum(group.came) : broadcast(group.came);
    for (size_t i = 0; i < group.came.size(); ++i) group.came[i] = nullptr, group.goes_on[i] = true;
    return true;
}
void go_on(const void* params, uint32_t, uint32_t) {
    const Request* request = static_cast<const Request*>(params);
    request->rank->group->goes_on[request->rank->number] = false;
}

int ask(const Request& request, void* stream) {
    using Ready = bool (*)(const void*);
    using Call = void (*)(const void*, uint32_t, uint32_t);
    using Ask = int (*)(Ready, Call, const void*, size_t, uint32_t, uint32_t, void*);
    static const Ask ask = reinterpret_cast<Ask>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_ask_when"));
    return ask && ask(ready, go_on, &request, sizeof request, 0, 0, stream) == 0 ? OK : INVALID_USAGE;
}
}  // namespace

extern "C" {
int ncclGetVersion(int* version) { return *version = 1, OK; }
int ncclCommInitAll(void** ranks, int count, const int*) {
    if (getenv("FAKE_NCCL_REFUSES")) return INVALID_USAGE;
    Group* group = new Group{std::vector<const Request*>(count), std::vector<bool>(count)};
    for (int i = 0; i < count; ++i) ranks[i] = new Rank{group, i};
    return OK;
}
int ncclAllReduce(const void* from, void* to, uint64_t count, int type, int op, void* rank, void* stream) {
    if (from != to || type != BF16 || op != 0) return INVALID_USAGE;
    return ask({static_cast<Rank*>(rank), true, static_cast<char*>(to), count, type, 0}, stream);
}
int ncclBroadcast(const void* from, void* to, uint64_t count, int type, int root, void* rank, void* stream) {
    if (from != to || type != I32) return INVALID_USAGE;
    return ask({static_cast<Rank*>(rank), false, static_cast<char*>(to), count, type, root}, stream);
}
const char* ncclGetErrorString(int) { return "it is a fake"; }
}
