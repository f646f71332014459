// exp and 1 / x of floats in the hardware's approximations; of doubles as usual.
#pragma once

namespace fused::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// e^x in two instructions, 2 ulp; 0 below the smallest normal float. x * log2(e) is rounded, which
// is harmless as long as x is a difference of logits: callers subtract first, never fold the
// reference into a fused multiply-add (that would lose the low bits of logits near 700, and
// overflow where a mask fills rows with the lowest float).
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
  return result;
}
__device__ __forceinline__ double fast_exp(double x) { return ::exp(x); }

// 1 / x in one instruction, 1 ulp.
__device__ __forceinline__ float fast_inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double fast_inverse(double x) { return 1 / x; }

}  // namespace fused::cuda
