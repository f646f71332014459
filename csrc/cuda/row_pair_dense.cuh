// Row pairs with contiguous classes. Some lanes of a warp share a row or, if rows are long, a
// block. For a gradient, each thread reads its classes again and writes their gradients.
//
// Bytes moved per row, and in place: as in row_pair.cuh.
#pragma once

#include "row_pair.cuh"

namespace fused::cuda {

constexpr int kRowPairThreads = 384;       // of a block that shares a row, at most
constexpr int kRowPairLanesThreads = 256;  // of a block whose warps have one row or more each

// The outputs of a kernel. kValue: the sums of a row, in one pass or two. kWithGradient: the sums,
// and then the gradient of input. kBackward: one or both gradients, from the sums.
enum class RowPairPass { kValue, kWithGradient, kBackward };

// How a kernel reads rows.
template <typename Loss, typename acc_t, RowPairPass kPass>
struct RowPairReads {
  static constexpr bool kOnce = kPass == RowPairPass::kValue && !kHasSecondPass<Loss>;
  static constexpr bool kDouble = sizeof(acc_t) == 8;
  // Packets of each operand that a thread has in flight.
  static constexpr int kPackets = kOnce && !kDouble ? 4 : 2;
  // The minimum occupancy, in warps a multiprocessor.
  static constexpr int kWarps = kDouble ? 12 : kPass == RowPairPass::kValue && !kOnce ? 32 : 24;
};

// Packets of a row pair. A packet of input has 16 bytes, a packet of target the same number of
// classes.
template <typename input_t, typename target_t, int kPackets_>
struct PairPackets {
  static constexpr int kPackets = kPackets_;
  static constexpr int kWidth = Packet<input_t>::kWidth;
  using acc_t = acc_type<input_t>;

  Packet<input_t> inputs[kPackets];
  Packet<target_t, kWidth> targets[kPackets];
  int count;
  int col, stride;  // in classes: the start of the first packet, and the step between packets

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

// Two dense rows. If both reach a 16-byte boundary at the same class, they are packets of kWidth
// classes and a few single, `loose`, classes. Otherwise all classes are loose.
template <typename input_t, typename target_t, typename Reads>
struct DensePair {
  using acc_t = acc_type<input_t>;
  using Packets = PairPackets<input_t, target_t, Reads::kPackets>;
  const input_t* x;
  const target_t* t;
  RowSpan<input_t> span;

  // inside: whether the caller has a row; otherwise the pair has no classes.
  __device__ __forceinline__ DensePair(const RowPairArgs& args, int64_t row, bool inside)
      : x(static_cast<const input_t*>(args.input.data) + row_offset(args.input.layout, row)),
        t(static_cast<const target_t*>(args.target.data) + row_offset(args.target.layout, row)),
        span(x, args.cols) {
    if (!is_aligned(t + span.head)) span.read_one_by_one(args.cols);
    if (!inside) span.packets = span.loose = 0;
  }

  template <typename packet_t, typename scalar_t>
  static __device__ __forceinline__ void load(packet_t& packet, const scalar_t* source) {
    packet = Reads::kOnce ? packet_t::load_streaming(source) : packet_t::load_to_l2(source);
  }

