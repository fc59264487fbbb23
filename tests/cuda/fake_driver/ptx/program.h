/* PTX as the machine runs it: each kernel a list of decoded instructions, whose operands are columns of a warp's register file.
 *
 * A column is a register of all 32 lanes side by side, so that most instructions are one loop that the compiler vectorises.
 * Immediates and special registers (%tid.x) are columns, too, filled when a warp starts: an operand is an offset, nothing else.
 * Predicates are masks of 32 bits, a word each, apart from the columns. */
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

/* What became of an instruction: the lanes go on to the next one; went where they were sent; or could not do it yet, and ask again. */
enum class Outcome { NEXT, JUMPED, BLOCKED };
using Handler = Outcome (*)(Warp&, const Instruction&);

/* Which lanes must stand at an instruction before it is done. */
enum class Together : u8 { NONE, WARP, MEMBERS };

struct Instruction {
    Handler run;
    const u32* at;       // operands: offsets of columns, indices of predicates, addresses of three words
    u32 guard, flip;     // it is done by lanes in predicate `guard` ^ `flip`
    u32 target;          // of a branch; the column of the member mask that it waits for
    u32 number;          // the operand that is a number
    u32 line;            // of the text
    Together together;
    bool polls;          // loads what another device may write (.sys): it may be asked again and again
};

/* An opcode that the machine knows. `operands` has a word for each, in the text's order:
 *   4      a column of 4 bytes a lane that is read (2, 4 or 8)    =4  written   +4  read and written   =4*8  eight in braces
 *   p =p   a predicate                                           =4|p  a column, and maybe a predicate
 *   T      a tensor's box in brackets: an address, three columns      @      an address in brackets          #  a number, known at once          ##  a bit of it          m  lanes that take part
 *   L      a label                                               .  says nothing to the machine   ?4  may be left out */
struct Form {
    std::string opcode, operands;
    Handler run;
    Together together = Together::NONE;
};
/* The form of an opcode. Of loads and stores the registers' width says the rest (0 where none is named). */
const Form* find_form(const std::string& opcode, u32 width);

enum class Special : u8 { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID, WARPID, CLUSTER_RANK, CLUSTER_SIZE, COUNT };

struct Parameter { u32 at, bytes; };
struct Entry {
    std::string name;
    std::vector<Parameter> parameters;
    std::vector<Instruction> code;
    std::vector<u32> operands;           // what `at` points into
    std::vector<u8> constants;           // columns that every warp's file begins with
    u32 specials[int(Special::COUNT)];   // their columns, or NO_COLUMN
    u32 file_bytes, predicates;
    u32 param_bytes, static_shared, dynamic_shared_at, local_bytes;
    u32 threads_most;                    // .maxntid
    u32 resident_least;                  // CTAs of a multiprocessor: .minnctapersm
    u32 cluster;                         // CTAs of a cluster, along x: .reqnctapercluster
    std::vector<std::string> lines;      // of the text, for messages
    mutable std::vector<u8> done;        // which instructions were ever done; counts, for statistics
    mutable u64 launches = 0, instructions = 0;
};
constexpr u32 NO_COLUMN = ~0u, LANES = 32;
constexpr u32 TRUE_PREDICATE = 0, FALSE_PREDICATE = 1;  // that are never written
constexpr u32 SHARED_BASE = 1024;  // shared memory begins here, so that address 0 is a mistake
constexpr u32 RANK_SHIFT = 24;     // of an address in a cluster: 1 + the CTA's rank stands there, 0: the own one

struct Module {
    std::vector<Entry> entries;
};
/* Decodes a file of PTX; gives what is wrong with it otherwise. */
bool parse(const char* text, Module& module, std::string& error);

/* ---- between the parser and the columns ------------------------------------------------------------------------------- */

struct Draft {
    struct Operand { u32 index; bool read, written, predicate; };  // a virtual register, or a predicate
    struct Line { u32 first, count; bool branches, ends, waits; };  // waits: for wgmma
    std::vector<u8> widths;     // of virtual registers
    std::vector<Operand> operands;
    std::vector<Line> lines;
    std::vector<u32> late;      // registers that work in flight reads and writes
};
/* Gives each virtual register a column for as long as it is live (columns.cc). `columns` begin at `from`; returns where they end. */
u32 assign_columns(const Draft& draft, const std::vector<Instruction>& code, u32 from, std::vector<u32>& columns);
}  // namespace ptx
