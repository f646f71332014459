// The gradient of statistics of a row of logits, for kernels that write it.
#pragma once

#include "../losses/row_statistics.h"
#include "class_target.cuh"
#include "packet.cuh"
#include "softcap.cuh"

namespace fused::cuda {

// The row's target; -1 if absent, ignored or out of bounds. One thread of a row reports a target
// out of bounds.
__device__ __forceinline__ int target_of(const RowStatisticsArgs& args, int64_t row, bool reports) {
  if (!args.target) return -1;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) return -1;
  if (target >= 0 && target < args.cols) return static_cast<int>(target);
  if (reports) report_target(target, row, args.cols);
  return -1;
}

template <typename acc_t>
__device__ __forceinline__ acc_t row_grad(const RowGrad& grad, int64_t row) {
  return grad.data ? load_as<acc_t>(grad.data, grad.dtype, row * grad.stride) : acc_t(0);
}

template <typename acc_t, bool kCapped>
struct StatisticsGradient {
  Softcap<acc_t, kCapped> cap;
  RowStatisticsGradient<acc_t> by_logits;
  bool softmax;
  acc_t picked;
  int target;

  // The gradient of the logit before the soft-cap.
  __device__ __forceinline__ acc_t operator()(acc_t logit, int col) const {
    const Capped<acc_t> capped = cap.with_slope(logit);
    return of_capped(capped.logit, col) * capped.slope;
  }

  __device__ __forceinline__ acc_t of_capped(acc_t logit, int col) const {
    const acc_t gradient = softmax ? by_logits(logit) : by_logits.of_total;
    return col == target ? gradient - picked : gradient;
  }

  template <typename scalar_t>
  __device__ __forceinline__ void apply(Packet<scalar_t>& packet, int col) const {
    acc_t values[Packet<scalar_t>::kWidth];
#pragma unroll
    for (int j = 0; j < Packet<scalar_t>::kWidth; ++j)
      values[j] = (*this)(packet.template get<acc_t>(j), col + j);
    packet.set(values);
  }
};

template <typename acc_t, bool kCapped>
__device__ __forceinline__ StatisticsGradient<acc_t, kCapped> statistics_gradient(
    const RowStatisticsArgs& args, int64_t row, bool reports) {
  const int target = target_of(args, row, reports);
  const acc_t grad_nll = target < 0 ? acc_t(0) : row_grad<acc_t>(args.grad_nll, row);
  const RowStatisticsGradient<acc_t> by_logits(static_cast<const acc_t*>(args.stats) + 3 * row,
                                               grad_nll, row_grad<acc_t>(args.grad_logsumexp, row),
                                               row_grad<acc_t>(args.grad_entropy, row),
                                               row_grad<acc_t>(args.grad_total, row));
  return {Softcap<acc_t, kCapped>(args.softcap), by_logits, has_softmax(args), grad_nll, target};
}

}  // namespace fused::cuda
