// Cross entropy of dense rows (col_stride 1), forward with or without the gradient, and backward.
// Fused: log-softmax, nll_loss, label smoothing, class weights and, on demand, the gradient. Never
// written to memory: log-probabilities, one-hot targets.
//   short rows  some lanes of a warp hold the whole row in registers
//   long rows   a block reads the row once, with an online softmax; for the gradient it keeps the
//               row in shared memory, and reads packets that do not fit again, through L2
// Bytes moved per row: forward cols * sizeof(logit) and the row's target and statistics (20 bytes);
// with the gradient, and backward, twice cols * sizeof(logit).
//
// In place: grad_input may be the buffer of input, in the same layout. Each thread writes only
// logits that it read itself, and the target's logit is read before a barrier that precedes all
// writes.
#pragma once

#include "cross_entropy.cuh"
#include "launch.cuh"
#include "row_threads.cuh"

namespace fused::cuda {

constexpr int kShortRowThreads = 256;
constexpr int kLongRowThreads = 512;    // at most
constexpr unsigned kLastBlocks = 4096;  // about as many as run on a device at a time

// kLanes lanes share a row of at most kLanes * kPackets packets.
template <typename scalar_t, int kLanes, int kPackets, bool kGradient, bool kCapped,
          bool kSmoothing>
__global__ void __launch_bounds__(kShortRowThreads, kPackets > 4 ? 3
                                                    : kGradient  ? 4
                                                                 : 5)
    cross_entropy_short_rows_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kWidth = Packet<scalar_t>::kWidth;
  constexpr int kLoose = (2 * (kWidth - 1) + kLanes - 1) / kLanes;
  constexpr int kRows = kShortRowThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const unsigned mask =
      kLanes == kWarp ? ~0u : ((1u << (kLanes % kWarp)) - 1) << (threadIdx.x % kWarp - lane);
  const acc_t* weight = class_weights<acc_t>(args);
  const Softcap<acc_t, kCapped> cap(args.softcap);
  let_next_start();
  await_previous();
  const acc_t common = kGradient ? common_scale<acc_t>(args) : acc_t(0);

  for (int64_t row = blockIdx.x * int64_t(kRows) + threadIdx.x / kLanes; row < args.rows;
       row += gridDim.x * int64_t(kRows)) {
    const scalar_t* x =
        static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
    const RowSpan<scalar_t> span(x, args.cols);
    const RowTarget<acc_t> target(args, row);
    const acc_t scale = kGradient ? row_scale(args, row, target, common) : acc_t(0);
    // Computed before the packets fill the registers, because row_offset may divide.
    scalar_t* out =
        kGradient ? static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row)
                  : nullptr;

    Packet<scalar_t> packets[kPackets];
    acc_t loose[kLoose];
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
      const int index = lane + u * kLanes;
      packets[u] = index < span.packets
                       ? Packet<scalar_t>::load_streaming(x + span.col_of_packet(index))
                       : lowest_packet<scalar_t>();
    }
    if (span.loose > 0) {
#pragma unroll
      for (int u = 0; u < kLoose; ++u) {
        const int index = lane + u * kLanes;
        loose[u] =
            index < span.loose ? to_acc<acc_t>(x[span.col_of_loose(index)]) : -kInfinity<acc_t>;
      }
    }
    const acc_t target_logit =
        lane == 0 && target.index >= 0 ? cap(to_acc<acc_t>(x[target.index])) : acc_t(0);

    auto softmax = Softmax<acc_t, kSmoothing>::none();
    softmax.largest = ::max(softmax.largest, Packet<scalar_t>::template largest<acc_t>(packets));
    if (span.loose > 0)
#pragma unroll
      for (int u = 0; u < kLoose; ++u) softmax.largest = ::max(softmax.largest, loose[u]);
    softmax.largest = cap(group_max(softmax.largest, kLanes, mask));
    const acc_t origin = softmax.reference();
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
      const int index = lane + u * kLanes;
      // Packets beyond the row hold -inf and add nothing, but a capped -inf would.
      if ((kCapped ? index : u * kLanes) >= span.packets) break;
      packets[u].keep_packed();
      acc_t sum = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        sum += fast_exp(cap(packets[u].template get<acc_t>(j)) - origin);
      softmax.sum += sum;
      if (kSmoothing && index < span.packets) {
        const acc_t* w = weight ? weight + span.col_of_packet(index) : nullptr;
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          softmax.weighted +=
              (w ? w[j] : acc_t(1)) * (origin - cap(packets[u].template get<acc_t>(j)));
      }
    }
    if (span.loose > 0)
#pragma unroll
      for (int u = 0; u < kLoose; ++u) {
        const int index = lane + u * kLanes;
        if (kCapped && index >= span.loose) break;
        const acc_t logit = cap(loose[u]);
        if (kSmoothing && index < span.loose)
          softmax.weighted +=
              (weight ? weight[span.col_of_loose(index)] : acc_t(1)) * (origin - logit);
        softmax.sum += fast_exp(logit - origin);
      }
    softmax.sum = group_sum(softmax.sum, kLanes, mask);
    if constexpr (kSmoothing) softmax.weighted = group_sum(softmax.weighted, kLanes, mask);
    if (lane == 0) finish_row(args, row, softmax, target, target_logit);
    if constexpr (!kGradient) continue;

    __syncwarp(mask);
    const RowGradient<acc_t, kCapped, kSmoothing> gradient(args, target, scale, softmax.largest,
                                                           fast_inverse(softmax.sum));
    const bool aligned = is_aligned(out + span.head);
