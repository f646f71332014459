// 0.5 d^2 / beta where |d| < beta, |d| - 0.5 beta elsewhere, with d = input - target. With beta 0
// it is the L1 loss. As torch.nn.functional.smooth_l1_loss (Girshick, Fast R-CNN, 2015).
#pragma once

#include "../elementwise.h"

namespace fused::smooth_l1_loss {

template <typename acc_t>
struct SmoothL1Loss {
  acc_t beta;
  acc_t lift;   // a power of two that keeps 1 / (lift beta) finite
  acc_t slope;  // of the gradient where |d| < beta, over lift; 1 if beta is 0
  acc_t edge;   // beta; above 0 if beta is 0, so that the L1 loss's gradient is 0 for 0

  FUSED_HOST_DEVICE explicit SmoothL1Loss(const double* parameters)
      : beta(static_cast<acc_t>(parameters[0])),
        lift(beta < acc_t(1) ? acc_t(0x1p64) : acc_t(1)),
        slope(beta > acc_t(0) ? acc_t(1) / (lift * beta) : acc_t(1)),
        edge(beta > acc_t(0) ? beta : math::kSmallest<acc_t>) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const acc_t distance = math::absolute(input - target);
    return distance < beta ? acc_t(0.5) * (slope * (lift * distance)) * distance
                           : distance - acc_t(0.5) * beta;
  }
  // The comparisons are ordered so that nan reaches the last branch. They also hold if difference
  // and beta are infinite. The L1 loss's gradient is 0 for nan, as in torch.
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    const acc_t difference = input - target;
    const acc_t middle = beta > acc_t(0) ? slope * (lift * difference) : acc_t(0);
    return difference >= edge ? acc_t(1) : difference <= -edge ? acc_t(-1) : middle;
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
    return -grad_input(input, target);
  }
};

struct Op : OpOf<SmoothL1Loss> {
  using Parameters = Types<double>;  // beta
  static constexpr Weights kWeights = Weights::kWeight;
  static constexpr bool kWeightHasGradient = true;
};

}  // namespace fused::smooth_l1_loss
