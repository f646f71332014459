// Row pairs with stride 1 between neighbouring rows, as in [N, C, H, W] or a transposed matrix. A
// block of kRowLanes rows goes through the classes together, one lane a row: once for the largest
// logits, once for the sums and, if the loss has a second pass, once more. Also the entry points
// for these rows and those of row_pair.h.
#pragma once

#include <bit>
#include <vector>

#include "row_pair.h"

namespace fused::cpu {

constexpr int64_t kRowLanes = 64;

// One operand's elements of one class, for all lanes.
template <typename acc_t>
class Lanes {
 public:
  Lanes(const RowOperand& operand, int64_t row, int64_t lanes)
      : operand_(operand),
        lanes_(lanes),
        offset_(operand.data ? row_offset(operand.layout, row) : 0),
        stride_(operand.layout.ndim > 0 ? operand.layout.strides[0] : 1),
        direct_(operand.dtype == dtype_of<acc_t>() && stride_ == 1) {}

  explicit operator bool() const { return operand_.data != nullptr; }

  const acc_t* read(int64_t col) {
    const int64_t begin = offset_ + col * operand_.layout.col_stride;
    if (direct_) return static_cast<const acc_t*>(operand_.data) + begin;
    load(operand_.data, operand_.dtype, begin, stride_, lanes_, buffer_);
    return buffer_;
  }

  acc_t* buffer() { return buffer_; }

  void write(int64_t col) {
    store(operand_.data, operand_.dtype, offset_ + col * operand_.layout.col_stride, stride_,
          lanes_, buffer_);
  }

 private:
  const RowOperand& operand_;
  int64_t lanes_, offset_, stride_;
  bool direct_;
  alignas(64) acc_t buffer_[kRowLanes];
};

// Structs of acc_t, one for each lane, stored as a struct of arrays so that loops over the lanes
// vectorise.
template <typename acc_t, typename Struct>
class LaneStructs {
 public:
  void set(int64_t lane, const Struct& value) {
    const auto members = std::bit_cast<Members>(value);
    for (int64_t k = 0; k < kCount; ++k) members_[k][lane] = members.values[k];
  }

  Struct operator[](int64_t lane) const {
    Members members;
    for (int64_t k = 0; k < kCount; ++k) members.values[k] = members_[k][lane];
    return std::bit_cast<Struct>(members);
  }

 private:
  static constexpr int64_t kCount = sizeof(Struct) / sizeof(acc_t);
  struct Members {
    acc_t values[kCount];
  };
  alignas(64) acc_t members_[kCount][kRowLanes];
};

template <typename Loss, typename acc_t>
acc_t weight_of(const RowPairArgs& args, int64_t col) {
  return Loss::kWeighted && args.weight ? static_cast<const acc_t*>(args.weight)[col] : acc_t(1);
}

template <template <typename> class Loss, typename acc_t>
void forward_lanes(const RowPairArgs& args, const Loss<acc_t>& loss, int64_t row, int64_t lanes,
                   double* values) {
  Lanes<acc_t> input(args.input, row, lanes), target(args.target, row, lanes);
  alignas(64) acc_t largest[kRowLanes], largest_target[kRowLanes], beside[kRowLanes];
  alignas(64) acc_t origin[kRowLanes], target_origin[kRowLanes], pivot[kRowLanes];
  alignas(64) acc_t exponentials[kRowLanes] = {};
  alignas(64) double mass[kRowLanes] = {}, cross[kRowLanes] = {};
  std::fill_n(largest, kRowLanes, -math::kInfinity<acc_t>);
  std::fill_n(largest_target, kRowLanes, -math::kInfinity<acc_t>);
  std::fill_n(beside, kRowLanes, acc_t(0));
  for (int64_t col = 0; col < args.cols; ++col) {
    const acc_t* x = input.read(col);
    for (int64_t i = 0; i < lanes; ++i) largest[i] = x[i] > largest[i] ? x[i] : largest[i];
    if constexpr (RowState<Loss>::kHasTargetLogits) {
      const acc_t* t = target.read(col);
      for (int64_t i = 0; i < lanes; ++i) {
        const bool larger = t[i] > largest_target[i];
        beside[i] = larger ? x[i] : beside[i];
        largest_target[i] = larger ? t[i] : largest_target[i];
      }
    }
  }
  RowState<Loss> states[kRowLanes];
  for (int64_t i = 0; i < lanes; ++i) {
    states[i] = RowState<Loss>::none();
    states[i].largest_input = static_cast<double>(largest[i]);
    states[i].largest_target = static_cast<double>(largest_target[i]);
    states[i].pivot = RowState<Loss>::kHasTargetLogits
                          ? static_cast<double>(finite_or_zero(beside[i]))
                          : states[i].input_origin();
    origin[i] = static_cast<acc_t>(states[i].input_origin());
    target_origin[i] = static_cast<acc_t>(states[i].target_origin());
    pivot[i] = static_cast<acc_t>(states[i].pivot);
  }
  for (int64_t col = 0; col < args.cols; ++col) {
    const acc_t* x = input.read(col);
    const acc_t* t = target.read(col);
    const acc_t weight = weight_of<Loss<acc_t>, acc_t>(args, col);
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) {
      const auto term =
          loss.term(x[i] - origin[i], x[i] - pivot[i], t[i] - target_origin[i], weight);
      exponentials[i] += term.exponential;
      mass[i] += static_cast<double>(term.mass);
      if constexpr (RowState<Loss>::kHasCross) cross[i] += static_cast<double>(term.cross);
    }
  }
  RowPairStatistics<acc_t> statistics[kRowLanes];
  for (int64_t i = 0; i < lanes; ++i) {
    states[i].exponentials = static_cast<double>(exponentials[i]);
    states[i].mass = mass[i];
    states[i].cross = cross[i];
    statistics[i] = Loss<acc_t>::finish(states[i]);
  }
  if constexpr (kHasSecondPass<Loss<acc_t>>) {
    using Pass = typename Loss<acc_t>::SecondPass;
    LaneStructs<acc_t, Pass> passes;
    alignas(64) double of_input[kRowLanes] = {}, of_target[kRowLanes] = {};
    for (int64_t i = 0; i < lanes; ++i) passes.set(i, Pass(loss, statistics[i]));
    for (int64_t col = 0; col < args.cols; ++col) {
      const acc_t* x = input.read(col);
      const acc_t* t = target.read(col);
#pragma omp simd
      for (int64_t i = 0; i < lanes; ++i) {
        const auto term = passes[i].term(x[i], t[i]);
        of_input[i] += static_cast<double>(term.input);
        of_target[i] += static_cast<double>(term.target);
      }
    }
    for (int64_t i = 0; i < lanes; ++i)
      Loss<acc_t>::finish(statistics[i], of_input[i], of_target[i]);
  }
  for (int64_t i = 0; i < lanes; ++i)
    values[i] = finish_row<Loss, acc_t>(args, loss, row + i, statistics[i]);
}

