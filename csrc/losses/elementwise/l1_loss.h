// Absolute error |input - target|, as torch.nn.functional.l1_loss.
#pragma once

#include "../elementwise.h"

namespace fused::l1_loss {

template <typename acc_t>
struct L1Loss {
  FUSED_HOST_DEVICE explicit L1Loss(const double* /*parameters*/) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    return math::absolute(input - target);
  }
  // torch's sign: 0 for 0 and for nan.
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    const acc_t difference = input - target;
    return difference > acc_t(0) ? acc_t(1) : difference < acc_t(0) ? acc_t(-1) : acc_t(0);
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
    return -grad_input(input, target);
  }
};

struct Op : OpOf<L1Loss> {
  static constexpr Weights kWeights = Weights::kWeight;
  static constexpr bool kWeightHasGradient = true;
};

}  // namespace fused::l1_loss
