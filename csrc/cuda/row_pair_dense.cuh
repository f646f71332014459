// Row pairs whose classes lie side by side: a warp a row, or a block where rows are long. With the
// gradient, and in the backward, each thread reads its classes again and writes theirs.
//
// Bytes moved per row, and in place: as in row_pair.cuh.
#pragma once

#include "row_pair.cuh"

namespace fused::cuda {

constexpr int kRowPairThreads = 384;      // at most
constexpr int kRowPairWarpThreads = 256;  // of a block of one warp a row
// Warps that a multiprocessor is to hold at least.
template <typename acc_t>
constexpr int kRowPairWarps = sizeof(acc_t) == 8 ? 12 : 24;

// Packets of a row pair: those of input as wide as 16 bytes, those of target of as many classes.
template <typename input_t, typename target_t>
struct PairPackets {
  // That a thread has in flight of each operand.
  static constexpr int kPackets = 2;
  static constexpr int kWidth = Packet<input_t>::kWidth;
  using acc_t = acc_type<input_t>;

  Packet<input_t> inputs[kPackets];
  Packet<target_t, kWidth> targets[kPackets];
  int count;
  int col, stride;  // in classes: the first packet's first, and from one packet to the next

  __device__ __forceinline__ acc_t input(int u, int j) const {
    return inputs[u].template get<acc_t>(j);
  }
  __device__ __forceinline__ acc_t target(int u, int j) const {
    return targets[u].template get<acc_t>(j);
  }
  __device__ __forceinline__ acc_t largest_input(int u) const {
    const Packet<input_t> packet[1] = {inputs[u]};
    return Packet<input_t>::template largest<acc_t>(packet);
  }
  __device__ __forceinline__ acc_t largest_target(int u) const {
    const Packet<target_t, kWidth> packet[1] = {targets[u]};
    return Packet<target_t, kWidth>::template largest<acc_t>(packet);
  }
  __device__ __forceinline__ int first_class(int u) const { return col + u * stride; }
};

// Two dense rows as packets of kWidth classes, where both start on 16-byte boundaries at the same
// class; as single, `loose`, classes otherwise.
template <typename input_t, typename target_t>
struct DensePair {
  using acc_t = acc_type<input_t>;
  using Packets = PairPackets<input_t, target_t>;
  const input_t* x;
  const target_t* t;
  RowSpan<input_t> span;

  __device__ __forceinline__ DensePair(const RowPairArgs& args, int64_t row)
      : x(static_cast<const input_t*>(args.input.data) + row_offset(args.input.layout, row)),
        t(static_cast<const target_t*>(args.target.data) + row_offset(args.target.layout, row)),
        span(x, args.cols) {
    if (is_aligned(t + span.head)) return;
    span.head = 0;
    span.packets = 0;
    span.loose = static_cast<int>(args.cols);
  }

  // Calls body(classes) for packets, and each loose class, of a lane; where other lanes of its warp
  // have more, with a count of 0.
  template <typename Body>
  __device__ __forceinline__ void for_each(int lane, int lanes, Body&& body) const {
    const int place = lane % kWarp;
#pragma unroll 1
    for (int first = lane; first - place < span.packets; first += Packets::kPackets * lanes) {
      Packets packets;
      packets.count = 0;
      packets.col = span.col_of_packet(first);
      packets.stride = lanes * Packets::kWidth;
#pragma unroll
      for (int u = 0; u < Packets::kPackets; ++u) {
        if (first + u * lanes >= span.packets) break;
        packets.count = u + 1;
        const int col = packets.first_class(u);
        packets.inputs[u] = Packet<input_t>::load_to_l2(x + col);
        packets.targets[u] = Packet<target_t, Packets::kWidth>::load_to_l2(t + col);
      }
      body(packets);
    }
#pragma unroll 1
    for (int index = lane; index - place < span.loose; index += lanes) {
      const int col = span.col_of_loose(index);
      PairClass<acc_t> one{0, 0, col, 0};
      if (index < span.loose) one = {to_acc<acc_t>(x[col]), to_acc<acc_t>(t[col]), col};
      body(one);
    }
  }
};

template <typename scalar_t, typename acc_t, int N>
__device__ __forceinline__ void store_classes(scalar_t* destination, const acc_t (&values)[N]) {
  if constexpr (N > 1) {
    if (is_aligned(destination)) {
      Packet<scalar_t, N> packet;
      packet.set(values);
      return packet.store_streaming(destination);
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) destination[j] = from_acc<scalar_t>(values[j]);
}

// kBoth: of input and target, those that are wanted; else of input.
template <bool kBoth, typename Loss, typename input_t, typename target_t>
__device__ __forceinline__ void write_gradients(const RowPairArgs& args, int64_t row,
                                                const typename Loss::Gradient& gradient,
                                                const DensePair<input_t, target_t>& pair, int lane,
                                                int lanes) {
  using acc_t = acc_type<input_t>;
  input_t* grad_input = static_cast<input_t*>(args.grad_input.data);
  target_t* grad_target = kBoth ? static_cast<target_t*>(args.grad_target.data) : nullptr;
  if (grad_input) grad_input += row_offset(args.grad_input.layout, row);
  if (grad_target) grad_target += row_offset(args.grad_target.layout, row);
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;
  pair.for_each(lane, lanes, [&]<typename Classes>(const Classes& classes) {
    constexpr int kWidth = Classes::kWidth;
#pragma unroll
    for (int u = 0; u < Classes::kPackets; ++u) {
      if (u >= classes.count) break;
      const int col = static_cast<int>(classes.first_class(u));
      acc_t values[kWidth];
      if (grad_target) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          values[j] = gradient.target(classes.input(u, j), classes.target(u, j),
                                      weight ? weight[col + j] : acc_t(1));
        store_classes(grad_target + col, values);
      }
      if (grad_input) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          values[j] = gradient.input(classes.input(u, j), classes.target(u, j),
                                     weight ? weight[col + j] : acc_t(1));
        store_classes(grad_input + col, values);
      }
    }
  });
}

