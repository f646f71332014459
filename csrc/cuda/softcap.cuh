// The soft-cap of logits on the device. Without kCapped it costs nothing.
//
// The last product is rounded on its own. If it were fused with the subtraction of a row's largest
// logit, the difference would not be 0 for that logit itself, and the loss of a row of one class
// would not be 0.
#pragma once

#include <type_traits>

#include "../losses/softcap.h"
#include "fast_math.cuh"

namespace fused::cuda {

// Gives the capped logit, and the slope: the last factor of the derivative with respect to the
// logit.
template <typename acc_t, bool kCapped>
struct Softcap {
  __device__ __forceinline__ explicit Softcap(double /*cap*/) {}
  __device__ __forceinline__ acc_t operator()(acc_t logit) const { return logit; }
  __device__ __forceinline__ Capped<acc_t> with_slope(acc_t logit) const {
    return {logit, acc_t(1)};
  }
};

template <>
struct Softcap<float, true> {
  float cap, inverse;

  // The inverse stays finite, because 0 times infinity would be nan.
  __device__ __forceinline__ explicit Softcap(double cap)
      : cap(static_cast<float>(cap)), inverse(fminf(1 / this->cap, -math::kLowest<float>)) {}

  __device__ __forceinline__ float operator()(float logit) const { return with_slope(logit).logit; }

  // As soft_capped, with one instruction each for the exponential and the division.
  __device__ __forceinline__ Capped<float> with_slope(float logit) const {
    const float x = logit * inverse;
    const float u = fast_exp(-2 * fabsf(x));
    const float factor = fast_inverse(1 + u);
    const float far = copysignf(__fmaf_rn(-u, factor, factor), x);
    const float tanh = fabsf(x) < kTanhNear<float> ? tanh_near(x) : far;
    return {__fmul_rn(cap, tanh),
            fabsf(x) < kTanhNear<float> ? 1 - tanh * tanh : 4 * u * factor * factor};
  }
};

template <>
struct Softcap<double, true> {
  double cap;

  __device__ __forceinline__ explicit Softcap(double cap) : cap(cap) {}
  __device__ __forceinline__ double operator()(double logit) const {
    return __dmul_rn(cap, ::tanh(logit / cap));
  }
  __device__ __forceinline__ Capped<double> with_slope(double logit) const {
    const double tanh = ::tanh(logit / cap);
    return {__dmul_rn(cap, tanh), 1 - tanh * tanh};
  }
};

}  // namespace fused::cuda
