// The gradient of cross entropy on the CPU, from each row's statistics, on the two paths that
// cross_entropy.cpp describes. Probabilities are never written to memory. In place: grad_input may
// be the buffer of input, in the same layout. A tile, or a class of a block of rows, is read before
// it is written.
#pragma once

#include "../losses/cross_entropy.h"
#include "class_targets.h"
#include "softcap.h"

namespace fused::cpu {

constexpr int64_t kTile = 1024;
constexpr int64_t kLanes = 64;  // rows of a block in the column path

// The weights of the row's classes with label smoothing; otherwise null, since 0 times an infinite
// weight would be nan.
template <typename acc_t>
const acc_t* smoothing_weights(const CrossEntropyArgs& args) {
  return args.label_smoothing == 0 ? nullptr : class_weights<acc_t>(args);
}

// Returns `count` logits as acc_t: in place if they are contiguous acc_t, otherwise in `buffer`.
template <typename acc_t>
const acc_t* read_tile(const CrossEntropyArgs& args, int64_t offset, int64_t stride, int64_t count,
                       acc_t* buffer) {
  if (args.dtype == dtype_of<acc_t>() && stride == 1)
    return static_cast<const acc_t*>(args.input) + offset;
  load(args.input, args.dtype, offset, stride, count, buffer);
  return buffer;
}

// As read_tile, after the soft-cap.
template <typename acc_t>
const acc_t* read_capped(const CrossEntropyArgs& args, int64_t offset, int64_t stride,
                         int64_t count, acc_t* buffer, acc_t* slopes = nullptr) {
  const acc_t* x = read_tile(args, offset, stride, count, buffer);
  if (args.softcap == 0) return x;
  cap_logits(x, count, static_cast<acc_t>(args.softcap), buffer, slopes);
  return buffer;
}

template <typename acc_t>
acc_t logit_at(const CrossEntropyArgs& args, int64_t offset, int64_t col) {
  acc_t buffer;
  return *read_capped(args, offset + col * args.input_layout.col_stride, 1, 1, &buffer);
}

// Turns the gradient with respect to capped logits into the gradient with respect to the logits.
template <typename acc_t>
void through_softcap(const CrossEntropyArgs& args, const acc_t* slopes, int64_t count,
                     acc_t* gradient) {
  if (args.softcap == 0) return;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) gradient[i] *= slopes[i];
}

// The factor of a row's probabilities for the gradient of its squared logsumexp; 0 for an ignored
// row.
template <typename acc_t>
acc_t of_square(const CrossEntropyArgs& args, int64_t row, const RowTarget<acc_t>& target,
                const CrossEntropyRow<acc_t>& summary) {
  if (!args.grad_squares || target.ignored) return acc_t(0);
  acc_t grad_square;
  load(args.grad_squares, args.grad_squares_dtype, row * args.grad_squares_stride, 1, 1,
       &grad_square);
  return summary.of_square(grad_square);
}

template <typename acc_t>
struct RowGradient {
  CrossEntropyRow<acc_t> summary;
  CrossEntropyGradient<acc_t> coefficient;
  int64_t target;

  RowGradient(const CrossEntropyArgs& args, int64_t row, acc_t common)
      : RowGradient(args, row, RowTarget<acc_t>(args, row), common) {}

 private:
  RowGradient(const CrossEntropyArgs& args, int64_t row, const RowTarget<acc_t>& row_target,
              acc_t common)
      : summary{static_cast<const acc_t*>(args.stats)[2 * row],
                static_cast<const acc_t*>(args.stats)[2 * row + 1]},
        coefficient(row_scale(args, row, row_target, common), row_target.weight,
                    static_cast<acc_t>(args.label_smoothing), weight_sum<acc_t>(args),
                    static_cast<acc_t>(args.classes)),
        target(row_target.index) {
    coefficient.probability += of_square(args, row, row_target, summary);
  }
};

