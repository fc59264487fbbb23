// What the host's kernels are given, each by value. The same structs stand in src/gpu/kernels.rs, with the same sizes.
#pragma once
#define DEVICE static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GEN_SIZE(T, bytes) static_assert(sizeof(T) == bytes, #T);

// One token to sample. Greedy where inverse_temperature is 0; top_k 0 and top_p 1 keep all tokens.
struct Draw {
    u32 row;  // of the step's tokens: the one whose logits are drawn from
    float inverse_temperature;
    float top_p;
    u32 top_k;
    u64 key;    // of the noise: seed, sample and place of the token, mixed
    u64 shape;  // 0: none; else its Shape's index, plus 1
};
GEN_SIZE(Draw, 32)

// Two pieces, in units of 16 bytes: `first` from the start, `second` from unit `second_at`.
struct LoadStepParams {
    u64 source, target;
    u32 first, second_at, second, reserved;
};
GEN_SIZE(LoadStepParams, 32)

struct EmbedParams {
    u64 table;    // bf16 [vocab, hidden]
    u64 tokens;   // i32 [tokens]: a token, or -1 - i for the token that the step before sampled as its draw i
    u64 sampled;  // u32 [draws]
    u64 x;        // bf16 [tokens, hidden]
    u64 weight;   // bf16 [hidden]
    u64 normed;   // bf16 [tokens, hidden]
    u32 hidden;
    float eps;
    float scale;  // of the table's rows
    u32 reserved;
};
GEN_SIZE(EmbedParams, 64)

struct NormParams {
    u64 x, weight, normed;
    u64 draws;  // Draw [rows]: row i is x's row draws[i].row; 0: row i
    u32 hidden;
    float eps;
};
GEN_SIZE(NormParams, 40)

struct RopeStoreParams {
    u64 qkv;          // bf16 [tokens, q_heads + 2 * kv_heads, head_dim]
    u64 positions;    // u32 [tokens]
    u64 slots;        // i32 or i64 [tokens]
    u64 q_norm;       // bf16 [head_dim]; 0: none
    u64 k_norm;       // bf16 [head_dim]; 0: none
    u64 frequencies;  // f32 [head_dim / 2]
    u64 k_pool, v_pool, page_stride, slot_stride;  // bytes
    u32 slot_bytes, page_size, tokens, q_heads, kv_heads;
    u32 heads_each;  // heads that one warp takes
    float eps;
    u32 reserved;
};
GEN_SIZE(RopeStoreParams, 112)

struct BiasParams {
    u64 y;     // bf16 [rows, width]
    u64 bias;  // bf16 [width]
    u32 width, reserved;
};
GEN_SIZE(BiasParams, 24)

struct NormAddParams {
    u64 x, y;    // bf16 [rows, hidden]
    u64 weight;  // bf16 [hidden]
    u32 hidden;
    float eps;
};
GEN_SIZE(NormAddParams, 32)

// The most experts of a layer.
#define ROUTED_MAX 256

// An expert of a token.
struct Route {
    u32 expert;
    float weight;
};
GEN_SIZE(Route, 8)

struct RouteParams {
    u64 x;       // bf16 [tokens, hidden]
    u64 weight;  // bf16 [experts, hidden]
    u64 bias;    // bf16 [experts]
    u64 routes;  // Route [tokens, per_token]
    u32 hidden, experts, per_token, reserved;
};
GEN_SIZE(RouteParams, 48)

struct ExpertsParams {
    u64 x;       // experts_up: bf16 [tokens, ins]; experts_down: bf16 [tokens, per_token, ins]
    u64 weight;  // experts_up: bf16 [experts, ins, outs, gate and up]; experts_down: bf16 [experts, ins, outs]
    u64 bias;    // experts_up: bf16 [experts, outs, gate and up]; experts_down: bf16 [experts, outs]; 0: none
    u64 routes;  // Route [tokens, per_token]
    u64 y;       // experts_up: bf16 [tokens, per_token, outs]; experts_down: bf16 [tokens, outs]
    u32 ins, outs, per_token;
    u32 add;  // experts_down: whether y is added to
};
GEN_SIZE(ExpertsParams, 56)

struct SiluMulParams {
    u64 gate_up, out;  // bf16 [tokens, 2 * width], [tokens, width]
    u32 width, reserved;
};
GEN_SIZE(SiluMulParams, 24)

