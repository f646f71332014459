// Losses of row pairs on CUDA: an online softmax over both rows, and the gradients.
//
// Fused: the softmax or log-softmax of input, that of target if it holds logits, their product, its
// sum and, on demand, the gradients. Never written to memory: probabilities.
//
// Bytes moved per row: both operands once in the forward and once in the backward, each gradient
// once, and 24 for the statistics (48 for float64). A forward with the gradient, and a loss with a
// second pass, read the rows again, usually from L2.
//
// Two kernels:
//   dense    contiguous classes, of dtypes for which there are packets (row_pair_dense.cuh)
//   strided  everything else (row_pair_strided.cuh)
//
// In place: grad_input may be the buffer of input, in the same layout. A thread writes only logits
// that no other thread reads, after it has read them for the last time.
#pragma once

#include "../losses/row_pair.h"
#include "launch.cuh"
#include "row_span.cuh"
#include "total.cuh"

namespace fused::cuda {

constexpr int kRowTotalThreads = 512;

template <typename Loss>
constexpr bool kHasTargetLogits = Loss::State::kHasTargetLogits;
template <typename Loss>
constexpr bool kHasCross = Loss::State::kHasCross;

// Sets largest_target in each lane to the largest of the lanes that share a row. Returns `beside`
// of the first lane that has this largest target logit.
template <typename acc_t>
__device__ __forceinline__ acc_t beside_largest(acc_t& largest_target, acc_t beside, int lanes) {
  const acc_t own = largest_target;
  largest_target = group_max(own, lanes);
  const int first = (threadIdx.x % kWarp) & -lanes;
  const unsigned have = __ballot_sync(~0u, own == largest_target) >> first;
  return __shfl_sync(~0u, beside, first + __ffs(have) - 1);
}

// One class of a row pair, with the interface of PairPackets (row_pair_dense.cuh), which holds
// several classes: kPackets packets of kWidth classes. Only the first `count` packets are valid.
template <typename acc_t>
struct PairClass {
  static constexpr int kPackets = 1, kWidth = 1;
  acc_t x, t;
  int64_t col;
  int count = 1;

  __device__ __forceinline__ acc_t input(int, int) const { return x; }
  __device__ __forceinline__ acc_t target(int, int) const { return t; }
  __device__ __forceinline__ acc_t largest_input(int) const { return x; }
  __device__ __forceinline__ acc_t largest_target(int) const { return t; }
  __device__ __forceinline__ int64_t first_class(int) const { return col; }
};

// The input logit of the class whose target logit is the largest.
template <typename Classes, typename acc_t>
__device__ __forceinline__ acc_t input_beside(const Classes& classes, acc_t largest_target) {
  acc_t beside = 0;
#pragma unroll
  for (int u = 0; u < Classes::kPackets; ++u) {
    if (u >= classes.count) break;
#pragma unroll
    for (int j = 0; j < Classes::kWidth; ++j)
      if (classes.target(u, j) == largest_target) beside = classes.input(u, j);
  }
  return beside;
}

// Adds classes to a row's sums. The terms of a few packets are added in acc_t and these sums in
// double, so that there are few conversions. kShared: groups of `lanes` lanes of a warp share a
// row, and the origins and the pivot of its sums. All lanes of the warp call. Sharing makes it rare
// that packets raise an origin, since the largest logits of all lanes count.
template <bool kShared, typename Loss, typename Classes>
__device__ __forceinline__ void add_classes(const RowPairArgs& args, const Loss& loss,
                                            typename Loss::State& state, const Classes& classes,
                                            int lanes = 1) {
  constexpr int kPackets = Classes::kPackets, kWidth = Classes::kWidth;
  using acc_t = decltype(state.pivot);
  acc_t largest = -math::kInfinity<acc_t>, largest_target = largest;
#pragma unroll
  for (int u = 0; u < kPackets; ++u) {
    if (u >= classes.count) break;
    largest = ::max(largest, classes.largest_input(u));
    if constexpr (kHasTargetLogits<Loss>)
      largest_target = ::max(largest_target, classes.largest_target(u));
  }
  const auto any = [](bool raised) { return kShared ? __any_sync(~0u, raised) : raised; };
  if (any(largest > state.largest_input))
    state.raise_input(kShared ? group_max(largest, lanes) : largest, loss.inverse_temperature);
  if constexpr (kHasTargetLogits<Loss>) {
    if (any(largest_target > state.largest_target)) {
      acc_t beside = 0;
      if constexpr (kHasCross<Loss>) beside = input_beside(classes, largest_target);
      if constexpr (kShared) beside = beside_largest(largest_target, beside, lanes);
      state.raise_target(largest_target, beside, loss.inverse_temperature);
    }
  }
  const acc_t origin = state.input_origin(), target_origin = state.target_origin();
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;
  // A single class is converted to double anyway, so its product is computed in double.
  constexpr bool kSingle = kPackets * kWidth == 1;
  using sum_t = std::conditional_t<kSingle && !kHasTargetLogits<Loss>, double, acc_t>;
  // Masses of different signs may cancel, so only the sum of one packet is in acc_t.
  using total_t = std::conditional_t<kHasTargetLogits<Loss>, acc_t, double>;
  acc_t exponentials = 0;
  total_t mass = 0, cross = 0;
#pragma unroll
  for (int u = 0; u < kPackets; ++u) {
    if (u >= classes.count) break;
    const acc_t* w = weight ? weight + classes.first_class(u) : nullptr;
    sum_t packet_mass = 0, packet_cross = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const acc_t x = classes.input(u, j);
      const auto term = loss.term(x - origin, sum_t(x) - sum_t(state.pivot),
                                  classes.target(u, j) - target_origin, w ? w[j] : acc_t(1));
      exponentials += term.exponential;
      packet_mass += term.mass;
      if constexpr (kHasCross<Loss>) packet_cross += term.cross;
    }
    mass += static_cast<total_t>(packet_mass);
    cross += static_cast<total_t>(packet_cross);
  }
  state.exponentials += static_cast<double>(exponentials);
  state.mass += static_cast<double>(mass);
  if constexpr (kHasCross<Loss>) state.cross += static_cast<double>(cross);
}

