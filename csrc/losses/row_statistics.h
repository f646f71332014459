// Statistics of a row of logits z (after the soft-cap, if there is one):
//   logsumexp  log(sum exp(z))
//   nll        logsumexp - z[t]
//   entropy    -sum p log(p), where p = exp(z - logsumexp); p = 0 adds nothing
//   total      sum z
//   maximum    and argmax, the first class that has the maximum; a nan counts as the largest
//   log_squares   log(sum p^2), if it is asked for
// and the gradient of the first four with respect to z, where g_nll, ... are the gradients of the
// statistics:
//   p (g_nll + g_logsumexp - g_entropy (z - logsumexp + entropy)) - g_nll [c == t] + g_total
//
// The row is read once. Let m be the largest logit so far, s = sum exp(z - m) and
// w = sum exp(z - m) (z - m). Then entropy = log(s) - w / s. Neither term is negative, and logits
// near 700 lose no digits. With q = sum exp(z - m)^2, log(sum p^2) = log(q / s^2).
//
// As in torch, these inputs give nan:
//   a nan                 in all statistics
//   +inf                  in all but logsumexp, maximum and total
//   -inf in all classes   in nll, entropy and log_squares
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

// A difference of logits, bounded below so that 0 times it is 0. Masked logits are -inf or the
// lowest finite number, and their differences may be infinite. A nan is bounded too, so that the
// sums do not show it.
template <typename acc_t>
FUSED_HOST_DEVICE acc_t bounded(acc_t difference) {
  return math::larger(difference, acc_t(-1e30));
}

// exp(z - m) and exp(z - m) (z - m) from the difference.
template <typename acc_t>
struct RowTerm {
  acc_t exponential, weighted;

  FUSED_HOST_DEVICE explicit RowTerm(acc_t difference) {
    const acc_t d = bounded(difference);
#ifdef __CUDA_ARCH__
    exponential = math::fast_exp(d);
#else
    exponential = math::host::exp_term(d);
#endif
    weighted = exponential * d;
  }

  // The exponential's square. Subnormal ones are slow on the host. So the exponential is first
  // rounded to a multiple of the root of the smallest normal number, if it is not much larger than
  // that.
  FUSED_HOST_DEVICE acc_t square() const {
#ifdef __CUDA_ARCH__
    return exponential * exponential;
#else
    constexpr acc_t kRounding = std::is_same_v<acc_t, float> ? 0x1p-40f : 0x1p-459;
    const acc_t rounded = (exponential + kRounding) - kRounding;
    return rounded * rounded;
#endif
  }
};

// The sums of the logits seen so far, without nans. sum_t may be wider than acc_t.
template <typename acc_t, typename sum_t = acc_t, bool kSquares = false>
struct RowSums {
  acc_t largest;
  sum_t exponentials, weighted;

  // The sums of no logits. Not the default: variables in shared memory must stay uninitialised.
  static FUSED_HOST_DEVICE RowSums none() { return {-math::kInfinity<acc_t>, 0, 0}; }

  // The logit that the sums are relative to. Never -inf: -inf - -inf would make the sums nan.
  FUSED_HOST_DEVICE acc_t origin() const {
    return largest > -math::kInfinity<acc_t> ? largest : acc_t(0);
  }

  // Makes new_largest, which is at least `largest`, the largest logit. If all logits so far are
  // -inf, the sums are 0 and need no factor. Returns the factor of the exponentials.
  FUSED_HOST_DEVICE sum_t raise(acc_t new_largest) {
    sum_t factor = 1;
    if (largest > -math::kInfinity<acc_t>) {
      const sum_t shift = bounded(static_cast<sum_t>(largest) - static_cast<sum_t>(new_largest));
      factor = math::fast_exp(shift);
      weighted = factor * weighted + exponentials * (factor * shift);
      exponentials *= factor;
    }
    largest = new_largest;
    return factor;
  }
};

// The same, and the sum of the squared exponentials.
template <typename acc_t, typename sum_t>
struct RowSums<acc_t, sum_t, true> : RowSums<acc_t, sum_t> {
  sum_t squares;

  static FUSED_HOST_DEVICE RowSums none() { return {RowSums<acc_t, sum_t>::none(), 0}; }

  FUSED_HOST_DEVICE void raise(acc_t new_largest) {
    const sum_t factor = RowSums<acc_t, sum_t>::raise(new_largest);
    squares *= factor * factor;
  }

  // If the row holds +inf, or nothing but -inf, both sums are 0, and the quotient is nan.
  FUSED_HOST_DEVICE acc_t log_squares(bool has_nan) const {
    const sum_t logarithm = math::log(squares / (this->exponentials * this->exponentials));
    return has_nan ? math::kNan<acc_t> : static_cast<acc_t>(logarithm);
  }
};

template <typename acc_t>
struct RowStatistics {
  acc_t nll, logsumexp, entropy;
  acc_t largest, log_sum;  // logsumexp is their rounded sum

  template <typename sum_t>
  FUSED_HOST_DEVICE RowStatistics(const RowSums<acc_t, sum_t>& sums, bool has_nan,
                                  acc_t target_logit) {
    const sum_t logarithm = math::log(sums.exponentials);
    largest = sums.largest;
    log_sum = static_cast<acc_t>(logarithm);
    nll = static_cast<acc_t>((static_cast<sum_t>(largest) - static_cast<sum_t>(target_logit)) +
                             logarithm);
    logsumexp = static_cast<acc_t>(static_cast<sum_t>(sums.origin()) + logarithm);
    entropy = static_cast<acc_t>(logarithm - sums.weighted / sums.exponentials);
    const bool infinite = largest == math::kInfinity<acc_t>;
    if (has_nan || infinite) {
      nll = entropy = log_sum = math::kNan<acc_t>;
      logsumexp = has_nan ? math::kNan<acc_t> : largest;
    }
  }

  // Writes the numbers that the backward needs. If the row holds +inf or nan, its softmax is nan in
  // all classes.
  FUSED_HOST_DEVICE void save(acc_t* stats) const {
    stats[0] = largest;
    stats[1] = log_sum;
    stats[2] = entropy;
  }
};

// The gradient with respect to a row's logits, without the target's term and the soft-cap.
template <typename acc_t>
struct RowStatisticsGradient {
  acc_t largest, log_sum, entropy;
  acc_t probability, of_entropy, of_total;

  FUSED_HOST_DEVICE RowStatisticsGradient(const acc_t* stats, acc_t g_nll, acc_t g_logsumexp,
                                          acc_t g_entropy, acc_t g_total)
      : largest(stats[0]),
        log_sum(stats[1]),
        entropy(stats[2]),
        probability(g_nll + g_logsumexp),
        of_entropy(g_entropy),
        of_total(g_total) {}

  // Called only if has_softmax. Otherwise the gradient is of_total.
  FUSED_HOST_DEVICE acc_t operator()(acc_t logit) const {
    const acc_t difference = (logit - largest) - log_sum;
    const acc_t p = math::fast_exp(difference);
    const acc_t share = p * (probability - of_entropy * (difference + entropy));
    return (p == acc_t(0) ? acc_t(0) : share) + of_total;
  }
};

FUSED_HOST_DEVICE bool has_softmax(const RowStatisticsArgs& args) {
  return args.grad_nll.data || args.grad_logsumexp.data || args.grad_entropy.data;
}

}  // namespace fused
