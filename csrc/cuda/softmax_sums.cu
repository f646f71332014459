// The largest number and the sum of exponentials of each row and each column of a matrix, on CUDA.
// Never written to memory: exponentials, and the matrix times its factor. And the gradient of the
// cross entropies of rows and columns, over the matrix.
//
// A warp reads a tile a few rows at a time, 16 bytes a lane and row. The results of the tile's
// columns stay in the registers of the lanes that read them; those of the rows go through shuffles.
// A second kernel merges the tiles' results, in their order.
// Bytes moved: rows * cols * sizeof(number); twice 2 * sizeof(acc_t) for each row and each column
// of a tile.
//
// Of the gradient a warp writes a tile, too, over what it has read; the numbers of the tile's
// columns stay in registers. Bytes moved: 2 * rows * cols * sizeof(number).
#include "../kernels.h"
#include "../losses/softmax_sums.h"
#include "class_target.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "row_span.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kTileThreads = 128;
constexpr int kMergeLanes = 8;  // threads that share the tiles of a row or column

// Rows that a warp reads at a time. Their numbers stay in registers.
template <typename scalar_t>
constexpr int kStepRows = Packet<scalar_t>::kWidth > 4 ? 4 : 8;

// The results of the rows and the columns of each tile.
template <typename acc_t>
struct Partials {
  int64_t high, row_tiles, col_tiles;
  SoftmaxSum<acc_t>*rows, *cols;  // [col_tiles, rows], [row_tiles, cols]

  explicit Partials(const SoftmaxSumsArgs& args)
      : high(softmax_sums_tile_rows(args.rows, args.cols)),
        row_tiles(divide_up(args.rows, high)),
        col_tiles(divide_up(args.cols, softmax_sums_tile_cols(args.dtype))),
        rows(static_cast<SoftmaxSum<acc_t>*>(args.workspace)),
        cols(rows + col_tiles * args.rows) {}
};

// The first `count` elements at `source`; the others are -inf.
template <bool kAligned, typename scalar_t>
__device__ __forceinline__ Packet<scalar_t> load_some(const scalar_t* source, int count) {
  if (kAligned && count == Packet<scalar_t>::kWidth)
    return Packet<scalar_t>::load_streaming(source);
  Packet<scalar_t> packet = lowest_packet<scalar_t>();
#pragma unroll
  for (int j = 0; j < Packet<scalar_t>::kWidth; ++j)
    if (j < count) packet.values[j] = source[j];
  return packet;
}

template <typename scalar_t, bool kAligned, bool kScaled>
__global__ void __launch_bounds__(kTileThreads)
    softmax_sums_kernel(const __grid_constant__ SoftmaxSumsArgs args,
                        const __grid_constant__ Partials<acc_type<scalar_t>> partials) {
  using acc_t = acc_type<scalar_t>;
  using State = SoftmaxSum<acc_t>;
  constexpr int kWidth = Packet<scalar_t>::kWidth, kRows = kStepRows<scalar_t>;
  const int lane = threadIdx.x % kWarp;
  const int64_t tile =
      blockIdx.x * int64_t(kTileThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  const int64_t col_tile = tile % partials.col_tiles, row_tile = tile / partials.col_tiles;
  if (row_tile >= partials.row_tiles) return;
  const int64_t col = (col_tile * kWarp + lane) * kWidth;
  const int count = static_cast<int>(::max(int64_t(0), ::min(int64_t(kWidth), args.cols - col)));
  const int64_t last = ::min(args.rows, (row_tile + 1) * partials.high);
  const acc_t factor = kScaled ? load_as<acc_t>(args.factor, args.factor_dtype, 0) : acc_t(1);
  const scalar_t* x = static_cast<const scalar_t*>(args.input) + col;

  State columns[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) columns[j] = State::none();

#pragma unroll 1
  for (int64_t row = row_tile * partials.high; row < last; row += kRows) {
    Packet<scalar_t> packets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      packets[r] = load_some<kAligned>(x + (row + r) * args.row_stride, row + r < last ? count : 0);
    acc_t values[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[r][j] = packets[r].template get<acc_t>(j);
        // Beyond the matrix, -inf times a factor could be anything.
        if (kScaled && j < count && row + r < last) values[r][j] *= factor;
      }
    }

    State own = State::none();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      acc_t largest = values[r][0];
#pragma unroll
      for (int j = 1; j < kWidth; ++j) largest = ::max(largest, values[r][j]);
      largest = group_max(::max(largest, -kInfinity<acc_t>));
      const acc_t origin = State::origin(largest);
      acc_t sum = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += State::term(values[r][j] - origin);
      sum = group_sum(sum);
      if (lane == r) own = {largest, sum};
    }
    if (lane < kRows && row + lane < last) partials.rows[col_tile * args.rows + row + lane] = own;

#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      acc_t largest = columns[j].largest;
#pragma unroll
      for (int r = 0; r < kRows; ++r) largest = ::max(largest, values[r][j]);
      const acc_t origin = State::origin(largest);
      columns[j].sum *= State::factor(columns[j].largest, largest);
      columns[j].largest = largest;
#pragma unroll
      for (int r = 0; r < kRows; ++r) columns[j].sum += State::term(values[r][j] - origin);
    }
  }

