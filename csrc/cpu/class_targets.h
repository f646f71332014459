// What the losses with class indices share: a row's target, and the factor of its gradient.
#pragma once

#include <stdexcept>
#include <string>

#include "rows.h"

namespace fused::cpu {

inline void check_target(const char* op, const CrossEntropyArgs& args, int64_t row) {
  const int64_t target = args.target[row];
  if (target != args.ignore_index && (target < 0 || target >= args.classes))
    throw std::out_of_range(std::string(op) + ": target " + std::to_string(target) +
                            " is out of bounds for " + std::to_string(args.classes) +
                            " classes (ignore_index is " + std::to_string(args.ignore_index) + ")");
}

// What one row's loss and gradient need besides its statistics.
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

// The weights of the row's classes, if there are any.
template <typename acc_t>
const acc_t* class_weights(const CrossEntropyArgs& args) {
  return args.weight ? static_cast<const acc_t*>(args.weight) + args.first_class : nullptr;
}

// grad_output, over the total weight for the mean; 0 for an ignored row.
template <typename acc_t>
acc_t row_scale(const CrossEntropyArgs& args, int64_t row, const RowTarget<acc_t>& target,
                acc_t total_weight) {
  if (target.ignored) return acc_t(0);
  acc_t grad_output = 1;
  if (args.grad_output)
    load(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride, 1, 1,
         &grad_output);
  return args.reduction == Reduction::kMean ? grad_output / total_weight : grad_output;
}

template <typename acc_t>
double sum_of_weights(const char* op, const CrossEntropyArgs& args) {
  return sum_over_rows(args.rows, [&](int64_t row) {
    check_target(op, args, row);
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
  const acc_t loss = static_cast<acc_t>(args.reduction == Reduction::kMean ? sum / weights : sum);
  store(args.loss, args.loss_dtype, 0, 1, 1, &loss);
}

}  // namespace fused::cpu
