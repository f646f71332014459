// What an elementwise loss's derivatives are multiplied with: grad_output over the reduction's
// divisor, in an order that neither overflows nor loses digits where the result does not.
#pragma once

#include "math.h"

namespace fused {

// A number that all derivatives of input and target have as a factor and that the loss leaves to
// the scale: twice the largest difference would overflow before a mean divides it.
template <typename Loss>
constexpr double kSlope = 1;
template <typename Loss>
  requires requires { Loss::kDerivativeSlope; }
constexpr double kSlope<Loss> = Loss::kDerivativeSlope;

// `factor` times one grad_output, as two factors. The second is 1 but where the product is below
// the smallest normal number, and has lost digits that a large derivative would bring back, or
// overflows.
template <typename acc_t>
struct GradientScale {
  acc_t first, second;

  static FUSED_HOST_DEVICE GradientScale of(double factor, acc_t grad_output) {
    const acc_t own = static_cast<acc_t>(factor), product = own * grad_output;
    const bool overflows = math::is_finite(grad_output) && !math::is_finite(product);
    const bool normal = math::absolute(product) >= math::kSmallestNormal<acc_t> && !overflows;
    return {normal ? product : own, normal ? acc_t(1) : grad_output};
  }

  FUSED_HOST_DEVICE acc_t operator()(acc_t derivative) const { return derivative * first * second; }
  // In torch's order, for infinities and what overflows: where it composes the weighted loss of
  // ops, the weight meets grad_output first.
  template <typename Loss>
  FUSED_HOST_DEVICE acc_t weighted(acc_t derivative, acc_t weight) const {
    if constexpr (requires { Loss::kWeightLast; }) return derivative * first * weight * second;
    return derivative * (weight * first) * second;
  }
};

}  // namespace fused
