// Statistics of a row of logits and a target row of the same classes, in one pass over both.
//
// The target row gives each class a mass m: a probability, or exp of a logit. For input logits x
// and temperature T:
//   exponentials = sum exp((x - origin) / T)
//   mass         = sum m
//   cross        = sum m d, where d = pivot - x or, if the target holds logits t,
//                  d = (pivot - x) - (target origin - t); not divided by T
// An origin is the largest logit seen so far, or 0 while all logits are -inf: -inf - -inf would
// make the sums nan. If the target holds logits, the pivot is the input logit of the class with the
// largest target logit; otherwise it is input's origin. If one class has almost all the mass, its
// term of `cross` is then 0 and nothing cancels. Sums are relative to origins and pivot, so that
// logits near 700 lose no digits. Raising an origin rescales the sums. A nan or +inf makes the sums
// nan, as in torch.
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

// The terms that one class adds to the sums.
template <typename acc_t, typename sum_t>
struct RowPairTerm {
  acc_t exponential;
  sum_t mass, cross;
};

// The statistics from which a row's loss and gradients are computed. Sums, not their logarithms:
// the rounding of a logarithm near 10 would be a much larger error of every probability.
template <typename acc_t>
struct RowPairStatistics {
  acc_t largest_input, exponentials, largest_target, mass, pivot, cross;

  FUSED_HOST_DEVICE void write(const RowPairArgs& args, int64_t row) const {
    acc_t* stats = static_cast<acc_t*>(args.stats) + row * kRowPairStats;
    stats[0] = largest_input;
    stats[1] = exponentials;
    stats[2] = largest_target;
    stats[3] = mass;
    stats[4] = pivot;
    stats[5] = cross;
  }
};

template <typename acc_t>
FUSED_HOST_DEVICE RowPairStatistics<acc_t> read_statistics(const RowPairArgs& args, int64_t row) {
  const acc_t* stats = static_cast<const acc_t*>(args.stats) + row * kRowPairStats;
  return {stats[0], stats[1], stats[2], stats[3], stats[4], stats[5]};
}

// If the terms of a loss need the sums of both rows, the loss has a type SecondPass, constructed
// from a row's statistics. It gives two numbers for each class, and the loss's `finish` stores
// their sums in the statistics.
template <typename acc_t>
struct RowPairSecondTerm {
  acc_t input, target;
};

template <typename Loss>
constexpr bool kHasSecondPass = requires { typename Loss::SecondPass; };

template <typename acc_t>
FUSED_HOST_DEVICE acc_t finite_or_zero(acc_t logit) {
  return logit > -math::kInfinity<acc_t> ? logit : acc_t(0);
}

// kTargetLogits: the target row holds logits, so its masses have an origin too. Without kCross,
// neither `cross` nor the pivot is computed.
template <typename acc_t, bool kTargetLogits, bool kCross = true>
struct RowPairState {
  static constexpr bool kHasTargetLogits = kTargetLogits, kHasCross = kCross;
  acc_t largest_input, largest_target, pivot;
  double exponentials, mass, cross;

  // The state of no classes. Not the default: variables in shared memory must stay uninitialised.
  static FUSED_HOST_DEVICE RowPairState none() {
    return {-math::kInfinity<acc_t>, -math::kInfinity<acc_t>, 0, 0, 0, 0};
  }

  FUSED_HOST_DEVICE acc_t input_origin() const { return finite_or_zero(largest_input); }
  FUSED_HOST_DEVICE acc_t target_origin() const {
    return kTargetLogits ? finite_or_zero(largest_target) : acc_t(0);
  }

  FUSED_HOST_DEVICE void raise_input(acc_t largest, acc_t inverse_temperature) {
    if (!(largest > largest_input)) return;
    exponentials *= static_cast<double>(
        math::fast_exp(largest_input - finite_or_zero(largest), inverse_temperature));
    largest_input = largest;
    if constexpr (!kTargetLogits) {
      cross += mass * static_cast<double>(input_origin() - pivot);
      pivot = input_origin();
    }
  }

  // beside: the input logit of the class whose target logit is `largest`.
  FUSED_HOST_DEVICE void raise_target(acc_t largest, acc_t beside, acc_t inverse_temperature) {
    if (!(largest > largest_target)) return;
    const acc_t origin = target_origin(), next = finite_or_zero(largest);
    const double factor =
        static_cast<double>(math::fast_exp(largest_target - next, inverse_temperature));
    if constexpr (kCross) {
      const acc_t next_pivot = finite_or_zero(beside);
      const acc_t shift = (next - origin) - (next_pivot - pivot);
      cross = factor * (cross - mass * static_cast<double>(shift));
      pivot = next_pivot;
    }
    mass *= factor;
    largest_target = largest;
  }

  // Makes the sums relative to the origins and the pivot of this state and those to be added.
  FUSED_HOST_DEVICE void align(acc_t input, acc_t target, acc_t target_pivot,
                               acc_t inverse_temperature) {
    raise_input(input, inverse_temperature);
    if constexpr (kTargetLogits) raise_target(target, target_pivot, inverse_temperature);
    if constexpr (kTargetLogits && kCross) {
      // The other state's largest target logit may be equal but belong to another class.
      cross += mass * static_cast<double>(target_pivot - pivot);
      pivot = target_pivot;
    }
  }

  // Both states must be aligned.
  FUSED_HOST_DEVICE void add(const RowPairState& other) {
    exponentials += other.exponentials;
    mass += other.mass;
    cross += other.cross;
  }

  // Adds the sums of other classes.
  FUSED_HOST_DEVICE void merge(RowPairState other, acc_t inverse_temperature) {
    const bool theirs = other.largest_target > largest_target;
    const acc_t input = other.largest_input > largest_input ? other.largest_input : largest_input;
    const acc_t target = theirs ? other.largest_target : largest_target;
    const acc_t target_pivot = theirs ? other.pivot : pivot;
    align(input, target, target_pivot, inverse_temperature);
    other.align(input, target, target_pivot, inverse_temperature);
    add(other);
  }

  // Divides cross by `divisor`.
  template <typename stats_t>
  FUSED_HOST_DEVICE RowPairStatistics<stats_t> statistics(double divisor) const {
    return {static_cast<stats_t>(largest_input),  static_cast<stats_t>(exponentials),
            static_cast<stats_t>(largest_target), static_cast<stats_t>(mass),
            static_cast<stats_t>(pivot),          static_cast<stats_t>(cross / divisor)};
  }
};

}  // namespace fused
