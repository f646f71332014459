// Losses of row pairs on the CPU: an online softmax over the tiles of two rows, and the gradients.
// Probabilities are never written to memory.
//
// Rows with contiguous classes are handled one by one. For rows with stride 1 between them, see
// row_pair_lanes.h. Bytes moved per row: each operand once in the forward (also with a second pass
// or the gradient, if two rows fit the L2 cache) and once in the backward; each gradient once.
#pragma once

#include "../losses/row_pair.h"
#include "rows.h"

namespace fused::cpu {

constexpr int64_t kRowTile = 1024;

// One operand's view of the current tile of a row.
template <typename acc_t>
class RowTile {
 public:
  RowTile(const RowOperand& operand, int64_t row)
      : operand_(operand),
        offset_(operand.data ? row_offset(operand.layout, row) : 0),
        stride_(operand.layout.col_stride),
        direct_(operand.dtype == dtype_of<acc_t>() && stride_ == 1) {}

  explicit operator bool() const { return operand_.data != nullptr; }

  const acc_t* read(int64_t first, int64_t count) {
    if (direct_) return static_cast<const acc_t*>(operand_.data) + offset_ + first;
    load(operand_.data, operand_.dtype, offset_ + first * stride_, stride_, count, buffer_);
    return buffer_;
  }

  acc_t* write_pointer(int64_t first) {
    return direct_ ? static_cast<acc_t*>(operand_.data) + offset_ + first : buffer_;
  }

  void write(int64_t first, int64_t count) {
    if (!direct_)
      store(operand_.data, operand_.dtype, offset_ + first * stride_, stride_, count, buffer_);
  }

