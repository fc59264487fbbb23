/* A libcuda.so.1 without a device: it runs kernels from their PTX on the CPU (ptx/machine.h). With it, the tests of the
 * CUDA backend run without a GPU (tests/cuda/fake_driver/run.sh).
 *
 * Device memory is host memory. A call only queues its work. The work runs, oldest first, when a call waits for it; a
 * call that queries work runs one item. A missing wait therefore changes results. All streams of a device
 * share one queue. A capture takes the work of all streams that its thread uses; calls that the driver forbids in a
 * capture return the driver's error codes. A wait for a stream ends as soon as the stream's work is done; other streams'
 * work may still be in the queue.
 *
 * Work may wait for another stream or device: an event, an exchange between devices, or a kernel that polls memory which
 * another device writes (loads with .sys). A call that waits for such work also runs the work of that stream or device.
 * Meanwhile later work of the same stream and of the default stream is held back. If the default stream waits, later
 * work of all streams is held back.
 *
 * The driver refuses PTX of a newer ISA than its version supports, PTX for a target that the device cannot run, and PTX
 * with an instruction that ptx/forms.cc lacks; the log names that instruction. It refuses a launch with more shared
 * memory than a CTA of the device can have. The process ends with a message if a kernel accesses memory that is not
 * allocated, if warps race in shared memory (ptx/races.h), or if a kernel waits for ever. The message names the kernel,
 * the warp and the line of PTX.
 *
 * If the process has a function fake_NAME, it replaces the kernel NAME. The function gets the kernel's parameters, of
 * fake_NAME_bytes bytes, and the grid. fake_ask queues work that is not a kernel (crates/host/tests/fake_cublaslt).
 *
 * Calls that queue work, wait for it, or allocate or free memory need a bound context. That is the primary context of a
 * device, retained, and current in the thread. The backend binds such a context.
 *
 * To run one kernel, run a test that launches it over this driver:
 *     .ci/cuda-stub.sh; tests/cuda/fake_driver/build.sh
 *     export LD_LIBRARY_PATH=$PWD/target/fake-driver CUDA_LIBRARY_PATH=$PWD/target/cuda-stub KVARENA_GPU_ERROR=None
 *     KVARENA_SEEDS=0..1 cargo test --features cuda,testkit --test cuda -- fp8:: --nocapture
 *
 * Environment variables, with their defaults in parentheses:
 * FAKE_DRIVER_PTX=FOLDER: modules are loaded from PTX files in this folder, so that kernels can be changed without a
 * build. The driver writes the files that are missing.
 * FAKE_DRIVER_STATISTICS=1: at its end, the process prints how often each kernel ran; 2: also the instructions that
 * never ran.
 * FAKE_DRIVER_EARLY=1: asynchronous copies and products are made at once, not as late as allowed. This shows targets
 * that are overwritten too early.
 * FAKE_DRIVER_RACES=0: no check for unsynchronised accesses of shared memory (ptx/races.h).
 * FAKE_DRIVER_SLICE (4096): instructions that a warp executes before the next warp's turn. Small numbers interleave the
 * warps finely.
 * FAKE_DRIVER_ORDER=1: some CTAs get few turns; successive launches of a kernel slow different CTAs. This shows results
 * that depend on the order of CTAs.
 * FAKE_DRIVER_STREAMS=1: of the streams with work that can run, the one created first runs; 2: the one created last.
 * This shows missing waits between streams.
 * FAKE_DRIVER_PINS (no limit): maximum bytes that cuMemHostRegister pins.
 * FAKE_DRIVER_PIN_MS (0): milliseconds that each call of cuMemHostRegister sleeps.
 * FAKE_DRIVER_PEERS=0: no device can access the memory of another.
 * FAKE_DRIVER_REFUSES=DEVICE:KERNEL: the device refuses launches of the kernel.
 * FAKE_DRIVER_VERSION (12040), FAKE_DRIVER_DEVICES (2), FAKE_DRIVER_MULTIPROCESSORS (4): what the driver reports.
 * FAKE_DRIVER_CAPABILITY (90): the compute capability. With 80, 86, 87, 89, 100 or 120, only kernels that need no
 * sm_90a run, with the shared memory of such a device. */
#include <dlfcn.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ptx/machine.h"

using ptx::setting;
using ptx::u32;
using ptx::u64;
using ptx::u8;

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, PEER_ACCESS_ALREADY_ENABLED = 704, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907 };

static const u32 MULTIPROCESSORS = setting("FAKE_DRIVER_MULTIPROCESSORS", 4);

/* Contexts are numbers: 16 + n is the primary context of device n. */
constexpr u32 DEVICES = 16;
static int retained[DEVICES];
static thread_local u64 current;
static bool bound() { return current - 16 < DEVICES && retained[current - 16] > 0; }

