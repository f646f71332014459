// What a newer compiler refers to in the C and C++ libraries, and those of manylinux_2_28 don't have.
// With a definition in each library one binary serves older systems, too. exports.map hides them.
#include <new>

#ifdef __GLIBCXX__
// glibc 2.32: whether reference counts may do without atomic instructions. No.
extern "C" {
char __libc_single_threaded = 0;
}

// libstdc++ of gcc 11.
namespace std {
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
