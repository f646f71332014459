// The soft-cap of logits, cap * tanh(logit / cap), and its slope, 1 - tanh^2 (Gemma 2,
// https://arxiv.org/abs/2408.00118).
//
// With u = exp(-2 |x|), tanh |x| = (1 - u) / (1 + u). The slope is 4 u / (1 + u)^2, which keeps its
// digits where the tanh rounds to 1. Near 0, where 1 - u would cancel, the tanh is Cephes'
// polynomial (float) or rational function (double). The result is monotone except for the last bit.
// For infinities the result is the limit and the slope is 0; for a nan both are nan.
#pragma once

#include "math.h"

namespace fused {

template <typename acc_t>
constexpr acc_t kTanhNear = acc_t(0.625);

FUSED_HOST_DEVICE float tanh_near(float x) {
  const float square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return p * (square * x) + x;
}

FUSED_HOST_DEVICE double tanh_near(double x) {
  const double square = x * x;
  double p = -9.64399179425052238628e-1;
  p = p * square - 9.92877231001918586564e1;
  p = p * square - 1.61468768441708447952e3;
  double q = square + 1.12811678491632931402e2;
  q = q * square + 2.23548839060100448583e3;
  q = q * square + 4.84406305325125486048e3;
  return p / q * (square * x) + x;
}

template <typename acc_t>
struct Capped {
  acc_t logit, slope;
};

// The version for the host, which vectorises.
template <typename acc_t>
FUSED_HOST_DEVICE Capped<acc_t> soft_capped(acc_t logit, acc_t cap) {
  const acc_t x = logit / cap;
  const acc_t magnitude = math::absolute(x);
  const acc_t u = math::exp(acc_t(-2) * magnitude);
  const acc_t inverse = acc_t(1) / (acc_t(1) + u);
  const acc_t magnitude_far = (acc_t(1) - u) * inverse;
  const acc_t far = x < acc_t(0) ? -magnitude_far : magnitude_far;
  const acc_t near = tanh_near(x);
  const acc_t slope_far = acc_t(4) * u * inverse * inverse;
  const bool is_near = magnitude < kTanhNear<acc_t>;
  return {cap * (is_near ? near : far), is_near ? acc_t(1) - near * near : slope_far};
}

}  // namespace fused
