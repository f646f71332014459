// Negative log likelihood of one row of log-probabilities with a class index, as
// torch.nn.functional.nll_loss: -w[t] x[t], with the class weight w (1 when absent).
#pragma once

#include "math.h"

namespace fused {

struct NllLoss {
  template <typename acc_t>
  static FUSED_HOST_DEVICE acc_t value(acc_t log_probability, acc_t weight) {
    return -weight * log_probability;
  }
  // The gradient with respect to the log-probability of the target's class. It is 0 for all other
  // classes.
  template <typename acc_t>
  static FUSED_HOST_DEVICE acc_t grad(acc_t scale, acc_t weight) {
    return -weight * scale;
  }
};

}  // namespace fused
