// Row pairs of any strides and mixture of dtypes, and the launches of the dense and the strided
// kernel. If classes are not contiguous, the stride between neighbouring rows is usually 1, as in
// [N, C, H, W] or a transposed matrix. Neighbouring threads take neighbouring rows, so that loads
// are coalesced. kStridedLanes threads share a row's classes.
//
// Bytes moved per row, and in place: as in row_pair.cuh.
#pragma once

#include <bit>

#include "row_pair_dense.cuh"
#include "row_threads.cuh"

namespace fused::cuda {

constexpr int kStridedRows = 32;
constexpr int kStridedLanes = 8;

template <typename Loss, typename acc_t, bool kForward>
__global__ void __launch_bounds__(kStridedRows* kStridedLanes)
    row_pair_strided_kernel(const __grid_constant__ RowPairArgs args, const Loss loss) {
  using State = typename Loss::State;
  if constexpr (kForward) let_next_start();
  __shared__ State scratch[kStridedLanes][kStridedRows];
  __shared__ RowPairStatistics<acc_t> shared[kStridedRows];
  const acc_t* weight = Loss::kWeighted ? static_cast<const acc_t*>(args.weight) : nullptr;

  for (int64_t first = blockIdx.x * int64_t(kStridedRows); first < args.rows;
       first += gridDim.x * int64_t(kStridedRows)) {
    const int64_t row = first + threadIdx.x;
    const bool inside = row < args.rows;
    const int64_t input = inside ? row_offset(args.input.layout, row) : 0;
    const int64_t target = inside ? row_offset(args.target.layout, row) : 0;
    // Calls body(logit, target, class) for every kStridedLanes-th class.
    const auto for_each = [&](auto&& body) {
      for (int64_t col = threadIdx.y; inside && col < args.cols; col += kStridedLanes)
        body(load_as<acc_t>(args.input.data, args.input.dtype,
                            input + col * args.input.layout.col_stride),
             load_as<acc_t>(args.target.data, args.target.dtype,
                            target + col * args.target.layout.col_stride),
             col);
    };

    RowPairStatistics<acc_t> statistics;
    if constexpr (kForward) {
      State state = State::none();
      for_each([&](acc_t x, acc_t t, int64_t col) {
        add_classes<false>(args, loss, state, PairClass<acc_t>{x, t, col});
      });
      scratch[threadIdx.y][threadIdx.x] = state;
      __syncthreads();
      if (threadIdx.y == 0) {
#pragma unroll 1
        for (int lane = 1; lane < kStridedLanes; ++lane)
          state.merge(scratch[lane][threadIdx.x], loss.inverse_temperature);
        statistics = Loss::finish(state);
        if (inside && !kHasSecondPass<Loss>) write_row(args, loss, row, statistics);
        shared[threadIdx.x] = statistics;
      }
      __syncthreads();
      statistics = shared[threadIdx.x];
      if constexpr (kHasSecondPass<Loss>) {
        __shared__ double sums[2][kStridedLanes][kStridedRows];
        const typename Loss::SecondPass pass(loss, statistics);
        SecondSums own;
        for_each(
            [&](acc_t x, acc_t t, int64_t col) { own.add(pass, PairClass<acc_t>{x, t, col}); });
        sums[0][threadIdx.y][threadIdx.x] = own.input;
        sums[1][threadIdx.y][threadIdx.x] = own.target;
        __syncthreads();
        own = {};
        for (int lane = 0; lane < kStridedLanes; ++lane) {
          own.input += sums[0][lane][threadIdx.x];
          own.target += sums[1][lane][threadIdx.x];
        }
        Loss::finish(statistics, own.input, own.target);
        if (inside && threadIdx.y == 0) write_row(args, loss, row, statistics);
      }
    } else if (inside) {
      statistics = read_statistics<acc_t>(args, row);
    }
    if (!inside || (!args.grad_input.data && !args.grad_target.data)) continue;

    const auto gradient = row_gradient(args, loss, row, statistics);
    const int64_t grad_input = row_offset(args.grad_input.layout, row);
    const int64_t grad_target = row_offset(args.grad_target.layout, row);
    for_each([&](acc_t x, acc_t t, int64_t col) {
      const acc_t w = weight ? weight[col] : acc_t(1);
      if (args.grad_target.data)
        store_as(args.grad_target.data, args.grad_target.dtype,
                 grad_target + col * args.grad_target.layout.col_stride, gradient.target(x, t, w));
      if (args.grad_input.data)
        store_as(args.grad_input.data, args.grad_input.dtype,
                 grad_input + col * args.grad_input.layout.col_stride, gradient.input(x, t, w));
    });
  }
}

// The number of threads that share a row. If rows are short and many, some lanes of a warp: work
// that is done once a row costs a warp the same for one row as for many. A lane then reads about 8
// packets, or 4 of the shortest rows.
template <RowPairPass kPass>
int row_pair_threads(int64_t rows, int64_t packets, const Device& device) {
  const int64_t filling = divide_up(512 * device.multiprocessors, rows);
  const int64_t wanted =
      std::max(divide_up(packets, 8), std::min<int64_t>(divide_up(packets, 4), 4));
  const int64_t lanes = std::max(wanted, filling);
  if (lanes <= kWarp / 2) return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(lanes)));
  // Rows that are read again should stay in the L2 cache: then more threads share a row, so that
  // fewer rows are in flight.
  return kPass == RowPairPass::kValue
             ? independent_row_threads(rows, packets, device.multiprocessors, kRowPairThreads)
             : row_threads(packets, 8, kWarp, kRowPairThreads);
}

