// Pointwise Kullback-Leibler divergence, as torch.nn.functional.kl_div. input holds
// log-probabilities or, without kLogInput, probabilities, whose logarithm is never written to
// memory. target holds probabilities or, with kLogTarget, log-probabilities.
//   target * (log(target) - log_input)          0 * log(0) is 0
//   exp(target) * (target - log_input)          kLogTarget
// The corner cases are torch's: a negative target gives nan, a log-input of -inf with target 0
// gives nan, and the gradient for a target of 0 is nan.
#pragma once

#include "../elementwise.h"

namespace fused::kl_div {

template <bool kLogInput, bool kLogTarget>
struct KlDiv {
  template <typename acc_t>
  struct Loss {
    static constexpr bool kLogarithms = true;  // takes more arithmetic than the other losses

    FUSED_HOST_DEVICE explicit Loss(const double* /*parameters*/) {}

    static FUSED_HOST_DEVICE acc_t log_of(acc_t input) {
      return kLogInput ? input : math::log(input);
    }

    // log(target) - log_input, if target holds probabilities. kFast: by the hardware's logarithm.
    template <bool kFast = false>
    static FUSED_HOST_DEVICE acc_t distance(acc_t input, acc_t target) {
      if constexpr (kFast) return math::fast_log(target) - input;
      return kLogInput ? math::log(target) - input : math::log_of_quotient(target, input);
    }

    template <bool kFast = false>
    FUSED_HOST_DEVICE acc_t value(acc_t input, acc_t target) const {
      if constexpr (kLogTarget) return math::exp(target) * (target - log_of(input));
      return target * (target == acc_t(0) ? -log_of(input) : distance<kFast>(input, target));
    }

    // On the device: the value for 16-bit operands. Their rounding, at least 2^-12 of a target,
    // hides the error of the hardware's logarithm.
    FUSED_HOST_DEVICE acc_t value_of_16_bit(acc_t input, acc_t target) const
      requires(kLogInput && !kLogTarget)
    {
      return value<true>(input, target);
    }

    // On the host: the value of arguments that are is_regular, by one logarithm without special
    // cases. This logarithm of 0 is some finite number.
    acc_t regular_value(acc_t input, acc_t target) const
      requires(!kLogTarget)
    {
      const acc_t logarithm = math::host::log_normal(kLogInput ? target : target / input);
      return target * (kLogInput ? logarithm - input : logarithm);
    }
    bool is_regular(acc_t input, acc_t target) const
      requires(!kLogTarget)
    {
      using math::host::is_positive_normal;
      const bool zero = target == acc_t(0);
      if constexpr (kLogInput) return zero | is_positive_normal(target);
      return (zero & is_positive_normal(input)) |
             ((target > acc_t(0)) & is_positive_normal(target / input));
    }

    FUSED_HOST_DEVICE acc_t grad_input(acc_t input, acc_t target) const {
      const acc_t probability = kLogTarget ? math::exp(target) : target;
      return kLogInput ? -probability : -probability / input;
    }
    FUSED_HOST_DEVICE acc_t grad_target(acc_t input, acc_t target) const {
      if constexpr (kLogTarget) {
        const acc_t probability = math::exp(target);
        return probability * (target - log_of(input)) + probability;
      }
      return distance(input, target) + target / target;
    }
  };
};

struct Op : AnyOp {
  using Parameters = Types<bool, bool>;  // log_target, log_input
  static constexpr Like kLike = Like::kTarget;

  template <typename Run>
  static void choose(const ElementwiseArgs& args, const Run& run) {
    const bool log_target = args.parameters[0] != 0, log_input = args.parameters[1] != 0;
    if (log_input) {
      if (log_target) return run(Functor<KlDiv<true, true>::template Loss>());
      return run(Functor<KlDiv<true, false>::template Loss>());
    }
    if (log_target) return run(Functor<KlDiv<false, true>::template Loss>());
    run(Functor<KlDiv<false, false>::template Loss>());
  }
};

}  // namespace fused::kl_div
