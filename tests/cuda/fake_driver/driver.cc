/* A libcuda.so.1 without a device, for what the CUDA backend's tests can hold without one (tests/cuda/fake_driver/run.sh).
 *
 * Device memory is host memory. Work is only queued: it is done when somebody waits, oldest first, or one piece whenever
 * somebody asks whether it is. So whoever does not wait where they must is seen. Kernels do what theirs do, by the same
 * parameters (ptx/params.cuh) but for how attention is split: each of its two kernels takes the sequences that are its
 * own. All streams are one queue, and a capture takes in all of them; what the driver forbids in a capture is refused with
 * its codes. Whoever waits for a stream sees its work done and what was asked of others before it, no more.
 *
 * PTX of a newer ISA than the driver's version is refused, and text that is none, with a log.
 *
 * A kernel that is not the backend's is looked up among the process's functions: fake_NAME takes the parameters and the grid, of
 * fake_NAME_bytes bytes; and whoever has work that is no kernel queues it by fake_ask (examples/generate/tests/fake_cublaslt).
 *
 * Work, waiting and memory need a device's primary context, retained and current in the thread, as the backend binds it.
 *
 * FAKE_DRIVER_VERSION (12040), FAKE_DRIVER_DEVICES (2), FAKE_DRIVER_CAPABILITY (90). */
#include <dlfcn.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <mutex>

#define DEVICE static
#define __device__
#define __forceinline__
#include "../../../ptx/params.cuh"

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907 };

