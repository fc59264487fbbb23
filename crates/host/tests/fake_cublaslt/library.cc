/* A libcublasLt.so.13 without a device, and most kernels of crates/host on the CPU. The tests of crates/host use them with
 * tests/cuda/fake_driver/driver.cc. The kernels have the same parameters (crates/host/ptx/src/params.cuh), and compute sums in f32
 * and rows in bf16. The driver queues all work, so a missing wait changes the results.
 *
 * The driver runs the PTX of `sample_shaped` and `sum_ranks`. One call of a kernel here computes its whole grid.
 *
 * FAKE_CUBLASLT_OVERFLOWS=DEVICE:N: on this device, a search for N algorithms reports N + 1, so the program panics. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <vector>

#include "../../ptx/src/params.cuh"
#include "bf16.h"

#define API extern "C" __attribute__((visibility("default")))
#define KERNEL(name, Params)                                            \
    API const size_t fake_##name##_bytes = sizeof(Params);              \
    static void run_##name(const Params& p, u32 grid_x, u32 grid_y);    \
    API void fake_##name(const void* p, u32 grid_x, u32 grid_y) { run_##name(*static_cast<const Params*>(p), grid_x, grid_y); } \
    static void run_##name([[maybe_unused]] const Params& p, [[maybe_unused]] u32 grid_x, [[maybe_unused]] u32 grid_y)

/* Returns whether a device's context is current. The fake driver's context of device n is the number 16 + n. */
static bool is_bound(int device) {
    using Current = int (*)(void**);
    static const Current current = reinterpret_cast<Current>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxGetCurrent"));
    void* context = nullptr;
    return current && current(&context) == 0 && reinterpret_cast<u64>(context) == 16ull + device;
}

template <class T> static T* at(u64 address) { return reinterpret_cast<T*>(address); }
static float scale_of(const float* x, u32 n, float eps) {
    float sum = 0;
    for (u32 i = 0; i < n; ++i) sum += x[i] * x[i];
    return 1 / sqrtf(sum / n + eps);
}
static float silu(float x) { return x / (1 + expf(-x)); }

KERNEL(load_step, LoadStepParams) {
    const u64 second = 16ull * p.second_at;
    memcpy(at<char>(p.target), at<char>(p.source), 16ull * p.first);
    memcpy(at<char>(p.target) + second, at<char>(p.source) + second, 16ull * p.second);
}

static void norm_row(const u16* row, u64 weight, u16* out, u32 hidden, float eps) {
    std::vector<float> x(hidden);
    for (u32 i = 0; i < hidden; ++i) x[i] = wide(row[i]);
    const float scale = scale_of(x.data(), hidden, eps);
    for (u32 i = 0; i < hidden; ++i) out[i] = narrow(x[i] * scale * wide(at<u16>(weight)[i]));
}
KERNEL(embed, EmbedParams) {
    for (u64 row = 0; row < grid_x; ++row) {
        int token = at<int>(p.tokens)[row];
        if (token < 0) token = at<int>(p.sampled)[-1 - token];
        u16* x = at<u16>(p.x) + row * p.hidden;
        const u16* from = at<u16>(p.table) + static_cast<u64>(token) * p.hidden;
        for (u32 i = 0; i < p.hidden; ++i) x[i] = narrow(wide(from[i]) * p.scale);
        norm_row(x, p.weight, at<u16>(p.normed) + row * p.hidden, p.hidden, p.eps);
    }
}
KERNEL(rms_norm, NormParams) {
    for (u64 row = 0; row < grid_x; ++row) {
        const u64 source = p.draws ? at<Draw>(p.draws)[row].row : row;
        norm_row(at<u16>(p.x) + source * p.hidden, p.weight, at<u16>(p.normed) + row * p.hidden, p.hidden, p.eps);
    }
}

static float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
static void multiply(const SiluMulParams& p, u32 rows, float (*activation)(float)) {
    for (u64 row = 0; row < rows; ++row) {
        const u16* gate = at<u16>(p.gate_up) + 2 * row * p.width;
        for (u32 i = 0; i < p.width; ++i) at<u16>(p.out)[row * p.width + i] = narrow(activation(wide(gate[i])) * wide(gate[p.width + i]));
    }
}
KERNEL(silu_mul, SiluMulParams) { multiply(p, grid_y, silu); }
KERNEL(gelu_mul, SiluMulParams) { multiply(p, grid_y, gelu); }