/* ---- work --------------------------------------------------------------------------------------------------------- */

using Call = void (*)(const void* params, u32 grid_x, u32 grid_y);
using Ready = bool (*)(const void* params);

struct Work {
    enum { KERNEL, COPY, STAGED, FILL, HOST, CALL, FREE, NOTHING } kind;
    u64 params[512];
    u64 target, source, bytes;
    u32 word;
    void* stream;
    u64 number;  /* number of this item among all work of the device */
    Call call;
    Ready ready;  /* if not null: the work waits until it returns true */
    const ptx::Entry* entry;
    ptx::Running* running;  /* state of a started kernel */
    std::atomic<bool>* over;  /* state of a started host function */
    u32 grid[3], block[3], shared;
    Work* next;
};
struct Line {
    Work* first = NULL;
    Work** end = &first;
};
struct Stream {
    bool fresh;  /* since the last load_plan, all launches used PDL */
    bool gone;
    u64 number;  /* in the order of creation */
};
struct Device {
    Line queue;
    int broken = OK;  /* after an error, the result of every call that queues work or waits */
    u64 asked = 0;  /* number of queued items so far */
};

struct Event { Device* device; void* stream; u64 at; bool captured; };  /* `at`: number of the device's items queued before it */

static thread_local Line* capturing = NULL;  /* the graph that gets the thread's work during a capture */
static Device devices[DEVICES + 1];  /* the last one belongs to threads without a context */
static bool reaches[DEVICES][DEVICES];  /* [a][b]: kernels of device a may access the memory of device b */
static Device* running_on = devices;  /* the device whose work runs now */
static Device& here() { return devices[bound() ? current - 16 : DEVICES]; }
static std::recursive_mutex queue_lock;
static std::condition_variable_any more;  /* notified when work is queued or done */
using Lock = std::lock_guard<std::recursive_mutex>;

static void add(Line* line, const Work& work) {
    Work* copy = static_cast<Work*>(malloc(sizeof(Work)));
    *copy = work, copy->next = NULL;
    *line->end = copy, line->end = &copy->next;
}
static int ask(const Work& work) {
    Lock lock(queue_lock);
    Device& device = here();
    if (device.broken || !bound()) return device.broken ? device.broken : NO_CONTEXT;
    Work numbered = work;
    numbered.number = capturing ? 0 : ++device.asked;
    add(capturing ? capturing : &device.queue, numbered);
    more.notify_all();
    return OK;
}

static char* at(u64 address) { return reinterpret_cast<char*>(address); }
/* Starts or continues the kernel. Returns whether it is done. */
static bool run_kernel(Work& work) {
    if (work.running) return work.running->go_on();
    ptx::Launch launch;
    launch.entry = work.entry, launch.dynamic_shared = work.shared, launch.known = {};
    const u8* params = reinterpret_cast<const u8*>(work.params);
    launch.params.assign(params, params + work.entry->param_bytes);
    memcpy(launch.grid, work.grid, sizeof launch.grid), memcpy(launch.block, work.block, sizeof launch.block);
    const u32 threads = work.block[0] * work.block[1] * work.block[2];
    work.running = new ptx::Running(launch, MULTIPROCESSORS * ptx::occupancy(*work.entry, threads, work.shared));
    return work.running->go_on();
}
/* Runs the function in its own thread, as a driver does, because it may wait for the calling thread. Returns whether it
   is done. */
static bool run_host(Work& work) {
    if (!work.over) {
        work.over = new std::atomic<bool>(false);
        std::thread([function = reinterpret_cast<void (*)(void*)>(work.target), data = reinterpret_cast<void*>(work.source), over = work.over] {
            function(data);
            *over = true;
            more.notify_all();
        }).detach();
    }
    return *work.over;
}
static void forget(u64 address);
/* Runs or continues an item. Returns whether it is done. */
static bool run(Work& work) {
    if (work.kind == Work::COPY || work.kind == Work::STAGED) memcpy(at(work.target), at(work.source), work.bytes);
    if (work.kind == Work::STAGED) free(at(work.source));
    if (work.kind == Work::FILL)
        for (u64 i = 0; i < work.bytes / 4; ++i) reinterpret_cast<u32*>(work.target)[i] = work.word;
    if (work.kind == Work::HOST) return run_host(work);
    if (work.kind == Work::FREE) forget(work.target);
    if (work.kind == Work::CALL) work.call(work.params, work.grid[0], work.grid[1]);
    return work.kind != Work::KERNEL || run_kernel(work);
}
/* Runs or continues an item of a device's work. If it is done, removes it from the queue and returns true. */
static bool try_run(Device& device, Work** at) {
    running_on = &device;
    Work* work = *at;
    if (!run(*work)) return false;
    *at = work->next;
    if (!*at) device.queue.end = at;
    delete work->running, delete work->over, free(work);
    more.notify_all();  /* other threads may wait for this work */
    return true;
}
/* Runs the oldest item of a device's work that need not wait; with FAKE_DRIVER_STREAMS, that of the first or last
   stream. Returns whether an item was done. */
