// Cross entropy of one row of logits with a class index, as torch.nn.functional.cross_entropy.
//
// A row is summarised by its largest logit and log(sum(exp(logit - largest))), kept apart: with
// logits near 700 their sum would lose six bits of every probability (float32 gradient errors of
// 4.6e-5 against 3e-7). With label smoothing s and class weights w (1 when absent):
//   loss  = (1 - s) w[t] (lse - x[t]) + s/C sum_c w[c] (lse - x[c])
//   dx[c] = (1 - s) w[t] (p[c] - [c == t]) + s/C (p[c] sum(w) - w[c])
// where lse = largest + log_sum and p[c] = exp(x[c] - lse).
#pragma once

#include "math.h"

namespace fused {

template <typename acc_t>
struct CrossEntropyRow {
  acc_t largest;
  acc_t log_sum;

  // weighted_sum: sum_c w[c] (largest - x[c]), used only with smoothing.
  FUSED_HOST_DEVICE acc_t loss(acc_t target_logit, acc_t target_weight, acc_t smoothing,
                               acc_t weight_sum, acc_t weighted_sum, acc_t cols) const {
    const acc_t picked = target_weight * ((largest - target_logit) + log_sum);
    if (smoothing == acc_t(0)) return picked;
    return (acc_t(1) - smoothing) * picked +
           smoothing / cols * (weight_sum * log_sum + weighted_sum);
  }

  FUSED_HOST_DEVICE acc_t probability(acc_t logit) const {
    return math::exp((logit - largest) - log_sum);
  }
};

// The coefficients of a row's gradient: dx[c] = probability * p[c] - uniform * w[c] - [c == t]
// target.
template <typename acc_t>
struct CrossEntropyGradient {
  acc_t probability, uniform, target;

  // scale: grad_output (over the total weight for the mean), 0 for an ignored row. An ignored row's
  // gradient is still probability * p[c]: 0, or nan where the row's softmax is nan, as in torch.
  FUSED_HOST_DEVICE CrossEntropyGradient(acc_t scale, acc_t target_weight, acc_t smoothing,
                                         acc_t weight_sum, acc_t cols)
      : probability(scale *
                    ((acc_t(1) - smoothing) * target_weight + smoothing / cols * weight_sum)),
        uniform(scale * smoothing / cols),
        target(scale * (acc_t(1) - smoothing) * target_weight) {}
};

}  // namespace fused
