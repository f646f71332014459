// The binary cross entropies of all numbers of a matrix, added up, and their gradient over it, on
// CUDA.
//
// A block goes through a tile of rows, 16 bytes a thread and row. Its sum of losses goes to a
// workspace, which a second kernel adds up in a fixed order.
// Bytes moved: 2 * rows * cols * sizeof(number); rows * cols more for a matrix of targets.
#include "../kernels.h"
#include "../losses/sigmoid_pairs.h"
#include "class_target.cuh"
#include "launch.cuh"
#include "total.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kPairThreads = 128;

template <typename scalar_t, bool kAligned>
__global__ void __launch_bounds__(kPairThreads)
    sigmoid_pairs_kernel(const __grid_constant__ SigmoidPairsArgs args, int64_t col_tiles) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kWidth = Packet<scalar_t>::kWidth, kRows = 4;
  const int64_t col = (blockIdx.x % col_tiles * kPairThreads + threadIdx.x) * kWidth;
  const int64_t first = blockIdx.x / col_tiles * kSigmoidPairsRows;
  const int64_t last = ::min(args.rows, first + kSigmoidPairsRows);
  const int count = static_cast<int>(::max(int64_t(0), ::min(int64_t(kWidth), args.cols - col)));
  const bool whole = kAligned && count == kWidth;
  const acc_t factor = *static_cast<const acc_t*>(args.factor);
  scalar_t* const x = static_cast<scalar_t*>(args.input) + col;
  acc_t bias[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    bias[j] = args.bias && j < count ? static_cast<const acc_t*>(args.bias)[col + j] : acc_t(0);

  double total = 0;
#pragma unroll 1
  for (int64_t row = first; row < last; row += kRows) {
    Packet<scalar_t> packets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= last) break;
      const scalar_t* source = x + (row + r) * args.row_stride;
      if (whole) {
        packets[r] = Packet<scalar_t>::load_streaming(source);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (j < count) packets[r].values[j] = source[j];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= last) break;
      const int64_t own = args.target ? args.target[row + r] : -1;
      if (own >= args.cols) report_target(own, row + r, args.cols);
      const bool* const positive =
          args.positive ? args.positive + (row + r) * args.cols + col : nullptr;
      acc_t gradients[kWidth], sum = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        gradients[j] = 0;
        if (j >= count) continue;
        const bool is_positive = positive ? positive[j] : own == col + j;
        gradients[j] = factor * SigmoidPair<acc_t>::add(packets[r].template get<acc_t>(j) + bias[j],
                                                        is_positive, sum);
      }
      total += static_cast<double>(sum);
      packets[r].set(gradients);
      scalar_t* const out = x + (row + r) * args.row_stride;
      if (whole) {
        packets[r].store_streaming(out);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (j < count) out[j] = packets[r].values[j];
      }
    }
  }
  total = block_sum<kPairThreads, true>(total);
  if (threadIdx.x == 0) args.workspace[blockIdx.x] = total;
}

template <typename scalar_t>
void launch_pairs(const SigmoidPairsArgs& args, cudaStream_t stream) {
  const int64_t blocks = sigmoid_pairs_blocks(args.rows, args.cols, args.dtype);
  if (blocks > INT32_MAX)
    throw std::runtime_error("sigmoid_pairs_: the matrix has more tiles than a grid has blocks");
  if (blocks > 0) {
    const bool aligned = reinterpret_cast<uintptr_t>(args.input) % 16 == 0 &&
                         args.row_stride * sizeof(scalar_t) % 16 == 0;
    const auto kernel =
        aligned ? sigmoid_pairs_kernel<scalar_t, true> : sigmoid_pairs_kernel<scalar_t, false>;
    kernel<<<static_cast<unsigned>(blocks), kPairThreads, 0, stream>>>(
        args, divide_up(args.cols, sigmoid_pairs_cols(args.dtype)));
    check_launch("sigmoid_pairs_kernel");
  }
  const Total total{args.sum, dtype_of<acc_type<scalar_t>>(), 1., args.workspace};
  launch_total(total, blocks, stream);
}

}  // namespace
}  // namespace cuda

void sigmoid_pairs(const SigmoidPairsArgs& args, void* stream) {
  using namespace cuda;
  visit(args.dtype, [&](auto* type) {
    launch_pairs<std::remove_pointer_t<decltype(type)>>(args, as_stream(stream));
  });
}

}  // namespace fused
