// Code that the losses with class indices share: a row's target, and the factor of its gradient.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../losses/cross_entropy.h"
#include "rows.h"

namespace fused::cpu {

inline void check_targets(const char* op, const CrossEntropyArgs& args) {
  bool wrong = false;
  for (int64_t row = 0; row < args.rows; ++row) wrong |= is_out_of_bounds(args, args.target[row]);
  if (!wrong) return;
  const int64_t target = *std::find_if(args.target, args.target + args.rows, [&](int64_t value) {
    return is_out_of_bounds(args, value);
  });
  throw std::out_of_range(std::string(op) + ": target " + std::to_string(target) +
                          " is out of bounds for " + std::to_string(args.classes) +
                          " classes (ignore_index is " + std::to_string(args.ignore_index) + ")");
}

// A row's target and its weight.
template <typename acc_t>
struct RowTarget {
  bool ignored;
  int64_t index;  // in the row; -1 where ignored or in another shard
  acc_t weight;   // 0 where ignored

  RowTarget(const CrossEntropyArgs& args, int64_t row)
      : ignored(args.target[row] == args.ignore_index),
        index(ignored ? -1 : args.target[row] - args.first_class),
        weight(ignored       ? acc_t(0)
               : args.weight ? static_cast<const acc_t*>(args.weight)[args.target[row]]
                             : acc_t(1)) {
    if (index >= args.cols || index < 0) index = -1;
  }
};

// The common factor of all rows' gradients: grad_output, if it is one number, and for the mean the
// inverse of the total weight.
template <typename acc_t>
acc_t common_scale(const CrossEntropyArgs& args) {
  acc_t scale = 1;
  if (args.grad_output && !args.grad_output_stride)
    load(args.grad_output, args.grad_output_dtype, 0, 1, 1, &scale);
  if (args.reduction == Reduction::kMean) scale /= *static_cast<const acc_t*>(args.total_weight);
  return scale;
}

// A row's factor: the common one, times the row's grad_output if each row has one; 0 for an ignored
// row.
template <typename acc_t>
acc_t row_scale(const CrossEntropyArgs& args, int64_t row, const RowTarget<acc_t>& target,
                acc_t common) {
  if (target.ignored) return acc_t(0);
  if (!args.grad_output_stride) return common;
  acc_t grad_output;
  load(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride, 1, 1, &grad_output);
  return common * grad_output;
}

// The sum of the target weights. Throws for a target out of bounds.
template <typename acc_t>
double sum_of_weights(const char* op, const CrossEntropyArgs& args) {
  check_targets(op, args);
  if (!args.weight)
    return static_cast<double>(args.rows -
                               std::count(args.target, args.target + args.rows, args.ignore_index));
  return sum_over_rows(args.rows, [&](int64_t row) {
    return static_cast<double>(RowTarget<acc_t>(args, row).weight);
  });
}

// Adds up row_losses and reduces them, in the order of the rows.
template <typename acc_t>
void reduce_losses(const CrossEntropyArgs& args, double weights) {
  if (!args.loss) return;
  const acc_t* losses = static_cast<const acc_t*>(args.row_losses);
  const double sum =
      sum_over_rows(args.rows, [&](int64_t row) { return static_cast<double>(losses[row]); });
  const acc_t loss = static_cast<acc_t>(args.reduction == Reduction::kMean
                                            ? cross_entropy_mean(sum, weights, args.label_smoothing)
                                            : sum);
  store(args.loss, args.loss_dtype, 0, 1, 1, &loss);
}

}  // namespace fused::cpu
