// Reports a class index that is out of bounds.
#pragma once

#include <cstdint>
#include <cstdio>

extern "C" __device__ void __assert_fail(const char* assertion, const char* file, unsigned int line,
                                         const char* function) noexcept;

namespace fused::cuda {

// Ends in torch's "device-side assert triggered", even with NDEBUG. Not inlined, so that printf's
// buffer does not increase the callers' register pressure.
static __device__ __noinline__ void report_target(int64_t target, int64_t row, int64_t classes) {
  printf("target %lld of row %lld is out of bounds for %lld classes\n",
         static_cast<long long>(target), static_cast<long long>(row),
         static_cast<long long>(classes));
  __assert_fail("a target is out of bounds", __FILE__, __LINE__, __func__);
}

}  // namespace fused::cuda