static u64 setting(const char* name, u64 otherwise) {
    const char* value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

/* Contexts: number 16 and on are the devices' primary ones. */
static int retained[16];
static thread_local u64 current;
static bool bound() { return current - 16 < 16 && retained[current - 16] > 0; }

/* ---- work --------------------------------------------------------------------------------------------------------- */

using Call = void (*)(const void* params, u32 grid_x, u32 grid_y);

struct Work {
    enum { KERNEL, COPY, FILL, HOST, CALL, NOTHING } kind;
    char name[64];
    union { StoreCacheParams store; StoreFp8Params store_fp8; CopyPagesParams pages; CompactSlotsParams compact; LoadPlanParams plan; AttendParams attend; AttendFp8Params attend_fp8; u64 words[30]; } params;
    u64 target, source, bytes;
    u32 word;
    void* stream;
    Call call;
    u32 grid_x, grid_y;
    Work* next;
};
struct Line { Work *first, **end; };
struct Event { u64 at; bool captured; };
struct Stream { bool fresh, gone; };  /* nothing was launched in order since the last load_plan */

static Line queue = {NULL, &queue.first};
static Line* capture;  /* where work goes instead */
static int broken;     /* what every call answers from then on that work or waiting is asked of */
static u64 asked, done;
static std::recursive_mutex queue_lock;
using Lock = std::lock_guard<std::recursive_mutex>;

static Work* add(Line* line, const Work& work) {
    Work* copy = static_cast<Work*>(malloc(sizeof(Work)));
    *copy = work, copy->next = NULL;
    *line->end = copy, line->end = &copy->next;
    return copy;
}
static int ask(const Work& work) {
    Lock lock(queue_lock);
    if (broken || !bound()) return broken ? broken : NO_CONTEXT;
    if (!capture) ++asked;
    add(capture ? capture : &queue, work);
    return OK;
}

static char* at(u64 address) { return reinterpret_cast<char*>(address); }
static void store_cache(const StoreCacheParams& p) {
    const u64 row = static_cast<u64>(p.row_units) * p.unit_bytes;
    for (u64 i = 0; i < p.tokens; ++i) {
        const long long slot = p.slot_bytes == 4 ? reinterpret_cast<int*>(p.slots)[i] : reinterpret_cast<long long*>(p.slots)[i];
        if (slot < 0) continue;
        const u64 to = slot / p.page_size * p.page_stride + slot % p.page_size * p.slot_stride;
        memcpy(at(p.k_pool + to), at(p.k + i * p.k_stride), row);
        memcpy(at(p.v_pool + to), at(p.v + i * p.v_stride), row);
    }
}
static void copy_pages(const CopyPagesParams& p, u64 copies) {
    const u64 pieces = p.page_units / p.piece_units, bytes = static_cast<u64>(p.piece_units) * p.unit_bytes;
    for (u64 i = 0; i < copies; ++i)
        for (u64 piece = 0; piece < pieces; ++piece)
            memcpy(at(p.target + p.copies[i].target * p.target_page_stride + piece * p.target_piece_stride),
                   at(p.source + p.copies[i].source * p.source_page_stride + piece * p.source_piece_stride), bytes);
}
static void compact_slots(const CompactSlotsParams& p, u64 rows) {
    const u32 *words = reinterpret_cast<u32*>(p.table), *chunks = words + p.chunk_base;
    for (u64 i = 0; i < rows; ++i) {
        const Compaction& c = p.compactions[i];
        auto slot = [&](u32 place) {
            const u32 page = place / p.page_size;
            const u64 chunk = words[c.row * p.chunks_per_row + page / p.chunk_pages];
            return p.pool + chunks[chunk * p.chunk_pages + page % p.chunk_pages] * p.page_stride + place % p.page_size * p.slot_stride;
        };
        u32 to = c.first;
        for (u32 bit = 0; bit < 64; ++bit)
            if (c.keep >> bit & 1) {
                const u64 source = slot(c.first + bit), target = slot(to++);
                for (u64 layer = 0; layer < p.layers; ++layer)
                    for (u64 run = 0; run < p.runs; ++run) {
                        const u64 offset = layer * p.layer_stride + run * p.run_stride;
                        memmove(at(target + offset), at(source + offset), static_cast<u64>(p.run_units) * p.unit_bytes);
                    }
            }
    }
}
static void load_plan(const LoadPlanParams& p) {
    memcpy(at(p.image), at(p.source), 16ull * p.units);
    const TableWrite* writes = reinterpret_cast<TableWrite*>(p.source + p.writes_at);
    for (u32 i = 0; i < p.writes; ++i) reinterpret_cast<u32*>(p.words)[writes[i].index] = writes[i].value;
    *reinterpret_cast<volatile u64*>(p.done) = p.ticket;
}

static float float_of(u32 bits) {
    float value;
    return memcpy(&value, &bits, 4), value;
}
static u32 bits_of(float value) {
    u32 bits;
    return memcpy(&bits, &value, 4), bits;
}
enum Type { F32, F16, BF16 };
static float load(Type type, u64 row, u64 i) {
    if (type == F32) return reinterpret_cast<float*>(row)[i];
    const u32 bits = reinterpret_cast<u16*>(row)[i];
    if (type == BF16) return float_of(bits << 16);
    const u32 exponent = bits >> 10 & 31, rest = bits & 1023;
    const float size = exponent == 31 ? (rest ? NAN : INFINITY) : ldexpf(exponent ? 1024 + rest : rest, static_cast<int>(exponent ? exponent : 1) - 25);
    return bits >> 15 ? -size : size;
}
static void store(Type type, u64 row, u64 i, float value) {
    if (type == F32) return void(reinterpret_cast<float*>(row)[i] = value);
    if (isnan(value)) return void(reinterpret_cast<u16*>(row)[i] = 0x7fff);
    const u32 bits = bits_of(value);
    u32 narrow = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (type == F16) {
        const float size = fabsf(value);
        const int exponent = size < 6.103515625e-5f ? -14 : ilogbf(size);
        narrow = (static_cast<u32>(exponent + 14) << 10) + static_cast<u32>(nearbyintf(ldexpf(size, 10 - exponent))) + (bits >> 31 << 15);
    }
    reinterpret_cast<u16*>(row)[i] = narrow;
}

/* ---- fp8 ---------------------------------------------------------------------------------------------------------- */

static float e4m3(u8 byte) {
    const u32 exponent = byte >> 3 & 15, rest = byte & 7;
    const float size = (byte & 127) == 127 ? NAN : ldexpf(exponent ? 8 + rest : rest, static_cast<int>(exponent ? exponent : 1) - 10);
    return byte >> 7 ? -size : size;
}
static u8 to_e4m3(float x) {
    if (isnan(x)) return 0x7f;
    const float size = fminf(fabsf(x), 448);
    const int exponent = size < 0.015625f ? -6 : ilogbf(size);
    const u32 rounded = (static_cast<u32>(exponent + 6) << 3) + static_cast<u32>(nearbyintf(ldexpf(size, 3 - exponent)));
    return static_cast<u8>(rounded | (signbit(x) ? 0x80 : 0));
}
static void store_fp8(const StoreFp8Params& p) {
    const Type type = p.rows == ROWS_BF16 ? BF16 : p.rows == ROWS_F16 ? F16 : F32;
    const u64 head_bytes = p.head_dim * (type == F32 ? 4 : 2);
    for (u64 i = 0; i < 2ull * p.tokens * p.kv_heads; ++i) {
        const u64 token = i / 2 / p.kv_heads, head = i / 2 % p.kv_heads;
        const bool v = i % 2;
        const long long slot = p.slot_bytes == 4 ? reinterpret_cast<int*>(p.slots)[token] : reinterpret_cast<long long*>(p.slots)[token];
        if (slot < 0) continue;
        const u64 from = (v ? p.v + token * p.v_stride : p.k + token * p.k_stride) + head * head_bytes;
        const u64 page = slot / p.page_size, offset = slot % p.page_size;
        const u64 to = (v ? p.v_pool : p.k_pool) + page * p.page_stride + offset * p.slot_stride + head * p.head_dim;
        float& scale = *reinterpret_cast<float*>((v ? p.v_scales : p.k_scales) + head * p.scale_head_stride +
                                                 (p.by_token ? page * p.scale_page_stride + offset * 4 : 0));
        if (p.by_token) {
            float most = 0;
            for (u32 d = 0; d < p.head_dim; ++d) most = isfinite(load(type, from, d)) ? fmaxf(most, fabsf(load(type, from, d))) : most;
            scale = most == 0 ? 1 : fmaxf(most / 448, 1.17549435e-38f);
        }
        for (u32 d = 0; d < p.head_dim; ++d) at(to)[d] = static_cast<char>(to_e4m3(load(type, from, d) / scale));
    }
}

/* A number of K or of V, of whatever the pool holds. */
static float load_cache(Type type, const LayerScales* scales, u64 row, u64 i, float scale) {
    return scales ? e4m3(reinterpret_cast<u8*>(row)[i]) * scale : load(type, row, i);
}
static void attend(const AttendParams& p, const char* name, const LayerScales* scales) {
    const Type type = strstr(name, "bf16") ? BF16 : strstr(name, "_f16") ? F16 : F32;
    const bool latent = !strncmp(name, "attend_latent", 13);
    const u32 row_size = type == F32 ? 4 : 2, dims = p.head_stride / (scales ? 1 : row_size), values = latent ? 512 : dims, most = strstr(name, "_r16") ? 16 : strstr(name, "_r8") || p.group <= 8 ? 8 : 16;
    const u64 v_pool = latent ? p.k : p.v;
    const u32 *words = reinterpret_cast<u32*>(p.table), *chunks = words + p.chunk_base;
    for (u32 b = 0; b < p.batch; ++b) {
        const BatchRow row = reinterpret_cast<BatchRow*>(p.batch_rows)[b];
        const bool tree = row.row >= TREE_ROW, decodes = !tree && row.extend_len * p.group <= most;
        if (decodes ? !strncmp(name, "attend_extend", 13) : !strncmp(name, "attend_decode", 13)) continue;
        for (u32 pair = 0; pair < row.extend_len * p.q_heads; ++pair) {
            const u32 query = pair / p.q_heads, head = pair % p.q_heads, end = row.kv_len ? row.kv_len - row.extend_len + query + 1 : 0;
            const u64 size = dims * row_size, kv_head = head / p.group, q = p.q + (row.qo_start + query) * p.q_stride + head * size;
            float top = -INFINITY, sum = 0, out[512] = {};
            for (u32 position = p.window && end > p.window ? end - p.window : 0; position < end; ++position) {
                const u32 back = row.kv_len - 1 - position;
                if (tree && back < 64 && !(reinterpret_cast<u64*>(p.masks)[row.qo_start + query] >> back & 1)) continue;
                const u32 page = position / p.page_size;
                const u32 chunk = words[(row.row & ~TREE_ROW) * p.chunks_per_row + page / p.chunk_pages];
                const u64 number = chunks[static_cast<u64>(chunk) * p.chunk_pages + page % p.chunk_pages];
                const u64 offset = number * p.page_stride + position % p.page_size * p.slot_stride + kv_head * p.head_stride;
                float k_scale = 1, v_scale = 1;
                if (scales) {
                    const u64 place = kv_head * scales->head_stride + (scales->by_token ? number * scales->page_stride + position % p.page_size * 4 : 0);
                    k_scale = *reinterpret_cast<float*>(scales->k + place), v_scale = *reinterpret_cast<float*>(scales->v + place);
                }
                float score = 0;
                for (u32 i = 0; i < dims; ++i) score += load(type, q, i) * load_cache(type, scales, p.k + offset, i, k_scale);
                score *= p.negate_q ? -p.scale : p.scale;
                if (p.soft_cap > 0) score = p.soft_cap * tanhf(score / p.soft_cap);
                const float above = fmaxf(top, score), old = expf(top - above), weight = expf(score - above);
                sum = sum * old + weight, top = above;
                for (u32 i = 0; i < values; ++i) out[i] = out[i] * old + weight * load_cache(type, scales, v_pool + offset, i, v_scale);
            }
            if (p.sinks && sum > 0) {
                const float sink = reinterpret_cast<float*>(p.sinks)[head], above = fmaxf(top, sink), old = expf(top - above);
                sum = sum * old + expf(sink - above), top = above;
                for (u32 i = 0; i < values; ++i) out[i] *= old;
            }
            const u64 to = p.out + (row.qo_start + query) * p.out_stride + head * values * row_size;
            for (u32 i = 0; i < values; ++i) store(type, to, i, sum != 0 ? out[i] / sum : 0);
            if (p.lse) reinterpret_cast<float*>(p.lse)[static_cast<u64>(row.qo_start + query) * p.q_heads + head] = top + logf(sum);
        }
    }
}

static void run(const Work& work) {
    if (work.kind == Work::COPY) memcpy(at(work.target), at(work.source), work.bytes);
    if (work.kind == Work::FILL)
        for (u64 i = 0; i < work.bytes / 4; ++i) reinterpret_cast<u32*>(work.target)[i] = work.word;
    if (work.kind == Work::HOST) reinterpret_cast<void (*)(void*)>(work.target)(reinterpret_cast<void*>(work.source));
    if (work.kind == Work::CALL) work.call(&work.params, work.grid_x, work.grid_y);
    if (work.kind != Work::KERNEL) return;
    const bool fp8 = strstr(work.name, "_fp8");
    if (!strncmp(work.name, "store_cache", 11)) fp8 ? store_fp8(work.params.store_fp8) : store_cache(work.params.store);
    if (!strcmp(work.name, "copy_pages")) copy_pages(work.params.pages, work.bytes);
    if (!strcmp(work.name, "compact_slots")) compact_slots(work.params.compact, work.bytes);
    if (!strcmp(work.name, "load_plan")) load_plan(work.params.plan);
    // The fake kernels leave nothing in parts.
    if (!strncmp(work.name, "attend", 6) && strncmp(work.name, "attend_latent_join", 18))
        attend(work.params.attend, work.name, fp8 ? &work.params.attend_fp8.scales : NULL);
}
static bool step() {
    Lock lock(queue_lock);
    Work* work = queue.first;
    if (!work) return false;
    queue.first = work->next;
    if (!queue.first) queue.end = &queue.first;
    run(*work), free(work), ++done;
    return queue.first != NULL;
}
static int wait() {
    if (capture || !bound()) return capture ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    while (step()) {}
    return broken;
}
static int wait_for(void* stream) {
    if (!stream) return wait();
    if (capture || !bound()) return capture ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    Lock lock(queue_lock);
    u64 last = 0, n = 0;
    for (Work* work = queue.first; work; work = work->next)
        if (++n, work->stream == stream) last = n;
    while (last--) step();
    return broken;
}

extern "C" {
/* ---- device and context ------------------------------------------------------------------------------------------- */
API int cuInit(u32) { return setting("FAKE_DRIVER_DEVICES", 2) ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int* version) { return *version = setting("FAKE_DRIVER_VERSION", 12040), OK; }
API int cuDeviceGet(int* device, int ordinal) {
    return static_cast<u64>(ordinal) < setting("FAKE_DRIVER_DEVICES", 2) ? (*device = ordinal, OK) : BAD_DEVICE;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
    const u64 capability = setting("FAKE_DRIVER_CAPABILITY", 90);
    return *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? 4 : attribute == 115 ? 1 : 0, OK;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
    Lock lock(queue_lock);
    return ++retained[device], *context = reinterpret_cast<void*>(16ull + device), OK;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
    Lock lock(queue_lock);
    return --retained[device], OK;
}
API int cuCtxSetCurrent(void* context) { return current = reinterpret_cast<u64>(context), OK; }
API int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(current), OK; }
API int cuCtxCreate_v2(void** context, u32, int) { return cuCtxSetCurrent(*context = malloc(1)); }
API int cuCtxDestroy_v2(void* context) { return free(context), OK; }
API int cuCtxSynchronize() { return wait(); }

/* ---- memory ------------------------------------------------------------------------------------------------------- */
API int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = 1ull << 33, OK; }
static int take(void** memory, size_t bytes) {
    if (capture || !bound()) return capture ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    if (bytes > 1ull << 33) return NO_MEMORY;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory ? (memset(*memory, 0xa5, bytes < 1 << 20 ? bytes : 1 << 20), OK) : NO_MEMORY;  /* never zeros by chance */
}
API int cuMemAlloc_v2(u64* address, size_t bytes) { return take(reinterpret_cast<void**>(address), bytes); }
API int cuMemAllocAsync(u64* address, size_t bytes, void*) { return take(reinterpret_cast<void**>(address), bytes); }
API int cuMemHostAlloc(void** memory, size_t bytes, u32) { return take(memory, bytes); }
API int cuMemHostGetDevicePointer_v2(u64* address, void* memory, u32) { return *address = reinterpret_cast<u64>(memory), OK; }
/* Freeing need not wait: so says neither call's documentation. Memory that queued work names is not given back, as if the
   work had met what others put there. */
