// Kullback-Leibler divergence, or cross entropy, of the softmaxes of two rows of logits, without
// the terms of infinite logits, as distillation over vocabularies with masked classes writes it
// (MiniLLM, DistiLLM, torchtune). For input logits x, target logits t, temperature T and w = 1 for
// the divergence, w = 0 for the cross entropy:
//   p = softmax(x / T), q = softmax(t / T)
//   K     = the classes whose input logit is not infinite and, for the divergence, whose target
//           logit is not infinite either
//   loss  = sum over K of q[c] (w log q[c] - log p[c])
//   dx[c] = (p[c] M - [c in K] q[c]) / T
//   dt[c] = q[c] ([c in K] (w log q[c] - log p[c] + w) - loss - w M) / T
// where M is the sum of q over K. The classes outside K still count in both softmaxes.
//
// If a row has no softmax (it holds a nan or +inf, or only -inf), the terms of K are nan, and all
// gradients of both rows. Without classes in K the loss is 0 even then, as in torch.
//
// The terms need the sums of both rows, so a second pass computes them.
#pragma once

#include "row_pair.h"

namespace fused {

template <typename acc_t>
struct SoftmaxFiniteKlDiv {
  static constexpr bool kWeighted = false;
  acc_t entropy, inverse_temperature;

  // parameters: 1 for the divergence and 0 for the cross entropy, temperature
  FUSED_HOST_DEVICE explicit SoftmaxFiniteKlDiv(const double* parameters)
      : entropy(static_cast<acc_t>(parameters[0])),
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

  // 0, and nan if one of the rows has no softmax.
  static FUSED_HOST_DEVICE acc_t nothing(const RowPairStatistics<acc_t>& row) {
    return row.exponentials > 0 && row.mass > 0 ? acc_t(0) : math::kNan<acc_t>;
  }

  struct SecondPass {
    acc_t largest_input, largest_target, inverse_temperature, entropy, q_scale;

    FUSED_HOST_DEVICE SecondPass(const SoftmaxFiniteKlDiv& loss,
                                 const RowPairStatistics<acc_t>& row)
        : largest_input(row.largest_input),
          largest_target(row.largest_target),
          inverse_temperature(loss.inverse_temperature),
          entropy(loss.entropy),
          q_scale(1 / row.mass + nothing(row)) {}

    FUSED_HOST_DEVICE bool counts(acc_t x, acc_t t) const {
      const bool infinite_target = math::absolute(t) == math::kInfinity<acc_t>;
      return !(math::absolute(x) == math::kInfinity<acc_t> || (entropy != 0 && infinite_target));
    }

    // log q plus the logarithm of the target's sum. Finite, so that 0 times it is 0. A nan becomes
    // finite too, but its q is nan.
    FUSED_HOST_DEVICE acc_t log_target(acc_t t) const {
      return math::larger((t - largest_target) * inverse_temperature, acc_t(-1e30));
    }

    // w log q - log p, less the logarithms of both sums.
    FUSED_HOST_DEVICE acc_t distance(acc_t x, acc_t log_target) const {
      return entropy * log_target - (x - largest_input) * inverse_temperature;
    }

    FUSED_HOST_DEVICE RowPairSecondTerm<acc_t> term(acc_t x, acc_t t) const {
      const acc_t v = log_target(t);
      const acc_t q = math::fast_exp(v) * q_scale;
      const bool counted = counts(x, t);
      return {counted ? q * distance(x, v) : acc_t(0), counted ? q : acc_t(0)};
    }
  };

  // Stores M in pivot and the loss, less the logarithms of both sums times M, in cross.
  static FUSED_HOST_DEVICE void finish(RowPairStatistics<acc_t>& row, double input, double target) {
    row.pivot = static_cast<acc_t>(target);
    row.cross = static_cast<acc_t>(input);
  }

  // The logarithm of input's sum less w times that of target's. One logarithm of a quotient; the
  // difference of two logarithms would cancel.
  template <typename value_t>
  FUSED_HOST_DEVICE value_t log_sums(const RowPairStatistics<acc_t>& row) const {
    const value_t mass = entropy != 0 ? static_cast<value_t>(row.mass) : value_t(1);
    return math::log(static_cast<value_t>(row.exponentials) / mass);
  }

  // Without mass in K, log_sums, which may be infinite or nan, is no part of the loss.
  template <typename value_t>
  static FUSED_HOST_DEVICE value_t value_of(const RowPairStatistics<acc_t>& row, value_t log_sums) {
    const value_t mass = static_cast<value_t>(row.pivot), terms = static_cast<value_t>(row.cross);
    return mass > 0 ? terms + mass * log_sums : terms;
  }

  FUSED_HOST_DEVICE double value(const RowPairStatistics<acc_t>& row) const {
    return value_of(row, log_sums<double>(row));
  }

  // The gradients of one row. scale: grad_output over the reduction's divisor. `inside` is added to
  // the distance of classes in K, `outside` takes its place for the others. If K has all the mass,
  // an error of log_sums cancels in `inside`.
  struct Gradient {
    SecondPass classes;
    acc_t inside, outside, p_scale, scale;

    FUSED_HOST_DEVICE Gradient(const SoftmaxFiniteKlDiv& loss, const RowPairStatistics<acc_t>& row,
                               acc_t scale)
        : classes(loss, row),
          p_scale(row.pivot / row.exponentials + nothing(row)),
          scale(scale * loss.inverse_temperature) {
      const acc_t log_sums = loss.template log_sums<acc_t>(row), value = value_of(row, log_sums);
      inside = (log_sums - value) + loss.entropy * (1 - row.pivot);
      outside = -value - loss.entropy * row.pivot;
    }

    FUSED_HOST_DEVICE acc_t input(acc_t x, acc_t t, acc_t /*weight*/) const {
      const acc_t q = math::fast_exp(classes.log_target(t)) * classes.q_scale;
      const acc_t p =
          p_scale * math::fast_exp(x - classes.largest_input, classes.inverse_temperature);
      return scale * (p - (classes.counts(x, t) ? q : acc_t(0)));
    }
    FUSED_HOST_DEVICE acc_t target(acc_t x, acc_t t, acc_t /*weight*/) const {
      const acc_t v = classes.log_target(t);
      const acc_t q = math::fast_exp(v) * classes.q_scale;
      return scale * q * (classes.counts(x, t) ? classes.distance(x, v) + inside : outside);
    }
  };
};

}  // namespace fused
