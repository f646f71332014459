// The number of threads that share a row, and grids for rows.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace fused::cuda {

// The threads of a row: whole warps, for about packets_per_thread packets a thread.
inline int row_threads(int64_t packets, int64_t packets_per_thread, int64_t least, int64_t most) {
  const int64_t wanted = divide_up(packets, packets_per_thread * kWarp) * kWarp;
  return static_cast<int>(std::clamp(wanted, least, most));
}

// The threads of a row that is read once. A warp that waits for no other warp overlaps its loads
// with arithmetic. Hence no more warps share a row than `packets_per_thread` asks for or, if rows
// are few, than make two rounds of blocks on the device.
inline int independent_row_threads(int64_t rows, int64_t packets, int multiprocessors, int most,
                                   int64_t packets_per_thread = 32) {
  const int64_t filling = divide_up(2048 * multiprocessors, rows);
  const int least =
      std::min(row_threads(filling, 1, kWarp, most), row_threads(packets, 4, kWarp, most));
  return row_threads(packets, packets_per_thread, least, most);
}

constexpr int kGradientThreads = 256;

// The grid of a kernel that calls for_each_gradient_row. threads.x * blocks.y threads share a row.
inline Grid gradient_grid(int64_t rows, int64_t packets) {
  // The threads of a block along a row are a power of two, for about four packets each. If the
  // blocks are then too few for the device, several blocks share a row.
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

// In a gradient_grid: calls body(row, thread, stride) for each row of the calling thread, which is
// number `thread` of the row's `stride` threads.
template <typename Body>
__device__ __forceinline__ void for_each_gradient_row(int64_t rows, const Body& body) {
  const int stride = blockDim.x * gridDim.y;
  const int thread = blockIdx.y * blockDim.x + threadIdx.x;
  for (int64_t row = blockIdx.x * int64_t(blockDim.y) + threadIdx.y; row < rows;
       row += gridDim.x * int64_t(blockDim.y))
    body(row, thread, stride);
}

}  // namespace fused::cuda