#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    if (j < count) partials.cols[row_tile * args.cols + col + j] = columns[j];
}

// Reads the number of the target of a row or column, if it lies in these rows.
template <typename acc_t>
__device__ __forceinline__ void pick_own(const SoftmaxSumsArgs& args, bool of_rows, int64_t index) {
  const int64_t target = (of_rows ? args.row_target : args.col_target)[index];
  if (target == args.ignore_index) return;
  const int64_t classes = of_rows ? args.cols : args.all_rows;
  if (target < 0 || target >= classes) report_target(target, index, classes);
  const int64_t row = of_rows ? index : target - args.first_row, col = of_rows ? target : index;
  if (row < 0 || row >= args.rows) return;
  static_cast<acc_t*>(of_rows ? args.row_own : args.col_own)[index] =
      load_as<acc_t>(args.input, args.dtype, row * args.row_stride + col);
}

// Merges the results of the rows if blockIdx.y is 0, else those of the columns.
template <typename acc_t>
__global__ void __launch_bounds__(kWarp* kMergeLanes)
    softmax_sums_merge_kernel(const __grid_constant__ SoftmaxSumsArgs args,
                              const __grid_constant__ Partials<acc_t> partials) {
  using State = SoftmaxSum<acc_t>;
  __shared__ State scratch[kMergeLanes][kWarp];
  await_previous();
  const bool of_rows = blockIdx.y == 0;
  const int64_t count = of_rows ? args.rows : args.cols;
  const int64_t tiles = of_rows ? partials.col_tiles : partials.row_tiles;
  const State* parts = of_rows ? partials.rows : partials.cols;
  const int64_t index = blockIdx.x * int64_t(kWarp) + threadIdx.x;
  State all = State::none();
  if (index < count)
    for (int64_t tile = threadIdx.y; tile < tiles; tile += kMergeLanes)
      all.add(parts[tile * count + index]);
  scratch[threadIdx.y][threadIdx.x] = all;
  __syncthreads();
  if (threadIdx.y != 0 || index >= count) return;
#pragma unroll
  for (int other = 1; other < kMergeLanes; ++other) all.add(scratch[other][threadIdx.x]);
  acc_t& largest = static_cast<acc_t*>(of_rows ? args.row_largest : args.col_largest)[index];
  acc_t& sum = static_cast<acc_t*>(of_rows ? args.row_sum : args.col_sum)[index];
  if (args.row_target) {
    pick_own<acc_t>(args, of_rows, index);
    if (!of_rows) {
      State before{largest, sum};
      before.add(all);
      all = before;
    }
  } else if (tiles > 0) {
    all = all.result();
  }
  largest = all.largest;
  sum = all.sum;
}

constexpr int kGradientRows = 64;  // of a tile

template <typename scalar_t, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    softmax_sums_gradient_kernel(const __grid_constant__ SoftmaxSumsGradientArgs args,
                                 int64_t col_tiles) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kWidth = Packet<scalar_t>::kWidth, kRows = 4;
  const int lane = threadIdx.x % kWarp;
  const int64_t tile =
      blockIdx.x * int64_t(kTileThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  const int64_t col = (tile % col_tiles * kWarp + lane) * kWidth;
  const int64_t first = tile / col_tiles * kGradientRows;
  const int64_t last = ::min(args.rows, first + kGradientRows);
  const int count = static_cast<int>(::max(int64_t(0), ::min(int64_t(kWidth), args.cols - col)));
  if (first >= last || count == 0) return;
  scalar_t* const x = static_cast<scalar_t*>(args.input) + col;
  const acc_t own = static_cast<acc_t>(args.own);
  const acc_t of_row = static_cast<acc_t>(args.of_rows.uniform);
  const acc_t of_col = static_cast<acc_t>(args.of_cols.uniform);

  SoftmaxGradient<acc_t> columns[kWidth];
  int target_rows[kWidth];  // after `first`; anything else if the tile does not have it
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int64_t index = col + ::min(j, count - 1);
    columns[j] = {args.of_cols, index};
    const int64_t row = args.of_cols.target[index] - args.first_row - first;
    target_rows[j] = row >= 0 && row < kGradientRows ? static_cast<int>(row) : -1;
  }

