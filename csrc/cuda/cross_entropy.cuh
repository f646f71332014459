// Code that the cross-entropy kernels share: a row's target, its online softmax, its gradient.
// Offsets of rows have 64 bits, class indices 32.
#pragma once

#include <cmath>

#include "../losses/cross_entropy.h"
#include "class_target.cuh"
#include "reduce.cuh"
#include "row_span.cuh"
#include "softcap.cuh"

namespace fused::cuda {

__device__ __forceinline__ void report_target(const CrossEntropyArgs& args, int64_t row) {
  report_target(args.target[row], row, args.classes);
}

// A row's target and its weight. A target out of bounds counts as ignored here, so that nothing is
// read or written out of bounds. It is reported by the sums over the rows in the forward, and by
// the gradient kernels in the backward.
template <typename acc_t>
struct RowTarget {
  bool ignored;
  int index;     // in the row; -1 where ignored or in another shard
  acc_t weight;  // 0 where ignored

  __device__ __forceinline__ RowTarget(const CrossEntropyArgs& args, int64_t row) {
    const int64_t target = args.target[row];
    ignored = target == args.ignore_index || target < 0 || target >= args.classes;
    const int64_t place = target - args.first_class;
    index = ignored || place < 0 || place >= args.cols ? -1 : static_cast<int>(place);
    weight = ignored       ? acc_t(0)
             : args.weight ? static_cast<const acc_t*>(args.weight)[target]
                           : acc_t(1);
  }
};

// The online softmax of the logits seen so far: the largest logit, and the sum of
// exp(logit - reference). The reference is the largest logit, or 0 while all logits are -inf
// (-inf - -inf would make the sum nan). A nan or +inf makes the sum nan, as in torch. With
// smoothing also `weights`, the sum of w, and `weighted`, the sum of w (reference - logit).
// `weighted` is relative to the reference, so that logits far from 0 lose no digits.
template <typename acc_t, bool kSmoothing>
struct Softmax {
  acc_t largest, sum;
  acc_t weighted, weights;

  // The state of no logits. Not the default: variables in shared memory must stay uninitialised.
  static __device__ __forceinline__ Softmax none() { return {-kInfinity<acc_t>, 0, 0, 0}; }

  __device__ __forceinline__ acc_t reference() const {
    return largest > -kInfinity<acc_t> ? largest : acc_t(0);
  }

  __device__ __forceinline__ void raise(acc_t new_largest) {
    const acc_t before = reference(), old = largest;
    largest = new_largest;
    sum *= fast_exp(old - reference());
    if constexpr (kSmoothing) weighted += weights * (reference() - before);
  }

