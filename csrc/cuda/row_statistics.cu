// Statistics of rows of logits on CUDA, and their gradient. Fused: soft-cap, log-softmax, nll_loss,
// entropy, sum, max, argmax and, if it is asked for, the sum of squared probabilities. Never
// written to memory: probabilities and their logarithms.
//
// A warp handles a short row, a block a long one, in one pass. Each warp has an online softmax
// whose largest logit its lanes share, so that few packets raise it.
// Bytes moved per row: forward cols * sizeof(logit), the row's target (8) and its statistics (40;
// 72 for float64; 4 and 8 more with squares); backward twice cols * sizeof(logit).
//
// In place: grad_input may be the buffer of input. Each thread writes only logits that it alone
// reads, after it has read them.
#include <climits>

#include "../kernels.h"
#include "row_span.cuh"
#include "row_statistics.cuh"
#include "row_threads.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kBlockThreads = 512;   // of a block that shares a row, at most
constexpr int kWarpsThreads = 256;   // of a block whose warps have a row each
constexpr int64_t kWarpCols = 1024;  // classes of a row that one warp handles, at most
constexpr int kNoClass = INT_MAX;

__device__ __forceinline__ int group_min(int value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = ::min(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

// The state of the logits that a warp has seen. `largest` is the same in all lanes; each lane has
// its own sums and classes. All lanes call.
template <typename acc_t, bool kSquares>
struct WarpScan {
  RowSums<acc_t, acc_t, kSquares> sums;
  acc_t total;
  int largest_class;  // the lane's first class with `largest`; kNoClass if none or -inf
  int nan_class;      // the lane's first class with a nan

  static __device__ __forceinline__ WarpScan none() {
    return {RowSums<acc_t, acc_t, kSquares>::none(), 0, kNoClass, kNoClass};
  }

  // own: the largest logit that the lane adds next. Returns whether that raises `largest`.
  __device__ __forceinline__ bool raises(acc_t own) {
    if (!__any_sync(~0u, own > sums.largest)) return false;
    sums.raise(group_max(own));
    largest_class = kNoClass;
    return true;
  }

  // Adds the first `count` packets, whose first classes are col, col + stride, ..., all beyond the
  // classes seen. The other packets must hold -inf.
  template <typename scalar_t, int kPackets, bool kCapped>
  __device__ __forceinline__ void add(Packet<scalar_t> (&packets)[kPackets], int count, int col,
                                      int stride, const Softcap<acc_t, kCapped>& cap) {
    constexpr int kWidth = Packet<scalar_t>::kWidth;
    const acc_t before_cap = Packet<scalar_t>::template largest<acc_t>(packets);
    const acc_t own = count > 0 ? cap(before_cap) : -kInfinity<acc_t>;
    if (raises(own) && own == sums.largest) {
#pragma unroll
      for (int u = kPackets - 1; u >= 0; --u) {
        packets[u].keep_packed();
        if (u >= count) continue;
#pragma unroll
        for (int j = kWidth - 1; j >= 0; --j) {
          // Different logits may be equal after the soft-cap.
          const acc_t logit = packets[u].template get<acc_t>(j);
          if (logit == before_cap || (kCapped && cap(logit) == own))
            largest_class = col + u * stride + j;
        }
      }
    }
    const acc_t origin = sums.origin();
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
      if (u >= count) break;
      packets[u].keep_packed();
      acc_t exponentials = 0, weighted = 0, values = 0;
      [[maybe_unused]] acc_t squares = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const acc_t logit = cap(packets[u].template get<acc_t>(j));
        const RowTerm<acc_t> term(logit - origin);
        exponentials += term.exponential;
        weighted += term.weighted;
        if constexpr (kSquares) squares += term.square();
        values += logit;
      }
      sums.exponentials += exponentials;
      sums.weighted += weighted;
      if constexpr (kSquares) sums.squares += squares;
      total += values;
      if (values != values) {  // a nan, or infinities of both signs
        packets[u].keep_packed();
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const acc_t logit = packets[u].template get<acc_t>(j);
          if (logit != logit) nan_class = ::min(nan_class, col + u * stride + j);
        }
      }
    }
  }

  // Adds one logit, of any class, in each lane that has one.
  __device__ __forceinline__ void add(acc_t logit, int col, bool has_one) {
    raises(has_one ? logit : -kInfinity<acc_t>);
    if (!has_one) return;
    if (logit == sums.largest && logit > -kInfinity<acc_t>)
      largest_class = ::min(largest_class, col);
    if (logit != logit) nan_class = ::min(nan_class, col);
    const RowTerm<acc_t> term(logit - sums.origin());
    sums.exponentials += term.exponential;
    sums.weighted += term.weighted;
    if constexpr (kSquares) sums.squares += term.square();
    total += logit;
  }

  // Gives each lane the state of all lanes, which may have different largest logits.
  __device__ __forceinline__ void combine() {
    const acc_t largest = group_max(sums.largest);
    largest_class = group_min(sums.largest == largest ? largest_class : kNoClass);
    sums.raise(largest);
    sums.exponentials = group_sum(sums.exponentials);
    sums.weighted = group_sum(sums.weighted);
    if constexpr (kSquares) sums.squares = group_sum(sums.squares);
    total = group_sum(total);
    nan_class = group_min(nan_class);
  }
};