static int give_back(void* memory) {
    Lock lock(queue_lock);
    if (!bound()) return NO_CONTEXT;
    const u64 start = reinterpret_cast<u64>(memory), end = start + malloc_usable_size(memory);
    bool used = false;
    for (Work* work = queue.first; work; work = work->next)
        for (u64* word = reinterpret_cast<u64*>(&work->params); word != &work->bytes; ++word) used |= start <= *word && *word < end;
    return used ? broken = ILLEGAL_ADDRESS : (free(memory), OK);
}
API int cuMemFree_v2(u64 address) { return give_back(at(address)); }
API int cuMemFreeHost(void* memory) { return give_back(memory); }
static int copy(u64 target, u64 source, size_t bytes, void* stream = NULL) {
    Work work = {Work::COPY};
    work.stream = stream, work.target = target, work.source = source, work.bytes = bytes;
    return ask(work);
}
API int cuMemcpyHtoD_v2(u64 to, const void* from, size_t bytes) {
    return capture ? CAPTURE_UNSUPPORTED : (copy(to, reinterpret_cast<u64>(from), bytes), wait());
}
API int cuMemcpyDtoH_v2(void* to, u64 from, size_t bytes) {
    return capture ? CAPTURE_UNSUPPORTED : (copy(reinterpret_cast<u64>(to), from, bytes), wait());
}
API int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
    return copy(to, reinterpret_cast<u64>(from), bytes, stream);
}
API int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void* stream) {
    return copy(reinterpret_cast<u64>(to), from, bytes, stream);
}
API int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    Work work = {Work::HOST};
    work.stream = stream, work.target = reinterpret_cast<u64>(function), work.source = reinterpret_cast<u64>(data);
    return ask(work);
}
static int copy_batch(u64* to, u64* from, size_t* bytes, size_t count, void*, size_t*, size_t, size_t*, void* stream) {
    if (capture) return CAPTURE_UNSUPPORTED;
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
API int cuModuleLoadDataEx(void** module, const void* image, u32 count, int* options, void** values) {
    const char *text = static_cast<const char*>(image), *isa = strstr(text, ".version ");
    const u64 version = setting("FAKE_DRIVER_VERSION", 12040), newest = 80 + version % 1000 / 10;  /* CUDA 12.0 has 8.0 */
    if (!isa || 10 * (isa[9] - '0') + (isa[11] - '0') > static_cast<int>(newest)) return 222;
    if (strstr(text, ".entry ")) return *module = strdup(text), OK;
    for (u32 i = 0; i + 1 < count; ++i)
        if (options[i] == 5) snprintf(static_cast<char*>(values[i]), reinterpret_cast<u64>(values[i + 1]), "line 3: nonsense\n");
    return 218;
}
API int cuModuleUnload(void* module) { return free(module), OK; }
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    char entry[80];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    return strstr(static_cast<char*>(module), entry) ? (*function = strdup(name), OK) : NOT_FOUND;
}
API int cuFuncSetAttribute(void*, int, int) { return OK; }
/* What it knows of a matrix is where it begins. */
API int cuTensorMapEncodeTiled(u64* map, int, u32, u64 address, const u64*, const u64*, const u32*, const u32*, int, int, int, int) {
    return *map = address, OK;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 2, OK; }