static bool step(Device& device) {
    static const u64 order = setting("FAKE_DRIVER_STREAMS", 0);
    Lock lock(queue_lock);
    std::vector<void*> held;  /* streams whose later work must wait */
    std::vector<std::pair<u64, Work**>> choice;
    for (Work** at = &device.queue.first; Work* work = *at; at = &work->next) {
        bool waits = !held.empty() && !work->stream;
        for (void* stream : held) waits |= !stream || stream == work->stream;
        waits = waits || (work->ready && !work->ready(work->params));
        if (!waits && !order && try_run(device, at)) return true;
        if (!waits && order) choice.push_back({work->stream ? static_cast<Stream*>(work->stream)->number : 0, at});
        held.push_back(work->stream);
    }
    std::sort(choice.begin(), choice.end());
    if (order == 2) std::reverse(choice.begin(), choice.end());
    for (auto& [number, at] : choice)
        if (try_run(device, at)) return true;
    return false;
}
/* Runs one item of the device's work. If all of it waits, runs one item of each other device. Returns whether any was
   done. */
static bool advance(Device& device) {
    if (step(device)) return true;
    bool any = false;
    for (Device& other : devices) any |= &other != &device && device.queue.first && step(other);
    return any;
}
/* Returns whether the stream's work up to `number` is done. A null `stream` stands for all streams of the device. */
static bool reached(const Device& device, void* stream, u64 number) {
    for (const Work* work = device.queue.first; work && work->number <= number; work = work->next)
        if (!stream || work->stream == stream) return false;
    return true;
}
static void reach(Device& device, void* stream, u64 number) {
    std::unique_lock<std::recursive_mutex> lock(queue_lock);
    while (!reached(device, stream, number))
        if (!advance(device)) more.wait_for(lock, std::chrono::milliseconds(10));  /* then a polling kernel polls again */
}
static int wait_for(void* stream) {
    Device& device = here();
    if (capturing || !bound()) return capturing ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    reach(device, stream, device.asked);
    return device.broken;
}
static int wait() { return wait_for(NULL); }

/* Allocations by address. After cuCtxEnablePeerAccess, kernels of another device can access the ones not pooled. */
struct Allocation { u64 bytes; Device* device; bool pooled, pinned, of_graph; };
static std::map<u64, Allocation> allocations;
ptx::Range ptx::find_memory(u64 address) {
    Lock lock(queue_lock);
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return {0, 0};
    const auto& [start, memory] = *--after;
    if (memory.device != running_on && !memory.pinned && (memory.pooled || !reaches[running_on - devices][memory.device - devices])) return {0, 0};
    return address - start < memory.bytes ? Range{start, memory.bytes} : Range{0, 0};
}

static void forget(u64 address) { allocations.erase(address), free(at(address)); }

extern "C" {
/* ---- device and context ------------------------------------------------------------------------------------------- */
API int cuInit(u32) { return setting("FAKE_DRIVER_DEVICES", 2) ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int* version) { return *version = setting("FAKE_DRIVER_VERSION", 12040), OK; }
API int cuDeviceGet(int* device, int ordinal) {
    return static_cast<u64>(ordinal) < setting("FAKE_DRIVER_DEVICES", 2) ? (*device = ordinal, OK) : BAD_DEVICE;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
    const u64 capability = setting("FAKE_DRIVER_CAPABILITY", 90);
    return *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? MULTIPROCESSORS : attribute == 115 ? 1 : 0, OK;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
    Lock lock(queue_lock);
    return ++retained[device], *context = reinterpret_cast<void*>(16ull + device), OK;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
    Lock lock(queue_lock);
    if (--retained[device] == 0)
        for (u32 other = 0; other < DEVICES; ++other) reaches[device][other] = reaches[other][device] = false;
    return OK;
}
API int cuCtxSetCurrent(void* context) { return current = reinterpret_cast<u64>(context), OK; }
API int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(current), OK; }
API int cuCtxCreate_v2(void** context, u32, int) { return cuCtxSetCurrent(*context = malloc(1)); }
API int cuCtxDestroy_v2(void* context) { return free(context), OK; }
API int cuCtxSynchronize() { return wait(); }
API int cuDeviceCanAccessPeer(int* can, int device, int other) {
    return *can = device != other && setting("FAKE_DRIVER_PEERS", 1), OK;
}
API int cuCtxEnablePeerAccess(void* context, u32 flags) {
    const u64 other = reinterpret_cast<u64>(context) - 16;
    if (!bound() || other >= DEVICES || other == current - 16 || flags || !setting("FAKE_DRIVER_PEERS", 1)) return INVALID;
    Lock lock(queue_lock);
    bool& can = reaches[current - 16][other];
    return can ? PEER_ACCESS_ALREADY_ENABLED : (can = true, OK);
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */
static const u64 DEVICE_BYTES = 1ull << 33;
static u64 used_bytes() {
    Lock lock(queue_lock);
    u64 bytes = 0;
    for (const auto& [start, memory] : allocations) bytes += memory.device == &here() && !memory.pinned ? memory.bytes : 0;
    return bytes;
}
API int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = DEVICE_BYTES - used_bytes(), *total = DEVICE_BYTES, OK; }
static int take(void** memory, size_t bytes, bool pooled = false, bool pinned = false) {
    if (capturing || !bound()) return capturing ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    if (bytes > DEVICE_BYTES - (pinned ? 0 : used_bytes())) return NO_MEMORY;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*memory) return NO_MEMORY;
    memset(*memory, 0xa5, bytes < 1 << 20 ? bytes : 1 << 20);  /* so that new memory is not zero by chance */
    Lock lock(queue_lock);
    return allocations[reinterpret_cast<u64>(*memory)] = {bytes, &here(), pooled, pinned}, OK;
}
API int cuMemsetD32Async(u64 address, u32 word, size_t words, void* stream);
API int cuMemAlloc_v2(u64* address, size_t bytes) { return take(reinterpret_cast<void**>(address), bytes); }
/* In a capture, the memory belongs to the graph and is never freed. Each launch of the graph overwrites it first, so that
   no launch can use what the previous one left there. */
