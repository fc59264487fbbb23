/* Parses the text of a PTX file into instructions. If a word is unknown, the error names the word and the line. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include "program.h"

namespace ptx {
namespace {
using std::string;
using std::string_view;

struct Wrong { string what; };

/* An operand as it is written in the text. */
struct Text {
    enum { NAME, NUMBER, LIST, ADDRESS } kind;
    string_view name, second;  // second: the name after `|`
    u64 number;
    std::vector<Text> list;
};

struct Register { u32 index, width; };  // width 0: a predicate
struct Scope {
    struct Many { Register first; u32 count; };
    std::map<string_view, Register> names;
    std::map<string_view, Many> many;        // declared as %r<100>
    std::map<string_view, u32> labels;
    std::vector<std::pair<u32, string_view>> jumps;  // branches whose labels are not looked up yet
};

struct Parser {
    const char* at;
    u32 line = 1;
    std::map<string_view, u64> symbols;    // variables of the file, and variables and parameters of the current entry
    u32 shared_end = SHARED_BASE;
    std::vector<string_view> dynamic;      // names of the dynamic shared memory
    u32 dynamic_align = 16;
    // The entry that is being parsed.
    Entry* entry = nullptr;
    Draft draft;
    std::vector<Scope> scopes;
    std::map<std::pair<u32, u64>, u32> constants;  // the column of each immediate, by its width and bits
    std::vector<u32> operand_starts;               // the first operand of each instruction

    [[noreturn]] void wrong(const string& what) const { throw Wrong{"line " + std::to_string(line) + ": " + what + "\n"}; }

    // ---- characters -------------------------------------------------------------------------------------------------