// kBlockRow: a block a row, else a warp a row. kForward: the sums first, in one pass or two, and at
// most the gradient of input; else both gradients, from the statistics.
template <typename Loss, typename input_t, typename target_t, bool kBlockRow, bool kForward>
__global__ void __launch_bounds__(kBlockRow ? kRowPairThreads : kRowPairWarpThreads,
                                  kRowPairWarps<acc_type<input_t>>* kWarp /
                                      (kBlockRow ? kRowPairThreads : kRowPairWarpThreads))
    row_pair_kernel(const __grid_constant__ RowPairArgs args, const Loss loss) {
  using acc_t = acc_type<input_t>;
  using State = typename Loss::State;
  if constexpr (kForward) let_next_start();
  __shared__ State scratch[kWarp];
  __shared__ RowPairStatistics<acc_t> shared;
  const int lane = kBlockRow ? threadIdx.x : threadIdx.x % kWarp;
  const int lanes = kBlockRow ? blockDim.x : kWarp;
  const int64_t rows = kBlockRow ? 1 : blockDim.x / kWarp;
  const int64_t first = blockIdx.x * rows + (kBlockRow ? 0 : threadIdx.x / kWarp);
  // Thread 0's, in every thread of a block; those of a warp are the same in all of its lanes.
  const auto share = [&](RowPairStatistics<acc_t>& statistics) {
    if constexpr (kBlockRow) {
      if (threadIdx.x == 0) shared = statistics;
      __syncthreads();
      statistics = shared;
    }
  };

  for (int64_t row = first; row < args.rows; row += gridDim.x * rows) {
    const DensePair<input_t, target_t> pair(args, row);
    RowPairStatistics<acc_t> statistics;
    if constexpr (kForward) {
      State state = State::none();
      pair.for_each(lane, lanes,
                    [&](const auto& classes) { add_classes<true>(args, loss, state, classes); });
      if constexpr (kBlockRow) {
        combine_block(loss, state, scratch);
      } else {
        __syncwarp();
        add_up_warp(state);
      }
      if (!kBlockRow || threadIdx.x < kWarp) statistics = Loss::finish(state);
      if constexpr (kHasSecondPass<Loss>) {
        share(statistics);
        const typename Loss::SecondPass pass(loss, statistics);
        SecondSums sums;
        pair.for_each(lane, lanes, [&](const auto& classes) { sums.add(pass, classes); });
        sums.input = kBlockRow ? block_sum(sums.input) : group_sum(sums.input);
        sums.target = kBlockRow ? block_sum(sums.target) : group_sum(sums.target);
        Loss::finish(statistics, sums.input, sums.target);
      }
      if (lane == 0) write_row(args, loss, row, statistics);
      share(statistics);
    } else {
      statistics = read_statistics<acc_t>(args, row);
    }
    if (args.grad_input.data || (!kForward && args.grad_target.data))
      write_gradients<!kForward, Loss>(args, row, row_gradient(args, loss, row, statistics), pair,
                                       lane, lanes);
  }
}

}  // namespace fused::cuda
