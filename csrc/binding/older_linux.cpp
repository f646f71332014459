// What a newer compiler refers to in the C and C++ libraries, and manylinux_2_28 does not have
// there. With a definition in each library one binary serves older systems, too. exports.map hides
// them. Some of it happens to be exported by libtorch, which is no reason to take it from there.
#include <new>
#include <sstream>

#ifdef __GLIBCXX__
// glibc 2.32: whether reference counts may do without atomic instructions. No.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {
// libstdc++ of gcc 11. Weak: where a compiler links libstdc++ as an archive, its definition comes
// along, and two strong ones would end the link.
[[noreturn]] __attribute__((weak)) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

// Of gcc 9 and, in C++20, of gcc 11: members of templates, the rest of which is older.
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
template string basic_stringbuf<char>::str() const &;
template string basic_stringbuf<char>::str() &&;
}  // namespace std
#endif