// Writes a row's outputs. One thread calls it.
template <typename acc_t, bool kSquares>
__device__ __forceinline__ void write_row(const RowStatisticsArgs& args, int64_t row,
                                          const WarpScan<acc_t, kSquares>& scan, int target,
                                          acc_t target_logit) {
  const bool has_nan = scan.nan_class != kNoClass;
  const RowStatistics<acc_t> statistics(scan.sums, has_nan, target_logit);
  const auto put = [row](void* results, acc_t value) { static_cast<acc_t*>(results)[row] = value; };
  if (args.nll) put(args.nll, target < 0 ? acc_t(0) : statistics.nll);
  put(args.logsumexp, statistics.logsumexp);
  statistics.save(static_cast<acc_t*>(args.stats) + 3 * row);
  put(args.entropy, statistics.entropy);
  put(args.total, scan.total);
  put(args.maximum, has_nan ? math::kNan<acc_t> : scan.sums.largest);
  if constexpr (kSquares) put(args.log_squares, scan.sums.log_squares(has_nan));
  args.argmax[row] = has_nan                          ? scan.nan_class
                     : scan.largest_class != kNoClass ? scan.largest_class
                                                      : 0;
}

// kBlock: a block a row, else a warp a row.
template <typename scalar_t, bool kBlock, bool kCapped, bool kSquares>
__global__ void __launch_bounds__(kBlock ? kBlockThreads : kWarpsThreads, kBlock ? 2 : 4)
    row_statistics_kernel(const __grid_constant__ RowStatisticsArgs args) {
  using acc_t = acc_type<scalar_t>;
  using Scan = WarpScan<acc_t, kSquares>;
  __shared__ Scan scratch[kBlockThreads / kWarp];
  const Softcap<acc_t, kCapped> cap(args.softcap);
  const int lanes = kBlock ? blockDim.x : kWarp;
  const int lane = kBlock ? threadIdx.x : threadIdx.x % kWarp;
  const int64_t rows = kBlock ? 1 : kWarpsThreads / kWarp;
  const int64_t own = kBlock ? 0 : threadIdx.x / kWarp;
  for (int64_t row = blockIdx.x * rows + own; row < args.rows; row += gridDim.x * rows) {
    const scalar_t* x = static_cast<const scalar_t*>(args.input) + row * args.row_stride;
    const RowSpan<scalar_t> span(x, args.cols);
    auto scan = Scan::none();
#pragma unroll 1
    for (int first = lane; first - lane % kWarp < span.packets;
         first += kRowUnroll<scalar_t> * lanes) {
      Packet<scalar_t> packets[kRowUnroll<scalar_t>];
      const int count = load_packets<false>(packets, x, span, first, lanes);
      scan.add(packets, count, span.col_of_packet(first), lanes * Packet<scalar_t>::kWidth, cap);
    }
    if (lane - lane % kWarp < span.loose) {
      const bool has_one = lane < span.loose;
      const int col = span.col_of_loose(lane);
      scan.add(has_one ? cap(to_acc<acc_t>(x[col])) : acc_t(0), col, has_one);
    }
    scan.combine();
    if constexpr (kBlock) {
      if (lane % kWarp == 0) scratch[lane / kWarp] = scan;
      __syncthreads();
      if (lane < kWarp) {
        scan = lane < lanes / kWarp ? scratch[lane] : Scan::none();
        scan.combine();
      }
    }
    if (lane == 0) {
      const int target = target_of(args, row, true);
      const acc_t target_logit = target < 0 ? acc_t(0) : cap(to_acc<acc_t>(x[target]));
      write_row(args, row, scan, target, target_logit);
    }
    if constexpr (kBlock) __syncthreads();  // before the next row reuses the scratch
  }
}