KERNEL(add_bias, BiasParams) {
    for (u64 row = 0; row < grid_y; ++row) {
        u16* y = at<u16>(p.y) + row * p.width;
        for (u32 i = 0; i < p.width; ++i) y[i] = narrow(wide(y[i]) + wide(at<u16>(p.bias)[i]));
    }
}
KERNEL(norm_add, NormAddParams) {
    std::vector<float> y(p.hidden);
    for (u64 row = 0; row < grid_x; ++row) {
        for (u32 i = 0; i < p.hidden; ++i) y[i] = wide(at<u16>(p.y)[row * p.hidden + i]);
        const float scale = scale_of(y.data(), p.hidden, p.eps);
        u16* x = at<u16>(p.x) + row * p.hidden;
        for (u32 i = 0; i < p.hidden; ++i) x[i] = narrow(wide(x[i]) + y[i] * scale * wide(at<u16>(p.weight)[i]));
    }
}

KERNEL(route, RouteParams) {
    std::vector<float> logits(p.experts);
    for (u64 token = 0; token < grid_x; ++token) {
        const u16* x = at<u16>(p.x) + token * p.hidden;
        for (u64 expert = 0; expert < p.experts; ++expert) {
            const u16* row = at<u16>(p.weight) + expert * p.hidden;
            float sum = 0;
            for (u32 i = 0; i < p.hidden; ++i) sum += wide(x[i]) * wide(row[i]);
            logits[expert] = sum + wide(at<u16>(p.bias)[expert]);
        }
        Route* routes = at<Route>(p.routes) + token * p.per_token;
        float best = 0, sum = 0;
        for (u32 n = 0; n < p.per_token; ++n) {
            const u32 expert = std::max_element(logits.begin(), logits.end()) - logits.begin();
            if (n == 0) best = logits[expert];
            routes[n] = {expert, expf(logits[expert] - best)};
            sum += routes[n].weight;
            logits[expert] = -INFINITY;
        }
        for (u32 n = 0; n < p.per_token; ++n) routes[n].weight /= sum;
    }
}
/* Returns a row of x times a matrix [ins, outs], plus a bias. */
static std::vector<float> times(const u16* x, const u16* weight, const u16* bias, u32 ins, u64 outs) {
    std::vector<float> y(outs);
    for (u64 out = 0; bias && out < outs; ++out) y[out] = wide(bias[out]);
    for (u32 i = 0; i < ins; ++i)
        for (u64 out = 0; out < outs; ++out) y[out] += wide(x[i]) * wide(weight[i * outs + out]);
    return y;
}
KERNEL(experts_up, ExpertsParams) {
    for (u64 chosen = 0; chosen < grid_x; ++chosen) {
        const u64 expert = at<Route>(p.routes)[chosen].expert, outs = 2ull * p.outs;
        const auto y = times(at<u16>(p.x) + chosen / p.per_token * p.ins, at<u16>(p.weight) + expert * p.ins * outs, at<u16>(p.bias) + expert * outs, p.ins, outs);
        for (u32 out = 0; out < p.outs; ++out) {
            const float gate = fminf(y[2 * out], 7), up = fminf(fmaxf(y[2 * out + 1], -7), 7);
            at<u16>(p.y)[chosen * p.outs + out] = narrow(gate / (1 + expf(-1.702f * gate)) * (up + 1));
        }
    }
}
KERNEL(experts_down, ExpertsParams) {
    for (u64 token = 0; token < grid_x; ++token) {
        u16* out = at<u16>(p.y) + token * p.outs;
        std::vector<float> sums(p.outs);
        for (u32 i = 0; p.add && i < p.outs; ++i) sums[i] = wide(out[i]);
        for (u64 chosen = token * p.per_token; chosen < (token + 1) * p.per_token; ++chosen) {
            const Route& route = at<Route>(p.routes)[chosen];
            const u16* bias = p.bias ? at<u16>(p.bias) + static_cast<u64>(route.expert) * p.outs : nullptr;
            const auto y = times(at<u16>(p.x) + chosen * p.ins, at<u16>(p.weight) + static_cast<u64>(route.expert) * p.ins * p.outs, bias, p.ins, p.outs);
            for (u32 i = 0; i < p.outs; ++i) sums[i] += route.weight * y[i];
        }
        for (u32 i = 0; i < p.outs; ++i) out[i] = narrow(sums[i]);
    }
}

