// The gradient of statistics of rows of logits on the CPU, alone or with that of a divergence.
#pragma once

#include <stdexcept>
#include <string>

#include "../losses/row_statistics.h"
#include "row_pair.h"
#include "softcap.h"

namespace fused::cpu {

inline bool is_out_of_bounds(const RowStatisticsArgs& args, int64_t target) {
  return target != args.ignore_index && (target < 0 || target >= args.cols);
}

inline void check_targets(const RowStatisticsArgs& args) {
  if (!args.target) return;
  for (int64_t row = 0; row < args.rows; ++row) {
    if (!is_out_of_bounds(args, args.target[row])) continue;
    throw std::out_of_range("row_statistics: target " + std::to_string(args.target[row]) +
                            " is out of bounds for " + std::to_string(args.cols) +
                            " classes (ignore_index is " + std::to_string(args.ignore_index) + ")");
  }
}

// The row's target, or -1 if there is none or it is ignored.
inline int64_t target_of(const RowStatisticsArgs& args, int64_t row) {
  if (!args.target || args.target[row] == args.ignore_index) return -1;
  return args.target[row];
}

// Returns logits as acc_t, after the soft-cap: in place if nothing changes, otherwise in `buffer`.
template <typename acc_t>
const acc_t* read(const RowStatisticsArgs& args, int64_t offset, int64_t count, acc_t* buffer,
                  acc_t* slopes = nullptr) {
  const acc_t* x = static_cast<const acc_t*>(args.input) + offset;
  if (args.dtype != dtype_of<acc_t>()) {
    load(args.input, args.dtype, offset, 1, count, buffer);
    x = buffer;
  }
  if (args.softcap == 0) return x;
  cap_logits(x, count, static_cast<acc_t>(args.softcap), buffer, slopes);
  return buffer;
}

template <typename acc_t>
acc_t row_grad(const RowGrad& grad, int64_t row) {
  acc_t value = 0;
  if (grad.data) load(grad.data, grad.dtype, row * grad.stride, 1, 1, &value);
  return value;
}

// Writes a row's gradient. added(first, count, x) returns what is added to the gradient of a tile
// of logits x (after the soft-cap), whose first class is `first`, or null.
template <typename acc_t, typename Added>
void gradient_row(const RowStatisticsArgs& args, int64_t row, Added&& added) {
  alignas(64) acc_t buffer[kRowTile], slopes[kRowTile], out[kRowTile];
  const int64_t offset = row * args.row_stride, grad_offset = row * args.grad_row_stride;
  const int64_t target = target_of(args, row);
  const acc_t grad_nll = target < 0 ? acc_t(0) : row_grad<acc_t>(args.grad_nll, row);
  const RowStatisticsGradient<acc_t> gradient(static_cast<const acc_t*>(args.stats) + 3 * row,
                                              grad_nll, row_grad<acc_t>(args.grad_logsumexp, row),
                                              row_grad<acc_t>(args.grad_entropy, row),
                                              row_grad<acc_t>(args.grad_total, row));
  const bool softmax = has_softmax(args);
  const bool direct = args.dtype == dtype_of<acc_t>();
  for (int64_t first = 0; first < args.cols; first += kRowTile) {
    const int64_t count = std::min(kRowTile, args.cols - first);
    const acc_t* x = read(args, offset + first, count, buffer, slopes);
    const acc_t* more = added(first, count, x);
    acc_t* g = direct ? static_cast<acc_t*>(args.grad_input) + grad_offset + first : out;
    if (softmax) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) g[i] = gradient(x[i]);
    } else {
      std::fill_n(g, count, gradient.of_total);
    }
    if (target >= first && target < first + count) g[target - first] -= grad_nll;
    if (more) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) g[i] += more[i];
    }
    if (args.softcap > 0) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) g[i] *= slopes[i];
    }
    if (!direct) store(args.grad_input, args.dtype, grad_offset + first, 1, count, out);
  }
}

template <typename Body>
void for_each_row(const RowStatisticsArgs& args, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, args.cols));
  parallel_for(0, args.rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

// The gradient of the statistics and of a divergence from a teacher's rows.
template <template <typename> class Loss, typename acc_t>
void shared_gradients(const RowStatisticsArgs& args, const RowPairArgs& pair, bool reverse) {
  const Loss<acc_t> loss(pair.parameters);
  for_each_row(args, [&](int64_t row) {
    alignas(64) acc_t divergence[kRowTile];
    RowTile<acc_t> teacher(reverse ? pair.input : pair.target, row);
    const auto of_pair = row_gradient<Loss<acc_t>, acc_t>(pair, loss, row);
    gradient_row<acc_t>(args, row, [&](int64_t first, int64_t count, const acc_t* x) {
      const acc_t* t = teacher.read(first, count);
      if (reverse) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) divergence[i] = of_pair.target(t[i], x[i], acc_t(1));
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) divergence[i] = of_pair.input(x[i], t[i], acc_t(1));
      }
      return divergence;
    });
  });
}

template <template <typename> class Loss>
void shared_backward(const RowStatisticsArgs& args, const RowPairArgs& pair, bool reverse) {
  check_targets(args);
  if (args.dtype == DType::kFloat64) return shared_gradients<Loss, double>(args, pair, reverse);
  shared_gradients<Loss, float>(args, pair, reverse);
}

}  // namespace fused::cpu
