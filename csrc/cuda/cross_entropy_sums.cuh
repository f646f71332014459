// Sums over the rows of a cross entropy: the total weight and the loss. The sums are in double and
// in a fixed order. If there are many blocks, their sums go through `partials`.
#pragma once

#include "cross_entropy.cuh"
#include "launch.cuh"

namespace fused::cuda {

constexpr int kSumThreads = 1024;
// The most rows a thread for which one cluster is faster than a second launch.
constexpr int kClusterRounds = 4;

template <typename acc_t>
__device__ __forceinline__ void write_sums(const CrossEntropyArgs& args, bool finished,
                                           double weights, double losses) {
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  if (finished && args.loss)
    store_as(args.loss, args.loss_dtype, 0,
             args.reduction == Reduction::kMean
                 ? cross_entropy_mean(losses, weights, args.label_smoothing)
                 : losses);
}

// Sums the target weights and, if the row kernel precedes (`finished`), row_losses. Each block sums
// one contiguous share of the rows. kCluster: the blocks are one cluster, whose first block adds up
// all shares. Without kCluster, if there are several blocks, the total kernel must follow.
// If the row kernel precedes, this kernel reads the targets before the row kernel has ended:
// whatever writes the targets ends before the row kernel lets this one start.
// Bytes moved per row: 8 for the target, sizeof(acc_t) for its loss.
template <typename acc_t, bool kCluster>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_sums_kernel(const __grid_constant__ CrossEntropyArgs args, bool finished) {
  if (!finished) await_previous();
  let_next_start();
  const int64_t share = (args.rows + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share;
  const int64_t end = min(args.rows, begin + share);

  double weights = 0, losses = 0;
  int64_t wrong = -1;
#pragma unroll 8
  for (int64_t row = begin + threadIdx.x; row < end; row += kSumThreads) {
    if (is_out_of_bounds(args, args.target[row])) wrong = row;
    weights += static_cast<double>(RowTarget<acc_t>(args, row).weight);
  }
  if (wrong >= 0) report_target(args, wrong);
  weights = block_sum(weights);
  if (finished) {
    await_previous();
    const acc_t* row_losses = static_cast<const acc_t*>(args.row_losses);
#pragma unroll 8
    for (int64_t row = begin + threadIdx.x; row < end; row += kSumThreads)
      losses += static_cast<double>(row_losses[row]);
    losses = block_sum(losses);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    __shared__ double2 own;
    if (threadIdx.x == 0) own = make_double2(weights, losses);
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (blockIdx.x == 0 && threadIdx.x < kMaxCluster) {
      double2 part = make_double2(0, 0);
      if (threadIdx.x < gridDim.x)
        part = *static_cast<const double2*>(__cluster_map_shared_rank(&own, threadIdx.x));
      weights = group_sum(part.x, kMaxCluster, (1u << kMaxCluster) - 1);
      losses = group_sum(part.y, kMaxCluster, (1u << kMaxCluster) - 1);
      if (threadIdx.x == 0) write_sums<acc_t>(args, finished, weights, losses);
    }
    __cluster_barrier_arrive();  // no block may exit while the first reads its `own`
    __cluster_barrier_wait();
    return;
  }
#endif
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) return write_sums<acc_t>(args, finished, weights, losses);
  args.partials[2 * blockIdx.x] = weights;
  args.partials[2 * blockIdx.x + 1] = losses;
}

// One block adds up the partial sums.
template <typename acc_t>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_total_kernel(const __grid_constant__ CrossEntropyArgs args, bool finished,
                               int blocks) {
  await_previous();
  let_next_start();
  double weights = 0, losses = 0;
  for (int i = threadIdx.x; i < blocks; i += kSumThreads) {
    weights += args.partials[2 * i];
    losses += args.partials[2 * i + 1];
  }
  weights = block_sum(weights);
  losses = block_sum(losses);
  if (threadIdx.x == 0) write_sums<acc_t>(args, finished, weights, losses);
}

template <typename acc_t>
void launch_sums(const CrossEntropyArgs& args, bool finished, cudaStream_t stream) {
  const Device& device = current_device();
  const int64_t wanted = divide_up(std::max<int64_t>(args.rows, 1), kSumThreads);
  if (has_clusters(device) && wanted <= kClusterRounds * kMaxCluster) {
    const int blocks = static_cast<int>(std::min<int64_t>(wanted, kMaxCluster));
    return launch("cross_entropy_sums_kernel", cross_entropy_sums_kernel<acc_t, true>,
                  {.blocks = static_cast<unsigned>(blocks),
                   .threads = kSumThreads,
                   .cluster = blocks,
                   .behind = true},
                  stream, args, finished);
  }
  const int64_t blocks =
      std::min({row_sum_shares(args.rows), int64_t(device.multiprocessors), wanted});
  launch_behind("cross_entropy_sums_kernel", cross_entropy_sums_kernel<acc_t, false>,
                static_cast<unsigned>(blocks), kSumThreads, stream, args, finished);
  if (blocks == 1) return;
  launch_behind("cross_entropy_total_kernel", cross_entropy_total_kernel<acc_t>, 1, kSumThreads,
                stream, args, finished, static_cast<int>(blocks));
}

}  // namespace fused::cuda