KERNEL(fold, FoldParams) {
    for (u64 i = 0; i < p.count; ++i) at<u16>(p.matrix)[i] = narrow(wide(at<u16>(p.matrix)[i]) * wide(at<u16>(p.weight)[i % p.cols]));
}
KERNEL(fill, FillParams) {
    for (u64 i = 0; i < p.count; ++i) {
        u64 z = p.seed + (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        at<u16>(p.out)[i] = narrow((static_cast<float>(z >> 40) * 0x1p-24f - 0.5f) * p.scale + p.offset);
    }
}

static u32 ordered(u16 logit) { return logit & 0x8000 ? static_cast<u16>(~logit) : logit | 0x8000u; }
static float gumbel(u64 key, u32 token) {
    u32 h = token * 0x9E3779B9u + static_cast<u32>(key);
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h ^= static_cast<u32>(key >> 32);
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    h ^= h >> 16;
    return -logf(-log1pf(-(h * 0x1p-32f + 0x1p-33f)));
}
KERNEL(sample_filter, SampleParams) {
    for (u32 row = 0; row < grid_x; ++row) {
        const Draw& draw = at<Draw>(p.draws)[row];
        const u16* logits = at<u16>(p.logits) + static_cast<u64>(row) * p.vocab;
        std::vector<u16> order(logits, logits + p.vocab);
        std::sort(order.begin(), order.end(), [](u16 a, u16 b) { return ordered(a) > ordered(b); });
        u32 least = 0;
        if (draw.inverse_temperature > 0) {
            if (draw.top_k > 0 && draw.top_k < p.vocab) least = ordered(order[draw.top_k - 1]);
            if (draw.top_p < 1) {
                const auto weight = [&](u16 x) { return static_cast<u64>(expf((wide(x) - wide(order[0])) * draw.inverse_temperature) * 0x1p32f); };
                u64 total = 0, mass = 0;
                for (u16 x : order) total += ordered(x) >= least ? weight(x) : 0;
                const u64 wanted = std::max<u64>(1, static_cast<u64>(static_cast<double>(draw.top_p) * static_cast<double>(total)));
                for (u16 x : order)
                    if ((mass += weight(x)) >= wanted) {
                        least = ordered(x);
                        break;
                    }
            }
        }
        at<u32>(p.thresholds)[row] = least;
    }
}
KERNEL(sample, SampleParams) {
    for (u32 row = 0; row < grid_y; ++row) {
        const Draw& draw = at<Draw>(p.draws)[row];
        const u16* logits = at<u16>(p.logits) + static_cast<u64>(row) * p.vocab;
        const u32 least = p.thresholds ? at<u32>(p.thresholds)[row] : 0;
        float best = -INFINITY;
        u32 token = 0;
        for (u32 i = 0; i < p.vocab; ++i) {
            if (ordered(logits[i]) < least) continue;
            float score = wide(logits[i]);
            if (draw.inverse_temperature > 0) score = score * draw.inverse_temperature + gumbel(draw.key, i);
            if (score > best) best = score, token = i;
        }
        at<u32>(p.sampled)[row] = token;
        (*at<u32*>(p.host))[p.first + row] = token;
    }
}

static float dot(const float* x, const u16* weight, u32 ins) {
    float sum = 0;
    for (u32 i = 0; i < ins; ++i) sum += x[i] * wide(weight[i]);
    return sum;
}
/* y[rows, outs] = x[rows, ins] * weight[outs, ins]^T, in f32. */
static void skinny(const SkinnyParams& p) {
    for (u64 row = 0; row < p.tokens; ++row) {
        const u16* from = at<u16>(p.x) + static_cast<u64>(p.draws ? at<Draw>(p.draws)[row].row : row) * p.ins;
        std::vector<float> x(p.ins);
        for (u32 i = 0; i < p.ins; ++i) x[i] = wide(from[i]);
        const float scale = p.norm ? scale_of(x.data(), p.ins, p.eps) : 1;
        for (u32 i = 0; p.norm && i < p.ins; ++i) x[i] = wide(narrow(x[i] * wide(at<u16>(p.norm)[i])));
        for (u64 out = 0; out < p.outs; ++out) {
            u16& y = at<u16>(p.y)[row * p.outs + out];
            float sum = scale * dot(x.data(), at<u16>(p.weight) + out * p.ins, p.ins);
            if (p.mode == PRODUCT_ADD) sum += wide(y);
            if (p.mode == PRODUCT_SILU) sum = silu(sum) * scale * dot(x.data(), at<u16>(p.weight) + (p.outs + out) * p.ins, p.ins);
            y = narrow(sum);
        }
    }
}
KERNEL(skinny_1_2, SkinnyParams) { skinny(p); }
KERNEL(skinny_1_4, SkinnyParams) { skinny(p); }
KERNEL(skinny_2_1, SkinnyParams) { skinny(p); }
KERNEL(skinny_2_2, SkinnyParams) { skinny(p); }
KERNEL(skinny_4_1, SkinnyParams) { skinny(p); }
KERNEL(skinny_4_2, SkinnyParams) { skinny(p); }

/* The fake driver stores the matrix's address in the first word of a tensor map. */
static void gemm(const GemmParams& p) {
    for (u64 row = 0; row < p.tokens; ++row) {
        std::vector<float> x(p.ins);
        for (u32 i = 0; i < p.ins; ++i) x[i] = wide(at<u16>(p.x.words[0])[row * p.ins + i]);
        const float scale = p.norm ? scale_of(x.data(), p.ins, p.eps) : 1;
        for (u64 out = 0; out < p.outs; ++out) {
            u16& y = at<u16>(p.y)[row * p.outs + out];
            const u16* weight = at<u16>(p.weight.words[0]);
            float sum = scale * dot(x.data(), weight + out * p.ins, p.ins);
            if (p.mode == PRODUCT_ADD) sum += wide(y);
            if (p.mode == PRODUCT_SILU) sum = silu(sum) * scale * dot(x.data(), weight + (p.outs + out) * p.ins, p.ins);
            y = narrow(sum);
        }
    }
}
KERNEL(gemm_16_64, GemmParams) { gemm(p); }
KERNEL(gemm_16_128, GemmParams) { gemm(p); }
KERNEL(gemm_32_64, GemmParams) { gemm(p); }
KERNEL(gemm_32_128, GemmParams) { gemm(p); }
KERNEL(gemm_64_64, GemmParams) { gemm(p); }
KERNEL(gemm_64_128, GemmParams) { gemm(p); }

/* ---- cublasLt: only preferences are freed ----------------------------------------------------------------------- */
struct Layout { u64 rows, cols; };
/* This struct has no padding, because the driver searches all of its words for addresses. */
struct Product { u64 weight, x, y, outs, ins, rows; float beta; u32 none; };
static void multiply(const void* params, u32, u32) {
    const Product& p = *static_cast<const Product*>(params);
    std::vector<float> x(p.ins);
    for (u64 row = 0; row < p.rows; ++row) {
        for (u64 i = 0; i < p.ins; ++i) x[i] = wide(at<u16>(p.x)[row * p.ins + i]);
        for (u64 out = 0; out < p.outs; ++out) {
            u16& y = at<u16>(p.y)[row * p.outs + out];
            const float sum = dot(x.data(), at<u16>(p.weight) + out * p.ins, p.ins);
            y = narrow(p.beta != 0 ? sum + p.beta * wide(y) : sum);
        }
    }
}
API int cublasLtCreate(void** handle) { return *handle = malloc(1), 0; }
API int cublasLtDestroy(void*) { return 0; }
API int cublasLtMatmulDescCreate(void** description, int, int) { return *description = malloc(1), 0; }
API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatrixLayoutCreate(Layout** layout, int, u64 rows, u64 cols, long long) { return *layout = new Layout{rows, cols}, 0; }
API int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = malloc(1), 0; }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceDestroy(void* preference) { return free(preference), 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, Layout*, Layout*, Layout*, Layout*, void*, int most, void*, int* found) {
    int device, count;
    const char* overflows = getenv("FAKE_CUBLASLT_OVERFLOWS");
    const bool over = overflows && sscanf(overflows, "%d:%d", &device, &count) == 2 && count == most && is_bound(device);
    return *found = over ? most + 1 : 1, 0;
}
API int cublasLtMatmul(void*, void*, const float*, u64 weight, Layout* weights, u64 x, Layout* xs, const float* beta, u64, Layout*, u64 y, Layout*,
                       const void*, void*, size_t, void* stream) {
    const Product product = {weight, x, y, weights->cols, weights->rows, xs->cols, *beta, 0};
    using Launch = int (*)(void (*)(const void*, u32, u32), const void*, size_t, u32, u32, void*);
    static const Launch launch = reinterpret_cast<Launch>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_ask"));
    return launch ? launch(multiply, &product, sizeof product, 0, 0, stream) : 13;
}
