// Sums in a fixed order: shuffles within a warp, then shared memory across the warps of a block.
#pragma once

#include "packet.cuh"

namespace fused::cuda {

constexpr int kWarp = 32;

// Returns to every lane the sum over a group of `lanes` neighbouring lanes, a power of two. All
// lanes of `mask` must call, with the same `lanes`.
template <typename T>
__device__ __forceinline__ T group_sum(T value, int lanes = kWarp, unsigned mask = ~0u) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    if (distance < lanes) value += __shfl_xor_sync(mask, value, distance);
  return value;
}

// As group_sum, but the maximum, ignoring nans.
template <typename T>
__device__ __forceinline__ T group_max(T value, int lanes = kWarp, unsigned mask = ~0u) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    if (distance < lanes) value = ::max(value, __shfl_xor_sync(mask, value, distance));
  return value;
}

// Returns the block's sum to its first thread. The block must be one-dimensional, with whole warps
// and at most kThreads threads, all of which call. kOnce: the kernel calls only once, which saves a
// barrier.
template <int kThreads = 1024, bool kOnce = false>
__device__ __forceinline__ double block_sum(double value) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ double sums[kWarps];
  value = group_sum(value);
  if constexpr (!kOnce) __syncthreads();
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    value = threadIdx.x < blockDim.x / kWarp ? sums[threadIdx.x] : 0;
    value = group_sum(value, kWarps);
  }
  return value;
}

}  // namespace fused::cuda