API int fake_ask(Call call, const void* params, size_t bytes, u32 grid_x, u32 grid_y, void* stream) {
    Work work = {Work::CALL};
    work.call = call, work.grid_x = grid_x, work.grid_y = grid_y, work.stream = stream;
    memcpy(&work.params, params, bytes);
    return ask(work);
}
static int launch(const char* name, const u32* grid, void** arguments, void* stream) {
    char symbol[96];
    snprintf(symbol, sizeof symbol, "fake_%s", name);
    if (void* call = dlsym(RTLD_DEFAULT, symbol)) {
        snprintf(symbol, sizeof symbol, "fake_%s_bytes", name);
        const size_t* bytes = static_cast<size_t*>(dlsym(RTLD_DEFAULT, symbol));
        return bytes ? fake_ask(reinterpret_cast<Call>(call), arguments[0], *bytes, grid[0], grid[1], stream) : NOT_FOUND;
    }
    const u32 grid_y = grid[1];
    Work work = {Work::KERNEL};
    work.stream = stream;
    snprintf(work.name, sizeof work.name, "%s", name);
    work.bytes = grid_y;
    const bool store = !strncmp(name, "store_cache", 11), fp8 = strstr(name, "_fp8"), pages = !strcmp(name, "copy_pages"), compact = !strcmp(name, "compact_slots"), plan = !strcmp(name, "load_plan");
    const size_t bytes = store     ? fp8 ? sizeof(StoreFp8Params) : sizeof(StoreCacheParams)
                         : pages   ? sizeof(CopyPagesParams)
                         : compact ? sizeof(CompactSlotsParams)
                         : plan    ? sizeof(LoadPlanParams)
                         : fp8     ? sizeof(AttendFp8Params) : sizeof(AttendParams);
    memcpy(&work.params, arguments[0], bytes);
    return ask(work);
}
struct LaunchConfig { u32 grid[3], block[3], shared; Stream* stream; void* attributes; u32 attribute_count; };
/* Decode reads plan and tables before it waits: launched by PDL, it must come after something that was not, after load_plan. */
API int cuLaunchKernelEx(const LaunchConfig* config, const char* name, void** arguments, void**) {
    static Stream default_stream;
    Stream& stream = config->stream ? *config->stream : default_stream;
    const bool pdl = config->attribute_count > 0;
    Lock lock(queue_lock);
    if (capture && pdl && setting("FAKE_DRIVER_VERSION", 12040) < 12030) return INVALID;
    if (!capture) {
        if (pdl && stream.fresh && !strncmp(name, "attend_decode", 13)) return INVALID;
        stream.fresh = !strcmp(name, "load_plan") || (stream.fresh && pdl);
    }
    return launch(name, config->grid, arguments, config->stream);
}
API int cuGetProcAddress(const char* name, void** found, int, u64) {
    *found = !strcmp(name, "cuLaunchKernelEx")     ? reinterpret_cast<void*>(cuLaunchKernelEx)
             : !strcmp(name, "cuMemcpyBatchAsync") ? reinterpret_cast<void*>(copy_batch)
                                                   : NULL;
    return *found ? OK : NOT_FOUND;
}