template <typename scalar_t, bool kCapped>
__global__ void __launch_bounds__(kGradientThreads)
    row_statistics_gradient_kernel(const __grid_constant__ RowStatisticsArgs args) {
  for_each_gradient_row(args.rows, [&](int64_t row, int thread, int stride) {
    const scalar_t* x = static_cast<const scalar_t*>(args.input) + row * args.row_stride;
    scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row * args.grad_row_stride;
    const RowSpan<scalar_t> span(x, args.cols);
    const bool aligned = is_aligned(out + span.head);
    const auto gradient = statistics_gradient<acc_type<scalar_t>, kCapped>(args, row, thread == 0);
    write_gradient(x, out, span, aligned, thread, stride, gradient);
  });
}

template <typename scalar_t, bool kCapped, bool kSquares>
void launch_forward(const RowStatisticsArgs& args, cudaStream_t stream) {
  if (args.cols <= kWarpCols) {
    row_statistics_kernel<scalar_t, false, kCapped, kSquares>
        <<<blocks_for(args.rows, kWarpsThreads / kWarp), kWarpsThreads, 0, stream>>>(args);
  } else {
    const int64_t packets = args.cols / Packet<scalar_t>::kWidth;
    const int threads = independent_row_threads(args.rows, packets,
                                                current_device().multiprocessors, kBlockThreads);
    row_statistics_kernel<scalar_t, true, kCapped, kSquares>
        <<<blocks_for(args.rows, 1), threads, 0, stream>>>(args);
  }
  check_launch("row_statistics_kernel");
}

template <typename scalar_t, bool kCapped>
void launch_forward(const RowStatisticsArgs& args, cudaStream_t stream) {
  args.log_squares ? launch_forward<scalar_t, kCapped, true>(args, stream)
                   : launch_forward<scalar_t, kCapped, false>(args, stream);
}

template <typename scalar_t, bool kCapped>
void launch_backward(const RowStatisticsArgs& args, cudaStream_t stream) {
  const Grid grid = gradient_grid(args.rows, args.cols / Packet<scalar_t>::kWidth);
  row_statistics_gradient_kernel<scalar_t, kCapped><<<grid.blocks, grid.threads, 0, stream>>>(args);
  check_launch("row_statistics_gradient_kernel");
}

}  // namespace
}  // namespace cuda

void row_statistics_forward(const RowStatisticsArgs& args, void* stream) {
  using namespace cuda;
  check_classes("row_statistics", args.cols);
  if (args.rows == 0) return;
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    if (args.softcap > 0) return launch_forward<scalar_t, true>(args, as_stream(stream));
    launch_forward<scalar_t, false>(args, as_stream(stream));
  });
}

void row_statistics_backward(const RowStatisticsArgs& args, void* stream) {
  using namespace cuda;
  check_classes("row_statistics", args.cols);
  if (args.rows == 0) return;
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    if (args.softcap > 0) return launch_backward<scalar_t, true>(args, as_stream(stream));
    launch_backward<scalar_t, false>(args, as_stream(stream));
  });
}

}  // namespace fused
