// Cross entropy of one row of logits with a class index, as torch.nn.functional.cross_entropy.
//
// A row is summarised by its largest logit and log(sum(exp(logit - largest))). They are kept apart:
// if logits are near 700, their rounded sum would lose six bits of every probability (float32
// gradient errors of 4.6e-5 instead of 3e-7). With label smoothing s and class weights w (1 if
// absent):
//   loss  = (1 - s) w[t] (lse - x[t]) + s/C sum_c w[c] (lse - x[c])
//   dx[c] = (1 - s) w[t] (p[c] - [c == t]) + s/C (p[c] sum(w) - w[c])
// where lse = largest + log_sum and p[c] = exp(x[c] - lse). A z-loss of z lse^2 adds 2 z lse p[c]
// to dx[c].
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

template <typename acc_t>
struct CrossEntropyRow {
  acc_t largest;
  acc_t log_sum;

  // weighted_sum: sum_c w[c] (largest - x[c]); used only with smoothing.
  FUSED_HOST_DEVICE acc_t loss(acc_t target_logit, acc_t target_weight, acc_t smoothing,
                               acc_t weight_sum, acc_t weighted_sum, acc_t cols) const {
    const acc_t picked = target_weight * ((largest - target_logit) + log_sum);
    if (smoothing == acc_t(0)) return picked;
    return (acc_t(1) - smoothing) * picked +
           smoothing / cols * (weight_sum * log_sum + weighted_sum);
  }

  // What the gradient of the squared lse has as the factor of each p[c].
  FUSED_HOST_DEVICE acc_t of_square(acc_t grad_square) const {
    return acc_t(2) * grad_square * (largest + log_sum);
  }

  FUSED_HOST_DEVICE acc_t probability(acc_t logit) const {
    return math::exp((logit - largest) - log_sum);
  }
};

// The mean of rows: the sum of their losses over the total weight of their targets. With smoothing,
// torch adds the means of two terms. If the total weight is 0, the mean of the target term is 0/0,
// and the sum is nan.
FUSED_HOST_DEVICE double cross_entropy_mean(double losses, double weights, double smoothing) {
  return smoothing > 0 && weights == 0 ? math::kNan<double> : losses / weights;
}

FUSED_HOST_DEVICE bool is_out_of_bounds(const CrossEntropyArgs& args, int64_t target) {
  return target != args.ignore_index && (target < 0 || target >= args.classes);
}

// The weights of the row's classes, if there are any.
template <typename acc_t>
FUSED_HOST_DEVICE const acc_t* class_weights(const CrossEntropyArgs& args) {
  return args.weight ? static_cast<const acc_t*>(args.weight) + args.first_class : nullptr;
}

// The sum of the class weights. Used with smoothing only.
template <typename acc_t>
FUSED_HOST_DEVICE acc_t weight_sum(const CrossEntropyArgs& args) {
  return args.weight_sum ? *static_cast<const acc_t*>(args.weight_sum)
                         : static_cast<acc_t>(args.classes);
}

// The part of a row that a shard of the classes computes: the largest logit; the sum of the
// exponentials relative to it; the target's logit, or 0 if the target is in another shard; with
// smoothing also sum_c w[c] (largest - x[c]). The sum is kept, not its logarithm, since sums merge
// without another rounding. If the largest logit is -inf or the shard has no logits, the sums are
// relative to 0.
constexpr int kPartColumns = 3;
constexpr int kSmoothingPartColumns = 4;

// Merges the parts of all shards of a row, which lie `stride` apart.
template <typename acc_t>
struct MergedParts {
  acc_t largest, sum, target_logit, weighted_sum;

  // shard_weights: each shard's sum of w; null without smoothing.
  FUSED_HOST_DEVICE MergedParts(const acc_t* parts, int64_t stride, int64_t shards,
                                const acc_t* shard_weights)
      : largest(parts[0]), sum(0), target_logit(0), weighted_sum(0) {
    for (int64_t shard = 1; shard < shards; ++shard)
      largest = parts[shard * stride] > largest ? parts[shard * stride] : largest;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const acc_t* part = parts + shard * stride;
      // If all logits of the shard are -inf, its sums are relative to 0: -inf - -inf would make
      // them nan.
      const bool finite = part[0] > -math::kInfinity<acc_t>;
      sum += finite ? part[1] * math::exp(part[0] - largest) : part[1];
      target_logit += part[2];
      if (shard_weights)
        weighted_sum += part[3] + (finite ? shard_weights[shard] * (largest - part[0]) : acc_t(0));
    }
  }
};

// Writes the loss and the statistics of a row whose parts all shards have computed. Target: the
// device's RowTarget.
template <typename acc_t, typename Target>
FUSED_HOST_DEVICE void merge_row(const CrossEntropyArgs& args, int64_t row) {
  const bool smoothing = args.label_smoothing > 0;
  const int64_t columns = smoothing ? kSmoothingPartColumns : kPartColumns;
  const MergedParts<acc_t> merged(
      static_cast<const acc_t*>(args.parts) + row * columns, args.rows * columns, args.shards,
      smoothing ? static_cast<const acc_t*>(args.shard_weights) : nullptr);
  const CrossEntropyRow<acc_t> summary{merged.largest, math::log(merged.sum)};
  const Target target(args, row);
  static_cast<acc_t*>(args.stats)[2 * row] = summary.largest;
  static_cast<acc_t*>(args.stats)[2 * row + 1] = summary.log_sum;
  static_cast<acc_t*>(args.row_losses)[row] =
      target.ignored
          ? acc_t(0)
          : summary.loss(merged.target_logit, target.weight,
                         static_cast<acc_t>(args.label_smoothing), weight_sum<acc_t>(args),
                         merged.weighted_sum, static_cast<acc_t>(args.classes));
}

// The coefficients of a row's gradient: dx[c] = probability * p[c] - uniform * w[c] - [c == t]
// target.
template <typename acc_t>
struct CrossEntropyGradient {
  acc_t probability, uniform, target;

  // scale: grad_output (for the mean, over the total weight); 0 for an ignored row. The gradient of
  // an ignored row is still probability * p[c]: 0, or nan if the row's softmax is nan, as in torch.
  FUSED_HOST_DEVICE CrossEntropyGradient(acc_t scale, acc_t target_weight, acc_t smoothing,
                                         acc_t weight_sum, acc_t cols)
      : probability(scale * target_weight), uniform(0), target(scale * target_weight) {
    if (smoothing == acc_t(0)) return;
    probability = scale * ((acc_t(1) - smoothing) * target_weight + smoothing / cols * weight_sum);
    uniform = scale * smoothing / cols;
    target = scale * (acc_t(1) - smoothing) * target_weight;
  }
};

}  // namespace fused
