/* Creates forms: opcodes with their operands and the function that runs them. The form of an opcode that does the same
   in each lane is created from a lambda for one lane. The lambda's types determine the sizes of the operands. */
#pragma once
#include <tuple>
#include <utility>
#include "machine.h"

namespace ptx {
using Forms = std::vector<Form>;
void add_arithmetic(Forms& forms);
void add_conversions(Forms& forms);
void add_control(Forms& forms);   // branches, barriers, shuffles and votes
void add_memory(Forms& forms);    // atomics, asynchronous copies, mbarriers
void add_matrix(Forms& forms);
/* Creates the form of a load or a store of registers of `width` bytes. Returns false for an unsupported opcode. */
bool load_or_store(const std::string& opcode, u32 width, Form& form);

/* Returns the size of T in bytes, as forms describe operands. */
template <class T> std::string token() { return std::to_string(sizeof(T)); }

/* Writes F of a lane's operands to the lane's first operand, in each active lane. */
template <class F, class R, class... A, size_t... I> Outcome do_lanes(Warp& warp, const Instruction& in, std::index_sequence<I...>) {
    const auto from = std::make_tuple(column<A>(warp, in.at[1 + I])...);
    each_lane(warp, column<R>(warp, in.at[0]), [&](u32 i) { return F{}(std::get<I>(from)[i]...); });
    return Outcome::NEXT;
}
template <class F, class R, class... A> Form lanes_form(std::string opcode, R (*)(A...)) {
    std::string operands = "=" + token<R>();
    ((operands += " " + token<A>()), ...);
    return {std::move(opcode), operands, [](Warp& warp, const Instruction& in) {
                return do_lanes<F, R, A...>(warp, in, std::index_sequence_for<A...>());
            }};
}
template <class F> Form lanes(std::string opcode, F f) { return lanes_form<F>(std::move(opcode), +f); }

/* The same with a predicate as the first operand. */
template <class F, class... A, size_t... I> Outcome do_compare(Warp& warp, const Instruction& in, std::index_sequence<I...>) {
    const auto from = std::make_tuple(column<A>(warp, in.at[1 + I])...);
    set_predicate(warp, in.at[0], which_lanes([&](u32 i) { return F{}(std::get<I>(from)[i]...); }));
    return Outcome::NEXT;
}
template <class F, class... A> Form compare_form(std::string opcode, bool (*)(A...)) {
    std::string operands = "=p";
    ((operands += " " + token<A>()), ...);
    return {std::move(opcode), operands, [](Warp& warp, const Instruction& in) {
                return do_compare<F, A...>(warp, in, std::index_sequence_for<A...>());
            }};
}
template <class F> Form compare(std::string opcode, F f) { return compare_form<F>(std::move(opcode), +f); }
}  // namespace ptx
