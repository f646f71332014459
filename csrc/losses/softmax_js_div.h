// Generalised Jensen-Shannon divergence of the softmaxes of two rows of logits, with temperature T
// and 0 < beta < 1 (Agarwal et al., On-Policy Distillation of Language Models, 2024), for input
// logits x and target logits t:
//   p = softmax(x / T), q = softmax(t / T), m = (1 - beta) p + beta q
//   loss  = (1 - beta) KL(p || m) + beta KL(q || m)
//   dx[c] = (1 - beta) p[c] (log p[c] - log m[c] - KL(p || m)) / T
//   dt[c] = beta q[c] (log q[c] - log m[c] - KL(q || m)) / T
// If a class has probability 0 in one row or both, that probability's term and gradient are 0. If a
// row has no softmax (it holds a nan or +inf, or only -inf), the loss and all gradients are nan.
//
// m depends on the sums of both rows, so a second pass computes the divergences.
#pragma once

#include "row_pair.h"

namespace fused {

template <typename acc_t>
struct SoftmaxJsDiv {
  static constexpr bool kWeighted = false;
  acc_t beta, rest, inverse_temperature;

  // parameters: beta, temperature. Both weights stay positive after rounding, and so does every m.
  FUSED_HOST_DEVICE explicit SoftmaxJsDiv(const double* parameters)
      : beta(math::positive<acc_t>(parameters[0])),
        rest(math::positive<acc_t>(1 - parameters[0])),
        inverse_temperature(math::positive<acc_t>(1 / parameters[1])) {}

  using State = RowPairState<acc_t, true, false>;

  // input, target: the logits less their origins
  FUSED_HOST_DEVICE RowPairTerm<acc_t, acc_t> term(acc_t input, acc_t /*below*/, acc_t target,
                                                   acc_t /*weight*/) const {
    return {math::fast_exp(input, inverse_temperature), math::fast_exp(target, inverse_temperature),
            0};
  }

  template <typename state_t>
  static FUSED_HOST_DEVICE RowPairStatistics<acc_t> finish(const state_t& state) {
    return state.template statistics<acc_t>(1);
  }

  // One class. Everything is relative to the larger of its two probabilities, so that nothing
  // overflows. If the rows are almost equal, the logarithms of these ratios are small and keep
  // their digits.
  struct Class {
    bool target_larger;
    acc_t larger, smaller;
    acc_t log_ratio;  // log(smaller / larger)
    acc_t log_m;      // log(m / larger)

    FUSED_HOST_DEVICE acc_t p() const { return target_larger ? smaller : larger; }
    FUSED_HOST_DEVICE acc_t q() const { return target_larger ? larger : smaller; }
    // log(p / m), log(q / m)
    FUSED_HOST_DEVICE acc_t log_input() const { return (target_larger ? log_ratio : 0) - log_m; }
    FUSED_HOST_DEVICE acc_t log_target() const { return (target_larger ? 0 : log_ratio) - log_m; }
  };

  struct SecondPass {
    acc_t largest_input, largest_target, inverse_temperature, beta, rest;
    acc_t log_sums, p_scale, q_scale;

    FUSED_HOST_DEVICE SecondPass(const SoftmaxJsDiv& loss, const RowPairStatistics<acc_t>& row)
        : largest_input(row.largest_input),
          largest_target(row.largest_target),
          inverse_temperature(loss.inverse_temperature),
          beta(loss.beta),
          rest(loss.rest),
          // If one row has no softmax, log_sums is nan, and with it all classes of both rows.
          log_sums(row.exponentials > 0 && row.mass > 0 ? math::log(row.exponentials / row.mass)
                                                        : math::kNan<acc_t>),
          p_scale(1 / row.exponentials + 0 * log_sums),
          q_scale(1 / row.mass + 0 * log_sums) {}

    FUSED_HOST_DEVICE Class at(acc_t x, acc_t t) const {
      // Finite, so that two probabilities of 0 have a quotient whose logarithm times 0 is 0.
      constexpr acc_t kLowestExponent = -1e30;
      const acc_t u = math::larger((x - largest_input) * inverse_temperature, kLowestExponent);
      const acc_t v = math::larger((t - largest_target) * inverse_temperature, kLowestExponent);
      const acc_t distance = (v - u) + log_sums;
      Class c;
      c.target_larger = distance > 0;
      c.larger = math::fast_exp(c.target_larger ? v : u) * (c.target_larger ? q_scale : p_scale);
      c.log_ratio = c.target_larger ? -distance : distance;
      const acc_t ratio = math::fast_exp(c.log_ratio);
      c.smaller = c.larger * ratio;
      const acc_t larger_weight = c.target_larger ? beta : rest;
      const acc_t smaller_weight = c.target_larger ? rest : beta;
      c.log_m = math::log_near_one(larger_weight + smaller_weight * ratio,
                                   smaller_weight * math::expm1_nonpositive(c.log_ratio, ratio));
      return c;
    }

    // The terms of KL(p || m) and KL(q || m). An error of log_sums shifts all logarithms of a row
    // and the row's divergence by the same amount. It cancels in the gradient, which subtracts the
    // divergence from the logarithms, and in the loss.
    FUSED_HOST_DEVICE RowPairSecondTerm<acc_t> term(acc_t x, acc_t t) const {
      const Class c = at(x, t);
      return {c.p() * c.log_input(), c.q() * c.log_target()};
    }
  };

  // Stores KL(p || m) in pivot and KL(q || m) in cross.
  static FUSED_HOST_DEVICE void finish(RowPairStatistics<acc_t>& row, double input, double target) {
    row.pivot = static_cast<acc_t>(input);
    row.cross = static_cast<acc_t>(target);
  }

  FUSED_HOST_DEVICE double value(const RowPairStatistics<acc_t>& row) const {
    return static_cast<double>(rest) * static_cast<double>(row.pivot) +
           static_cast<double>(beta) * static_cast<double>(row.cross);
  }

  // The gradients of one row. scale: grad_output over the reduction's divisor.
  struct Gradient {
    SecondPass classes;
    acc_t input_divergence, target_divergence, input_scale, target_scale;

    FUSED_HOST_DEVICE Gradient(const SoftmaxJsDiv& loss, const RowPairStatistics<acc_t>& row,
                               acc_t scale)
        : classes(loss, row),
          input_divergence(row.pivot),
          target_divergence(row.cross),
          input_scale(scale * loss.inverse_temperature * loss.rest),
          target_scale(scale * loss.inverse_temperature * loss.beta) {}

    FUSED_HOST_DEVICE acc_t input(acc_t x, acc_t t, acc_t /*weight*/) const {
      const Class c = classes.at(x, t);
      return input_scale * c.p() * (c.log_input() - input_divergence);
    }
    FUSED_HOST_DEVICE acc_t target(acc_t x, acc_t t, acc_t /*weight*/) const {
      const Class c = classes.at(x, t);
      return target_scale * c.q() * (c.log_target() - target_divergence);
    }
  };
};

}  // namespace fused
