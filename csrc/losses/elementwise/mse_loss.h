// Squared error (input - target)^2, as torch.nn.functional.mse_loss.
#pragma once

#include "../elementwise.h"

namespace fused::mse_loss {

template <typename acc_t>
struct MseLoss {
  static constexpr double kDerivativeSlope = 2;

  FUSED_HOST_DEVICE explicit MseLoss(const double* /*parameters*/) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const acc_t difference = input - target;
    return difference * difference;
  }
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const { return input - target; }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const { return target - input; }
};

struct Op : OpOf<MseLoss> {
  static constexpr Weights kWeights = Weights::kWeight;
  static constexpr bool kWeightHasGradient = true;
};

}  // namespace fused::mse_loss