struct SampleParams {
    u64 logits;      // bf16 [rows, vocab]
    u64 draws;       // Draw [rows]
    u64 thresholds;  // u32 [rows]: the least ordered logit that is kept; 0: none is filtered
    u64 best;        // u64 [rows]; zero between launches
    u64 counters;    // u32 [rows]; zero between launches
    u64 sampled;     // u32 [rows]
    u64 host;        // address of the address of u32 [draws] in pinned host memory
    u32 vocab;
    u32 first;  // the row's number among the draws is `first` more
};
GEN_SIZE(SampleParams, 64)

// The largest vocabulary that sample_shaped serves.
#define SHAPED_VOCAB_MAX 327680

// What changes the logits of a draw, and which of them min-p keeps.
struct Shape {
    u32 start, count;  // of its edits
    u32 only;          // whether tokens without an edit are left out
    float depth;       // the least logit that is kept is so far below the greatest; infinity: all are
};
GEN_SIZE(Shape, 16)

// Of src/shaping.rs: `before` is added to a logit, `repetition` divides or multiplies it, `after` is added.
struct Edit {
    u32 token;
    float before, repetition, after;
};
GEN_SIZE(Edit, 16)

struct ShapedParams {
    u64 logits;   // bf16 [rows, vocab]
    u64 draws;    // Draw [rows]
    u64 shapes;   // Shape [..]
    u64 edits;    // Edit [..]
    u64 sampled;  // u32 [rows]
    u64 host;     // address of the address of u32 [draws] in pinned host memory
    u32 vocab;
    u32 first;  // the row's number among the draws is `first` more
};
GEN_SIZE(ShapedParams, 56)

// Most blocks of sum_ranks, and most ranks.
#define SUM_BLOCKS 64
#define RANKS_MAX 8

struct SumRanksParams {
    u64 x;                   // bf16 [units, 8]
    u64 y;                   // bf16 [units, 8]: this rank's part of what is added
    u64 inboxes[RANKS_MAX];  // of each rank, bf16 [2, ranks, capacity, 8], as this one's GPU reaches it
    u64 turns;               // u32 [SUM_BLOCKS]: how many sums each block has made
    u64 reserved;
    u32 units;     // of 16 bytes
    u32 capacity;  // most units
    u32 rank, ranks;
};
GEN_SIZE(SumRanksParams, 112)

struct FillParams {
    u64 out;  // bf16 [count]
    u64 count, seed;
    float scale, offset;
};
GEN_SIZE(FillParams, 32)

struct FoldParams {
    u64 matrix;  // bf16 [.., cols]
    u64 weight;  // bf16 [cols]
    u64 count;
    u32 cols, reserved;
};
GEN_SIZE(FoldParams, 32)

// What a product does with its sums.
#define PRODUCT_SET 0
#define PRODUCT_ADD 1
#define PRODUCT_SILU 2

struct SkinnyParams {
    u64 weight;  // bf16 [outs, ins]; silu: [2, outs, ins], of gate and up
    u64 x;       // bf16 [.., ins]
    u64 y;       // bf16 [tokens, outs]
    u64 norm;    // bf16 [ins]: x is normed with this weight first; 0: it is not
    u64 draws;   // Draw [tokens]: row i is x's row draws[i].row; 0: row i
    u64 next;    // what the product after this one reads first
    u32 outs, ins, tokens, mode;
    float eps;
    u32 next_lines;  // of 128 bytes
};
GEN_SIZE(SkinnyParams, 72)

// What the copy engine knows of a matrix; the driver makes it.
struct alignas(64) TensorMap {
    u64 words[16];
};

struct GemmParams {
    TensorMap weight;  // bf16 [outs / 8, 1 or (silu) 2, 8, ins], boxes of as many rows as a CTA takes, by 64
    TensorMap x;       // bf16 [tokens, ins], boxes of as many rows as a CTA takes, by 64
    u64 y;             // bf16 [tokens, outs]
    u32 outs, ins, tokens, mode;
    u32 norm;  // whether x is to be normed (with no weight)
    float eps;
    u32 stages;  // of the ring in dynamic shared memory: there is room for it, for f32 [TOKENS, OUTS + 4], and 1,024 bytes
    u32 reserved[7];
};
GEN_SIZE(GemmParams, 320)