/* ---- streams, events, graphs -------------------------------------------------------------------------------------- */
API int cuStreamCreate(void** stream, u32) { return *stream = calloc(1, sizeof(Stream)), OK; }
/* What is left knows those who ask of it later. */
static bool gone(const Stream* stream) { return stream && stream->gone; }
API int cuStreamDestroy_v2(Stream* stream) { return gone(stream) ? BAD_HANDLE : (stream->gone = true, OK); }
API int cuStreamSynchronize(Stream* stream) { return gone(stream) ? BAD_HANDLE : wait_for(stream); }
API int cuStreamQuery(Stream* stream) { return gone(stream) ? BAD_HANDLE : capture ? CAPTURE_UNSUPPORTED : step() ? NOT_READY : OK; }
API int cuStreamIsCapturing(void*, int* status) { return *status = capture != NULL, OK; }
API int cuEventCreate(void** event, u32) { return *event = calloc(1, sizeof(Event)), OK; }
API int cuEventDestroy_v2(void* event) { return free(event), OK; }
API int cuEventRecord(Event* event, Stream* stream) {
    return gone(stream) ? BAD_HANDLE : (event->at = asked, event->captured = capture != NULL, OK);
}
API int cuStreamWaitEvent(void* stream, Event* event, u32) {
    if (capture && !event->captured && event->at > 0) return CAPTURE_ISOLATION;
    if (!capture && event->captured) return CAPTURED_EVENT;
    Work work = {Work::NOTHING};
    work.stream = stream;
    return ask(work);  /* what the event stands for comes before it */
}
API int cuEventQuery(Event* event) {
    if (event->captured) return CAPTURED_EVENT;
    if (capture) return CAPTURE_UNSUPPORTED;
    if (done < event->at) step();
    return done < event->at ? NOT_READY : OK;
}
API int cuEventSynchronize(Event* event) {
    if (event->captured) return CAPTURED_EVENT;
    if (capture || !bound()) return capture ? CAPTURE_UNSUPPORTED : NO_CONTEXT;
    while (done < event->at) step();  /* and not what comes after it */
    return broken;
}
API int cuEventElapsedTime(float* ms, Event*, Event*) { return *ms = 0, OK; }
API int cuStreamBeginCapture_v2(void*, int) {
    if (capture) return INVALID;
    capture = static_cast<Line*>(malloc(sizeof(Line)));
    return capture->first = NULL, capture->end = &capture->first, OK;
}
API int cuStreamEndCapture(void*, Line** graph) { return *graph = capture, capture = NULL, OK; }
API int cuGraphInstantiateWithFlags(Line** exec, Line* graph, u64) {
    *exec = static_cast<Line*>(malloc(sizeof(Line)));
    (*exec)->first = NULL, (*exec)->end = &(*exec)->first;
    for (Work* work = graph->first; work; work = work->next) add(*exec, *work);
    return OK;
}
API int cuGraphDestroy(Line* graph) {
    for (Work* work = graph->first; work;) {
        Work* next = work->next;
        free(work), work = next;
    }
    return free(graph), OK;
}
API int cuGraphExecDestroy(Line* graph) { return cuGraphDestroy(graph); }
API int cuGraphLaunch(Line* graph, void* stream) {
    if (capture) return CAPTURE_UNSUPPORTED;
    int answer = OK;
    for (Work* work = graph->first; work && !answer; work = work->next) {
        Work again = *work;
        again.stream = stream, answer = ask(again);
    }
    return answer;
}
}