template <typename acc_t, typename Loss>
void gradient_lanes(const RowPairArgs& args, const Loss& loss, int64_t row, int64_t lanes) {
  Lanes<acc_t> input(args.input, row, lanes), target(args.target, row, lanes);
  Lanes<acc_t> grad_input(args.grad_input, row, lanes), grad_target(args.grad_target, row, lanes);
  LaneStructs<acc_t, typename Loss::Gradient> gradients;
  for (int64_t i = 0; i < lanes; ++i)
    gradients.set(i, row_gradient<Loss, acc_t>(args, loss, row + i));
  for (int64_t col = 0; col < args.cols; ++col) {
    const acc_t* x = input.read(col);
    const acc_t* t = target.read(col);
    const acc_t weight = weight_of<Loss, acc_t>(args, col);
    // Both gradients are computed into buffers before either is written, because grad_input may
    // share input's buffer.
    if (grad_target) {
      acc_t* out = grad_target.buffer();
#pragma omp simd
      for (int64_t i = 0; i < lanes; ++i) out[i] = gradients[i].target(x[i], t[i], weight);
    }
    if (grad_input) {
      acc_t* out = grad_input.buffer();
#pragma omp simd
      for (int64_t i = 0; i < lanes; ++i) out[i] = gradients[i].input(x[i], t[i], weight);
    }
    if (grad_target) grad_target.write(col);
    if (grad_input) grad_input.write(col);
  }
}

template <template <typename> class Loss, typename acc_t>
void gradients(const RowPairArgs& args, const Loss<acc_t>& loss, int64_t row, int64_t lanes) {
  if (lanes > 0) return gradient_lanes<acc_t>(args, loss, row, lanes);
  gradient_row<acc_t>(args, loss, row);
}

template <template <typename> class Loss, typename acc_t>
void row_pair_forward_as(const RowPairArgs& args) {
  const Loss<acc_t> loss(args.parameters);
  std::vector<double> values(args.rows);
  for_each_block(args.input.layout, args.rows, args.cols, kRowLanes,
                 [&](int64_t row, int64_t lanes) {
                   if (lanes > 0)
                     forward_lanes<Loss, acc_t>(args, loss, row, lanes, values.data() + row);
                   else
                     values[row] = forward_row<Loss, acc_t>(args, loss, row);
                   if (args.grad_input.data) gradients<Loss, acc_t>(args, loss, row, lanes);
                 });
  if (!args.loss) return;
  const double sum = sum_over_rows(args.rows, [&](int64_t row) { return values[row]; });
  const double total = sum / args.divisor;
  store(args.loss, args.loss_dtype, 0, 1, 1, &total);
}

template <template <typename> class Loss, typename acc_t>
void row_pair_backward_as(const RowPairArgs& args) {
  const Loss<acc_t> loss(args.parameters);
  for_each_block(
      args.input.layout, args.rows, args.cols, kRowLanes,
      [&](int64_t row, int64_t lanes) { gradients<Loss, acc_t>(args, loss, row, lanes); });
}

template <template <typename> class Loss>
void row_pair_forward(const RowPairArgs& args) {
  if (args.is_double()) return row_pair_forward_as<Loss, double>(args);
  row_pair_forward_as<Loss, float>(args);
}

template <template <typename> class Loss>
void row_pair_backward(const RowPairArgs& args) {
  if (args.is_double()) return row_pair_backward_as<Loss, double>(args);
  row_pair_backward_as<Loss, float>(args);
}

}  // namespace fused::cpu