API int cuMemAllocAsync(u64* address, size_t bytes, void* stream) {
    Line* const graph = std::exchange(capturing, nullptr);
    const int result = take(reinterpret_cast<void**>(address), bytes, true);
    capturing = graph;
    if (!graph || result) return result;
    Lock lock(queue_lock);
    allocations[*address].of_graph = true;
    return cuMemsetD32Async(*address, 0xa5a5a5a5, bytes / 4, stream);
}
API int cuMemHostAlloc(void** memory, size_t bytes, u32) { return take(memory, bytes, false, true); }
API int cuMemHostGetDevicePointer_v2(u64* address, void* memory, u32) { return *address = reinterpret_cast<u64>(memory), OK; }
/* Returns whether queued work names memory in the range. A real driver may free memory without waiting for such work:
   its documentation promises no wait. The calls below then break the device, as if the work had used freed memory. */
static bool is_named(u64 start, u64 end) {
    bool used = false;
    for (const Device& device : devices)
        for (Work* work = device.queue.first; work; work = work->next)
            for (u64* word = work->params; word != &work->bytes; ++word) used |= start <= *word && *word < end;
    return used;
}
/* Reports the device of an address (attribute 9), as a real driver does for memory that it allocated. */
API int cuPointerGetAttribute(void* value, int attribute, u64 address) {
    Lock lock(queue_lock);
    const auto after = allocations.upper_bound(address);
    if (!bound() || attribute != 9 || after == allocations.begin()) return bound() ? INVALID : NO_CONTEXT;
    const auto& [start, memory] = *std::prev(after);
    return address - start < memory.bytes ? (*static_cast<int*>(value) = memory.device - devices, OK) : INVALID;
}
static int give_back(void* memory) {
    Lock lock(queue_lock);
    if (!bound()) return NO_CONTEXT;
    const u64 start = reinterpret_cast<u64>(memory), end = start + malloc_usable_size(memory);
    return is_named(start, end) ? here().broken = ILLEGAL_ADDRESS : (allocations.erase(start), free(memory), OK);
}
static std::map<u64, u64> registered;
API int cuMemHostRegister_v2(void* memory, size_t bytes, u32) {
    if (!bound()) return NO_CONTEXT;
    std::this_thread::sleep_for(std::chrono::milliseconds(setting("FAKE_DRIVER_PIN_MS", 0)));
    Lock lock(queue_lock);
    u64 all = bytes;
    const u64 start = reinterpret_cast<u64>(memory);
    for (auto& [other, size] : registered) {
        if (start < other + size && other < start + bytes) return 712;  /* already registered */
        all += size;
    }
    if (start % 4096 || bytes % 4096) return INVALID;
    if (all > setting("FAKE_DRIVER_PINS", ~0ull)) return NO_MEMORY;
    registered[start] = bytes;
    return allocations[start] = {bytes, &here(), false, true}, OK;
}
API int cuMemHostUnregister(void* memory) {
    Lock lock(queue_lock);
    const u64 start = reinterpret_cast<u64>(memory);
    if (!bound() || !registered.count(start)) return bound() ? 713 : NO_CONTEXT;  /* not registered */
    if (is_named(start, start + registered[start])) return here().broken = ILLEGAL_ADDRESS;
    return registered.erase(start), allocations.erase(start), OK;
}
API int cuMemFree_v2(u64 address) { return give_back(at(address)); }
API int cuMemFreeHost(void* memory) { return give_back(memory); }
/* Queues the release in the order of the stream, because earlier work of the stream may still use the memory. */
API int cuMemFreeAsync(u64 address, void* stream) {
    Lock lock(queue_lock);
    const auto memory = allocations.find(address);
    if (memory == allocations.end() || (capturing && !memory->second.of_graph)) return INVALID;
    if (capturing) return OK;
    Work work = {Work::FREE};
    work.stream = stream, work.target = address;
    return ask(work);
}
/* Number of copies so far, for tests which show that a call makes none. */
static std::atomic<u64> copies;
API u64 fake_driver_copies() { return copies; }
static int copy(u64 target, u64 source, size_t bytes, void* stream = NULL) {
    ++copies;
    Work work = {Work::COPY};
    work.stream = stream, work.target = target, work.source = source, work.bytes = bytes;
    return ask(work);
}
API int cuMemcpyHtoD_v2(u64 to, const void* from, size_t bytes) {
    return capturing ? CAPTURE_UNSUPPORTED : (copy(to, reinterpret_cast<u64>(from), bytes), wait());
}
API int cuMemcpyDtoH_v2(void* to, u64 from, size_t bytes) {
    return capturing ? CAPTURE_UNSUPPORTED : (copy(reinterpret_cast<u64>(to), from, bytes), wait());
}
API int cuMemcpyDtoD_v2(u64 to, u64 from, size_t bytes) {
    return capturing ? CAPTURE_UNSUPPORTED : (copy(to, from, bytes), wait());
}
static bool is_pinned(u64 address) {
    Lock lock(queue_lock);
    const auto after = allocations.upper_bound(address);
    return after != allocations.begin() && address - std::prev(after)->first < std::prev(after)->second.bytes;
}
/* Outside a capture, memory that is not pinned is read before the call returns: drivers copy it to a staging buffer. */
API int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
    const u64 source = reinterpret_cast<u64>(from);
    if (capturing || is_pinned(source)) return copy(to, source, bytes, stream);
    ++copies;
    Work work = {Work::STAGED};
    work.stream = stream, work.target = to, work.bytes = bytes;
    work.source = reinterpret_cast<u64>(memcpy(malloc(bytes), from, bytes));
    return ask(work);
}
/* Outside a capture, the call returns after the copy if the target is not pinned. */
API int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void* stream) {
    const u64 target = reinterpret_cast<u64>(to);
    const int result = copy(target, from, bytes, stream);
    return result || capturing || is_pinned(target) ? result : wait_for(stream);
}
API int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) { return copy(to, from, bytes, stream); }
/* Only copies within device memory are supported. */
struct Copy2D {
    size_t from_x, from_y; u32 from_kind; const void* from_host; u64 from; void* from_array; size_t from_pitch;
    size_t to_x, to_y; u32 to_kind; void* to_host; u64 to; void* to_array; size_t to_pitch;
    size_t width, height;
};
API int cuMemcpy2DAsync_v2(const Copy2D* call, void* stream) {
    if (call->from_kind != 2 || call->to_kind != 2 || call->from_x || call->from_y || call->to_x || call->to_y) return INVALID;
    int result = OK;
    for (size_t row = 0; row < call->height && result == OK; row++)
        result = copy(call->to + row * call->to_pitch, call->from + row * call->from_pitch, call->width, stream);
    return result;
}
API int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    Work work = {Work::HOST};
    work.stream = stream, work.target = reinterpret_cast<u64>(function), work.source = reinterpret_cast<u64>(data);
    return ask(work);
}
static int copy_batch(u64* to, u64* from, size_t* bytes, size_t count, void*, size_t*, size_t, size_t*, void* stream) {
    if (capturing) return CAPTURE_UNSUPPORTED;
    int answer = OK;
    for (size_t i = 0; i < count && !answer; ++i) answer = copy(to[i], from[i], bytes[i], stream);
    return answer;
}
API int cuMemsetD32Async(u64 address, u32 word, size_t words, void* stream) {
    Work work = {Work::FILL};
    work.stream = stream, work.target = address, work.word = word, work.bytes = 4 * words;
    return ask(work);
}
API int cuMemsetD8_v2(u64 address, u8 byte, size_t bytes) { return wait() ? CAPTURE_UNSUPPORTED : (memset(at(address), byte, bytes), OK); }

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

