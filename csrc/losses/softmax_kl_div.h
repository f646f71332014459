// Kullback-Leibler divergence of the softmaxes of two rows of logits, with temperature T (Hinton,
// Vinyals, Dean, Distilling the Knowledge in a Neural Network, 2015), for input logits x and target
// logits t:
//   q = softmax(t / T), p = softmax(x / T)
//   loss  = sum_c q[c] (log q[c] - log p[c])
//   dx[c] = (p[c] - q[c]) / T
//   dt[c] = q[c] (log q[c] - log p[c] - loss) / T
// A target logit of -inf is probability 0. If p[c] is not 0, the class adds 0 to the loss and the
// gradient of its target logit is 0. If p[c] is 0 as well, the result is nan, as in torch's kl_div.
#pragma once

#include "row_pair.h"

namespace fused {

template <typename acc_t>
struct SoftmaxKlDiv {
  static constexpr bool kWeighted = false;
  acc_t inverse_temperature;

  // parameters: temperature
  FUSED_HOST_DEVICE explicit SoftmaxKlDiv(const double* parameters)
      : inverse_temperature(math::positive<acc_t>(1 / parameters[0])) {}

  // Keeps the logit of a probability 0 finite, so that 0 times it is 0. A nan becomes finite too,
  // but its probability is nan.
  static FUSED_HOST_DEVICE acc_t finite(acc_t logit) {
    return math::larger(logit, math::kLowest<acc_t>);
  }

  using State = RowPairState<acc_t, true>;

  // input, target: the logits less their origins; below: the input logit less the pivot
  FUSED_HOST_DEVICE RowPairTerm<acc_t, acc_t> term(acc_t input, acc_t below, acc_t target,
                                                   acc_t /*weight*/) const {
    const acc_t mass = math::fast_exp(target, inverse_temperature);
    return {math::fast_exp(input, inverse_temperature), mass, mass * (finite(target) - below)};
  }

  // Divides cross by the mass: sum q ((t - largest) - (x - pivot)).
  template <typename state_t>
  static FUSED_HOST_DEVICE RowPairStatistics<acc_t> finish(const state_t& state) {
    return state.template statistics<acc_t>(state.mass);
  }

  // One logarithm of a quotient near 1; the difference of two logarithms would cancel.
  FUSED_HOST_DEVICE double value(const RowPairStatistics<acc_t>& row) const {
    const double distance = static_cast<double>(row.largest_input) - static_cast<double>(row.pivot);
    return (static_cast<double>(row.cross) + distance) * static_cast<double>(inverse_temperature) +
           math::log(static_cast<double>(row.exponentials) / static_cast<double>(row.mass));
  }

  // The gradients of one row. scale: grad_output over the reduction's divisor.
  struct Gradient {
    acc_t largest_input, largest_target, inverse_temperature, pivot, cross;
    acc_t p_scale, q_scale, distance_scale;

    FUSED_HOST_DEVICE Gradient(const SoftmaxKlDiv& loss, const RowPairStatistics<acc_t>& row,
                               acc_t scale)
        : largest_input(row.largest_input),
          largest_target(row.largest_target),
          inverse_temperature(loss.inverse_temperature),
          pivot(row.pivot),
          cross(row.cross),
          p_scale(scale * loss.inverse_temperature / row.exponentials),
          q_scale(scale * loss.inverse_temperature / row.mass),
          distance_scale(q_scale * loss.inverse_temperature) {}

    FUSED_HOST_DEVICE acc_t input(acc_t x, acc_t target, acc_t /*weight*/) const {
      return p_scale * math::fast_exp(x - largest_input, inverse_temperature) -
             q_scale * math::fast_exp(target - largest_target, inverse_temperature);
    }
    // distance - cross is log q - log p - loss without the terms that cancel, times the
    // temperature.
    FUSED_HOST_DEVICE acc_t target(acc_t x, acc_t target, acc_t /*weight*/) const {
      const acc_t t = target - largest_target;
      const acc_t distance = finite(t) - (x - pivot);
      return distance_scale * math::fast_exp(t, inverse_temperature) * (distance - cross);
    }
  };
};

}  // namespace fused