template <typename input_t, typename target_t, RowPairPass kPass, typename Loss>
void launch_dense_rows(const RowPairArgs& args, const Loss& loss, cudaStream_t stream) {
  const int threads =
      row_pair_threads<kPass>(args.rows, args.cols / Packet<input_t>::kWidth, current_device());
  auto kernel = row_pair_kernel<Loss, input_t, target_t, RowPairShare::kBlock, kPass>;
  int block = threads;
  if (threads <= kWarp) {
    block = kRowPairLanesThreads;
    kernel = threads < kWarp ? row_pair_kernel<Loss, input_t, target_t, RowPairShare::kLanes, kPass>
                             : row_pair_kernel<Loss, input_t, target_t, RowPairShare::kWarp, kPass>;
  }
  kernel<<<blocks_for(args.rows, block / threads), block, 0, stream>>>(args, loss, threads);
  check_launch("row_pair_kernel");
}

template <template <typename> class Loss, typename input_t, typename target_t, bool kForward>
bool try_dense(const RowPairArgs& args, cudaStream_t stream) {
  if (args.input.dtype != dtype_of<input_t>() || args.target.dtype != dtype_of<target_t>())
    return false;
  if (args.cols > 1) {
    for (const RowOperand* operand :
         {&args.input, &args.target, &args.grad_input, &args.grad_target})
      if (operand->data && operand->layout.col_stride != 1) return false;
  }
  const Loss<acc_type<input_t>> loss(args.parameters);
  if constexpr (!kForward)
    launch_dense_rows<input_t, target_t, RowPairPass::kBackward>(args, loss, stream);
  else if (args.grad_input.data)
    launch_dense_rows<input_t, target_t, RowPairPass::kWithGradient>(args, loss, stream);
  else
    launch_dense_rows<input_t, target_t, RowPairPass::kValue>(args, loss, stream);
  return true;
}

template <template <typename> class Loss, typename acc_t, bool kForward>
void launch_strided_rows(const RowPairArgs& args, cudaStream_t stream) {
  const Loss<acc_t> loss(args.parameters);
  row_pair_strided_kernel<Loss<acc_t>, acc_t, kForward>
      <<<blocks_for(args.rows, kStridedRows), dim3(kStridedRows, kStridedLanes), 0, stream>>>(args,
                                                                                              loss);
  check_launch("row_pair_strided_kernel");
}

template <template <typename> class Loss, bool kForward>
void launch_row_pair(const RowPairArgs& args, cudaStream_t stream) {
  if (args.cols > INT32_MAX)
    throw std::runtime_error(std::to_string(args.cols) +
                             " classes are more than the CUDA kernels count (2^31 - 1)");
  if (args.rows == 0) return;
  if (try_dense<Loss, float, float, kForward>(args, stream) ||
      try_dense<Loss, __nv_bfloat16, __nv_bfloat16, kForward>(args, stream) ||
      try_dense<Loss, __half, __half, kForward>(args, stream) ||
      try_dense<Loss, __nv_bfloat16, float, kForward>(args, stream) ||
      try_dense<Loss, __half, float, kForward>(args, stream) ||
      try_dense<Loss, double, double, kForward>(args, stream))
    return;
  if (args.is_double()) return launch_strided_rows<Loss, double, kForward>(args, stream);
  launch_strided_rows<Loss, float, kForward>(args, stream);
}

template <template <typename> class Loss>
void row_pair_forward(const RowPairArgs& args, void* stream_pointer) {
  const cudaStream_t stream = as_stream(stream_pointer);
  launch_row_pair<Loss, true>(args, stream);
  if (!args.loss) return;
  if (args.is_double()) return launch_row_pair_total<Loss<double>, double>(args, stream);
  launch_row_pair_total<Loss<float>, float>(args, stream);
}

template <template <typename> class Loss>
void row_pair_backward(const RowPairArgs& args, void* stream) {
  launch_row_pair<Loss, false>(args, as_stream(stream));
}

}  // namespace fused::cuda
