// selftest [ISA [SUBJECT ...]]: of the best instruction set, or that one, all kernels, or those of some subjects: a
// weight type, rows, attention, sample, limits. Exits 1 if a check fails, 2 if this CPU lacks the instruction set.
#include <cstring>

#include "selftest.h"

namespace {

char** wanted;

bool is_wanted(const char* subject) {
    if (!*wanted) return true;
    for (char** name = wanted; *name; name++)
        if (!std::strcmp(*name, subject)) return true;
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const char* isa = argc > 1 ? argv[1] : "";
    wanted = argv + (argc > 1 ? 2 : 1);
    const auto *table = pelton::find_kernels(isa), *plain = pelton::find_kernels("generic");
    if (!table) {
        std::printf("this CPU does not have %s\n", isa);
        return 2;
    }
    selftest::Counts counts(table->isa);
    if (is_wanted("rows")) selftest::check_rows(*table, *plain, counts);
    if (is_wanted("attention")) selftest::check_attention(*table, *plain, counts);
    if (is_wanted("limits")) selftest::check_limits(*table, *plain, counts);
    if (is_wanted("sample")) selftest::check_sample(*table, *plain, counts);
    selftest::check_linear(*table, *plain, counts, is_wanted);
    return counts.has_failures() ? 1 : 0;
}
