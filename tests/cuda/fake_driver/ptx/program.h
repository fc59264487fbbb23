/* Decoded PTX. Each kernel is a list of instructions, whose operands are columns of a warp's register file.
 *
 * A column contains one register of all 32 lanes side by side, so most instructions are one loop that the compiler
 * vectorises. Immediates and special registers (%tid.x) are columns, too, which are filled when a warp starts.
 * Therefore an operand that is a value is always the offset of a column. Each predicate is a mask of 32 bits; the masks
 * are not in the columns. */
#pragma once
#include <stdint.h>
#include <string>
#include <vector>

namespace ptx {
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

struct Warp;
struct Instruction;

/* Result of an instruction: the lanes go on to the next one; the instruction has set where they go; or they could not
 * execute it yet and must try again. */
enum class Outcome { NEXT, JUMPED, BLOCKED };
using Handler = Outcome (*)(Warp&, const Instruction&);

/* The lanes that must have reached an instruction before it is executed. */
enum class Together : u8 { NONE, WARP, MEMBERS };

struct Instruction {
    Handler run;
    const u32* at;       // operands: offsets of columns, indices of predicates, addresses of three words
    u32 guard, flip;     // lanes in the mask `predicates[guard] ^ flip` execute the instruction
    u32 target;          // of a branch; with Together::MEMBERS, the column of the member mask
    u32 number;          // the value of the operand that is a number
    u32 line;            // line of the PTX text
    Together together;
    bool polls;          // it loads memory that another device may write (.sys), perhaps in a loop
};

/* An opcode that the machine supports. `operands` has one word for each operand, in the order of the text:
 *   4   a column that is read, with 4 bytes for each lane; 2 and 8 likewise   =4  written   +4  both
 *   =4*8   eight columns in braces
 *   p   a predicate that is read   =p  written   =4|p  a column, and maybe a predicate   m  the lanes that take part
 *   @   an address in brackets   T  a tensor's box in brackets: an address and three columns   L  a label
 *   #   an immediate number   ##  an immediate bit   .  ignored   ?4  may be left out */
struct Form {
    std::string opcode, operands;
    Handler run;
    Together together = Together::NONE;
};
/* Returns the form of an opcode, or null. `width`: bytes of the registers that a load or store moves, otherwise 0. */
const Form* find_form(const std::string& opcode, u32 width);

enum class Special : u8 { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID, WARPID, CLUSTER_RANK, CLUSTER_SIZE, COUNT };

struct Parameter { u32 at, bytes; };
struct Entry {
    std::string name;
    std::vector<Parameter> parameters;
    std::vector<Instruction> code;
    std::vector<u32> operands;           // where the `at` of each instruction points
    std::vector<u8> constants;           // the first columns of each warp's register file
    u32 specials[int(Special::COUNT)];   // the column of each special register, or NO_COLUMN
    u32 file_bytes, predicates;
    u32 param_bytes, dynamic_shared_at;
    u32 threads_most;                    // .maxntid
    u32 resident_least;                  // .minnctapersm: minimum number of CTAs on a multiprocessor
    u32 cluster;                         // .reqnctapercluster: CTAs of a cluster, along x
    std::vector<std::string> lines;      // lines of the PTX text, for messages
    mutable std::vector<u8> done;        // which instructions were executed, for statistics
    mutable u64 launches = 0, instructions = 0;
};
constexpr u32 NO_COLUMN = ~0u, LANES = 32;
constexpr u32 TRUE_PREDICATE = 0, FALSE_PREDICATE = 1;  // never written
constexpr u32 SHARED_BASE = 1024;  // shared memory starts here, so accesses of address 0 fail
constexpr u32 RANK_SHIFT = 24;     // these upper bits of a shared address in a cluster are 1 + the CTA's rank; 0: the own CTA

struct Module {
    std::vector<Entry> entries;
};
/* Decodes a PTX file. On failure, returns false and writes the reason to `error`. */
bool parse(const char* text, Module& module, std::string& error);

/* ---- between the parser and the columns ------------------------------------------------------------------------------- */

struct Draft {
    struct Operand { u32 index; bool read, written, predicate; };  // a virtual register, or a predicate
    struct Line { u32 first, count; bool branches, ends, waits; };  // waits: it waits for wgmma
    std::vector<u8> widths;     // bytes of each virtual register
    std::vector<Operand> operands;
    std::vector<Line> lines;
    std::vector<u32> late;      // registers that asynchronous products read and write
};
/* Assigns each virtual register a column while it is live (columns.cc). The columns start at `from`; returns their
 * end. */
u32 assign_columns(const Draft& draft, const std::vector<Instruction>& code, u32 from, std::vector<u32>& columns);
}  // namespace ptx