/* The types to which CUmodule and CUfunction point. Equal texts share one decoded module, also in several contexts. */
struct Module { std::string text; std::shared_ptr<ptx::Module> decoded; };
struct Function { std::string name; const ptx::Entry* entry; std::shared_ptr<ptx::Module> module; u32 dynamic_most = 48 << 10; };

static void* of_process(const std::string& kernel, const char* end = "") { return dlsym(RTLD_DEFAULT, ("fake_" + kernel + end).c_str()); }
static std::string first_entry(const char* text) {
    const char* name = strstr(text, ".entry ");
    return name ? std::string(name + 7, strcspn(name + 7, "(\n ")) : "";
}
static auto& modules = *new std::map<std::string, std::shared_ptr<ptx::Module>>();  /* by their text; never freed */

/* At the process's end, prints for each loaded kernel: launches, instructions that warps executed, the percentage of
   its instructions that ever ran, and optionally the lines of the other instructions. */
__attribute__((destructor)) static void print_statistics() {
    const u64 wanted = setting("FAKE_DRIVER_STATISTICS", 0);
    if (!wanted) return;
    for (auto& [text, module] : modules) {
        if (!module) continue;
        for (const ptx::Entry& entry : module->entries) {
            u64 ran = 0;
            for (u8 done : entry.done) ran += done;
            fprintf(stderr, "%-36s %8llu launches %12llu instructions %3llu %% of %zu\n", entry.name.c_str(), 0ull + entry.launches,
                    0ull + entry.instructions, 100ull * ran / entry.code.size(), entry.code.size());
            for (size_t i = 0; wanted > 1 && i < entry.code.size(); ++i)
                if (!entry.done[i]) fprintf(stderr, "  %u: %s\n", entry.code[i].line, entry.lines[entry.code[i].line - 1].c_str());
        }
    }
}
/* Returns the text of the file in FAKE_DRIVER_PTX that has the name of the first kernel. If there is no such file, writes
   it and returns `text`. */
