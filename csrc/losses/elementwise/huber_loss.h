// 0.5 d^2 where |d| < delta, delta (|d| - 0.5 delta) elsewhere, with d = input - target. As
// torch.nn.functional.huber_loss (Huber, Robust Estimation of a Location Parameter, 1964).
#pragma once

#include "../elementwise.h"

namespace fused::huber_loss {

template <typename acc_t>
struct HuberLoss {
  acc_t delta;

  FUSED_HOST_DEVICE explicit HuberLoss(const double* parameters)
      : delta(static_cast<acc_t>(parameters[0])) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const acc_t distance = math::absolute(input - target);
    return distance < delta ? acc_t(0.5) * distance * distance
                            : delta * (distance - acc_t(0.5) * delta);
  }
  // The comparisons are ordered so that nan reaches the last branch.
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    const acc_t difference = input - target;
    return difference > delta ? delta : difference < -delta ? -delta : difference;
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
    return -grad_input(input, target);
  }
};

struct Op : OpOf<HuberLoss> {
  using Parameters = Types<double>;  // delta
  static constexpr Weights kWeights = Weights::kWeight;
  static constexpr bool kWeightHasGradient = true;
  static constexpr Like kLike = Like::kInput;
};

}  // namespace fused::huber_loss
