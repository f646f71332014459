// Cross entropy of rows whose logits are not contiguous, as in [N, C, H, W] or a transposed matrix.
// The stride between neighbouring rows is then usually 1. Neighbouring threads take neighbouring
// rows, so that loads are coalesced. kColumnLanes threads share a row's classes. Correct for any
// layout.
//
// Fused, never written to memory, and in place: as in cross_entropy_rows.cuh.
//
// Bytes moved per row: forward cols * sizeof(logit). With the gradient, and backward, twice that,
// if a block's kColumnRows rows stay in the L2 cache between the two reads of the forward.
#pragma once

#include "cross_entropy.cuh"

namespace fused::cuda {

constexpr int kColumnRows = 32;
constexpr int kColumnLanes = 8;
constexpr int kColumnUnroll = 4;  // logits that a thread has in flight

// Calls body(col, count, logits) for groups of `count` logits, whose classes are col,
// col + kColumnLanes, ...
template <typename scalar_t, typename Body>
__device__ __forceinline__ void for_each_group(const CrossEntropyArgs& args, const scalar_t* x,
                                               Body&& body) {
  using acc_t = acc_type<scalar_t>;
  const int cols = static_cast<int>(args.cols);
  for (int64_t first = threadIdx.y; first < cols; first += kColumnUnroll * kColumnLanes) {
    acc_t logits[kColumnUnroll];
#pragma unroll
    for (int u = 0; u < kColumnUnroll; ++u) {
      const int64_t col = first + u * kColumnLanes;
      if (col < cols) logits[u] = to_acc<acc_t>(x[col * args.input_layout.col_stride]);
    }
    const int left = (cols - static_cast<int>(first) + kColumnLanes - 1) / kColumnLanes;
    body(static_cast<int>(first), min(left, kColumnUnroll), logits);
  }
}

template <typename scalar_t, bool kCapped>
__device__ __forceinline__ void write_gradient(
    const CrossEntropyArgs& args, int64_t row, const scalar_t* x,
    const RowGradient<acc_type<scalar_t>, kCapped>& gradient) {
  scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row);
  using acc_t = acc_type<scalar_t>;
  for_each_group(args, x, [&](int first, int count, const acc_t(&logits)[kColumnUnroll]) {
#pragma unroll
    for (int u = 0; u < kColumnUnroll; ++u) {
      if (u >= count) break;
      const int64_t col = first + u * kColumnLanes;
      out[col * args.grad_layout.col_stride] =
          from_acc<scalar_t>(gradient(logits[u], static_cast<int>(col)));
    }
  });
}

template <typename scalar_t, bool kCapped>
__global__ void __launch_bounds__(kColumnRows* kColumnLanes)
    cross_entropy_columns_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  __shared__ Softmax<acc_t, true> scratch[kColumnLanes][kColumnRows];
  const acc_t* weight = class_weights<acc_t>(args);
  const Softcap<acc_t, kCapped> cap(args.softcap);
  const bool smoothing = args.label_smoothing > 0;
  const acc_t common = args.grad_input ? common_scale<acc_t>(args) : acc_t(0);

  for (int64_t first = blockIdx.x * int64_t(kColumnRows); first < args.rows;
       first += gridDim.x * int64_t(kColumnRows)) {
    const int64_t row = first + threadIdx.x;
    const bool inside = row < args.rows;
    const scalar_t* x = nullptr;
    auto softmax = Softmax<acc_t, true>::none();
    acc_t target_logit = 0;
    if (inside) {
      x = static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
      for_each_group(args, x, [&](int first, int count, acc_t(&logits)[kColumnUnroll]) {
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u)
          if (u < count) logits[u] = cap(logits[u]);
        softmax.add(logits, count, smoothing ? weight : nullptr, first, kColumnLanes);
      });
      const RowTarget<acc_t> target(args, row);
      if (threadIdx.y == 0 && target.index >= 0)
        target_logit = cap(to_acc<acc_t>(x[target.index * args.input_layout.col_stride]));
    }
    __syncthreads();
    scratch[threadIdx.y][threadIdx.x] = softmax;
    __syncthreads();
    if (!inside) continue;

    softmax = scratch[0][threadIdx.x];
#pragma unroll
    for (int lane = 1; lane < kColumnLanes; ++lane) {
      Softmax<acc_t, true> other = scratch[lane][threadIdx.x];
      const acc_t largest = ::max(softmax.largest, other.largest);
      softmax.raise(largest);
      other.raise(largest);
      softmax.sum += other.sum;
      softmax.weighted += other.weighted;
      softmax.weights += other.weights;
    }
    const RowTarget<acc_t> target(args, row);
    if (threadIdx.y == 0) {
      if (smoothing)
        finish_row(args, row, softmax, target, target_logit);
      else
        finish_row(args, row, Softmax<acc_t, false>{softmax.largest, softmax.sum, 0, 0}, target,
                   target_logit);
    }
    if (args.grad_input)
      write_gradient(args, row, x,
                     RowGradient<acc_t, kCapped>(args, target, row_scale(args, row, target, common),
                                                 softmax.largest, fast_inverse(softmax.sum)));
  }
}

template <typename scalar_t, bool kCapped, bool kSquares>
__global__ void __launch_bounds__(kColumnRows* kColumnLanes)
    cross_entropy_columns_gradient_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  const acc_t common = common_scale<acc_t>(args);
  for (int64_t row = blockIdx.x * int64_t(kColumnRows) + threadIdx.x; row < args.rows;
       row += gridDim.x * int64_t(kColumnRows)) {
    const scalar_t* x =
        static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
    if (threadIdx.y == 0 && is_out_of_bounds(args, args.target[row])) report_target(args, row);
    write_gradient(args, row, x,
                   RowGradient<acc_t, kCapped>::template of<kSquares>(args, row, common));
  }
}

}  // namespace fused::cuda
