// Elementwise losses for any strides, broadcasting and mixture of dtypes. The kernel computes the
// outputs that are present at run time. Threads run along the innermost dimension, so that loads
// and stores are coalesced if that dimension is dense. Bytes moved per element: as in
// elementwise.cuh, if strides allow.
#pragma once

#include "../losses/gradient_scale.h"
#include "launch.cuh"
#include "total.cuh"

namespace fused::cuda {

constexpr int kStridedThreads = 256;
constexpr int kStridedBlocksPerMultiprocessor = 8;

inline Total total_of(const ElementwiseArgs& args) {
  return {args.total.data, args.total.dtype, 1 / args.divisor,
          static_cast<double*>(args.workspace)};
}

// Splits a linear index into its digits, innermost first, and calls body(dimension, digit). If all
// indices fit, index_t is uint32_t: a 64-bit division costs several times a 32-bit one.
template <typename index_t, typename Body>
__device__ __forceinline__ void for_each_digit(int ndim, const int64_t* sizes, int64_t linear,
                                               Body&& body) {
  index_t remainder = static_cast<index_t>(linear);
  for (int d = 0; d + 1 < ndim; ++d) {
    const index_t size = static_cast<index_t>(sizes[d]);
    const index_t quotient = remainder / size;
    body(d, static_cast<int64_t>(remainder - quotient * size));
    remainder = quotient;
  }
  if (ndim > 0) body(ndim - 1, static_cast<int64_t>(remainder));
}

template <bool kWeighted, typename acc_t, typename Loss>
__global__ void __launch_bounds__(kStridedThreads)
    strided_kernel(const __grid_constant__ ElementwiseArgs args, const Loss loss,
                   const Total total) {
  let_next_start();
  constexpr bool kPosWeight = takes_pos_weight<Loss, acc_t>;
  const bool small = args.numel <= UINT32_MAX;
  double sum = 0;
  for (int64_t i = blockIdx.x * int64_t(kStridedThreads) + threadIdx.x; i < args.numel;
       i += gridDim.x * int64_t(kStridedThreads)) {
    int64_t input = 0, target = 0, grad_output = 0, losses = 0, grad_input = 0, grad_target = 0;
    [[maybe_unused]] int64_t weight = 0, grad_weight = 0, pos_weight = 0;
    const auto advance = [&](int d, int64_t digit) {
      input += digit * args.input.strides[d];
      target += digit * args.target.strides[d];
      grad_output += digit * args.grad_output.strides[d];
      losses += digit * args.losses.strides[d];
      grad_input += digit * args.grad_input.strides[d];
      grad_target += digit * args.grad_target.strides[d];
      if constexpr (kWeighted) {
        weight += digit * args.weight.strides[d];
        grad_weight += digit * args.grad_weight.strides[d];
      }
      if constexpr (kPosWeight) pos_weight += digit * args.pos_weight.strides[d];
    };
    if (small)
      for_each_digit<uint32_t>(args.ndim, args.sizes, i, advance);
    else
      for_each_digit<uint64_t>(args.ndim, args.sizes, i, advance);

    const acc_t x = load_as<acc_t>(args.input.data, args.input.dtype, input);
    const acc_t y = load_as<acc_t>(args.target.data, args.target.dtype, target);
    acc_t w = 1;
    if constexpr (kWeighted) w = load_as<acc_t>(args.weight.data, args.weight.dtype, weight);
    acc_t p = 1;
    if constexpr (kPosWeight)
      p = load_as<acc_t>(args.pos_weight.data, args.pos_weight.dtype, pos_weight);
    const auto apply = [&](auto&& function) {
      if constexpr (kPosWeight)
        return function(x, y, p);
      else
        return function(x, y);
    };
    const auto weighted = [&](auto&& function) {
      if constexpr (kWeighted)
        return w * apply(function);
      else
        return apply(function);
    };
    const auto loss_value = [&](auto... at) { return loss.value(at...); };
    if (args.total.data || args.losses.data) {
      const acc_t value = weighted(loss_value);
      sum += static_cast<double>(value);
      if (args.losses.data) store_as(args.losses.data, args.losses.dtype, losses, value);
    }
    if (args.grad_input.data || args.grad_target.data || (kWeighted && args.grad_weight.data)) {
      acc_t upstream = 1;
      if (args.grad_output.data)
        upstream = load_as<acc_t>(args.grad_output.data, args.grad_output.dtype, grad_output);
      const auto scale = GradientScale<acc_t>::of(kSlope<Loss> * total.scale, upstream);
      const auto scaled = [&](auto&& derivative) {
        if constexpr (kWeighted)
          return scale.template weighted<Loss>(apply(derivative), w);
        else
          return scale(apply(derivative));
      };
      if constexpr (kWeighted) {
        if (args.grad_weight.data)
          store_as(args.grad_weight.data, args.grad_weight.dtype, grad_weight,
                   GradientScale<acc_t>::of(total.scale, upstream)(apply(loss_value)));
      }
      if (args.grad_target.data)
        store_as(args.grad_target.data, args.grad_target.dtype, grad_target,
                 scaled([&](auto... at) { return loss.grad_target(at...); }));
      if (args.grad_input.data)
        store_as(args.grad_input.data, args.grad_input.dtype, grad_input,
                 scaled([&](auto... at) { return loss.grad_input(at...); }));
    }
  }
  if (args.total.data) total.add_block<kStridedThreads>(sum);
}

template <bool kWeighted, typename acc_t, typename Loss>
void launch_strided(const ElementwiseArgs& args, const Loss& loss, cudaStream_t stream) {
  const int64_t most = std::min<int64_t>(
      kWorkspaceBlocks, current_device().multiprocessors * kStridedBlocksPerMultiprocessor);
  const int64_t tiles = divide_up(args.numel, kStridedThreads);
  const int64_t blocks = args.total.data && tiles <= 4 ? 1 : std::min(tiles, most);
  strided_kernel<kWeighted, acc_t>
      <<<static_cast<unsigned>(blocks), kStridedThreads, 0, stream>>>(args, loss, total_of(args));
  check_launch("strided_kernel");
  if (args.total.data && blocks > 1) launch_total(total_of(args), blocks, stream);
}

}  // namespace fused::cuda
