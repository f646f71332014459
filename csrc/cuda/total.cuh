// The sum over a grid of blocks, through a workspace and a second launch.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace fused::cuda {

constexpr int kTotalThreads = 256;  // threads that add up the blocks' sums

// The destination of a sum over all blocks: total = sum * scale.
struct Total {
  void* data;
  DType dtype;
  double scale;      // a factor, since a division would slow down a small loss
  double* partials;  // [gridDim.y, gridDim.x]; unused by a grid of one block

  __device__ __forceinline__ void write(double sum) const { store_as(data, dtype, 0, sum * scale); }

  // Every thread of every block calls this once; a block has kThreads threads. If the grid has more
  // than one block, launch_total must follow on the same stream.
  template <int kThreads>
  __device__ __forceinline__ void add_block(double thread_sum) const {
    const double sum = block_sum<kThreads, true>(thread_sum);
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1) return write(sum);
    partials[blockIdx.y * gridDim.x + blockIdx.x] = sum;
  }
};

// One block adds up `count` block sums, in an order that depends only on `count`.
static __global__ void __launch_bounds__(kTotalThreads) total_kernel(const Total total, int count) {
  await_previous();
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kTotalThreads) sum += total.partials[i];
  sum = block_sum<kTotalThreads, true>(sum);
  if (threadIdx.x == 0) total.write(sum);
}

inline void launch_total(const Total& total, int64_t blocks, cudaStream_t stream) {
  launch_behind("total_kernel", total_kernel, 1, kTotalThreads, stream, total,
                static_cast<int>(blocks));
}

}  // namespace fused::cuda
