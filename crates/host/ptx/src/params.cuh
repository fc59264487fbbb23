// Parameters of the host's kernels, passed by value. src/gpu/kernels.rs contains the same structs with the same sizes.
#pragma once
#define DEVICE static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GEN_SIZE(T, bytes) static_assert(sizeof(T) == bytes, #T);

// One token to sample. Greedy if inverse_temperature is 0; top_k 0 and top_p 1 keep all tokens.
struct Draw {
    u32 row;  // index of the step's token whose logits the kernel samples
    float inverse_temperature;
    float top_p;
    u32 top_k;
    u64 key;    // key of the noise: a hash of seed, sample and the new token's index
    u64 shape;  // index of its Shape, plus 1; 0: no Shape
};
GEN_SIZE(Draw, 32)

// Two ranges, in units of 16 bytes: `first` units from the start, and `second` units from unit `second_at`.
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
    float scale;  // factor of the table's rows
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

// Maximum number of experts that `route` supports.
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
    u64 bias;    // experts_up: bf16 [experts, outs, gate and up]; experts_down: bf16 [experts, outs], 0: none
    u64 routes;  // Route [tokens, per_token]
    u64 y;       // experts_up: bf16 [tokens, per_token, outs]; experts_down: bf16 [tokens, outs]
    u32 ins, outs, per_token;
    u32 add;  // experts_down: whether to add to y
};
GEN_SIZE(ExpertsParams, 56)

struct SiluMulParams {
    u64 gate_up, out;  // bf16 [tokens, 2 * width], [tokens, width]
    u32 width, reserved;
};
GEN_SIZE(SiluMulParams, 24)

// In the structs of Gated DeltaNet, `width` is the stride in elements of the rows of the layer's projection, which contain q, k, v,
// z, a and b. `channels` is the width of q, k and v. A slot is a place of states; `states` is the address of slot 0's part.
struct DeltaConvParams {
    u64 x;              // bf16 [tokens, width], from q on
    u64 weight;         // bf16 [channels, 4]
    u64 out;            // bf16 [tokens, channels]
    u64 states;         // bf16 [3, channels] in each slot: the latest inputs, the oldest first
    u64 stride;         // bytes between slots
    u64 reads, writes;  // i32 [rows]: slots; a negative slot to write: the row is padding
    u64 starts;         // u32 [rows + 1]: the first token of each row, and the number of tokens
    u32 width, channels, rows;
    u32 tile;  // tokens of a CTA
};
GEN_SIZE(DeltaConvParams, 80)

struct DeltaUpdateParams {
    u64 x;              // bf16 [tokens, channels]: output of delta_conv
    u64 a, b;           // bf16 [tokens, width], from a and from b on
    u64 rate, bias;     // f32 [value_heads]: -exp(A_log), dt_bias
    u64 states;         // f32 [value_heads, K, value_dim] in each slot
    u64 stride;         // bytes between slots
    u64 reads, writes;  // as in DeltaConvParams
    u64 starts;         // as in DeltaConvParams
    u64 out;            // bf16 [tokens, value_heads, value_dim]
    u32 width, channels, key_heads, value_heads, value_dim;
    float scale;  // factor of q
};
GEN_SIZE(DeltaUpdateParams, 112)

struct DeltaGateParams {
    u64 x;       // bf16 [tokens, value_heads, value_dim]
    u64 z;       // bf16 [tokens, width], from z on
    u64 weight;  // bf16 [value_dim]
    u32 tokens, width, value_heads, value_dim;
    float eps;
    u32 reserved;
};
GEN_SIZE(DeltaGateParams, 48)

struct GateParams {
    u64 x;      // bf16 [tokens, width]
    u64 gates;  // bf16 [tokens, stride]
    u32 width, stride;
};
GEN_SIZE(GateParams, 24)

struct SampleParams {
    u64 logits;      // bf16 [rows, vocab]
    u64 draws;       // Draw [rows]
    u64 thresholds;  // u32 [rows]: the least `ordered` logit to keep, or 0 to keep all; 0: no row has a threshold
    u64 best;        // u64 [rows]; zero between launches
    u64 counters;    // u32 [rows]; zero between launches
    u64 sampled;     // u32 [rows]
    u64 host;        // address of the address of u32 [draws] in pinned memory
    u32 vocab;
    u32 first;  // index of row 0 among the step's draws
};
GEN_SIZE(SampleParams, 64)

// The largest vocabulary that sample_shaped supports.
#define SHAPED_VOCAB_MAX 327680

// The edits of a draw's logits, and its min-p.
struct Shape {
    u32 start, count;  // range of its edits
    u32 only;          // whether to exclude tokens without an edit
    float depth;       // min-p keeps the logits from the greatest minus `depth` on; infinity: all
};
GEN_SIZE(Shape, 16)

// An Edit of src/shaping.rs: adds `before` to a logit. Then divides a positive sum by `repetition`, or multiplies any other sum
// by `repetition`. Then adds `after`.
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
    u64 host;     // address of the address of u32 [draws] in pinned memory
    u32 vocab;
    u32 first;  // index of row 0 among the step's draws
};
GEN_SIZE(ShapedParams, 56)

// Maximum numbers of blocks of sum_ranks, and of ranks.
#define SUM_BLOCKS 64
#define RANKS_MAX 8

struct SumRanksParams {
    u64 x;                   // bf16 [units, 8]
    u64 y;                   // bf16 [units, 8]: this rank's summand
    u64 inboxes[RANKS_MAX];  // the inbox of each rank, bf16 [2, ranks, capacity, 8], in the address space of this rank
    u64 turns;               // u32 [SUM_BLOCKS]: for each block, the number of sums in which it had units
    u64 reserved;
    u32 units;     // number of units of 16 bytes
    u32 capacity;  // maximum of `units`
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

// Operation on the sums of a product: y = sum, y += sum, y = silu(gate) * up.
#define PRODUCT_SET 0
#define PRODUCT_ADD 1
#define PRODUCT_SILU 2

struct SkinnyParams {
    u64 weight;  // bf16 [outs, ins]; for silu [2, outs, ins]: gate, then up
    u64 x;       // bf16 [.., ins]
    u64 y;       // bf16 [tokens, outs]
    u64 norm;    // bf16 [ins]: weight of the RMSNorm before the product; 0: no norm
    u64 draws;   // Draw [tokens]: row i is x's row draws[i].row; 0: row i
    u64 next;    // start of the next product's matrix, to prefetch
    u32 outs, ins, tokens, mode;
    float eps;
    u32 next_lines;  // number of lines of 128 bytes to prefetch
};
GEN_SIZE(SkinnyParams, 72)

// A CUtensorMap: the driver's description of a matrix for the TMA.
struct alignas(64) TensorMap {
    u64 words[16];
};

struct GemmParams {
    TensorMap weight;  // bf16 [outs / 8, 1 or (silu) 2, 8, ins], boxes of a CTA's rows by 64 columns
    TensorMap x;       // bf16 [tokens, ins], boxes of a CTA's rows by 64 columns
    u64 y;             // bf16 [tokens, outs]
    u32 outs, ins, tokens, mode;
    u32 norm;  // whether to norm x, without a weight
    float eps;
    u32 stages;  // stages of the ring; dynamic shared memory: the larger of ring and f32 [TOKENS, OUTS + 4], plus 1,024 bytes
    u32 reserved[7];
};
GEN_SIZE(GemmParams, 320)