template <typename acc_t>
void gradient_row(const CrossEntropyArgs& args, int64_t row, acc_t common) {
  alignas(64) acc_t buffer[kTile], out[kTile], slopes[kTile];
  const RowGradient<acc_t> gradient(args, row, common);
  const int64_t offset = row_offset(args.input_layout, row);
  const int64_t grad_offset = row_offset(args.grad_layout, row);
  const int64_t stride = args.input_layout.col_stride, grad_stride = args.grad_layout.col_stride;
  const acc_t* weight = smoothing_weights<acc_t>(args);
  const acc_t probability = gradient.coefficient.probability;
  const acc_t uniform = gradient.coefficient.uniform;
  const bool direct = args.dtype == dtype_of<acc_t>() && grad_stride == 1;

  for (int64_t first = 0; first < args.cols; first += kTile) {
    const int64_t count = std::min(kTile, args.cols - first);
    const acc_t* x = read_capped(args, offset + first * stride, stride, count, buffer, slopes);
    const int64_t begin = grad_offset + first * grad_stride;
    acc_t* g = direct ? static_cast<acc_t*>(args.grad_input) + begin : out;
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        g[i] = probability * gradient.summary.probability(x[i]) - uniform * weight[first + i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        g[i] = probability * gradient.summary.probability(x[i]) - uniform;
    }
    const int64_t picked = gradient.target - first;
    if (picked >= 0 && picked < count) g[picked] -= gradient.coefficient.target;
    through_softcap(args, slopes, count, g);
    if (!direct) store(args.grad_input, args.dtype, begin, grad_stride, count, out);
  }
}

// The column path: rows [row, row + lanes) have stride 1 between them.
template <typename acc_t>
void gradient_lanes(const CrossEntropyArgs& args, int64_t row, int64_t lanes, acc_t common) {
  alignas(64) acc_t buffer[kLanes], out[kLanes], slopes[kLanes];
  alignas(64) acc_t largest[kLanes], log_sum[kLanes], probability[kLanes], uniform[kLanes];
  acc_t picked[kLanes];
  int64_t targets[kLanes];
  for (int64_t i = 0; i < lanes; ++i) {
    const RowGradient<acc_t> gradient(args, row + i, common);
    largest[i] = gradient.summary.largest;
    log_sum[i] = gradient.summary.log_sum;
    probability[i] = gradient.coefficient.probability;
    uniform[i] = gradient.coefficient.uniform;
    picked[i] = gradient.coefficient.target;
    targets[i] = gradient.target;
  }
  const int64_t offset = row_offset(args.input_layout, row);
  const int64_t grad_offset = row_offset(args.grad_layout, row);
  const int64_t grad_row_stride = args.grad_layout.strides[0];
  const acc_t* weight = smoothing_weights<acc_t>(args);
  for (int64_t col = 0; col < args.cols; ++col) {
    const acc_t* x =
        read_capped(args, offset + col * args.input_layout.col_stride, 1, lanes, buffer, slopes);
    const acc_t w = weight ? weight[col] : acc_t(1);
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i)
      out[i] = probability[i] * math::exp((x[i] - largest[i]) - log_sum[i]) - uniform[i] * w;
    for (int64_t i = 0; i < lanes; ++i) out[i] -= targets[i] == col ? picked[i] : acc_t(0);
    through_softcap(args, slopes, lanes, out);
    store(args.grad_input, args.dtype, grad_offset + col * args.grad_layout.col_stride,
          grad_row_stride, lanes, out);
  }
}

template <typename acc_t>
void gradients(const CrossEntropyArgs& args) {
  const acc_t common = common_scale<acc_t>(args);
  for_each_block(args.input_layout, args.rows, args.cols, kLanes, [&](int64_t row, int64_t lanes) {
    if (lanes > 0) return gradient_lanes<acc_t>(args, row, lanes, common);
    gradient_row<acc_t>(args, row, common);
  });
}

}  // namespace fused::cpu
