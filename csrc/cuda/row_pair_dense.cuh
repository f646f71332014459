// Row pairs whose classes lie side by side: a warp a row, or a block where rows are long. With the
// gradient, and in the backward, each thread reads its classes again and writes theirs.
//
// Bytes moved per row, and in place: as in row_pair.cuh.
#pragma once

#include "row_pair.cuh"

namespace fused::cuda {

constexpr int kRowPairThreads = 512;      // at most
constexpr int kRowPairWarpThreads = 256;  // of a block of one warp a row
constexpr int kRowPairUnroll = 2;         // packets of each operand that a thread has in flight

// Two dense rows as packets of kWidth classes, where both start on 16-byte boundaries at the same
// class; as single, `loose`, classes otherwise.
template <typename input_t, typename target_t>
struct DensePair {
  using acc_t = acc_type<input_t>;
  static constexpr int kWidth = Packet<input_t>::kWidth;
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

  // Calls body(logits, targets, first class) for each packet, and each loose class, of a lane.
  template <typename Body>
  __device__ __forceinline__ void for_each(int lane, int lanes, Body&& body) const {
    for (int first = lane; first < span.packets; first += kRowPairUnroll * lanes) {
      Packet<input_t> inputs[kRowPairUnroll];
      Packet<target_t, kWidth> targets[kRowPairUnroll];
#pragma unroll
      for (int u = 0; u < kRowPairUnroll; ++u) {
        const int index = first + u * lanes;
        if (index >= span.packets) break;
        const int col = span.col_of_packet(index);
        inputs[u] = Packet<input_t>::load_to_l2(x + col);
        targets[u] = Packet<target_t, kWidth>::load_to_l2(t + col);
      }
#pragma unroll
      for (int u = 0; u < kRowPairUnroll; ++u) {
        const int index = first + u * lanes;
        if (index >= span.packets) break;
        acc_t a[kWidth], b[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          a[j] = inputs[u].template get<acc_t>(j);
          b[j] = targets[u].template get<acc_t>(j);
        }
        body(a, b, span.col_of_packet(index));
      }
    }
    for (int index = lane; index < span.loose; index += lanes) {
      const int col = span.col_of_loose(index);
      const acc_t a[1] = {to_acc<acc_t>(x[col])}, b[1] = {to_acc<acc_t>(t[col])};
      body(a, b, col);
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

template <typename Loss, typename input_t, typename target_t>
__device__ __forceinline__ void write_gradients(const RowPairArgs& args, int64_t row,
                                                const typename Loss::Gradient& gradient,
                                                const DensePair<input_t, target_t>& pair, int lane,
                                                int lanes) {
  using acc_t = acc_type<input_t>;
  input_t* grad_input = static_cast<input_t*>(args.grad_input.data);
  target_t* grad_target = static_cast<target_t*>(args.grad_target.data);
  if (grad_input) grad_input += row_offset(args.grad_input.layout, row);
  if (grad_target) grad_target += row_offset(args.grad_target.layout, row);
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;
  pair.for_each(lane, lanes, [&]<int N>(const acc_t(&x)[N], const acc_t(&t)[N], int col) {
    acc_t values[N];
    if (grad_target) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        values[j] = gradient.target(x[j], t[j], weight ? weight[col + j] : acc_t(1));
      store_classes(grad_target + col, values);
    }
    if (grad_input) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        values[j] = gradient.input(x[j], t[j], weight ? weight[col + j] : acc_t(1));
      store_classes(grad_input + col, values);
    }
  });
}

// kBlockRow: a block a row, else a warp a row. kForward: the sums first; else from the statistics.
template <typename Loss, typename input_t, typename target_t, bool kBlockRow, bool kForward>
__global__ void __launch_bounds__(kBlockRow ? kRowPairThreads : kRowPairWarpThreads)
    row_pair_kernel(const __grid_constant__ RowPairArgs args, const Loss loss) {
  using acc_t = acc_type<input_t>;
  using State = typename Loss::State;
  __shared__ State scratch[kWarp];
  const int lane = kBlockRow ? threadIdx.x : threadIdx.x % kWarp;
  const int lanes = kBlockRow ? blockDim.x : kWarp;
  const int64_t rows = kBlockRow ? 1 : blockDim.x / kWarp;
  const int64_t first = blockIdx.x * rows + (kBlockRow ? 0 : threadIdx.x / kWarp);

  for (int64_t row = first; row < args.rows; row += gridDim.x * rows) {
    const DensePair<input_t, target_t> pair(args, row);
    RowPairStatistics<acc_t> statistics;
    if constexpr (kForward) {
      State state = State::none();
      pair.for_each(lane, lanes, [&]<int N>(const acc_t(&x)[N], const acc_t(&t)[N], int col) {
        add_classes(args, loss, state, x, t, col);
      });
      if constexpr (kBlockRow) {
        __syncthreads();
        combine_block(loss, state, scratch);
      } else {
        __syncwarp();
        combine_warp(loss, state);
      }
      statistics = Loss::finish(state);
      if (lane == 0) write_row(args, loss, row, statistics);
    } else {
      statistics = read_statistics<acc_t>(args, row);
    }
    if (args.grad_input.data || args.grad_target.data)
      write_gradients<Loss>(args, row, row_gradient(args, loss, row, statistics), pair, lane,
                            lanes);
  }
}

}  // namespace fused::cuda
