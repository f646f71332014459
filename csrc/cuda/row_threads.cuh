// How many threads share a row, and the grids of kernels that go through rows.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace fused::cuda {

// Whole warps for about so many packets a thread.
inline int row_threads(int64_t packets, int64_t packets_per_thread, int64_t least, int64_t most) {
  const int64_t wanted = divide_up(packets, packets_per_thread * kWarp) * kWarp;
  return static_cast<int>(std::clamp(wanted, least, most));
}

// For rows that are read once. A warp that waits for no other one overlaps its loads with their
// arithmetic: no more of them share a row than `packets_per_thread` says or it takes to have two
// rounds of blocks on the device.
inline int independent_row_threads(int64_t rows, int64_t packets, int multiprocessors, int most,
                                   int64_t packets_per_thread = 32) {
  const int64_t filling = divide_up(2048 * multiprocessors, rows);
  const int least =
      std::min(row_threads(filling, 1, kWarp, most), row_threads(packets, 4, kWarp, most));
  return row_threads(packets, packets_per_thread, least, most);
}

constexpr int kGradientThreads = 256;

// Of a kernel that calls for_each_gradient_row: threads.x * blocks.y threads share a row.
inline Grid gradient_grid(int64_t rows, int64_t packets) {
  // Threads along a row: a power of two, for about four packets each. Where that leaves too few
  // blocks for the device, several blocks share a row.
  constexpr int kPackets = 4;
  int threads = 8;
  while (threads < kGradientThreads && threads * kPackets < packets) threads *= 2;
  const int rows_per_block = kGradientThreads / threads;
  const unsigned blocks = blocks_for(rows, rows_per_block);
  const int64_t wanted = divide_up(8 * current_device().multiprocessors, blocks);
  const int64_t shares = divide_up(packets + 1, int64_t(threads) * kPackets);
  return {.blocks = dim3(blocks, static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, shares))),
          .threads = dim3(threads, rows_per_block)};
}

// Of gradient_grid: calls body(row, thread, stride), where the row's threads are thread, ... of
// `stride`.
template <typename Body>
__device__ __forceinline__ void for_each_gradient_row(int64_t rows, const Body& body) {
  const int stride = blockDim.x * gridDim.y;
  const int thread = blockIdx.y * blockDim.x + threadIdx.x;
  for (int64_t row = blockIdx.x * int64_t(blockDim.y) + threadIdx.y; row < rows;
       row += gridDim.x * int64_t(blockDim.y))
    body(row, thread, stride);
}

}  // namespace fused::cuda
