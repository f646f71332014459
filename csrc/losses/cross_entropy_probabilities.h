// Cross entropy of one row of logits x with class probabilities q, as
// torch.nn.functional.cross_entropy. With label smoothing s, C classes, class weights w (1 if
// absent) and q' = (1 - s) q + s / C:
//   loss  = sum_c w[c] q'[c] (lse - x[c])
//   dx[c] = p[c] sum(w q') - w[c] q'[c]
//   dq[c] = (1 - s) w[c] (lse - x[c])
//   dw[c] = q'[c] (lse - x[c])
// where lse = largest + log(sum), kept apart (see cross_entropy.h), and p[c] = exp(x[c] - lse).
// q need not add up to 1, nor lie between 0 and 1. If it has both signs, terms of a row cancel, and
// losses of rows cancel in their sum. Hence a row's loss keeps more digits than acc_t has.
#pragma once

#include "row_pair.h"

namespace fused {

template <typename acc_t>
struct CrossEntropyProbabilities {
  static constexpr bool kWeighted = true;
  acc_t kept, uniform;
  static constexpr acc_t inverse_temperature = 1;

  // parameters: label smoothing, number of classes
  FUSED_HOST_DEVICE explicit CrossEntropyProbabilities(const double* parameters)
      : kept(static_cast<acc_t>(1 - parameters[0])),
        uniform(static_cast<acc_t>(parameters[0] / parameters[1])) {}

  using State = RowPairState<acc_t, false>;

  // input: the logit less its origin; below: the logit less the pivot. sum_t: the type of mass and
  // cross.
  template <typename sum_t>
  FUSED_HOST_DEVICE RowPairTerm<acc_t, sum_t> term(acc_t input, sum_t below, acc_t target,
                                                   acc_t weight) const {
    const sum_t smoothed = sum_t(kept) * sum_t(target) + sum_t(uniform);
    const sum_t mass = sum_t(weight) * smoothed;
    return {math::fast_exp(input), mass, mass * -below};
  }

  // Only the loss needs cross, so the loss is computed here, before anything is rounded. It
  // replaces cross, and its rounding error replaces the pivot.
  template <typename state_t>
  static FUSED_HOST_DEVICE RowPairStatistics<acc_t> finish(const state_t& state) {
    auto row = state.template statistics<acc_t>(1);
    const double loss = state.cross + state.mass * math::log(state.exponentials);
    row.cross = static_cast<acc_t>(loss);
    const bool finite = math::absolute(row.cross) < math::kInfinity<acc_t>;
    row.pivot = finite ? static_cast<acc_t>(loss - static_cast<double>(row.cross)) : acc_t(0);
    return row;
  }

  FUSED_HOST_DEVICE double value(const RowPairStatistics<acc_t>& row) const {
    return static_cast<double>(row.cross) + static_cast<double>(row.pivot);
  }

  // The gradients of one row. scale: grad_output over the reduction's divisor.
  struct Gradient {
    CrossEntropyProbabilities loss;
    acc_t largest, log_sum, scale, probability, kept, uniform;

    FUSED_HOST_DEVICE Gradient(const CrossEntropyProbabilities& loss,
                               const RowPairStatistics<acc_t>& row, acc_t scale)
        : loss(loss),
          largest(row.largest_input),
          log_sum(math::log(row.exponentials)),
          scale(scale),
          probability(scale * row.mass / row.exponentials),
          kept(scale * loss.kept),
          uniform(scale * loss.uniform) {}

    FUSED_HOST_DEVICE acc_t input(acc_t x, acc_t target, acc_t weight) const {
      return probability * math::fast_exp(x - largest) - weight * (kept * target + uniform);
    }
    FUSED_HOST_DEVICE acc_t target(acc_t x, acc_t /*target*/, acc_t weight) const {
      return (kept * weight) * ((largest - x) + log_sum);
    }
    FUSED_HOST_DEVICE acc_t weight(acc_t x, acc_t target) const {
      return scale * ((loss.kept * target + loss.uniform) * ((largest - x) + log_sum));
    }
  };
};

}  // namespace fused
