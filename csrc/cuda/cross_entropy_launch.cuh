// Cross entropy on CUDA: the choice of a kernel for each shape, and the launches.
#pragma once

#include <bit>

#include "cross_entropy_bulk.cuh"
#include "cross_entropy_columns.cuh"
#include "cross_entropy_rows.cuh"

namespace fused::cuda {

// Whether the rows' kernel needs the total weight, as for the gradient of a mean. The sums of the
// target weights are then launched before the rows' kernel.
inline bool needs_total_weight(const CrossEntropyArgs& args) {
  return args.grad_input && args.reduction == Reduction::kMean;
}

enum class Path { kColumns, kShortRows, kBlock, kBulk };

struct Choice {
  Path path;
  // kShortRows: the capacity of a row's lanes; kBlock: packets kept in shared memory; kBulk:
  // packets of a block's slice.
  int64_t packets = 0;
  int threads = 0;  // of a block, if the path does not fix it
  int cluster = 1;  // kBulk: blocks that share a row
};

// Whether each row of the gradient is aligned modulo 16 bytes as its row of logits is.
inline bool equally_aligned(const CrossEntropyArgs& args) {
  const int64_t size = element_size(args.dtype);
  const auto differ = [&](int64_t a, int64_t b) { return (a - b) * size % 16 != 0; };
  if ((reinterpret_cast<uintptr_t>(args.input) - reinterpret_cast<uintptr_t>(args.grad_input)) % 16)
    return false;
  if (args.input_layout.ndim != args.grad_layout.ndim) return false;
  for (int d = 0; d < args.input_layout.ndim; ++d) {
    if (args.input_layout.sizes[d] != args.grad_layout.sizes[d] ||
        differ(args.input_layout.strides[d], args.grad_layout.strides[d]))
      return false;
  }
  return true;
}

// Chooses the forward kernel for a shape. Limits are in 16-byte packets of a row.
inline Choice choose_forward(const CrossEntropyArgs& args, const Device& device) {
  const bool gradient = args.grad_input;
  const int64_t packets = args.cols * element_size(args.dtype) / 16;
  if (args.cols > 1 &&
      (args.input_layout.col_stride != 1 || (gradient && args.grad_layout.col_stride != 1)))
    return {Path::kColumns};
  // double's exponential takes too many registers for a kernel that keeps a row in registers.
  const bool is_double = args.dtype == DType::kFloat64;
  if (is_double && packets <= 128) return {Path::kColumns};
  const bool bulk = gradient && !is_double && has_clusters(device) && equally_aligned(args) &&
                    args.rows <= INT32_MAX / kMaxCluster;
  if (!is_double && packets <= (bulk ? 128 : 256))
    return {Path::kShortRows, std::max<int64_t>(std::bit_ceil(static_cast<uint64_t>(packets)), 4)};

  if (!gradient) {
    // 16 for rows with the least arithmetic; other rows would take up to 15% longer.
    const bool light = args.dtype == DType::kFloat32 && packets >= 1024 &&
                       args.label_smoothing == 0 && args.softcap == 0;
    return {Path::kBlock, 0,
            independent_row_threads(args.rows, packets, device.multiprocessors, kLongRowThreads,
                                    light ? 16 : 32)};
  }

  if (bulk) {
    // Three blocks a multiprocessor: the copies of one row overlap the arithmetic of two others.
    // The kernel's static shared memory stays below 512 bytes.
    const int64_t third =
        (device.shared_per_multiprocessor / 3 - device.shared_reserved - 512) / 16;
    const int64_t most = (device.shared_per_block - 512) / 16;
    for (const int cluster : {1, 2, 4, 8}) {
      const int64_t slice = divide_up(packets, cluster);
      if (slice <= third || (cluster == kMaxCluster && slice <= most))
        return {Path::kBulk, slice, row_threads(slice, 8, kWarp, kBulkThreads), cluster};
    }
  }
  // Half of a multiprocessor's shared memory, so that it holds two rows at a time.
  const int64_t half = (device.shared_per_multiprocessor / 2 - device.shared_reserved - 512) / 16;
  return {Path::kBlock, std::min(packets, half), row_threads(packets, 4, 64, kLongRowThreads)};
}

template <typename Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  if (bytes > 48 * 1024 - 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
}

template <typename scalar_t, bool kCapped, bool kGradient, int kLanes, int kPackets>
void launch_lanes(const CrossEntropyArgs& args, cudaStream_t stream) {
  const auto kernel =
      args.label_smoothing > 0
          ? cross_entropy_short_rows_kernel<scalar_t, kLanes, kPackets, kGradient, kCapped, true>
          : cross_entropy_short_rows_kernel<scalar_t, kLanes, kPackets, kGradient, kCapped, false>;
  launch("cross_entropy_short_rows_kernel", kernel,
         {.blocks = blocks_for(args.rows, kShortRowThreads / kLanes),
          .threads = kShortRowThreads,
          .behind = needs_total_weight(args)},
         stream, args);
}

// Uses as few lanes a row as can hold it in registers: work that is done once a row costs a warp
// the same for one row as for many.
template <typename scalar_t, bool kCapped, bool kGradient>
void launch_short_rows(const CrossEntropyArgs& args, int64_t packets, cudaStream_t stream) {
  constexpr int kPackets = kGradient ? 4 : 8;
  switch (packets) {
    case 4: return launch_lanes<scalar_t, kCapped, kGradient, 1, 4>(args, stream);
    case 8: return launch_lanes<scalar_t, kCapped, kGradient, 2, 4>(args, stream);
    case 16:
      return launch_lanes<scalar_t, kCapped, kGradient, 16 / kPackets, kPackets>(args, stream);
    case 32:
      return launch_lanes<scalar_t, kCapped, kGradient, 32 / kPackets, kPackets>(args, stream);
    case 64:
      return launch_lanes<scalar_t, kCapped, kGradient, 64 / kPackets, kPackets>(args, stream);
    case 128:
      return launch_lanes<scalar_t, kCapped, kGradient, 128 / kPackets, kPackets>(args, stream);
    default: return launch_lanes<scalar_t, kCapped, kGradient, kWarp, 8>(args, stream);
  }
}

template <typename scalar_t, bool kCapped, bool kSmoothing>
void launch_bulk(const CrossEntropyArgs& args, const Choice& choice, cudaStream_t stream) {
  const auto kernel = cross_entropy_bulk_kernel<scalar_t, kCapped, kSmoothing>;
  const int slice = static_cast<int>(choice.packets);
  // A multiple of the packets of one unrolled iteration of the block, so that only the last chunk
  // has a remainder.
  const int step = kBulkUnroll * choice.threads;
  const int chunk = static_cast<int>(divide_up(divide_up(slice, kBulkChunks), step)) * step;
  const size_t shared = size_t(16) * slice;
  allow_shared(kernel, shared);

  launch("cross_entropy_bulk_kernel", kernel,
         {.blocks = static_cast<unsigned>(args.rows * choice.cluster),
          .threads = static_cast<unsigned>(choice.threads),
          .shared = shared,
          .cluster = choice.cluster,
          .behind = needs_total_weight(args)},
         stream, args, choice.cluster, slice, chunk);
}

template <typename scalar_t, bool kGradient, bool kCapped, bool kSmoothing>
void launch_long_rows(const CrossEntropyArgs& args, const Choice& choice, cudaStream_t stream) {
  const auto kernel = cross_entropy_long_rows_kernel<scalar_t, kGradient, kCapped, kSmoothing>;
  const size_t shared = size_t(16) * choice.packets;
  allow_shared(kernel, shared);
  kernel<<<blocks_for(args.rows, 1), choice.threads, shared, stream>>>(
      args, static_cast<int>(choice.packets));
  check_launch("cross_entropy_long_rows_kernel");
}

template <typename scalar_t, bool kCapped, bool kSmoothing>
void launch_blocks(const CrossEntropyArgs& args, const Choice& choice, cudaStream_t stream) {
  if constexpr (!std::is_same_v<scalar_t, double>) {
    if (choice.path == Path::kBulk)
      return launch_bulk<scalar_t, kCapped, kSmoothing>(args, choice, stream);
  }
  if (args.grad_input)
    return launch_long_rows<scalar_t, true, kCapped, kSmoothing>(args, choice, stream);
  launch_long_rows<scalar_t, false, kCapped, kSmoothing>(args, choice, stream);
}

template <typename scalar_t, bool kCapped>
void launch_forward(const CrossEntropyArgs& args, cudaStream_t stream) {
  const Choice choice = choose_forward(args, current_device());
  switch (choice.path) {
    case Path::kColumns:
      cross_entropy_columns_kernel<scalar_t, kCapped>
          <<<blocks_for(args.rows, kColumnRows), dim3(kColumnRows, kColumnLanes), 0, stream>>>(
              args);
      return check_launch("cross_entropy_columns_kernel");
    case Path::kShortRows:
      if constexpr (!std::is_same_v<scalar_t, double>) {  // never chosen for double
        args.grad_input ? launch_short_rows<scalar_t, kCapped, true>(args, choice.packets, stream)
                        : launch_short_rows<scalar_t, kCapped, false>(args, choice.packets, stream);
      }
      return;
    default:
      if (args.label_smoothing > 0)
        return launch_blocks<scalar_t, kCapped, true>(args, choice, stream);
      return launch_blocks<scalar_t, kCapped, false>(args, choice, stream);
  }
}

template <typename scalar_t, bool kCapped, bool kSquares>
void launch_backward(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (args.cols > 1 && (args.input_layout.col_stride != 1 || args.grad_layout.col_stride != 1)) {
    cross_entropy_columns_gradient_kernel<scalar_t, kCapped, kSquares>
        <<<blocks_for(args.rows, kColumnRows), dim3(kColumnRows, kColumnLanes), 0, stream>>>(args);
    return check_launch("cross_entropy_columns_gradient_kernel");
  }
  const Grid grid = gradient_grid(args.rows, args.cols / Packet<scalar_t>::kWidth);
  cross_entropy_gradient_kernel<scalar_t, kCapped, kSquares>
      <<<grid.blocks, grid.threads, 0, stream>>>(args);
  check_launch("cross_entropy_gradient_kernel");
}

// With kCapped, cross_entropy_softcap.cu instantiates both functions, otherwise cross_entropy.cu.
template <bool kCapped>
void forward_rows(const CrossEntropyArgs& args, cudaStream_t stream) {
  visit(args.dtype, [&](auto* type) {
    launch_forward<std::remove_pointer_t<decltype(type)>, kCapped>(args, stream);
  });
}

template <bool kCapped>
void backward_rows(const CrossEntropyArgs& args, cudaStream_t stream) {
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    args.grad_squares ? launch_backward<scalar_t, kCapped, true>(args, stream)
                      : launch_backward<scalar_t, kCapped, false>(args, stream);
  });
}

extern template void forward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);
extern template void backward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);

}  // namespace fused::cuda