  // Calls body(classes) for the packets and each loose class of a lane. While other lanes of the
  // warp have more, the count is 0. All lanes of a warp call. kWarpRow: they have the same row.
  template <bool kWarpRow, typename Body>
  __device__ __forceinline__ void for_each(int lane, int lanes, Body&& body) const {
    const auto any_below = [&](int index, int count) {
      return kWarpRow ? index - lane % kWarp < count : __any_sync(~0u, index < count);
    };
#pragma unroll 1
    for (int first = lane; any_below(first, span.packets); first += Packets::kPackets * lanes) {
      Packets packets;
      packets.count = 0;
      packets.col = span.col_of_packet(first);
      packets.stride = lanes * Packets::kWidth;
#pragma unroll
      for (int u = 0; u < Packets::kPackets; ++u) {
        if (first + u * lanes >= span.packets) break;
        packets.count = u + 1;
        const int col = packets.first_class(u);
        load(packets.inputs[u], x + col);
        load(packets.targets[u], t + col);
      }
      body(packets);
    }
#pragma unroll 1
    for (int index = lane; any_below(index, span.loose); index += lanes) {
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

// Writes the gradients that are present: with kBoth, of input and target; otherwise of input.
template <bool kBoth, bool kWarpRow, typename Loss, typename input_t, typename target_t,
          typename Reads>
__device__ __forceinline__ void write_gradients(const RowPairArgs& args, int64_t row,
                                                const typename Loss::Gradient& gradient,
                                                const DensePair<input_t, target_t, Reads>& pair,
                                                int lane, int lanes) {
  using acc_t = acc_type<input_t>;
  input_t* grad_input = static_cast<input_t*>(args.grad_input.data);
  target_t* grad_target = kBoth ? static_cast<target_t*>(args.grad_target.data) : nullptr;
  if (grad_input) grad_input += row_offset(args.grad_input.layout, row);
  if (grad_target) grad_target += row_offset(args.grad_target.layout, row);
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;
  pair.template for_each<kWarpRow>(lane, lanes, [&]<typename Classes>(const Classes& classes) {
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

// The threads that share a row: a block, a warp, or `row_lanes` lanes of a warp, a power of two.
enum class RowPairShare { kBlock, kWarp, kLanes };

template <typename Loss, typename input_t, typename target_t, RowPairShare kShare,
          RowPairPass kPass>
__global__ void __launch_bounds__(kShare == RowPairShare::kBlock ? kRowPairThreads
                                                                 : kRowPairLanesThreads,
                                  RowPairReads<Loss, acc_type<input_t>, kPass>::kWarps* kWarp /
                                      (kShare == RowPairShare::kBlock ? kRowPairThreads
                                                                      : kRowPairLanesThreads))
    row_pair_kernel(const __grid_constant__ RowPairArgs args, const Loss loss, int row_lanes) {
  using acc_t = acc_type<input_t>;
  using State = typename Loss::State;
  constexpr bool kBlockRow = kShare == RowPairShare::kBlock;
  constexpr bool kWarpRow = kShare != RowPairShare::kLanes;
  constexpr bool kBackward = kPass == RowPairPass::kBackward;
  if constexpr (!kBackward) let_next_start();
  __shared__ State scratch[kWarp];
  __shared__ RowPairStatistics<acc_t> shared;
  const int voting = kWarpRow ? kWarp : row_lanes;  // lanes of a warp that share a row
  const int lanes = kBlockRow ? blockDim.x : voting;
  const int lane = kBlockRow ? threadIdx.x : threadIdx.x & (voting - 1);
  const int64_t rows = kBlockRow ? 1 : blockDim.x / voting;
  const int64_t own = kBlockRow ? 0 : threadIdx.x / voting;
  // Broadcasts the statistics of thread 0 to its block. Lanes that share a row already agree.
  const auto share = [&](RowPairStatistics<acc_t>& statistics) {
    if constexpr (kBlockRow) {
      if (threadIdx.x == 0) shared = statistics;
      __syncthreads();
      statistics = shared;
    }
  };

  for (int64_t first = blockIdx.x * rows; first < args.rows; first += gridDim.x * rows) {
    const bool inside = first + own < args.rows;
    const int64_t row = inside ? first + own : first;
    const DensePair<input_t, target_t, RowPairReads<Loss, acc_t, kPass>> pair(args, row, inside);
    RowPairStatistics<acc_t> statistics;
    if constexpr (kBackward) {
      statistics = read_statistics<acc_t>(args, row);
    } else {
      State state = State::none();
      pair.template for_each<kWarpRow>(lane, lanes, [&](const auto& classes) {
        add_classes<true>(args, loss, state, classes, voting);
      });
      if constexpr (kBlockRow) {
        combine_block(loss, state, scratch);
      } else {
        add_up_lanes(state, voting);
      }
      if (!kBlockRow || threadIdx.x < kWarp) statistics = Loss::finish(state);
      if constexpr (kHasSecondPass<Loss>) {
        share(statistics);
        const typename Loss::SecondPass pass(loss, statistics);
        SecondSums sums;
        pair.template for_each<kWarpRow>(lane, lanes,
                                         [&](const auto& classes) { sums.add(pass, classes); });
        sums.input = kBlockRow ? block_sum(sums.input) : group_sum(sums.input, voting);
        sums.target = kBlockRow ? block_sum(sums.target) : group_sum(sums.target, voting);
        Loss::finish(statistics, sums.input, sums.target);
      }
      if (lane == 0 && inside) write_row(args, loss, row, statistics);
      share(statistics);
    }
    if constexpr (kPass != RowPairPass::kValue)
      write_gradients<kBackward, kWarpRow, Loss>(
          args, row, row_gradient(args, loss, row, statistics), pair, lane, lanes);
  }
}

}  // namespace fused::cuda
