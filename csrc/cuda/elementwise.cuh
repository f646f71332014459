// Elementwise losses on CUDA: the value and derivative of each element and the sum, in one read of
// the operands.
//
// Fused: the loss, its reduction and, on demand, its gradient. Never written to memory: the losses
// of single elements under a reduction, and any temporary.
//
// Bytes moved per element: each operand once and each output once. The block sums (at most 32 KiB)
// are the only other traffic.
//
// Two kernels:
//   contiguous  16-byte packets. Operands are float32, bfloat16 or float16 (or a 16-bit input and a
//               float32 target), dense in one order and equally aligned. A weight has the wider
//               dtype of input and target.
//   strided     everything else (strided.cuh)
#pragma once

#include "launch.cuh"
#include "strided.cuh"

namespace fused::cuda {

// Threads of a block. Few large blocks are faster than many small ones, most of all for a loss with
// logarithms, and a small loss fits into one block.
template <typename Loss>
constexpr int kThreads = requires { Loss::kLogarithms; } ? 1024 : 512;
constexpr int kThreadsPerMultiprocessor = 1024;

// Packets of each operand that a thread has in flight: four, or two if register pressure is high.
// That is so with a weight, and with a loss with exponentials whose target is wider than its input.
template <bool kWeighted, typename input_t, typename target_t, typename Loss>
constexpr int kUnroll =
    kWeighted || (requires { Loss::kExponentials; } && sizeof(input_t) < sizeof(target_t)) ? 2 : 4;

enum class Mode {
  kTotal,             // the sum of the losses
  kTotalAndGradient,  // the sum of the losses and grad_input, with one grad_output
  kLosses,            // the loss of each element
  kGradient,          // grad_input, with one grad_output for all elements
  kGradientOfEach,    // grad_input, with a grad_output for each element
};

struct ContiguousArgs {
  const void* input;
  const void* target;
  const void* weight;       // one per element; null if there is none
  const void* grad_output;  // one element or, for kGradientOfEach, one per element; null: 1
  DType grad_output_dtype;
  void* output;  // losses or grad_input; may be the buffer of input
  int64_t numel;
  int64_t head;  // elements before the first packet
  Total total;   // its scale is the gradient's too
};

// The loss of one element. If both operands have 16 bits, uses the loss's cheaper arithmetic, if
// any.
template <typename input_t, typename target_t, typename Loss>
__device__ __forceinline__ float value_of(const Loss& loss, float x, float y) {
  if constexpr (sizeof(input_t) == 2 && sizeof(target_t) == 2 &&
                requires { loss.value_of_16_bit(x, y); })
    return loss.value_of_16_bit(x, y);
  else
    return loss.value(x, y);
}

// The distribution of the packets over the blocks of a launch. The host computes it, because 64-bit
// remainders on the device would slow down a small loss.
//
// A row of the grid has as many blocks as run at a time. They share half of the tiles that the
// earlier rows have left; the last row takes all of the rest. Multiprocessors do not read equally
// fast, so the first to finish takes the next block.
struct Tiles {
  int64_t packets;
  int64_t full;
  unsigned last_block;  // the block of the grid's first row that also takes the last, partial tile
                        // and the elements before and after all packets; if there are none, no
                        // block has this number