#pragma unroll
    for (int u = 0; u < kPackets; ++u) {
      const int index = lane + u * kLanes;
      if (index >= span.packets) break;
      const int col = span.col_of_packet(index);
      packets[u].keep_packed();
      gradient.apply(packets[u], col);
      store_packet(packets[u], out + col, aligned);
    }
#pragma unroll
    for (int u = 0; u < kLoose; ++u) {
      const int index = lane + u * kLanes;
      if (index >= span.loose) break;
      const int col = span.col_of_loose(index);
      out[col] = from_acc<scalar_t>(gradient(loose[u], col));
    }
  }
}

// One block a row, of at least 2 * (kWidth - 1) threads. Dynamic shared memory holds the first
// `cached_packets` packets of the row, 16 bytes each; used with the gradient only.
template <typename scalar_t, bool kGradient, bool kCapped, bool kSmoothing>
__global__ void __launch_bounds__(kLongRowThreads, 2)
    cross_entropy_long_rows_kernel(const __grid_constant__ CrossEntropyArgs args,
                                   int cached_packets) {
  using acc_t = acc_type<scalar_t>;
  extern __shared__ uint4 cache[];
  __shared__ Softmax<acc_t, kSmoothing> scratch[kLongRowThreads / kWarp];
  const acc_t* weight = class_weights<acc_t>(args);
  const Softcap<acc_t, kCapped> cap(args.softcap);
  // Only the last blocks signal: when they begin, all others have ended. If every block signalled,
  // a device would finish at most one block in 1.5 ns, which is too slow for rows of 4 KB.
  if (blockIdx.x + kLastBlocks >= gridDim.x) let_next_start();
  const acc_t common = kGradient ? common_scale<acc_t>(args) : acc_t(0);
  const int threads = blockDim.x;

  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const scalar_t* x =
        static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
    const RowSpan<scalar_t> span(x, args.cols);
    const RowTarget<acc_t> target(args, row);
    const acc_t scale = kGradient ? row_scale(args, row, target, common) : acc_t(0);
    const int loose_col = span.col_of_loose(threadIdx.x);
    const bool has_loose = threadIdx.x < span.loose;
    const acc_t loose = has_loose ? to_acc<acc_t>(x[loose_col]) : acc_t(0);

    auto softmax = Softmax<acc_t, kSmoothing>::none();
    for (int first = threadIdx.x; first < span.packets; first += kRowUnroll<scalar_t> * threads) {
      Packet<scalar_t> packets[kRowUnroll<scalar_t>];
      const int count = load_packets<kGradient>(packets, x, span, first, threads);
      if constexpr (kGradient) {
#pragma unroll
        for (int u = 0; u < kRowUnroll<scalar_t>; ++u) {
          const int index = first + u * threads;
          if (index < cached_packets && index < span.packets) cache[index] = packets[u].words[0];
        }
      }
      softmax.add(packets, count, weight, span.col_of_packet(first),
                  threads * Packet<scalar_t>::kWidth, cap);
    }
    if (has_loose) softmax.add(cap(loose), kSmoothing && weight ? weight[loose_col] : acc_t(1));
    // Read only now, so that no load of the row waits for the load of the target.
    const acc_t target_logit =
        threadIdx.x == 0 && target.index >= 0 ? cap(to_acc<acc_t>(x[target.index])) : acc_t(0);
    __syncthreads();
    softmax.combine_block(scratch);
    if (threadIdx.x == 0) finish_row(args, row, softmax, target, target_logit);
    if constexpr (!kGradient) continue;

    const RowGradient<acc_t, kCapped, kSmoothing> gradient(args, target, scale, softmax.largest,
                                                           fast_inverse(softmax.sum));
    scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row);
    const bool aligned = is_aligned(out + span.head);
#pragma unroll 2
    for (int index = threadIdx.x; index < span.packets; index += threads) {
      const int col = span.col_of_packet(index);
      Packet<scalar_t> packet;
      if (index < cached_packets)
        packet.words[0] = cache[index];
      else
        packet = Packet<scalar_t>::load_streaming(x + col);
      gradient.apply(packet, col);
      store_packet(packet, out + col, aligned);
    }
    if (has_loose) out[loose_col] = from_acc<scalar_t>(gradient(loose, loose_col));
  }
}

// The backward, from the statistics of the forward.
template <typename scalar_t, bool kCapped, bool kSquares>
__global__ void __launch_bounds__(kGradientThreads)
    cross_entropy_gradient_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  const acc_t common = common_scale<acc_t>(args);
  for_each_gradient_row(args.rows, [&](int64_t row, int thread, int stride) {
    const scalar_t* x =
        static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
    scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row);
    const RowSpan<scalar_t> span(x, args.cols);
    const bool aligned = is_aligned(out + span.head);
    if (thread == 0 && is_out_of_bounds(args, args.target[row])) report_target(args, row);
    const auto gradient = RowGradient<acc_t, kCapped>::template of<kSquares>(args, row, common);
    write_gradient(x, out, span, aligned, thread, stride, gradient);
  });
}

}  // namespace fused::cuda