    void space() {
        for (;;) {
            if (*at == '\n') ++line, ++at;
            else if (isspace(static_cast<u8>(*at))) ++at;
            else if (at[0] == '/' && at[1] == '/') at += strcspn(at, "\n");
            else if (at[0] == '/' && at[1] == '*') {
                for (at += 2; *at && !(at[0] == '*' && at[1] == '/'); ++at) line += *at == '\n';
                at += *at ? 2 : 0;
            } else return;
        }
    }
    bool next(char c) { return space(), *at == c ? (++at, true) : false; }
    void expect(char c) {
        if (!next(c)) wrong(string("'") + c + "' is missing before '" + string(at, strnlen(at, 20)) + "'");
    }
    static bool part(char c) { return isalnum(static_cast<u8>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }
    string_view word() {
        space();
        const char* start = at;
        while (part(*at) || (at[0] == ':' && at[1] == ':' && part(at[2]))) at += *at == ':' ? 2 : 1;
        if (at == start) wrong("a word is missing before '" + string(at, strnlen(at, 20)) + "'");
        return {start, static_cast<size_t>(at - start)};
    }
    u64 number() {
        space();
        if (at[0] == '0' && (at[1] == 'f' || at[1] == 'F')) return read_bits(8);
        if (at[0] == '0' && (at[1] == 'd' || at[1] == 'D')) return read_bits(16);
        char* end;
        const u64 value = *at == '-' ? static_cast<u64>(strtoll(at, &end, 0)) : strtoull(at, &end, 0);
        if (end == at) wrong("a number is missing before '" + string(at, strnlen(at, 20)) + "'");
        at = end;
        if (*at == 'U') ++at;
        if (*at == '.') at += 1 + strspn(at + 1, "0123456789");  // the fraction of a cache policy, which is ignored
        return value;
    }
    u64 read_bits(u32 digits) {
        const string text(at + 2, digits);
        at += 2 + digits;
        return strtoull(text.c_str(), nullptr, 16);
    }

    // ---- declarations -----------------------------------------------------------------------------------------------

    static u32 width_of(string_view type) {
        if (type == ".pred") return 0;
        const u32 bits = static_cast<u32>(atoi(string(type.substr(2)).c_str()));
        return bits <= 16 ? (bits == 8 ? 1 : 2) : bits / 8;
    }
    Register fresh(u32 width) {
        if (width == 0) return {entry->predicates++, 0};
        draft.widths.push_back(static_cast<u8>(width));
        return {static_cast<u32>(draft.widths.size() - 1), width};
    }
    void registers() {
        const u32 width = width_of(word());
        do {
            const string_view name = word();
            if (next('<')) {
                const u32 count = static_cast<u32>(number());
                expect('>');
                Register first = fresh(width);
                for (u32 i = 1; i < count; ++i) fresh(width);
                scopes.back().many[name] = {first, count};
            } else scopes.back().names[name] = fresh(width);
        } while (next(','));
        expect(';');
    }
    /* `.shared .align 16 .b8 name[100];`, `.global .align 4 .u32 name = 128;` */
    void variable(string_view space, bool external) {
        u32 align = 1, width = 1;
        string_view name = word();
        for (; name[0] == '.'; name = word()) {
            if (name == ".align") align = static_cast<u32>(number());
            else width = width_of(name);
        }
        u64 bytes = width;
        if (next('[')) bytes = *at == ']' ? 0 : width * number(), expect(']');
        if (next('=')) {
            const bool list = next('{');
            do number();
            while (next(','));
            if (list) expect('}');
        }
        expect(';');
        if (space == ".shared" && external) {
            dynamic.push_back(name), dynamic_align = std::max(dynamic_align, align);
        } else if (space == ".shared") {
            shared_end = (shared_end + align - 1) / align * align;
            symbols[name] = shared_end;
            shared_end += static_cast<u32>(bytes);
        }  // other variables are constants of templates, which no kernel reads
    }

    // ---- instructions -----------------------------------------------------------------------------------------------

    Text operand() {
        space();
        if (next('{')) {
            Text text{Text::LIST, {}, {}, 0, {}};
            do text.list.push_back(operand());
            while (next(','));
            return expect('}'), text;
        }
        if (next('[')) {
            Text text{Text::ADDRESS, {}, {}, 0, {}};
            space();
            if (isdigit(static_cast<u8>(*at))) text.number = number();
            else text.name = word();
            if (next(',')) text.list.push_back(operand());
            else if (next('+')) text.number = number();
            else if (space(), *at == '-') text.number = number();
            return expect(']'), text;
        }
        if (isdigit(static_cast<u8>(*at)) || *at == '-') return {Text::NUMBER, {}, {}, number(), {}};
        Text text{Text::NAME, word(), {}, 0, {}};
        if (next('|')) text.second = word();
        return text;
    }
    Register find(string_view name) const {
        for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
            if (auto found = scope->names.find(name); found != scope->names.end()) return found->second;
            const size_t digits = name.find_last_not_of("0123456789") + 1;
            if (digits == name.size()) continue;
            if (auto found = scope->many.find(name.substr(0, digits)); found != scope->many.end()) {
                const u32 index = static_cast<u32>(atoi(name.data() + digits));
                if (index >= found->second.count) break;
                return {found->second.first.index + index, found->second.first.width};
            }
        }
        wrong("unknown register " + string(name));
    }
    static Special special(string_view name) {
        static const char* const names[] = {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
                                            "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid",
                                            "%cluster_ctarank", "%cluster_nctarank"};
        for (u32 i = 0; i < u32(Special::COUNT); ++i)
            if (name == names[i]) return Special(i);
        return Special::COUNT;
    }
    /* Marks an operand that is not an index of a virtual register. place_operands replaces the indices by columns, and
       removes the mark from the other operands. */
    static constexpr u32 CONSTANT = 1u << 31;
    void push_constant(u32 width, u64 bits) {
        if (width < 8) bits &= (1ull << width * 8) - 1;
        const auto [found, is_new] = constants.try_emplace({width, bits}, 0);
        if (is_new) {
            found->second = static_cast<u32>(entry->constants.size());
            const u32 size = std::max(64u, width * LANES);
            entry->constants.resize(entry->constants.size() + size);
            u8* to = entry->constants.data() + found->second;
            for (u32 i = 0; i < LANES; ++i) memcpy(to + i * width, &bits, width);
        }
        entry->operands.push_back(CONSTANT | found->second);
    }
    void push_register(Register found, bool read, bool written) {
        draft.operands.push_back({found.index, read, written, found.width == 0});
        entry->operands.push_back(found.index | (found.width == 0 ? CONSTANT : 0));
    }
    void push(const Text& text, string_view form, bool guarded) {
        bool written = false, read = true;
        if (form[0] == '=') written = true, read = guarded, form.remove_prefix(1);
        else if (form[0] == '+') written = true, form.remove_prefix(1);
        if (const size_t star = form.find('*'); star != form.npos) {
            const u32 count = static_cast<u32>(atoi(form.data() + star + 1));
            if (text.kind != Text::LIST || text.list.size() != count) wrong("a list of " + std::to_string(count) + " is wanted");
            const string each = (written ? read && !guarded ? "+" : "=" : "") + string(form.substr(0, star));
            for (const Text& item : text.list) push(item, each, guarded);
            return;
        }
        if (form[0] == 'p') {
            if (text.kind == Text::NUMBER) return entry->operands.push_back(CONSTANT | (text.number ? TRUE_PREDICATE : FALSE_PREDICATE));
            const Register found = text.name == "_" ? fresh(0) : find(text.name);
            if (found.width != 0) wrong("a predicate is wanted, not " + string(text.name));
            return push_register(found, read, written);
        }
        const u32 width = static_cast<u32>(form[0] - '0');
        if (text.kind == Text::NUMBER) return written ? wrong("a number cannot be written") : push_constant(width, text.number);
        if (text.kind != Text::NAME) wrong("a register is wanted");
        if (!written)
            if (auto symbol = symbols.find(text.name); symbol != symbols.end()) return push_constant(width, symbol->second);
        if (const Special which = special(text.name); which != Special::COUNT) {
            u32& column = entry->specials[u32(which)];
            if (column == NO_COLUMN) column = static_cast<u32>(entry->constants.size()), entry->constants.resize(column + 4 * LANES);
            return entry->operands.push_back(CONSTANT | column);
        }
        const Register found = text.name == "_" ? fresh(width) : find(text.name);
        if (found.width != width) wrong(string(text.name) + " has " + std::to_string(found.width) + " bytes, not " + std::to_string(width));
        push_register(found, read, written);
        if (form.ends_with("|p")) {
            const Register predicate = text.second.empty() ? fresh(0) : find(text.second);
            push_register(predicate, guarded, true);
        }
    }
    void push_address(const Text& text) {
        if (text.kind != Text::ADDRESS) wrong("an address is wanted");
        u32 wide = 1;
        if (text.name.empty()) push_constant(8, 0);
        else if (auto symbol = symbols.find(text.name); symbol != symbols.end()) push_constant(8, symbol->second);
        else {
            const Register found = find(text.name);
            if (found.width != 4 && found.width != 8) wrong("an address has 4 or 8 bytes");
            wide = found.width == 8, push_register(found, true, false);
        }
        entry->operands.push_back(CONSTANT | wide), entry->operands.push_back(CONSTANT | static_cast<u32>(text.number & 0x7fffffff));
        if (static_cast<i64>(text.number) != static_cast<i32>(text.number << 1) >> 1) wrong("an offset is too large");
    }
    /* Returns the opcode's name in the table of forms. For some opcodes, the name contains the kinds of the operands.
       `width` becomes the width of the registers that a load or a store moves. */
    string full_name(string_view opcode, const std::vector<Text>& operands, u32& width) const {
        string name(opcode);
        width = 0;
        const bool list0 = !operands.empty() && operands[0].kind == Text::LIST, list1 = operands.size() > 1 && operands[1].kind == Text::LIST;
        if (opcode.starts_with("mov.") && list0) name += " {}";
        else if (opcode.starts_with("mov.") && list1) name += " = {}";
        else if (opcode.starts_with("wgmma.mma") && list1) name += " registers";
        if (opcode.starts_with("ld.") || opcode.starts_with("st.")) {
            if (operands.size() != 2) wrong("a load or store has two operands");
            const Text& data = operands[opcode[0] == 's'];
            const Text& item = data.kind == Text::LIST ? data.list[0] : data;
            width = item.kind == Text::NAME ? find(item.name).width : 0;
        }
        return name;
    }
    void instruction(string_view opcode, u32 guard, u32 flip) {
        const u32 its_line = line;
        std::vector<Text> operands;
        if (!next(';')) {
            do operands.push_back(operand());
            while (next(','));
            expect(';');
        }
        u32 width;
        const string name = full_name(opcode, operands, width);
        const Form* form = find_form(name, width);
        if (!form) wrong("unknown instruction " + name);
        const bool guarded = guard != TRUE_PREDICATE;
        Instruction decoded{form->run, nullptr, guard, flip, 0, 0, its_line, form->together, name.starts_with("ld.") && name.find(".sys.") != string::npos};
        const u32 first_operand = static_cast<u32>(draft.operands.size());
        operand_starts.push_back(static_cast<u32>(entry->operands.size()));
        if (guarded) draft.operands.push_back({guard, true, false, true});
        size_t used = 0;
        string_view rest = form->operands;
        while (!rest.empty()) {
            const size_t end = std::min(rest.find(' '), rest.size());
            string_view token = rest.substr(0, end);
            rest.remove_prefix(std::min(end + 1, rest.size()));
            if (token[0] == '?') {
                token.remove_prefix(1);
                if (used == operands.size()) { entry->operands.push_back(NO_COLUMN); continue; }
            }
            if (used == operands.size()) wrong(name + " wants more operands");
            const Text& text = operands[used++];
            if (token == ".") continue;
            if (token[0] == '#') {
                if (text.kind != Text::NUMBER) wrong("a number is wanted");
                decoded.number = static_cast<u32>(token == "##" ? decoded.number << 1 | (text.number & 1) : text.number);
            } else if (token == "L") scopes.back().jumps.push_back({static_cast<u32>(entry->code.size()), text.name});
            else if (token == "@") push_address(text);
            else if (token == "T") push_address(text), push(text.list.empty() ? text : text.list[0], "4*3", guarded);
            else if (token == "m") decoded.target = static_cast<u32>(entry->operands.size() - operand_starts.back()), push(text, "4", false);
            else push(text, token, guarded);
        }
        if (used != operands.size()) wrong(name + " has too many operands");
        const u32 count = static_cast<u32>(draft.operands.size()) - first_operand;
        if (name.starts_with("wgmma.mma"))
            for (u32 i = first_operand; i < first_operand + count; ++i)
                if (draft.operands[i].written) draft.late.push_back(draft.operands[i].index);
        const bool waits = name.starts_with("wgmma.wait"), branches = name.starts_with("bra");
        draft.lines.push_back({first_operand, count, branches, !guarded && (branches || name == "ret" || name == "exit" || name == "trap"), waits});
        entry->code.push_back(decoded);
    }