  __device__ __forceinline__ int64_t end(unsigned grid_row) const {
    return grid_row < gridDim.y ? full - (full >> grid_row) : full;
  }
};

// Arithmetic is in float. A thread adds the losses of kPackets packets in float and these sums in
// double, so that the rounding error of a total does not grow with the number of elements.
template <Mode kMode, bool kWeighted, typename input_t, typename target_t, typename Loss>
__global__ void __launch_bounds__(kThreads<Loss>, kThreadsPerMultiprocessor / kThreads<Loss>)
    contiguous_kernel(const ContiguousArgs args, const Tiles tiles, const Loss loss) {
  using losses_t = std::conditional_t<sizeof(input_t) == 4, input_t, target_t>;
  using output_t = std::conditional_t<kMode == Mode::kLosses, losses_t, input_t>;
  constexpr bool kSum = kMode == Mode::kTotal || kMode == Mode::kTotalAndGradient;
  constexpr int kWidth = Packet<input_t>::kWidth;
  constexpr int kPackets = kUnroll<kWeighted, input_t, target_t, Loss>;
  constexpr int kBlock = kThreads<Loss>;
  constexpr int64_t kTile = kBlock * kPackets;
  if constexpr (kSum) let_next_start();
  const input_t* input = static_cast<const input_t*>(args.input);
  const target_t* target = static_cast<const target_t*>(args.target);
  const losses_t* weight = static_cast<const losses_t*>(args.weight);
  const losses_t* grad_output = static_cast<const losses_t*>(args.grad_output);
  output_t* output = static_cast<output_t*>(args.output);
  float common = 1;
  if constexpr (kMode == Mode::kGradient || kMode == Mode::kTotalAndGradient) {
    if (args.grad_output) common = load_as<float>(args.grad_output, args.grad_output_dtype, 0);
  }
  const auto scale = GradientScale<float>::of(kSlope<Loss> * args.total.scale, common);

  float packet_sum = 0, tile_sum = 0;
  const auto element = [&](float x, float y, float g, float w) {
    const auto weighted = [w](float value) { return kWeighted ? w * value : value; };
    if constexpr (kSum) packet_sum += weighted(value_of<input_t, target_t>(loss, x, y));
    if constexpr (kMode == Mode::kTotal) return 0.f;
    if constexpr (kMode == Mode::kLosses) return weighted(value_of<input_t, target_t>(loss, x, y));
    const auto scaled = [&](const GradientScale<float>& by) {
      if constexpr (kWeighted)
        return by.template weighted<Loss>(loss.grad_input(x, y), w);
      else
        return by(loss.grad_input(x, y));
    };
    if constexpr (kMode == Mode::kGradientOfEach) return scaled({g, scale.first});
    return scaled(scale);
  };
  // Handles kCount packets from packet `first` on, kBlock apart. All loads precede the first use.
  const auto packets = [&]<int kCount>(std::integral_constant<int, kCount>, int64_t first) {
    Packet<input_t, kWidth> x[kCount];
    Packet<target_t, kWidth> y[kCount];
    Packet<losses_t, kWidth> g[kCount];
    Packet<losses_t, kWidth> w[kCount];
    const int64_t begin = args.head + first * kWidth;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int64_t i = begin + u * kBlock * kWidth;
      x[u] = Packet<input_t, kWidth>::load_streaming(input + i);
      y[u] = Packet<target_t, kWidth>::load_streaming(target + i);
      if constexpr (kMode == Mode::kGradientOfEach)
        g[u] = Packet<losses_t, kWidth>::load_streaming(grad_output + i);
      if constexpr (kWeighted) w[u] = Packet<losses_t, kWidth>::load_streaming(weight + i);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      packet_sum = 0;
      float results[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float upstream = 0, factor = 1;
        if constexpr (kMode == Mode::kGradientOfEach) upstream = g[u].template get<float>(j);
        if constexpr (kWeighted) factor = w[u].template get<float>(j);
        results[j] =
            element(x[u].template get<float>(j), y[u].template get<float>(j), upstream, factor);
      }
      tile_sum += packet_sum;
      if constexpr (kMode != Mode::kTotal) {
        Packet<output_t, kWidth> packet;
        packet.set(results);
        packet.store_streaming(output + begin + u * kBlock * kWidth);
      }
    }
  };

