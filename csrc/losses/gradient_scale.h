// The factor of an elementwise loss's derivatives: grad_output over the reduction's divisor. If the
// result neither overflows nor loses digits, no intermediate product does.
#pragma once

#include "math.h"

namespace fused {

// A constant factor of the derivatives with respect to input and target. The loss leaves it to the
// scale, because twice a large difference would overflow before a mean divides it.
template <typename Loss>
constexpr double kSlope = 1;
template <typename Loss>
  requires requires { Loss::kDerivativeSlope; }
constexpr double kSlope<Loss> = Loss::kDerivativeSlope;

// `factor` times one grad_output, as two factors. The second is 1 unless the product overflows or
// is below the smallest normal number, where it loses digits that a large derivative would need.
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
  // Multiplies in torch's order, so that infinities and overflows agree. If torch composes the
  // weighted loss of several ops, it multiplies the weight with grad_output first.
  template <typename Loss>
  FUSED_HOST_DEVICE acc_t weighted(acc_t derivative, acc_t weight) const {
    if constexpr (requires { Loss::kWeightLast; }) return derivative * first * weight * second;
    return derivative * (weight * first) * second;
  }
};

}  // namespace fused
