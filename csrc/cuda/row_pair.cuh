// Losses of row pairs on CUDA: an online softmax over both rows, and their gradients.
//
// Fused: the softmax or log-softmax of input, that of target where it holds logits, their product,
// its sum and, on demand, the gradients. Never written to memory: probabilities.
//
// Bytes moved per row: both operands once in the forward and once in the backward, each gradient
// once, and 24 for the statistics. With the gradient in the forward the rows come a second time, as
// a rule from L2.
//
// Two ways through the rows:
//   dense    classes side by side, dtypes of which packets can be made (row_pair_dense.cuh);
//   strided  everything else (row_pair_strided.cuh).
//
// In place: grad_input may be the buffer of input, in the same layout. A thread writes only logits
// that no other thread reads, after it has read them for the last time.
#pragma once

#include "../losses/row_pair.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "row_span.cuh"

namespace fused::cuda {

template <typename Loss>
constexpr bool kHasTargetLogits = Loss::State::kHasTargetLogits;

// Adds N classes, from `col` on, to a row's sums.
template <typename Loss, typename acc_t, int N>
__device__ __forceinline__ void add_classes(const RowPairArgs& args, const Loss& loss,
                                            typename Loss::State& state, const acc_t (&x)[N],
                                            const acc_t (&t)[N], int64_t col) {
  acc_t largest = x[0];
#pragma unroll
  for (int j = 1; j < N; ++j) largest = ::max(largest, x[j]);
  state.raise_input(largest, loss.inverse_temperature);
  if constexpr (kHasTargetLogits<Loss>) {
    acc_t largest_target = t[0], beside = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) {
      // In this order, so that a nan in front gives way.
      const bool larger = !(t[j] <= largest_target);
      beside = larger ? x[j] : beside;
      largest_target = larger ? t[j] : largest_target;
    }
    state.raise_target(largest_target, beside, loss.inverse_temperature);
  }
  const acc_t origin = state.input_origin(), target_origin = state.target_origin();
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;
  // A class by itself is converted anyway: then nothing is lost where its product is double.
  using sum_t = std::conditional_t<N == 1 && !kHasTargetLogits<Loss>, double, acc_t>;
  acc_t exponentials = 0;
  sum_t mass = 0, cross = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto term = loss.term(x[j] - origin, sum_t(x[j]) - sum_t(state.pivot),
                                t[j] - target_origin, weight ? weight[col + j] : acc_t(1));
    exponentials += term.exponential;
    mass += term.mass;
    cross += term.cross;
  }
  state.exponentials += static_cast<double>(exponentials);
  state.mass += static_cast<double>(mass);
  state.cross += static_cast<double>(cross);
}

// The state of all classes of a warp's lanes, in each of them. The lanes first agree on what their
// sums are relative to, so that each rescales them once, and then only add.
template <typename Loss, typename State = typename Loss::State>
__device__ __forceinline__ void combine_warp(const Loss& loss, State& state) {
  const auto largest = group_max(state.largest_input);
  auto largest_target = state.largest_target;
  auto pivot = state.pivot;
  if constexpr (State::kHasTargetLogits) {
    largest_target = group_max(largest_target);
    const unsigned found = __ballot_sync(~0u, state.largest_target == largest_target);
    pivot = __shfl_sync(~0u, pivot, __ffs(found) - 1);
  }
  state.align(largest, largest_target, pivot, loss.inverse_temperature);
  state.exponentials = group_sum(state.exponentials);
  state.mass = group_sum(state.mass);
  state.cross = group_sum(state.cross);
}

// The state of a block of whole warps, in every thread. scratch: [kWarp] in shared memory, free
// again only after another barrier.
template <typename Loss, typename State = typename Loss::State>
__device__ __forceinline__ void combine_block(const Loss& loss, State& state, State* scratch) {
  combine_warp(loss, state);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = state;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  state = lane < blockDim.x / kWarp ? scratch[lane] : State::none();
  combine_warp(loss, state);
}

template <typename acc_t>
__device__ __forceinline__ RowPairStatistics<acc_t> read_statistics(const RowPairArgs& args,
                                                                    int64_t row) {
  const acc_t* stats = static_cast<const acc_t*>(args.stats) + row * kRowPairStats;
  return {stats[0], stats[1], stats[2], stats[3], stats[4], stats[5]};
}

// Called by one thread.
template <typename Loss, typename acc_t>
__device__ __forceinline__ void write_row(const RowPairArgs& args, const Loss& loss, int64_t row,
                                          const RowPairStatistics<acc_t>& done) {
  acc_t* stats = static_cast<acc_t*>(args.stats) + row * kRowPairStats;
  stats[0] = done.largest_input;
  stats[1] = done.exponentials;
  stats[2] = done.largest_target;
  stats[3] = done.mass;
  stats[4] = done.pivot;
  stats[5] = done.cross;
  if (args.losses)
    store_as(args.losses, args.loss_dtype, row, args.cols > 0 ? loss.value(done) : 0.);
}

template <typename Loss, typename acc_t>
__device__ __forceinline__ typename Loss::Gradient row_gradient(
    const RowPairArgs& args, const Loss& loss, int64_t row,
    const RowPairStatistics<acc_t>& statistics) {
  acc_t scale = 1;
  if (args.grad_output)
    scale = load_as<acc_t>(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride);
  return {loss, statistics, scale / static_cast<acc_t>(args.divisor)};
}

// One block: adds up the rows' losses, in an order that depends on nothing else.
template <typename Loss, typename acc_t>
__global__ void __launch_bounds__(1024)
    row_pair_total_kernel(const __grid_constant__ RowPairArgs args, const Loss loss) {
  double sum = 0;
  if (args.cols > 0)
    for (int64_t row = threadIdx.x; row < args.rows; row += blockDim.x)
      sum += loss.value(read_statistics<acc_t>(args, row));
  sum = block_sum(sum);
  if (threadIdx.x == 0) store_as(args.loss, args.loss_dtype, 0, sum / args.divisor);
}

}  // namespace fused::cuda