// A thread's sums of a second pass.
struct SecondSums {
  double input = 0, target = 0;

  template <typename SecondPass, typename Classes>
  __device__ __forceinline__ void add(const SecondPass& pass, const Classes& classes) {
    decltype(pass.inverse_temperature) of_input = 0, of_target = 0;
#pragma unroll
    for (int u = 0; u < Classes::kPackets; ++u) {
      if (u >= classes.count) break;
#pragma unroll
      for (int j = 0; j < Classes::kWidth; ++j) {
        const auto term = pass.term(classes.input(u, j), classes.target(u, j));
        of_input += term.input;
        of_target += term.target;
      }
    }
    input += static_cast<double>(of_input);
    target += static_cast<double>(of_target);
  }
};

// Gives each lane the sums over the lanes that share a row. Their origins and pivots must be equal.
template <typename State>
__device__ __forceinline__ void add_up_lanes(State& state, int lanes) {
  state.exponentials = group_sum(state.exponentials, lanes);
  state.mass = group_sum(state.mass, lanes);
  if constexpr (State::kHasCross) state.cross = group_sum(state.cross, lanes);
}

// Gives each lane of a warp the state of the classes of all lanes. The lanes first align their sums
// to common origins and a common pivot, so that each lane rescales its sums only once.
template <typename Loss, typename State = typename Loss::State>
__device__ __forceinline__ void combine_warp(const Loss& loss, State& state) {
  const auto largest = group_max(state.largest_input);
  auto largest_target = state.largest_target;
  auto pivot = state.pivot;
  if constexpr (State::kHasTargetLogits) {
    pivot = beside_largest(largest_target, pivot, kWarp);
  }
  state.align(largest, largest_target, pivot, loss.inverse_temperature);
  add_up_lanes(state, kWarp);
}

// Gives the first warp of a block of whole warps the state of the block's classes. The lanes of
// each warp must have the same origins and pivot. scratch: [kWarp] in shared memory, which may be
// reused only after another barrier.
template <typename Loss, typename State = typename Loss::State>
__device__ __forceinline__ void combine_block(const Loss& loss, State& state, State* scratch) {
  add_up_lanes(state, kWarp);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = state;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  state = threadIdx.x < blockDim.x / kWarp ? scratch[threadIdx.x] : State::none();
  combine_warp(loss, state);
}

// Writes a row's statistics and its loss. One thread calls it.
template <typename Loss, typename acc_t>
__device__ __forceinline__ void write_row(const RowPairArgs& args, const Loss& loss, int64_t row,
                                          const RowPairStatistics<acc_t>& done) {
  done.write(args, row);
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

// Adds up the rows' losses, in an order that depends only on the number of rows.
template <typename Loss, typename acc_t>
__global__ void __launch_bounds__(kRowTotalThreads)
    row_pair_total_kernel(const __grid_constant__ RowPairArgs args, const Loss loss,
                          const Total total) {
  await_previous();
  let_next_start();
  double sum = 0;
  if (args.cols > 0) {
#pragma unroll 4
    for (int64_t row = blockIdx.x * int64_t(kRowTotalThreads) + threadIdx.x; row < args.rows;
         row += gridDim.x * int64_t(kRowTotalThreads))
      sum += loss.value(read_statistics<acc_t>(args, row));
  }
  total.add_block<kRowTotalThreads>(sum);
}

// Bytes moved per row: 24.
template <typename Loss, typename acc_t>
void launch_row_pair_total(const RowPairArgs& args, cudaStream_t stream) {
  const Total total{args.loss, args.loss_dtype, 1 / args.divisor, args.workspace};
  const int64_t blocks = std::min(row_sum_shares(args.rows),
                                  std::max<int64_t>(1, divide_up(args.rows, kRowTotalThreads)));
  launch_behind("row_pair_total_kernel", row_pair_total_kernel<Loss, acc_t>,
                static_cast<unsigned>(blocks), kRowTotalThreads, stream, args,
                Loss(args.parameters), total);
  if (blocks > 1) launch_total(total, blocks, stream);
}

}  // namespace fused::cuda
