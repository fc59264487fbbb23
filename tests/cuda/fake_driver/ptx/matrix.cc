/* Products of matrices (mma, wgmma), moves of their tiles between shared memory and registers (ldmatrix, stmatrix), and
 * transposes of tiles in registers (movmatrix).
 *
 * A tile is 8 rows of 8 halves. A register of lane 4 r + c contains columns 2 c and 2 c + 1 of row r of a tile.
 * Therefore the register's column in the register file contains the tile row by row. A result has 16 rows and 8
 * columns; lane 4 r + c has columns 2 c and 2 c + 1 of rows r and r + 8 in four registers.
 *
 * An asynchronous product (wgmma) is computed when its warp waits for it, so shared memory that is overwritten earlier
 * changes the result. If A is in registers, it is copied at once. Each warp of a warpgroup computes 16 of the 64
 * rows. */
#include "forms.h"
#include "numbers.h"

namespace ptx {
namespace {
template <bool BF16> inline float number(u32 bits) { return BF16 ? bf16_to_float(bits) : half_to_float(bits); }

// ---- products ---------------------------------------------------------------------------------------------------------

using Row = float __attribute__((vector_size(32)));
struct A { alignas(64) float at[16][16]; };            // [row][k]
struct B { alignas(64) Row at[16]; };                  // [k][column]
struct C { alignas(64) Row at[16]; };                  // [row][column]

void multiply(const A& a, const B& b, C& c) {
    for (u32 row = 0; row < 16; row += 4) {
        Row sums[4] = {c.at[row], c.at[row + 1], c.at[row + 2], c.at[row + 3]};
        for (u32 k = 0; k < 16; ++k)
            for (u32 i = 0; i < 4; ++i) sums[i] += a.at[row + i][k] * b.at[k];
        for (u32 i = 0; i < 4; ++i) c.at[row + i] = sums[i];
    }
}
/* Reads A from four tiles: rows 0 to 7 and 8 to 15 for the first 8 k, then the same rows for the last 8 k. */
template <bool BF16> void read_a(const u32* const tiles[4], A& a) {
    for (u32 tile = 0; tile < 4; ++tile) {
        u16 halves[64];
        memcpy(halves, tiles[tile], sizeof halves);
        float numbers[64];
        for (u32 i = 0; i < 64; ++i) numbers[i] = number<BF16>(halves[i]);
        for (u32 row = 0; row < 8; ++row) memcpy(&a.at[tile % 2 * 8 + row][tile / 2 * 8], numbers + row * 8, 32);
    }
}
/* Reads B from two tiles, for the first and the last 8 k. A row of a tile is a column of B. */
template <bool BF16> void read_b(const u16* const tiles[2], B& b) {
    for (u32 tile = 0; tile < 2; ++tile) {
        float numbers[64];
        for (u32 i = 0; i < 64; ++i) numbers[i] = number<BF16>(tiles[tile][i]);
        for (u32 k = 0; k < 8; ++k)
            for (u32 column = 0; column < 8; ++column) b.at[tile * 8 + k][column] = numbers[column * 8 + k];
    }
}
void read_c(const float* const registers[4], C& c) {
    float* to = reinterpret_cast<float*>(c.at);
    for (u32 half = 0; half < 2; ++half)
        for (u32 lane = 0; lane < LANES; ++lane)
            to[half * 64 + lane * 2] = registers[half * 2][lane], to[half * 64 + lane * 2 + 1] = registers[half * 2 + 1][lane];
}
void write_c(const C& c, float* const registers[4]) {
    const float* from = reinterpret_cast<const float*>(c.at);
    for (u32 half = 0; half < 2; ++half)
        for (u32 lane = 0; lane < LANES; ++lane)
            registers[half * 2][lane] = from[half * 64 + lane * 2], registers[half * 2 + 1][lane] = from[half * 64 + lane * 2 + 1];
}

template <bool BF16> Outcome mma(Warp& warp, const Instruction& in) {
    A a;
    B b;
    C c;
    const u32* const as[4] = {column<u32>(warp, in.at[4]), column<u32>(warp, in.at[5]), column<u32>(warp, in.at[6]), column<u32>(warp, in.at[7])};
    const u16* const bs[2] = {column<u16>(warp, in.at[8]), column<u16>(warp, in.at[9])};
    const float* const cs[4] = {column<float>(warp, in.at[10]), column<float>(warp, in.at[11]), column<float>(warp, in.at[12]), column<float>(warp, in.at[13])};
    float* const ds[4] = {column<float>(warp, in.at[0]), column<float>(warp, in.at[1]), column<float>(warp, in.at[2]), column<float>(warp, in.at[3])};
    read_a<BF16>(as, a), read_b<BF16>(bs, b), read_c(cs, c);
    multiply(a, b, c);
    write_c(c, ds);
    return Outcome::NEXT;
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

void transpose(u16* tile) {
    for (u32 row = 0; row < 8; ++row)
        for (u32 column = row + 1; column < 8; ++column) std::swap(tile[row * 8 + column], tile[column * 8 + row]);
}
/* Returns the address that a lane supplies; lanes 8 i to 8 i + 7 supply the rows of tile i. `at` are the words of an
   address operand: see Addresses in memory.cc. */
u64 row_address(Warp& warp, const u32* at, u32 lane) {
    const i64 offset = static_cast<i32>(at[2] << 1) >> 1;
    return at[1] ? column<u64>(warp, at[0])[lane] + offset : static_cast<u32>(column<u32>(warp, at[0])[lane] + offset);
}
template <u32 COUNT, bool TRANSPOSED> Outcome load_matrix(Warp& warp, const Instruction& in) {
    alignas(64) u16 tiles[COUNT][64];
    for (u32 lane = 0; lane < 8 * COUNT; ++lane) {
        const u64 address = row_address(warp, in.at + COUNT, lane);
        const u8* row = shared_at(warp, in, lane, address, 16);
        touch(warp, in, lane, address, 16, Access::READ);
        memcpy(tiles[lane / 8] + lane % 8 * 8, row, 16);
    }
    for (u32 i = 0; i < COUNT; ++i) {
        if (TRANSPOSED) transpose(tiles[i]);
        memcpy(column<u32>(warp, in.at[i]), tiles[i], sizeof tiles[i]);
    }
    return Outcome::NEXT;
}
template <u32 COUNT, bool TRANSPOSED> Outcome store_matrix(Warp& warp, const Instruction& in) {
    for (u32 i = 0; i < COUNT; ++i) {
        u16 tile[64];
        memcpy(tile, column<u32>(warp, in.at[3 + i]), sizeof tile);
        if (TRANSPOSED) transpose(tile);
        for (u32 row = 0; row < 8; ++row) {
            const u32 lane = i * 8 + row;
            const u64 address = row_address(warp, in.at, lane);
            memcpy(shared_at(warp, in, lane, address, 16), tile + row * 8, 16), touch(warp, in, lane, address, 16, Access::WRITE);
        }
    }
    return Outcome::NEXT;
}
Outcome move_matrix(Warp& warp, const Instruction& in) {
    u16 tile[64];
    memcpy(tile, column<u32>(warp, in.at[1]), sizeof tile);
    transpose(tile);
    memcpy(column<u32>(warp, in.at[0]), tile, sizeof tile);
    return Outcome::NEXT;
}

// ---- asynchronous products --------------------------------------------------------------------------------------------

/* A matrix in shared memory, decoded from a descriptor of 64 bits: its start, two distances between its parts, and the
   swizzle, which spreads rows over the banks. */
struct Matrix {
    u64 start, leading, stride;
    u32 units, mixed;  // adjacent 16-byte units of a row; mask of the row's bits that are mixed into the unit's number
    Matrix(Warp& warp, const Instruction& in, u64 bits) : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
        const u32 swizzle = bits >> 62;  // none, 128, 64, 32 bytes
        units = swizzle == 0 ? 1 : 16u >> swizzle, mixed = units - 1;
        if (bits >> 49 & 7) fail(warp, in, 0, "a matrix with a base offset, which is not supported");
    }
    u64 mix(u64 address) const { return address ^ (address >> 7 & mixed) << 4; }
    /* Returns the address of the 8 values of row `row` that begin at k = 8 `eighth`. */
    u64 k_major(u32 row, u32 eighth) const {
        const u64 across = mixed == 0 ? eighth * leading : eighth * 16;
        return mix(start + row / 8 * stride + row % 8 * 16 * units + across);
    }
    /* Returns the address of the values of rows `row` to `row` + 7 at `k`. */
    u64 row_major(u32 row, u32 k) const {
        if (mixed == 0) return start + row / 8 * stride + k / 8 * leading + k % 8 * 16;
        const u32 unit = row / 8;
        return mix(start + unit / units * leading + unit % units * 16 + k / 8 * stride + k % 8 * 16 * units);
    }
};

/* Reads rows `at` to `at` + 7 of A, or these columns of B, for all 16 k. They become the rows of two tiles. */
void read_tiles(Warp& warp, const Instruction& in, const Matrix& matrix, bool row_major, u32 at, u16 tiles[2][64]) {
    for (u32 eighth = 0; eighth < 2; ++eighth) {
        for (u32 i = 0; i < 8; ++i) {
            const u64 address = row_major ? matrix.row_major(at, eighth * 8 + i) : matrix.k_major(at + i, eighth);
            memcpy(tiles[eighth] + i * 8, shared_at(warp, in, 0, address, 16), 16), touch(warp, in, 0, address, 16, Access::READ);
        }
        if (row_major) transpose(tiles[eighth]);
    }
}
/* Operands: N / 2 sums, then A (a descriptor or four registers), B, and whether to add to the sums. Then two signs,
 * which are ignored, and flags of the matrices that are row major. */
template <bool BF16, u32 N, bool REGISTERS> void multiply_now(Warp& warp, const AsyncProduct& product) {
    const Instruction& in = *product.instruction;
    A a;
    const u32 row_major = in.number;
    if (REGISTERS) {
        const u32* const tiles[4] = {product.a[0], product.a[1], product.a[2], product.a[3]};
        read_a<BF16>(tiles, a);
    } else {
        const Matrix matrix(warp, in, product.a_matrix);
        u16 halves[2][2][64];
        const u32 rows = warp.index % 4 * 16;
        read_tiles(warp, in, matrix, row_major & 2, rows, halves[0]), read_tiles(warp, in, matrix, row_major & 2, rows + 8, halves[1]);
        u32 words[4][32];
        for (u32 tile = 0; tile < 4; ++tile) memcpy(words[tile], halves[tile % 2][tile / 2], sizeof words[tile]);
        const u32* const tiles[4] = {words[0], words[1], words[2], words[3]};
        read_a<BF16>(tiles, a);
    }
    const Matrix matrix(warp, in, product.b_matrix);
    for (u32 n = 0; n < N / 8; ++n) {
        float* const sums[4] = {column<float>(warp, in.at[n * 4]), column<float>(warp, in.at[n * 4 + 1]), column<float>(warp, in.at[n * 4 + 2]),
                                column<float>(warp, in.at[n * 4 + 3])};
        u16 halves[2][64];
        read_tiles(warp, in, matrix, row_major & 1, n * 8, halves);
        const u16* const tiles[2] = {halves[0], halves[1]};
        B b;
        C c = {};
        read_b<BF16>(tiles, b);
        if (product.add) read_c(sums, c);
        multiply(a, b, c);
        write_c(c, sums);
    }
}
template <bool BF16, u32 N, bool REGISTERS> Outcome begin_product(Warp& warp, const Instruction& in) {
    const u32* at = in.at + N / 2;
    AsyncProduct& product = warp.products.emplace_back();
    product.run = multiply_now<BF16, N, REGISTERS>, product.instruction = &in, product.group = warp.product_groups;
    if (warp.active != ~0u) fail(warp, in, 0, "wgmma of a part of a warp");
    for (u32 i = 0; REGISTERS && i < 4; ++i) memcpy(product.a[i], column<u32>(warp, at[i]), sizeof product.a[i]);
    if (!REGISTERS) product.a_matrix = *column<u64>(warp, at[0]);
    at += REGISTERS ? 4 : 1;
    product.b_matrix = *column<u64>(warp, at[0]), product.add = warp.predicates[at[1]] & 1;
    if (early) product.run(warp, product), warp.products.pop_back();
    return Outcome::NEXT;
}
Outcome commit_products(Warp& warp, const Instruction&) { return ++warp.product_groups, Outcome::NEXT; }
Outcome wait_products(Warp& warp, const Instruction& in) {
    size_t done = 0;
    for (; done < warp.products.size() && warp.products[done].group + in.number < warp.product_groups; ++done)
        warp.products[done].run(warp, warp.products[done]);
    warp.products.erase(warp.products.begin(), warp.products.begin() + done);
    return Outcome::NEXT;
}
Outcome fence_products(Warp&, const Instruction&) { return Outcome::NEXT; }

template <bool BF16, u32 N> void add_product(Forms& forms) {
    const std::string type = BF16 ? "bf16" : "f16", name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(N) + "k16.f32." + type + "." + type;
    const std::string sums = "+4*" + std::to_string(N / 2);
    forms.push_back({name, sums + " 8 8 p . . ## ##", begin_product<BF16, N, false>, Together::WARP});
    forms.push_back({name + " registers", sums + " 4*4 8 p . . ##", begin_product<BF16, N, true>, Together::WARP});
}
}  // namespace

void add_matrix(Forms& forms) {
    const Together W = Together::WARP;
    forms.insert(forms.end(), {
        {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "=4*4 4*4 4*2 4*4", mma<false>, W},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "=4*4 4*4 4*2 4*4", mma<true>, W},
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "=4*4 @", load_matrix<4, false>, W},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "=4*4 @", load_matrix<4, true>, W},
        {"ldmatrix.sync.aligned.m8n8.x2.shared.b16", "=4*2 @", load_matrix<2, false>, W},
        {"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", "=4*2 @", load_matrix<2, true>, W},
        {"stmatrix.sync.aligned.m8n8.x4.shared.b16", "@ 4*4", store_matrix<4, false>, W},
        {"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "@ 4*4", store_matrix<4, true>, W},
        {"movmatrix.sync.aligned.m8n8.trans.b16", "=4 4", move_matrix, W},
        {"wgmma.fence.sync.aligned", "", fence_products, W},
        {"wgmma.commit_group.sync.aligned", "", commit_products, W},
        {"wgmma.wait_group.sync.aligned", "#", wait_products, W},
    });
    add_product<false, 16>(forms), add_product<false, 32>(forms), add_product<false, 64>(forms), add_product<false, 128>(forms);
    add_product<false, 256>(forms), add_product<true, 16>(forms), add_product<true, 32>(forms), add_product<true, 64>(forms);
    add_product<true, 128>(forms), add_product<true, 256>(forms);
}
}  // namespace ptx