static std::string find_text(const char* text) {
    const char* folder = getenv("FAKE_DRIVER_PTX");
    const std::string kernel = first_entry(text);
    if (!folder || kernel.empty()) return text;
    const std::string path = std::string(folder) + "/" + kernel + ".ptx";
    if (std::ifstream file(path); file) return std::string(std::istreambuf_iterator<char>(file), {});
    std::ofstream(path) << text;
    return text;
}
API int cuModuleLoadDataEx(Module** module, const void* image, u32 count, int* options, void** values) {
    if (capturing) return CAPTURE_UNSUPPORTED;
    const std::string whole = find_text(static_cast<const char*>(image));
    const char *text = whole.c_str(), *isa = strstr(text, ".version ");
    const u64 version = setting("FAKE_DRIVER_VERSION", 12040), newest = 80 + version % 1000 / 10;  /* CUDA 12.0 has 8.0 */
    if (!isa || 10 * (isa[9] - '0') + (isa[11] - '0') > static_cast<int>(newest)) return 222;
    const char* target = strstr(text, ".target sm_");
    u32 wanted = 0;
    char of_one = 0;  /* `a`: only this capability runs the kernel */
    if (target) sscanf(target + 11, "%u%c", &wanted, &of_one);
    if (wanted > ptx::device().capability || (of_one == 'a' && wanted != ptx::device().capability)) return 209;
    if (of_process(first_entry(text))) return *module = new Module{text, nullptr}, OK;
    const auto known = [&] {
        Lock lock(queue_lock);
        return modules[whole];
    };
    std::shared_ptr<ptx::Module> decoded = known();
    std::string error;
    if (!decoded) {  /* without the lock, so that threads decode in parallel; if two decode one text, the first result stays */
        decoded = std::make_shared<ptx::Module>();
        if (!ptx::parse(text, *decoded, error)) decoded = nullptr;
        Lock lock(queue_lock);
        auto& first = modules[whole];
        decoded = first ? first : first = decoded;
    }
    if (decoded) return *module = new Module{text, decoded}, OK;
    for (u32 i = 0; i + 1 < count; ++i)
        if (options[i] == 5) snprintf(static_cast<char*>(values[i]), reinterpret_cast<u64>(values[i + 1]), "%s", error.c_str());
    return 218;
}
API int cuModuleLoadData(Module** module, const void* image) { return cuModuleLoadDataEx(module, image, 0, NULL, NULL); }
API int cuModuleUnload(Module* module) { return delete module, OK; }
API int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    if (of_process(name)) return *function = new Function{name, nullptr, nullptr}, OK;
    if (!module->decoded) return NOT_FOUND;
    for (const ptx::Entry& entry : module->decoded->entries)
        if (entry.name == name) return *function = new Function{name, &entry, module->decoded}, OK;
    return NOT_FOUND;
}
/* Allows launches with more than 48 KiB of dynamic shared memory, up to the device's limit. */
API int cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute != 8) return INVALID;
    if (function->entry && (value < 0 || ptx::cta_shared(*function->entry, value) > ptx::device().cta_shared)) return INVALID;
    return function->dynamic_most = value, OK;
}
/* Maps with three dimensions (of latent rows) are written as ptx/memory.cc reads them. Of any other map, only the
   address is written. */