    // ---- bodies -----------------------------------------------------------------------------------------------------

    void close_scope() {
        Scope scope = std::move(scopes.back());
        scopes.pop_back();
        for (auto [from, label] : scope.jumps) {
            if (auto found = scope.labels.find(label); found != scope.labels.end()) entry->code[from].target = found->second;
            else if (!scopes.empty()) scopes.back().jumps.push_back({from, label});
            else wrong("unknown label " + string(label));
        }
    }
    void body() {
        scopes.emplace_back();
        while (!scopes.empty()) {
            space();
            if (next('{')) { scopes.emplace_back(); continue; }
            if (next('}')) { close_scope(); continue; }
            if (next(';')) continue;
            u32 guard = TRUE_PREDICATE, flip = 0;
            if (next('@')) {
                flip = next('!') ? ~0u : 0;
                guard = find(word()).index;
            }
            if (!*at) wrong("the text ends within a kernel");
            const string_view name = word();
            if (name == ".reg") registers();
            else if (name == ".shared" || name == ".pragma") at += strcspn(at, ";");
            else if (*at == ':') ++at, scopes.back().labels[name] = static_cast<u32>(entry->code.size());
            else instruction(name, guard, flip);
        }
    }
    void parameters() {
        u32 bytes = 0;
        if (next(')')) return;
        do {
            if (word() != ".param") wrong("a parameter is wanted");
            u32 align = 1, width = 1;
            string_view name = word();
            for (; name[0] == '.'; name = word()) {
                if (name == ".align") align = static_cast<u32>(number());
                else width = width_of(name), align = std::max(align, width);
            }
            bytes = (bytes + align - 1) / align * align;
            symbols[name] = bytes;
            u32 size = width;
            if (next('[')) size = width * static_cast<u32>(number()), expect(']');
            entry->parameters.push_back({bytes, size});
            bytes += size;
        } while (next(','));
        expect(')');
        entry->param_bytes = bytes;
    }
    void kernel(Module& module) {
        module.entries.emplace_back();
        entry = &module.entries.back();
        *entry = Entry{};
        entry->name = word();
        std::fill_n(entry->specials, u32(Special::COUNT), NO_COLUMN);
        entry->predicates = 2, entry->threads_most = 1024, entry->resident_least = entry->cluster = 1;
        draft = {}, constants.clear(), operand_starts.clear(), scopes.clear();
        const auto symbols_of_file = symbols;
        const u32 shared_of_file = shared_end;
        declare_shared();
        entry->dynamic_shared_at = (shared_end + dynamic_align - 1) / dynamic_align * dynamic_align;
        for (string_view name : dynamic) symbols[name] = entry->dynamic_shared_at;
        if (next('(')) parameters();
        while (!next('{')) {
            const string_view directive = word();
            if (directive == ".explicitcluster") continue;
            u32 threads = 1;
            do threads *= static_cast<u32>(number());
            while (next(','));
            if (directive == ".maxntid") entry->threads_most = threads;
            if (directive == ".minnctapersm") entry->resident_least = threads;
            if (directive == ".reqnctapercluster") entry->cluster = threads;
        }
        body();
        place_operands();
        symbols = symbols_of_file, shared_end = shared_of_file;
    }
    /* Places all shared variables of the kernel before the body is parsed, because the dynamic shared memory follows them. */
    void declare_shared() {
        const char *const body = at, *const end = strstr(at, ".entry ");
        const u32 body_line = line;
        while ((at = strstr(at, ".shared .align ")) && (!end || at < end)) at += 7, variable(".shared", false);
        at = body, line = body_line;
    }
    void place_operands() {
        u32 constants_end = static_cast<u32>(entry->constants.size());
        for (u32 i = 0; i < entry->code.size(); ++i) {
            Instruction& instruction = entry->code[i];
            instruction.at = entry->operands.data() + operand_starts[i];
        }
        std::vector<u32> columns;
        entry->file_bytes = assign_columns(draft, entry->code, constants_end, columns);
        for (u32& operand : entry->operands) {
            if (operand != NO_COLUMN) operand = operand & CONSTANT ? operand & ~CONSTANT : columns[operand];
        }
        for (Instruction& instruction : entry->code)
            if (instruction.together == Together::MEMBERS) instruction.target = instruction.at[instruction.target];
    }
    void file(Module& module) {
        bool external = false;
        for (space(); *at; space()) {
            const string_view name = word();
            if (name == ".version" || name == ".target") at += strcspn(at, "\n");
            else if (name == ".address_size") number();
            else if (name == ".visible" || name == ".weak") continue;
            else if (name == ".extern") external = true;
            else if (name == ".shared" || name == ".global" || name == ".const") variable(name, external), external = false;
            else if (name == ".entry") kernel(module);
            else wrong("unknown directive " + string(name));
        }
    }
};
}  // namespace

bool parse(const char* text, Module& module, std::string& error) {
    Parser parser;
    parser.at = text;
    try {
        parser.file(module);
    } catch (const Wrong& wrong) {
        return error = wrong.what, false;
    }
    std::vector<string> lines;
    for (const char* at = text; *at; at += *at == '\n') {
        const size_t length = strcspn(at, "\n");
        lines.emplace_back(at, length), at += length;
    }
    for (Entry& entry : module.entries) entry.lines = lines, entry.done.resize(entry.code.size());
    return true;
}
}  // namespace ptx