  // Adds the first `count` packets, whose first classes are col, col + stride, ... The other
  // packets must hold -inf. weight: [cols] or null.
  template <typename scalar_t, int kPackets, bool kCapped>
  __device__ __forceinline__ void add(Packet<scalar_t> (&packets)[kPackets], int count,
                                      const acc_t* weight, int col, int stride,
                                      const Softcap<acc_t, kCapped>& cap) {
    constexpr int kWidth = Packet<scalar_t>::kWidth;
    raise(::max(largest, cap(Packet<scalar_t>::template largest<acc_t>(packets))));
    const acc_t origin = reference();
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
      if (kCapped && u >= count) break;  // a capped -inf is finite
      packets[u].keep_packed();
      acc_t even = 0, odd = 0;
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) {
        even += fast_exp(cap(packets[u].template get<acc_t>(j)) - origin);
        odd += fast_exp(cap(packets[u].template get<acc_t>(j + 1)) - origin);
      }
      sum += even + odd;
      if constexpr (kSmoothing) {
        if (u >= count) continue;
        packets[u].keep_packed();
        const acc_t* w = weight ? weight + col + u * stride : nullptr;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const acc_t own = w ? w[j] : acc_t(1);
          weighted += own * (origin - cap(packets[u].template get<acc_t>(j)));
          weights += own;
        }
      }
    }
  }

  __device__ __forceinline__ void add(acc_t logit, acc_t own_weight) {
    if (logit > largest) raise(logit);
    sum += fast_exp(logit - reference());
    if constexpr (kSmoothing) {
      weighted += own_weight * (reference() - logit);
      weights += own_weight;
    }
  }

  // Adds the first `count` logits, whose classes are col, col + stride, ...
  template <int kCount>
  __device__ __forceinline__ void add(const acc_t (&logits)[kCount], int count, const acc_t* weight,
                                      int col, int stride) {
    acc_t highest = largest;
#pragma unroll
    for (int u = 0; u < kCount; ++u)
      if (u < count) highest = ::max(highest, logits[u]);
    if (highest > largest) raise(highest);
    const acc_t origin = reference();
    acc_t total = 0;  // not added to `sum` directly: sums of fewer terms round less
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (u >= count) break;
      total += fast_exp(logits[u] - origin);
      if constexpr (kSmoothing) {
        const acc_t own = weight ? weight[col + u * stride] : acc_t(1);
        weighted += own * (origin - logits[u]);
        weights += own;
      }
    }
    sum += total;
  }

  // Gives each of kLanes neighbouring lanes the state of the logits of all of them.
  template <int kLanes = kWarp>
  __device__ __forceinline__ void combine(unsigned mask = ~0u) {
    raise(group_max(largest, kLanes, mask));
    sum = group_sum(sum, kLanes, mask);
    if constexpr (kSmoothing) {
      weighted = group_sum(weighted, kLanes, mask);
      weights = group_sum(weights, kLanes, mask);
    }
  }

  // Gives every thread of a block of whole warps the state of the block's logits. Orders the
  // block's earlier reads before its later writes. scratch: [kWarp] in shared memory, which may be
  // reused only after another barrier.
  __device__ __forceinline__ void combine_block(Softmax* scratch) {
    combine();
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = *this;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    *this = lane < blockDim.x / kWarp ? scratch[lane] : none();
    combine();
  }
};

// Writes a shard's part of a row. One thread calls it.
template <typename acc_t, bool kSmoothing>
__device__ __forceinline__ void finish_part(const CrossEntropyArgs& args, int64_t row,
                                            const Softmax<acc_t, kSmoothing>& softmax,
                                            const RowTarget<acc_t>& target, acc_t target_logit) {
  const bool smoothing = kSmoothing && args.label_smoothing > 0;
  acc_t* part =
      static_cast<acc_t*>(args.parts) + row * (smoothing ? kSmoothingPartColumns : kPartColumns);
  part[0] = softmax.largest;
  part[1] = softmax.sum;
  part[2] = target.index < 0 ? acc_t(0) : target_logit;
  if (smoothing) part[3] = softmax.weighted;
}

// Writes a row's outputs. One thread calls it.
template <typename acc_t, bool kSmoothing>
__device__ __forceinline__ void finish_row(const CrossEntropyArgs& args, int64_t row,
                                           const Softmax<acc_t, kSmoothing>& softmax,
                                           const RowTarget<acc_t>& target, acc_t target_logit) {
  if (args.parts) return finish_part(args, row, softmax, target, target_logit);
  const CrossEntropyRow<acc_t> summary{softmax.largest, math::log(softmax.sum)};
  if (args.stats) {
    static_cast<acc_t*>(args.stats)[2 * row] = summary.largest;
    static_cast<acc_t*>(args.stats)[2 * row + 1] = summary.log_sum;
  }
  const acc_t smoothing = kSmoothing ? static_cast<acc_t>(args.label_smoothing) : acc_t(0);
  static_cast<acc_t*>(args.row_losses)[row] =
      target.index < 0
          ? acc_t(0)
          : summary.loss(target_logit, target.weight, smoothing, weight_sum<acc_t>(args),
                         softmax.weighted, static_cast<acc_t>(args.classes));
}

// The common factor of all rows' gradients: grad_output, if it is one number, and for the mean the
// inverse of the total weight, which the preceding kernel may write. The loads stall the thread.
template <typename acc_t>
__device__ __forceinline__ acc_t common_scale(const CrossEntropyArgs& args) {
  acc_t scale = 1;
  if (args.grad_output && !args.grad_output_stride)
    scale = load_as<acc_t>(args.grad_output, args.grad_output_dtype, 0);
  if (args.reduction == Reduction::kMean) scale /= *static_cast<acc_t*>(args.total_weight);
  return scale;
}