  double sum = 0;
  const int64_t end = tiles.end(blockIdx.y + 1);
  for (int64_t tile = tiles.end(blockIdx.y) + blockIdx.x; tile < end; tile += gridDim.x) {
    tile_sum = 0;
    packets(std::integral_constant<int, kPackets>(), tile * kTile + threadIdx.x);
    sum += static_cast<double>(tile_sum);
  }
  if (blockIdx.x == tiles.last_block && blockIdx.y == 0) [[unlikely]] {
    tile_sum = 0;
#pragma unroll 1  // short code, since a small loss waits for the instructions to be loaded
    for (int64_t i = tiles.full * kTile + threadIdx.x; i < tiles.packets; i += kBlock)
      packets(std::integral_constant<int, 1>(), i);
    const int64_t in_packets = tiles.packets * kWidth;
    if (threadIdx.x < args.numel - in_packets) {
      const int64_t i = threadIdx.x < args.head ? threadIdx.x : threadIdx.x + in_packets;
      packet_sum = 0;
      float upstream = 0, factor = 1;
      if constexpr (kMode == Mode::kGradientOfEach) upstream = to_acc<float>(grad_output[i]);
      if constexpr (kWeighted) factor = to_acc<float>(weight[i]);
      const float result =
          element(to_acc<float>(input[i]), to_acc<float>(target[i]), upstream, factor);
      if constexpr (kMode != Mode::kTotal) output[i] = from_acc<output_t>(result);
      tile_sum += packet_sum;
    }
    sum += static_cast<double>(tile_sum);
  }
  if constexpr (kSum) args.total.add_block<kBlock>(sum);
}

constexpr unsigned kMostGridRows = 8;

// The number of grid rows, see Tiles. If nothing is written, load balancing saves little more than
// the ends of additional blocks cost. There must then be many tiles, and a second block on the
// multiprocessor that reads while one ends.
template <Mode kMode, typename Loss>
unsigned grid_rows_for(int64_t full, int64_t blocks) {
  constexpr bool kAlone = kThreads<Loss> == kThreadsPerMultiprocessor;
  if (kMode == Mode::kTotal && (kAlone || full < 48 * blocks)) return 1;
  unsigned rows = 1;
  while (rows < kMostGridRows && full >> rows >= blocks) ++rows;
  return rows;
}

template <Mode kMode, bool kWeighted, typename input_t, typename target_t, typename Loss>
void launch_contiguous(const ContiguousArgs& args, const Loss& loss, cudaStream_t stream) {
  constexpr bool kSum = kMode == Mode::kTotal || kMode == Mode::kTotalAndGradient;
  constexpr int kWidth = Packet<input_t>::kWidth;
  constexpr int kBlock = kThreads<Loss>;
  constexpr int64_t kTile = kBlock * kUnroll<kWeighted, input_t, target_t, Loss>;
  const int64_t packets = (args.numel - args.head) / kWidth;
  const bool all_full = packets % kTile == 0 && packets * kWidth == args.numel;
  const int64_t most =
      std::min<int64_t>(kWorkspaceBlocks / kMostGridRows,
                        current_device().multiprocessors * kThreadsPerMultiprocessor / kBlock);
  const int64_t blocks = std::clamp<int64_t>(divide_up(packets, kTile), 1, most);
  const int64_t full = packets / kTile;
  const unsigned grid_rows = grid_rows_for<kMode, Loss>(full, blocks);
  const Tiles tiles{packets, full, static_cast<unsigned>(all_full ? blocks : full % blocks)};
  contiguous_kernel<kMode, kWeighted, input_t, target_t>
      <<<dim3(static_cast<unsigned>(blocks), grid_rows), kBlock, 0, stream>>>(args, tiles, loss);
  check_launch("contiguous_kernel");
  if (kSum && blocks > 1) launch_total(args.total, blocks * grid_rows, stream);
}

inline bool is_dense(const ElementwiseArgs& args, const Operand& operand) {
  return args.ndim == 0 || (args.ndim == 1 && operand.strides[0] == 1);
}

inline bool is_one_element(const ElementwiseArgs& args, const Operand& operand) {
  return std::all_of(operand.strides, operand.strides + args.ndim,
                     [](int64_t stride) { return stride == 0; });
}

