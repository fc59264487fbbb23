/* Assignment of columns to registers. PTX has thousands of registers, most of which are written once, and few are live
 * at the same time. A register has a column from the first instruction where it is live to the last (linear scan).
 * This keeps a warp's register file so small that it stays in the processor's cache.
 *
 * Lanes of a warp may be at different instructions. This is safe, because each lane has its own place in a column. */
#include <algorithm>
#include "program.h"

namespace ptx {
namespace {
using Bits = std::vector<u64>;
bool has(const Bits& bits, u32 i) { return bits[i / 64] >> i % 64 & 1; }
void insert(Bits& bits, u32 i) { bits[i / 64] |= 1ull << i % 64; }

struct Block {
    u32 first, end, next[2], next_count;
    Bits read, written, live_in, live_out;  // read: registers that the block reads before it writes them
};

std::vector<Block> find_blocks(const Draft& draft, const std::vector<Instruction>& code) {
    const u32 count = static_cast<u32>(code.size());
    std::vector<bool> starts(count + 1);
    starts[0] = true;
    for (u32 i = 0; i < count; ++i)
        if (draft.lines[i].branches || draft.lines[i].ends) {
            starts[i + 1] = true;
            if (draft.lines[i].branches) starts[code[i].target] = true;
        }
    std::vector<Block> blocks;
    std::vector<u32> block_of(count + 1);
    for (u32 i = 0; i < count; ++i) {
        if (starts[i]) blocks.push_back({i, i, {}, 0, {}, {}, {}, {}});
        blocks.back().end = i + 1, block_of[i] = static_cast<u32>(blocks.size() - 1);
    }
    for (Block& block : blocks) {
        const u32 last = block.end - 1;
        if (draft.lines[last].branches && code[last].target < count) block.next[block.next_count++] = block_of[code[last].target];
        if (!draft.lines[last].ends && block.end < count) block.next[block.next_count++] = block_of[block.end];
    }
    return blocks;
}

void find_live(const Draft& draft, std::vector<Block>& blocks) {
    const size_t words = draft.widths.size() / 64 + 1;
    for (Block& block : blocks) {
        block.read.resize(words), block.written.resize(words), block.live_in.resize(words), block.live_out.resize(words);
        auto reads = [&](u32 index) {
            if (!has(block.written, index)) insert(block.read, index);
        };
        for (u32 i = block.first; i < block.end; ++i) {
            const Draft::Line& line = draft.lines[i];
            for (u32 k = line.first; k < line.first + line.count; ++k)
                if (const Draft::Operand& operand = draft.operands[k]; operand.read && !operand.predicate) reads(operand.index);
            if (line.waits)
                for (u32 index : draft.late) reads(index);
            for (u32 k = line.first; k < line.first + line.count; ++k)
                if (const Draft::Operand& operand = draft.operands[k]; operand.written && !operand.predicate) insert(block.written, operand.index);
        }
        block.live_in = block.read;
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (auto block = blocks.rbegin(); block != blocks.rend(); ++block)
            for (size_t word = 0; word < words; ++word) {
                u64 out = 0;
                for (u32 k = 0; k < block->next_count; ++k) out |= blocks[block->next[k]].live_in[word];
                const u64 in = block->read[word] | (out & ~block->written[word]);
                changed |= in != block->live_in[word];
                block->live_out[word] = out, block->live_in[word] = in;
            }
    }
}
}  // namespace

u32 assign_columns(const Draft& draft, const std::vector<Instruction>& code, u32 from, std::vector<u32>& columns) {
    std::vector<Block> blocks = find_blocks(draft, code);
    find_live(draft, blocks);
    struct Live { u32 first = ~0u, last = 0, index = 0; };
    std::vector<Live> lives(draft.widths.size());
    auto lives_at = [&](u32 index, u32 place) {
        lives[index].first = std::min(lives[index].first, place), lives[index].last = std::max(lives[index].last, place);
    };
    for (const Block& block : blocks) {
        for (u32 word = 0; word < block.live_in.size(); ++word) {
            for (u64 rest = block.live_in[word]; rest; rest &= rest - 1) lives_at(word * 64 + __builtin_ctzll(rest), block.first);
            for (u64 rest = block.live_out[word]; rest; rest &= rest - 1) lives_at(word * 64 + __builtin_ctzll(rest), block.end - 1);
        }
        for (u32 i = block.first; i < block.end; ++i) {
            const Draft::Line& line = draft.lines[i];
            for (u32 k = line.first; k < line.first + line.count; ++k)
                if (!draft.operands[k].predicate) lives_at(draft.operands[k].index, i);
            if (line.waits)
                for (u32 index : draft.late) lives_at(index, i);
        }
    }
    for (u32 i = 0; i < lives.size(); ++i) lives[i].index = i;
    std::sort(lives.begin(), lives.end(), [](const Live& a, const Live& b) { return a.first != b.first ? a.first < b.first : a.index < b.index; });

    // `free`: the free columns, by width. `used`: a heap of the columns in use; the one that becomes free first is on top.
    columns.assign(draft.widths.size(), 0);
    std::vector<u32> free[9];
    std::vector<std::pair<u32, u32>> used;
    u32 end = (from + 63) / 64 * 64;
    for (const Live& live : lives) {
        if (live.first == ~0u) break;
        while (!used.empty() && used.front().first < live.first) {
            std::pop_heap(used.begin(), used.end(), std::greater<>());
            free[draft.widths[used.back().second]].push_back(columns[used.back().second]), used.pop_back();
        }
        const u32 width = draft.widths[live.index];
        if (free[width].empty()) columns[live.index] = end, end += std::max(64u, width * LANES);
        else columns[live.index] = free[width].back(), free[width].pop_back();
        used.push_back({live.last, live.index});
        std::push_heap(used.begin(), used.end(), std::greater<>());
    }
    return end;
}
}  // namespace ptx
