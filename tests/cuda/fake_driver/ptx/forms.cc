/* The table of all instructions that the machine supports, by name. */
#include "forms.h"
#include <mutex>
#include <unordered_map>

namespace ptx {
const Form* find_form(const std::string& opcode, u32 width) {
    static std::unordered_map<std::string, Form>* const known = [] {
        Forms forms;
        add_arithmetic(forms), add_conversions(forms), add_control(forms), add_memory(forms), add_matrix(forms);
        auto* map = new std::unordered_map<std::string, Form>();
        for (Form& form : forms) map->try_emplace(form.opcode, form);
        return map;
    }();
    // Several threads may parse modules at the same time, and each may add forms of loads and stores to the table.
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (width == 0) {
        const auto found = known->find(opcode);
        return found == known->end() ? nullptr : &found->second;
    }
    const std::string key = opcode + " " + std::to_string(width);
    if (const auto found = known->find(key); found != known->end()) return &found->second;
    Form form;
    form.opcode = key;
    return load_or_store(opcode, width, form) ? &known->try_emplace(key, form).first->second : nullptr;
}
}  // namespace ptx