// Launches the contiguous kernel if the operands have these types and meet its other conditions.
template <bool kWeighted, typename input_t, typename target_t, typename Loss>
bool try_contiguous(const ElementwiseArgs& args, const Loss& loss, cudaStream_t stream) {
  constexpr bool kMixed = !std::is_same_v<input_t, target_t>;
  const bool total = args.total.data, losses = args.losses.data, gradient = args.grad_input.data;
  if (args.input.dtype != dtype_of<input_t>() || args.target.dtype != dtype_of<target_t>())
    return false;
  if (args.grad_target.data || args.grad_weight.data || total + losses + gradient == 0 ||
      losses + gradient == 2 || (losses && total) || (!gradient && args.grad_output.data))
    return false;
  const bool one = !args.grad_output.data || is_one_element(args, args.grad_output);
  if ((total || kMixed) && (losses || !one)) return false;

  const Operand& output = losses ? args.losses : args.grad_input;
  const input_t* input = static_cast<const input_t*>(args.input.data);
  const int64_t head = std::min<int64_t>(args.numel, elements_to_boundary(input));
  const auto fits = [&](const Operand& operand, DType dtype) {
    const uintptr_t start =
        reinterpret_cast<uintptr_t>(operand.data) + head * element_size(operand.dtype);
    return operand.dtype == dtype && is_dense(args, operand) &&
           (start % 16 == 0 || head == args.numel);
  };
  if (!fits(args.input, dtype_of<input_t>()) || !fits(args.target, dtype_of<target_t>()) ||
      (output.data && !fits(output, dtype_of<input_t>())) ||
      (!one && !fits(args.grad_output, dtype_of<input_t>())) ||
      (kWeighted && !fits(args.weight, kMixed ? dtype_of<target_t>() : dtype_of<input_t>())))
    return false;

  const ContiguousArgs dense{
      args.input.data,        args.target.data, args.weight.data, args.grad_output.data,
      args.grad_output.dtype, output.data,      args.numel,       head,
      total_of(args)};
  if (total && !gradient)
    launch_contiguous<Mode::kTotal, kWeighted, input_t, target_t>(dense, loss, stream);
  else if (total)
    launch_contiguous<Mode::kTotalAndGradient, kWeighted, input_t, target_t>(dense, loss, stream);
  else if (gradient && one)
    launch_contiguous<Mode::kGradient, kWeighted, input_t, target_t>(dense, loss, stream);
  if constexpr (!kMixed) {
    if (losses)
      launch_contiguous<Mode::kLosses, kWeighted, input_t, target_t>(dense, loss, stream);
    else if (gradient && !one)
      launch_contiguous<Mode::kGradientOfEach, kWeighted, input_t, target_t>(dense, loss, stream);
  }
  return true;
}

template <template <typename> class Loss, bool kWeighted = false>
void elementwise(const ElementwiseArgs& args, void* stream_pointer) {
  const cudaStream_t stream = as_stream(stream_pointer);
  if (args.numel == 0) {
    if (args.total.data) launch_total(total_of(args), 0, stream);
    return;
  }
  if (uses_double(args))
    return launch_strided<kWeighted, double>(args, Loss<double>(args.parameters), stream);
  const Loss<float> loss(args.parameters);
  if constexpr (!takes_pos_weight<Loss<float>, float>) {
    if (try_contiguous<kWeighted, float, float>(args, loss, stream) ||
        try_contiguous<kWeighted, __nv_bfloat16, __nv_bfloat16>(args, loss, stream) ||
        try_contiguous<kWeighted, __half, __half>(args, loss, stream) ||
        try_contiguous<kWeighted, __nv_bfloat16, float>(args, loss, stream) ||
        try_contiguous<kWeighted, __half, float>(args, loss, stream))
      return;
  }
  launch_strided<kWeighted, float>(args, loss, stream);
}

// For a loss whose elements may have weights.
template <template <typename> class Loss>
void weighted_elementwise(const ElementwiseArgs& args, void* stream) {
  if (args.weight.data) return elementwise<Loss, true>(args, stream);
  elementwise<Loss>(args, stream);
}

}  // namespace fused::cuda