API int cuTensorMapEncodeTiled(u64* map, int kind, u32 dims, u64 address, const u64* sizes, const u64* strides, const u32* window, const u32* steps,
                               int interleave, int swizzle, int, int) {
    if (dims != 3) return *map = address, OK;
    const bool fits = reinterpret_cast<u64>(map) % 64 == 0 && address % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0 && steps[0] == 1 && steps[1] == 1;
    if (!fits || (kind != 6 && kind != 9) || interleave != 0 || swizzle != 3 || window[0] != 64 || window[1] > 256 || window[2] != 1) return INVALID;
    const u64 words[] = {0x7e4503, address, sizes[0], sizes[1], sizes[2], strides[0], strides[1], window[0] | u64(window[1]) << 32, window[2]};
    return memcpy(map, words, sizeof words), OK;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const Function* function, int threads, size_t shared) {
    return *blocks = function->entry ? ptx::occupancy(*function->entry, threads, shared) : 2, OK;
}
/* Queues a call in the order of the stream. If `ready` is not null, the call waits until it returns true. */
API int fake_ask_when(Ready ready, Call call, const void* params, size_t bytes, u32 grid_x, u32 grid_y, void* stream) {
    Work work = {Work::CALL};
    work.ready = ready, work.call = call, work.grid[0] = grid_x, work.grid[1] = grid_y, work.stream = stream;
    if (bytes > sizeof work.params) return INVALID;
    memcpy(work.params, params, bytes);
    return ask(work);
}
API int fake_ask(Call call, const void* params, size_t bytes, u32 grid_x, u32 grid_y, void* stream) {
    return fake_ask_when(NULL, call, params, bytes, grid_x, grid_y, stream);
}
struct LaunchConfig { u32 grid[3], block[3], shared; Stream* stream; void* attributes; u32 attribute_count; };
static int launch(const Function& function, const LaunchConfig& config, void** arguments) {
    static const char* refused = getenv("FAKE_DRIVER_REFUSES");
    if (refused && refused == std::to_string(&here() - devices) + ":" + function.name) return LAUNCH_FAILED;
    if (void* call = of_process(function.name)) {
        const size_t* bytes = static_cast<size_t*>(of_process(function.name, "_bytes"));
        return bytes ? fake_ask(reinterpret_cast<Call>(call), arguments[0], *bytes, config.grid[0], config.grid[1], config.stream) : NOT_FOUND;
    }
    const ptx::Entry& entry = *function.entry;
    const u64 threads = u64(config.block[0]) * config.block[1] * config.block[2];
    if (threads == 0 || threads > entry.threads_most || u64(config.grid[0]) * config.grid[1] * config.grid[2] == 0) return INVALID;
    if (ptx::occupancy(entry, static_cast<u32>(threads), config.shared) == 0 || config.grid[0] % entry.cluster != 0) return INVALID;
    if (config.shared > function.dynamic_most) return INVALID;
    Work work = {Work::KERNEL};
    work.stream = config.stream, work.entry = &entry, work.shared = config.shared;
    if (entry.param_bytes > sizeof work.params) return INVALID;
    memcpy(work.params, arguments[0], entry.param_bytes);
    memcpy(work.grid, config.grid, sizeof work.grid), memcpy(work.block, config.block, sizeof work.block);
    return ask(work);
}
/* Decode kernels read the plan and the tables before they wait for the previous launch. Therefore a launch without PDL
   must be between load_plan and a decode kernel with PDL. Otherwise the kernel is refused, except in captures. */
API int cuLaunchKernelEx(const LaunchConfig* config, const Function* function, void** arguments, void**) {
    static Stream default_stream;
    Stream& stream = config->stream ? *config->stream : default_stream;
    const bool pdl = config->attribute_count > 0, decodes = function->name.starts_with("attend_decode");
    Lock lock(queue_lock);
    if (capturing && pdl && setting("FAKE_DRIVER_VERSION", 12040) < 12030) return INVALID;
    if (!capturing) {
        if (pdl && stream.fresh && decodes) return INVALID;
        stream.fresh = function->name == "load_plan" || (stream.fresh && pdl);
    }
    return launch(*function, *config, arguments);
}
/* Launches a kernel of any number of parameters. cuLaunchKernelEx reads only the first argument, because a kernel of
   the backend has one parameter. Therefore this call packs all arguments into one. */