 private:
  const RowOperand& operand_;
  int64_t offset_, stride_;
  bool direct_;
  alignas(64) acc_t buffer_[kRowTile];
};

// Calls body(weight), where weight(i) is the weight of class first + i. Without weights, weight(i)
// is a constant.
template <typename Loss, typename acc_t, typename Body>
void with_weights(const RowPairArgs& args, int64_t first, Body&& body) {
  if constexpr (Loss::kWeighted) {
    if (args.weight) {
      const acc_t* weight = static_cast<const acc_t*>(args.weight) + first;
      return body([weight](int64_t i) { return weight[i]; });
    }
  }
  body([](int64_t) { return acc_t(1); });
}

// The state of a row so far, in double.
template <template <typename> class Loss>
using RowState = typename Loss<double>::State;

template <template <typename> class Loss, typename acc_t>
void add_tile(const RowPairArgs& args, const Loss<acc_t>& loss, RowState<Loss>& state,
              const acc_t* x, const acc_t* t, int64_t first, int64_t count) {
  acc_t largest = static_cast<acc_t>(state.largest_input);
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  state.raise_input(largest, loss.inverse_temperature);
  if constexpr (RowState<Loss>::kHasTargetLogits) {
    const acc_t before = static_cast<acc_t>(state.largest_target);
    acc_t largest_target = before;
#pragma omp simd reduction(max : largest_target)
    for (int64_t i = 0; i < count; ++i)
      largest_target = t[i] > largest_target ? t[i] : largest_target;
    if (largest_target > before)
      state.raise_target(largest_target, x[std::find(t, t + count, largest_target) - t],
                         loss.inverse_temperature);
  }
  const acc_t origin = static_cast<acc_t>(state.input_origin());
  const acc_t target_origin = static_cast<acc_t>(state.target_origin());
  const acc_t pivot = static_cast<acc_t>(state.pivot);
  with_weights<Loss<acc_t>, acc_t>(args, first, [&](auto weight) {
    acc_t exponentials = 0;
    double mass = 0, cross = 0;
#pragma omp simd reduction(+ : exponentials, mass, cross)
    for (int64_t i = 0; i < count; ++i) {
      const auto term = loss.term(x[i] - origin, x[i] - pivot, t[i] - target_origin, weight(i));
      exponentials += term.exponential;
      mass += static_cast<double>(term.mass);
      if constexpr (RowState<Loss>::kHasCross) cross += static_cast<double>(term.cross);
    }
    state.exponentials += static_cast<double>(exponentials);
    state.mass += mass;
    state.cross += cross;
  });
}

template <typename acc_t>
acc_t gradient_scale(const RowPairArgs& args, int64_t row) {
  acc_t scale = 1;
  if (args.grad_output)
    load(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride, 1, 1, &scale);
  return scale / static_cast<acc_t>(args.divisor);
}

template <typename Loss, typename acc_t>
typename Loss::Gradient row_gradient(const RowPairArgs& args, const Loss& loss, int64_t row) {
  return {loss, read_statistics<acc_t>(args, row), gradient_scale<acc_t>(args, row)};
}

// Writes a row's statistics and returns its loss, which is 0 if there are no classes.
template <template <typename> class Loss, typename acc_t>
double finish_row(const RowPairArgs& args, const Loss<acc_t>& loss, int64_t row,
                  const RowPairStatistics<acc_t>& done) {
  done.write(args, row);
  const double value = args.cols > 0 ? loss.value(done) : 0;
  if (args.losses) store(args.losses, args.loss_dtype, row, 1, 1, &value);
  return value;
}

template <template <typename> class Loss, typename acc_t>
double forward_row(const RowPairArgs& args, const Loss<acc_t>& loss, int64_t row) {
  RowTile<acc_t> input(args.input, row), target(args.target, row);
  auto state = RowState<Loss>::none();
  for (int64_t first = 0; first < args.cols; first += kRowTile) {
    const int64_t count = std::min(kRowTile, args.cols - first);
    add_tile<Loss, acc_t>(args, loss, state, input.read(first, count), target.read(first, count),
                          first, count);
  }
  RowPairStatistics<acc_t> statistics = Loss<acc_t>::finish(state);
  if constexpr (kHasSecondPass<Loss<acc_t>>) {
    const typename Loss<acc_t>::SecondPass pass(loss, statistics);
    double of_input = 0, of_target = 0;
    for (int64_t first = 0; first < args.cols; first += kRowTile) {
      const int64_t count = std::min(kRowTile, args.cols - first);
      const acc_t* x = input.read(first, count);
      const acc_t* t = target.read(first, count);
#pragma omp simd reduction(+ : of_input, of_target)
      for (int64_t i = 0; i < count; ++i) {
        const auto term = pass.term(x[i], t[i]);
        of_input += static_cast<double>(term.input);
        of_target += static_cast<double>(term.target);
      }
    }
    Loss<acc_t>::finish(statistics, of_input, of_target);
  }
  return finish_row<Loss, acc_t>(args, loss, row, statistics);
}

template <typename acc_t, typename Loss>
void gradient_row(const RowPairArgs& args, const Loss& loss, int64_t row) {
  RowTile<acc_t> input(args.input, row), target(args.target, row);
  RowTile<acc_t> grad_input(args.grad_input, row), grad_target(args.grad_target, row);
  const auto gradient = row_gradient<Loss, acc_t>(args, loss, row);
  for (int64_t first = 0; first < args.cols; first += kRowTile) {
    const int64_t count = std::min(kRowTile, args.cols - first);
    const acc_t* x = input.read(first, count);
    const acc_t* t = target.read(first, count);
    with_weights<Loss, acc_t>(args, first, [&](auto weight) {
      // grad_target is written first, because grad_input may share input's buffer.
      if (grad_target) {
        acc_t* out = grad_target.write_pointer(first);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = gradient.target(x[i], t[i], weight(i));
        grad_target.write(first, count);
      }
      if (grad_input) {
        acc_t* out = grad_input.write_pointer(first);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = gradient.input(x[i], t[i], weight(i));
        grad_input.write(first, count);
      }
    });
  }
}

}  // namespace fused::cpu