#pragma unroll 1
  for (int64_t row = first; row < last; row += kRows) {
    Packet<scalar_t> packets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      packets[r] = load_some<kAligned>(x + (row + r) * args.row_stride, row + r < last ? count : 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= last) break;
      const SoftmaxGradient<acc_t> of_this(args.of_rows, row + r);
      const int64_t target = args.of_rows.target[row + r] - col;
      const int place = static_cast<int>(row + r - first);
      acc_t values[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const acc_t value = packets[r].template get<acc_t>(j);
        values[j] = of_this(value, target == j ? of_row + own : of_row) +
                    columns[j](value, target_rows[j] == place ? of_col + own : of_col);
      }
      packets[r].set(values);
      scalar_t* const out = x + (row + r) * args.row_stride;
      if (kAligned && count == kWidth) {
        packets[r].store_streaming(out);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (j < count) out[j] = packets[r].values[j];
      }
    }
  }
}

template <typename scalar_t>
void launch_gradient(const SoftmaxSumsGradientArgs& args, cudaStream_t stream) {
  const int64_t col_tiles = divide_up(args.cols, softmax_sums_tile_cols(args.dtype));
  const int64_t tiles = divide_up(args.rows, kGradientRows) * col_tiles;
  const bool aligned = reinterpret_cast<uintptr_t>(args.input) % 16 == 0 &&
                       args.row_stride * sizeof(scalar_t) % 16 == 0;
  const auto kernel = aligned ? softmax_sums_gradient_kernel<scalar_t, true>
                              : softmax_sums_gradient_kernel<scalar_t, false>;
  kernel<<<blocks_for(tiles, kTileThreads / kWarp), kTileThreads, 0, stream>>>(args, col_tiles);
  check_launch("softmax_sums_gradient_kernel");
}

template <typename scalar_t>
void launch_sums(const SoftmaxSumsArgs& args, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const Partials<acc_t> partials(args);
  const int64_t tiles = partials.row_tiles * partials.col_tiles;
  if (tiles > 0) {
    const bool aligned = reinterpret_cast<uintptr_t>(args.input) % 16 == 0 &&
                         args.row_stride * sizeof(scalar_t) % 16 == 0;
    const auto kernel = aligned       ? args.factor ? softmax_sums_kernel<scalar_t, true, true>
                                                    : softmax_sums_kernel<scalar_t, true, false>
                              : args.factor ? softmax_sums_kernel<scalar_t, false, true>
                                      : softmax_sums_kernel<scalar_t, false, false>;
    kernel<<<blocks_for(tiles, kTileThreads / kWarp), kTileThreads, 0, stream>>>(args, partials);
    check_launch("softmax_sums_kernel");
  }
  const dim3 blocks(blocks_for(std::max(args.rows, args.cols), kWarp), 2);
  launch_behind("softmax_sums_merge_kernel", softmax_sums_merge_kernel<acc_t>, blocks,
                dim3(kWarp, kMergeLanes), stream, args, partials);
}

}  // namespace
}  // namespace cuda

void softmax_sums(const SoftmaxSumsArgs& args, void* stream) {
  using namespace cuda;
  if (args.rows == 0 && args.cols == 0) return;
  visit(args.dtype, [&](auto* type) {
    launch_sums<std::remove_pointer_t<decltype(type)>>(args, as_stream(stream));
  });
}

void softmax_sums_gradient(const SoftmaxSumsGradientArgs& args, void* stream) {
  using namespace cuda;
  if (args.rows == 0 || args.cols == 0) return;
  visit(args.dtype, [&](auto* type) {
    launch_gradient<std::remove_pointer_t<decltype(type)>>(args, as_stream(stream));
  });
}

}  // namespace fused
