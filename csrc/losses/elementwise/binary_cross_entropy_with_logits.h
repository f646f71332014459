// Binary cross entropy of a logit, as torch.nn.functional.binary_cross_entropy_with_logits:
//   (1 - target) softplus(logit) + pos_weight target softplus(-logit)
// where softplus(x) = max(x, 0) + log1p(exp(-|x|)) neither overflows nor cancels. torch subtracts a
// log-sigmoid from (1 - target) logit instead, which differs for infinities. If our result is not
// finite, torch's formula is used.
#pragma once

#include "../elementwise.h"

namespace fused::binary_cross_entropy_with_logits {

template <typename acc_t>
struct Logit {
  acc_t positive;  // max(logit, 0)
  acc_t negative;  // max(-logit, 0)
  acc_t decay;     // exp(-|logit|), in [0, 1]

  FUSED_HOST_DEVICE explicit Logit(acc_t logit)
      : positive(logit > acc_t(0) ? logit : acc_t(0)),
        negative(logit < acc_t(0) ? -logit : acc_t(0)),
        decay(math::exp(-math::absolute(logit))) {}

  // The common term of softplus(logit) and softplus(-logit). It is nan if the logit is.
  FUSED_HOST_DEVICE acc_t common() const { return math::log1p_unit(decay); }
};

template <typename acc_t>
FUSED_HOST_DEVICE acc_t finite_or(acc_t result, acc_t torchs) {
  return math::is_finite(result) ? result : torchs;
}

// The probabilities of both classes, from one division. Neither is computed as 1 minus the other,
// which would cancel.
template <typename acc_t>
FUSED_HOST_DEVICE void probabilities(acc_t logit, acc_t& one, acc_t& zero) {
  const acc_t decay = math::exp(-math::absolute(logit));
  const acc_t larger = math::fast_inverse(acc_t(1) + decay), smaller = decay * larger;
  one = logit < acc_t(0) ? smaller : larger;
  zero = logit < acc_t(0) ? larger : smaller;
}

template <typename acc_t>
struct BinaryCrossEntropyWithLogits {
  static constexpr bool kExponentials = true, kWeightLast = true;

  FUSED_HOST_DEVICE explicit BinaryCrossEntropyWithLogits(const double* /*parameters*/) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
    const Logit<acc_t> logit(input);
    const acc_t common = logit.common(), rest = acc_t(1) - target;
    return finite_or(rest * logit.positive + target * logit.negative + common,
                     rest * input + (logit.negative + common));
  }
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
    acc_t one, zero;
    probabilities(input, one, zero);
    return finite_or((acc_t(1) - target) * one - target * zero, one - target);
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t /*target*/) const { return -input; }
};

// With a weight of the positive class for each element.
template <typename acc_t>
struct BinaryCrossEntropyWithPosWeight {
  static constexpr bool kWeightLast = true;

  FUSED_HOST_DEVICE explicit BinaryCrossEntropyWithPosWeight(const double* /*parameters*/) {}

  FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target, acc_t pos_weight) const {
    const Logit<acc_t> logit(input);
    const acc_t common = logit.common(), rest = acc_t(1) - target;
    const acc_t negative = logit.negative + common;
    return finite_or(rest * (logit.positive + common) + pos_weight * target * negative,
                     rest * input + ((pos_weight - acc_t(1)) * target + acc_t(1)) * negative);
  }
  FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target, acc_t pos_weight) const {
    acc_t one, zero;
    probabilities(input, one, zero);
    const acc_t positive = pos_weight * target;
    return finite_or((acc_t(1) - target) * one - positive * zero,
                     (positive + acc_t(1) - target) * one - positive);
  }
  FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t /*target*/, acc_t pos_weight) const {
    const Logit<acc_t> logit(input);
    const acc_t common = logit.common();
    return pos_weight * (logit.negative + common) - (logit.positive + common);
  }
};

struct Op : AnyOp {
  static constexpr Weights kWeights = Weights::kWeightAndPosWeight;
  static constexpr Like kLike = Like::kTarget;

  template <typename Run>
  static void choose(const ElementwiseArgs& args, const Run& run) {
    if (args.pos_weight.data) return run(Functor<BinaryCrossEntropyWithPosWeight>());
    run(Functor<BinaryCrossEntropyWithLogits>());
  }
};

}  // namespace fused::binary_cross_entropy_with_logits
