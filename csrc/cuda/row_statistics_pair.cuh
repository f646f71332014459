// The gradient of statistics of rows of logits and of their divergence from a teacher's rows,
// written over the logits in one pass. Nothing else is written to memory.
//
// Bytes moved per row: the logits twice, the teacher's logits once.
//
// A thread writes only logits that it alone reads, after it has read them.
#pragma once

#include "row_pair.cuh"
#include "row_statistics.cuh"
#include "row_threads.cuh"

namespace fused::cuda {

// Packets of each row that a thread has in flight.
template <typename scalar_t>
constexpr int kPairUnroll = std::is_same_v<scalar_t, double> ? 1 : 2;

// kReverse: the logits are the target of the divergence, the teacher's logits its input.
template <typename Loss, bool kReverse, typename acc_t, bool kCapped>
struct SharedGradient {
  StatisticsGradient<acc_t, kCapped> of_statistics;
  typename Loss::Gradient of_pair;

  __device__ __forceinline__ acc_t operator()(acc_t logit, acc_t teacher, int col) const {
    const Capped<acc_t> capped = of_statistics.cap.with_slope(logit);
    const acc_t divergence = kReverse ? of_pair.target(teacher, capped.logit, acc_t(1))
                                      : of_pair.input(capped.logit, teacher, acc_t(1));
    return (of_statistics.of_capped(capped.logit, col) + divergence) * capped.slope;
  }
};

template <typename Loss, typename scalar_t, bool kReverse, bool kCapped>
__global__ void __launch_bounds__(kGradientThreads)
    shared_gradient_kernel(const __grid_constant__ RowStatisticsArgs args,
                           const __grid_constant__ RowPairArgs pair, const Loss loss) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kUnroll = kPairUnroll<scalar_t>, kWidth = Packet<scalar_t>::kWidth;
  const RowOperand& teacher = kReverse ? pair.input : pair.target;
  for_each_gradient_row(args.rows, [&](int64_t row, int thread, int stride) {
    scalar_t* x = static_cast<scalar_t*>(args.grad_input) + row * args.grad_row_stride;
    const scalar_t* t =
        static_cast<const scalar_t*>(teacher.data) + row_offset(teacher.layout, row);
    RowSpan<scalar_t> span(x, args.cols);
    if (!is_aligned(t + span.head)) span.read_one_by_one(args.cols);
    const SharedGradient<Loss, kReverse, acc_t, kCapped> gradient{
        statistics_gradient<acc_t, kCapped>(args, row, thread == 0),
        row_gradient(pair, loss, row, read_statistics<acc_t>(pair, row))};
    for (int first = thread; first < span.packets; first += kUnroll * stride) {
      Packet<scalar_t> logits[kUnroll], teachers[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int index = first + u * stride;
        if (index >= span.packets) break;
        const int col = span.col_of_packet(index);
        logits[u] = Packet<scalar_t>::load_streaming(x + col);
        teachers[u] = Packet<scalar_t>::load_streaming(t + col);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int index = first + u * stride;
        if (index >= span.packets) break;
        const int col = span.col_of_packet(index);
        acc_t values[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          values[j] = gradient(logits[u].template get<acc_t>(j), teachers[u].template get<acc_t>(j),
                               col + j);
        logits[u].set(values);
        logits[u].store_streaming(x + col);
      }
    }
    for (int index = thread; index < span.loose; index += stride) {
      const int col = span.col_of_loose(index);
      x[col] = from_acc<scalar_t>(gradient(to_acc<acc_t>(x[col]), to_acc<acc_t>(t[col]), col));
    }
  });
}

// The logits and their gradient lie at args.grad_input. The logits of both rows have one dtype, and
// each row lies side by side.
template <template <typename> class Loss>
void shared_backward(const RowStatisticsArgs& args, const RowPairArgs& pair, bool reverse,
                     cudaStream_t stream) {
  check_classes("row_statistics", args.cols);
  if (args.rows == 0) return;
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    using LossOfRow = Loss<acc_type<scalar_t>>;
    const bool capped = args.softcap > 0;
    const auto kernel = reverse  ? capped ? shared_gradient_kernel<LossOfRow, scalar_t, true, true>
                                          : shared_gradient_kernel<LossOfRow, scalar_t, true, false>
                         : capped ? shared_gradient_kernel<LossOfRow, scalar_t, false, true>
                                 : shared_gradient_kernel<LossOfRow, scalar_t, false, false>;
    const Grid grid = gradient_grid(args.rows, args.cols / Packet<scalar_t>::kWidth);
    kernel<<<grid.blocks, grid.threads, 0, stream>>>(args, pair, LossOfRow(pair.parameters));
    check_launch("shared_gradient_kernel");
  });
}

}  // namespace fused::cuda
