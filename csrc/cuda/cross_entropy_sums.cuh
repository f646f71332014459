// Sums over the rows of a cross entropy: the total weight, and the loss. In double and in a fixed
// order. Where many blocks take part, row_weights (on an 8-byte boundary) holds their partial sums
// until its own values replace them.
#pragma once

#include "cross_entropy.cuh"
#include "launch.cuh"

namespace fused::cuda {

constexpr int kSumThreads = 1024;
constexpr int64_t kSingleBlockRows = 32768;  // summed faster by one block than by two launches

template <typename acc_t>
__device__ __forceinline__ void write_sums(const CrossEntropyArgs& args, bool finished,
                                           double weights, double losses) {
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  if (finished && args.loss)
    store_as(args.loss, args.loss_dtype, 0,
             args.reduction == Reduction::kMean ? losses / weights : losses);
}

// How many row_weights the partial sums of `blocks` blocks, two doubles each, lie over.
template <typename acc_t>
__host__ __device__ constexpr int64_t borrowed_rows(int64_t blocks) {
  return blocks > 1 ? blocks * 2 * sizeof(double) / sizeof(acc_t) : 0;
}

// Sums of the target weights and, once the row kernel has written them (`finished`), of row_losses;
// one contiguous share of the rows a block.
// Bytes moved per row: 8 for the target, 2 sizeof(acc_t) for its loss and weight.
template <typename acc_t>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_sums_kernel(const __grid_constant__ CrossEntropyArgs args, bool finished) {
  const int64_t share = (args.rows + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share;
  const int64_t end = min(args.rows, begin + share);
  const int64_t borrowed = borrowed_rows<acc_t>(gridDim.x);
  const acc_t* row_losses = static_cast<const acc_t*>(args.row_losses);
  acc_t* row_weights = static_cast<acc_t*>(args.row_weights);

  double weights = 0, losses = 0;
  int64_t wrong = -1;
#pragma unroll 4
  for (int64_t row = begin + threadIdx.x; row < end; row += kSumThreads) {
    if (is_out_of_bounds(args, row)) wrong = row;
    const acc_t weight = RowTarget<acc_t>(args, row).weight;
    if (row >= borrowed) row_weights[row] = weight;
    weights += static_cast<double>(weight);
    if (finished) losses += static_cast<double>(row_losses[row]);
  }
  if (wrong >= 0) report_target(args, wrong);
  weights = block_sum(weights);
  losses = block_sum(losses);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) return write_sums<acc_t>(args, finished, weights, losses);
  double* partial = static_cast<double*>(args.row_weights) + 2 * blockIdx.x;
  partial[0] = weights;
  partial[1] = losses;
}

// One block: adds up the partial sums, then gives row_weights its first values back.
template <typename acc_t>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_total_kernel(const __grid_constant__ CrossEntropyArgs args, bool finished,
                               int blocks) {
  const double* partial = static_cast<const double*>(args.row_weights);
  double weights = 0, losses = 0;
  for (int i = threadIdx.x; i < blocks; i += kSumThreads) {
    weights += partial[2 * i];
    losses += partial[2 * i + 1];
  }
  weights = block_sum(weights);
  losses = block_sum(losses);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < borrowed_rows<acc_t>(blocks); row += kSumThreads)
    static_cast<acc_t*>(args.row_weights)[row] = RowTarget<acc_t>(args, row).weight;
  if (threadIdx.x == 0) write_sums<acc_t>(args, finished, weights, losses);
}

template <typename acc_t>
void launch_sums(const CrossEntropyArgs& args, bool finished, cudaStream_t stream) {
  const int64_t blocks = args.rows <= kSingleBlockRows
                             ? 1
                             : std::min<int64_t>(current_device().multiprocessors,
                                                 divide_up(args.rows, 4 * kSumThreads));
  cross_entropy_sums_kernel<acc_t>
      <<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(args, finished);
  check_launch("cross_entropy_sums_kernel");
  if (blocks == 1) return;
  cross_entropy_total_kernel<acc_t>
      <<<1, kSumThreads, 0, stream>>>(args, finished, static_cast<int>(blocks));
  check_launch("cross_entropy_total_kernel");
}

}  // namespace fused::cuda