// A row's factor: the common one, times the row's grad_output if each row has one; 0 for an ignored
// row.
template <typename acc_t>
__device__ __forceinline__ acc_t row_scale(const CrossEntropyArgs& args, int64_t row,
                                           const RowTarget<acc_t>& target, acc_t common) {
  if (args.grad_output_stride)
    common *=
        load_as<acc_t>(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride);
  return target.ignored ? acc_t(0) : common;
}

// The factor of a row's probabilities for the gradient of its squared logsumexp; 0 for an ignored
// row.
template <typename acc_t>
__device__ __forceinline__ acc_t of_square(const CrossEntropyArgs& args, int64_t row,
                                           const RowTarget<acc_t>& target,
                                           const CrossEntropyRow<acc_t>& summary) {
  if (target.ignored) return acc_t(0);
  return summary.of_square(
      load_as<acc_t>(args.grad_squares, args.grad_squares_dtype, row * args.grad_squares_stride));
}

// The gradient of one row, element by element. `probability` includes the softmax's factor 1 / sum.
// In the exponent, that factor would cost an instruction per logit and the low bits of the
// difference.
template <typename acc_t, bool kCapped, bool kSmoothing = true>
struct RowGradient {
  Softcap<acc_t, kCapped> cap;
  acc_t largest;
  acc_t probability, uniform, picked;
  int target;
  const acc_t* weight;  // [cols]; null without smoothing

  // scale: row_scale. more: of_square.
  __device__ __forceinline__ RowGradient(const CrossEntropyArgs& args,
                                         const RowTarget<acc_t>& row_target, acc_t scale,
                                         acc_t row_largest, acc_t inverse_sum, acc_t more = 0)
      : cap(args.softcap), largest(row_largest), target(row_target.index) {
    const CrossEntropyGradient<acc_t> coefficient(
        scale, row_target.weight, kSmoothing ? static_cast<acc_t>(args.label_smoothing) : acc_t(0),
        weight_sum<acc_t>(args), static_cast<acc_t>(args.classes));
    probability = (coefficient.probability + more) * inverse_sum;
    uniform = coefficient.uniform;
    picked = coefficient.target;
    weight = kSmoothing && args.label_smoothing != 0 ? class_weights<acc_t>(args) : nullptr;
  }

  __device__ __forceinline__ acc_t operator()(acc_t logit, int col) const {
    const Capped<acc_t> capped = cap.with_slope(logit);
    const acc_t shift = weight ? uniform * weight[col] : uniform;
    const acc_t gradient = probability * fast_exp(capped.logit - largest) - shift;
    return (col == target ? gradient - picked : gradient) * capped.slope;
  }

  // From the statistics of the forward; with kSquares also for args.grad_squares.
  template <bool kSquares>
  static __device__ __forceinline__ RowGradient of(const CrossEntropyArgs& args, int64_t row,
                                                   acc_t common) {
    const RowTarget<acc_t> target(args, row);
    const acc_t* stats = static_cast<const acc_t*>(args.stats) + 2 * row;
    const CrossEntropyRow<acc_t> summary{stats[0], stats[1]};
    return RowGradient(args, target, row_scale(args, row, target, common), summary.largest,
                       math::exp(-summary.log_sum),
                       kSquares ? of_square(args, row, target, summary) : acc_t(0));
  }

  // Replaces a packet, whose first class is col, by its gradient.
  template <typename scalar_t>
  __device__ __forceinline__ void apply(Packet<scalar_t>& packet, int col) const {
    constexpr int kWidth = Packet<scalar_t>::kWidth;
    acc_t values[kWidth], slopes[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Capped<acc_t> capped = cap.with_slope(packet.template get<acc_t>(j));
      values[j] = fast_exp(capped.logit - largest);
      slopes[j] = capped.slope;
    }
    if (weight) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        values[j] = probability * values[j] - uniform * weight[col + j];
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = probability * values[j] - uniform;
    }
    if (static_cast<unsigned>(target - col) < kWidth) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] -= target == col + j ? picked : acc_t(0);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] *= slopes[j];
    packet.set(values);
  }
};

}  // namespace fused::cuda
