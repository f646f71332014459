// How many threads share a row.
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

}  // namespace fused::cuda
