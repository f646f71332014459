// 0.5 d^2 / beta where |d| < beta, |d| - 0.5 beta elsewhere, with d = input - target; beta 0 is the
// L1 loss. As torch.nn.functional.smooth_l1_loss (Girshick, Fast R-CNN, 2015).
#pragma once

#include "math.h"

namespace fused {

template <typename acc_t>
struct SmoothL1Loss {
  acc_t beta;
  acc_t slope;  // of the gradient around 0: 1 / beta, and 1 where there is no such part

  FUSED_HOST_DEVICE explicit SmoothL1Loss(const double* parameters)
      : beta(static_cast<acc_t>(parameters[0])),
        slope(beta > acc_t(0) ? acc_t(1) / beta : acc_t(1)) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const acc_t distance = math::absolute(input - target);
    return distance < beta ? acc_t(0.5) * slope * distance * distance
                           : distance - acc_t(0.5) * beta;
  }
  // The comparisons are ordered so that nan reaches the last branch. The L1 loss's gradient is 0
  // for nan, as torch's.
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    const acc_t difference = input - target;
    const acc_t middle = beta > acc_t(0) ? slope * difference : acc_t(0);
    return difference > beta ? acc_t(1) : difference < -beta ? acc_t(-1) : middle;
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
    return -grad_input(input, target);
  }
};

}  // namespace fused