API int cuLaunchKernel(const Function* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x, u32 block_y, u32 block_z, u32 shared, Stream* stream,
                       void** arguments, void**) {
    u64 packed[512] = {};
    for (size_t i = 0; i < function->entry->parameters.size(); ++i) {
        const auto [at, bytes] = function->entry->parameters[i];
        if (at + bytes > sizeof packed) return INVALID;
        memcpy(reinterpret_cast<char*>(packed) + at, arguments[i], bytes);
    }
    void* all = packed;
    const LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    return cuLaunchKernelEx(&config, function, &all, NULL);
}
API int cuGetProcAddress(const char* name, void** found, int, u64) {
    *found = !strcmp(name, "cuLaunchKernelEx")         ? reinterpret_cast<void*>(cuLaunchKernelEx)
             : !strcmp(name, "cuTensorMapEncodeTiled") ? reinterpret_cast<void*>(cuTensorMapEncodeTiled)
             : !strcmp(name, "cuMemcpyBatchAsync") ? reinterpret_cast<void*>(copy_batch)
                                                   : NULL;
    return *found ? OK : NOT_FOUND;
}

/* ---- streams, events, graphs -------------------------------------------------------------------------------------- */
API int cuStreamCreate(Stream** stream, u32) {
    static std::atomic<u64> number = 0;
    *stream = static_cast<Stream*>(calloc(1, sizeof(Stream)));
    return (*stream)->number = ++number, OK;
}
/* A destroyed stream keeps its memory, so that later uses are detected. */
static bool gone(const Stream* stream) { return stream && stream->gone; }
API int cuStreamDestroy_v2(Stream* stream) { return gone(stream) ? BAD_HANDLE : (stream->gone = true, OK); }
API int cuStreamSynchronize(Stream* stream) { return gone(stream) ? BAD_HANDLE : wait_for(stream); }
API int cuStreamQuery(Stream* stream) {
    Device& device = here();
    if (gone(stream) || capturing) return gone(stream) ? BAD_HANDLE : CAPTURE_UNSUPPORTED;
    Lock lock(queue_lock);
    advance(device);
    return reached(device, stream, device.asked) ? OK : NOT_READY;
}
API int cuStreamIsCapturing(void*, int* status) { return *status = capturing != NULL, OK; }
API int cuEventCreate(void** event, u32) { return *event = calloc(1, sizeof(Event)), OK; }
API int cuEventDestroy_v2(void* event) { return free(event), OK; }
API int cuEventRecord(Event* event, Stream* stream) {
    return gone(stream) ? BAD_HANDLE : (*event = {&here(), stream, here().asked, capturing != NULL}, OK);
}
static bool is_over(const void* params) {
    const Event* event = static_cast<const Event*>(params);
    return !event->device || reached(*event->device, event->stream, event->at);
}
API int cuStreamWaitEvent(void* stream, Event* event, u32) {
    if (capturing && !event->captured && event->at > 0) return CAPTURE_ISOLATION;
    if (!capturing && event->captured) return CAPTURED_EVENT;
    Work work = {Work::NOTHING};
    work.stream = stream;
    memcpy(work.params, event, sizeof *event);
    if (!capturing) work.ready = is_over;  /* a graph's work runs in order, so the event's work is done by then */
    return ask(work);
}
API int cuEventQuery(Event* event) {
    if (event->captured) return CAPTURED_EVENT;
    if (capturing) return CAPTURE_UNSUPPORTED;
    Lock lock(queue_lock);
    if (!is_over(event)) advance(*event->device);
    return is_over(event) ? OK : NOT_READY;
}
API int cuEventSynchronize(Event* event) {
    if (event->captured) return CAPTURED_EVENT;
    if (capturing || !bound()) return capturing ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    if (event->device) reach(*event->device, event->stream, event->at);  /* without waiting for later work */
    return here().broken;
}
API int cuEventElapsedTime(float* ms, Event*, Event*) { return *ms = 0, OK; }
API int cuStreamBeginCapture_v2(void* stream, int) {
    // The default stream cannot be captured.
    if (!stream) return CAPTURE_UNSUPPORTED;
    if (capturing) return INVALID;
    return capturing = new Line(), OK;
}
API int cuStreamEndCapture(void*, Line** graph) { return *graph = capturing, capturing = NULL, OK; }
API int cuGraphInstantiateWithFlags(Line** exec, Line* graph, u64) {
    *exec = new Line();
    for (Work* work = graph->first; work; work = work->next) add(*exec, *work);
    return OK;
}
API int cuGraphDestroy(Line* graph) {
    for (Work* work = graph->first; work;) {
        Work* next = work->next;
        free(work), work = next;
    }
    return delete graph, OK;
}
API int cuGraphExecDestroy(Line* graph) { return cuGraphDestroy(graph); }
API int cuGraphLaunch(Line* graph, void* stream) {
    if (capturing) return CAPTURE_UNSUPPORTED;
    int answer = OK;
    for (Work* work = graph->first; work && !answer; work = work->next) {
        Work again = *work;
        again.stream = stream, answer = ask(again);
    }
    return answer;
}
}
