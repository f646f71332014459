// The binary cross entropies of all numbers of a matrix, added up, and their gradient over it, on
// the CPU.
//
// A thread goes through tiles of rows. Their sums lie in a workspace, and are added up in its
// order, whatever the number of threads. Bytes moved: 2 * rows * cols * sizeof(number); rows * cols
// more for a matrix of targets.
#include "../losses/sigmoid_pairs.h"

#include <stdexcept>
#include <string>

#include "../kernels.h"
#include "parallel.h"
#include "sum.h"

namespace fused {
namespace cpu {
namespace {

// The numbers of a row that lie in a tile.
template <typename acc_t>
double row_of_tile(const SigmoidPairsArgs& args, int64_t row, int64_t col, int64_t width,
                   acc_t factor) {
  alignas(64) acc_t x[kSumBlock], sums[kSumLanes];
  bool positive[kSumBlock];
  double total = 0;
  for (int64_t first = col; first < col + width; first += kSumBlock) {
    const int64_t count = std::min(kSumBlock, col + width - first);
    const int64_t offset = row * args.row_stride + first;
    load(args.input, args.dtype, offset, 1, count, x);
    if (args.bias)
      for (int64_t i = 0; i < count; ++i) x[i] += static_cast<const acc_t*>(args.bias)[first + i];
    std::fill_n(positive, count, false);
    if (args.positive) std::copy_n(args.positive + row * args.cols + first, count, positive);
    const int64_t own = args.target ? args.target[row] - first : -1;
    if (own >= 0 && own < count) positive[own] = true;
    std::fill_n(sums, kSumLanes, acc_t(0));
    for_each_lane(0, count, [&](int64_t lane, int64_t i) {
      x[i] = factor * SigmoidPair<acc_t>::add(x[i], positive[i], sums[lane]);
    });
    total += static_cast<double>(sum_of_lanes(sums));
    store(args.input, args.dtype, offset, 1, count, x);
  }
  return total;
}

template <typename acc_t>
void pairs(const SigmoidPairsArgs& args) {
  const acc_t factor = *static_cast<const acc_t*>(args.factor);
  const int64_t wide = sigmoid_pairs_cols(args.dtype);
  const int64_t col_tiles = (args.cols + wide - 1) / wide;
  const int64_t blocks = sigmoid_pairs_blocks(args.rows, args.cols, args.dtype);
  if (args.target)
    for (int64_t row = 0; row < args.rows; ++row)
      if (args.target[row] >= args.cols)
        throw std::runtime_error("sigmoid_pairs_: target " + std::to_string(args.target[row]) +
                                 " is out of bounds for " + std::to_string(args.cols) + " columns");
  parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block / col_tiles * kSigmoidPairsRows;
      const int64_t last = std::min(args.rows, first + kSigmoidPairsRows);
      const int64_t col = block % col_tiles * wide, width = std::min(wide, args.cols - col);
      double total = 0;
      for (int64_t row = first; row < last; ++row)
        total += row_of_tile<acc_t>(args, row, col, width, factor);
      args.workspace[block] = total;
    }
  });
  Sum total;
  for (int64_t block = 0; block < blocks; ++block) total.add(args.workspace[block]);
  *static_cast<acc_t*>(args.sum) = static_cast<acc_t>(total.value());
}

}  // namespace
}  // namespace cpu

void sigmoid_pairs(const SigmoidPairsArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::pairs<double>(args);
  cpu::pairs<float>(args);
}

}  // namespace fused
