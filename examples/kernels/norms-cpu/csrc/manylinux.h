// What a newer compiler would take from a newer system than manylinux_2_28 is defined here instead. Included first.
#pragma once

#include <cstddef>

#ifdef __GLIBCXX__
// Streams are compiled here: libstdc++.so has their default constructors since GLIBCXX_3.4.26 alone.
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0

// What shared_ptr asks before it counts without atomics, in glibc since 2.32. False is always right.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
