// Symbols of the C and C++ libraries that newer compilers refer to and manylinux_2_28 lacks. With a
// definition in each of our libraries, one binary runs on older systems too. exports.map hides the
// definitions. libtorch happens to export some of these symbols, but that cannot be relied on.
#include <new>
#include <sstream>

#ifdef __GLIBCXX__
// Of glibc 2.32. 0: reference counts must use atomic instructions.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {
// Of gcc 11's libstdc++. Weak: if a compiler links libstdc++ as an archive, the archive defines the
// symbol too, and two strong definitions would be a link error.
[[noreturn]] __attribute__((weak)) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

// Members that gcc 9 and, for C++20, gcc 11 added to older templates.
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
template string basic_stringbuf<char>::str() const &;
template string basic_stringbuf<char>::str() &&;
}  // namespace std
#endif
