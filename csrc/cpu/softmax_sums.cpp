// The largest number and the sum of exponentials of each row and each column of a matrix, on the
// CPU. Never written to memory: exponentials, and the matrix times its factor.
//
// A thread goes through tiles of rows. The columns of each tile have partial results, which are
// merged in the order of the tiles, whatever the number of threads.
// Bytes moved: rows * cols * sizeof(number); for each tile twice 2 * cols * sizeof(acc_t).
#include "../losses/softmax_sums.h"

#include "../kernels.h"
#include "parallel.h"

namespace fused {
namespace cpu {
namespace {

constexpr int64_t kStepRows = 8;       // rows read at a time
constexpr int64_t kStepCols = 512;     // numbers of each of them
constexpr int64_t kMergeGrain = 1024;  // columns of a thread, at least

// Rows that are read at a time: as they are, or converted and multiplied in a buffer.
template <typename acc_t>
struct Step {
  alignas(64) acc_t buffer[kStepRows * kStepCols];
  const acc_t* rows[kStepRows];

  void read(const SoftmaxSumsArgs& args, int64_t row, int64_t height, int64_t col, int64_t width,
            acc_t factor) {
    for (int64_t r = 0; r < height; ++r) {
      const int64_t offset = (row + r) * args.row_stride + col;
      acc_t* const own = buffer + r * kStepCols;
      if (args.dtype == dtype_of<acc_t>() && !args.factor) {
        rows[r] = static_cast<const acc_t*>(args.input) + offset;
        continue;
      }
      load(args.input, args.dtype, offset, 1, width, own);
      if (args.factor)
        for (int64_t i = 0; i < width; ++i) own[i] *= factor;
      rows[r] = own;
    }
  }
};

template <typename acc_t>
acc_t largest_of(const acc_t* x, int64_t count, acc_t largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

template <typename acc_t>
void add_row(const acc_t* x, int64_t count, acc_t& largest, double& sum) {
  using State = SoftmaxSum<acc_t>;
  const acc_t most = largest_of(x, count, largest), origin = State::origin(most);
  acc_t added = 0;
#pragma omp simd reduction(+ : added)
  for (int64_t i = 0; i < count; ++i) added += State::term(x[i] - origin);
  sum = sum * static_cast<double>(State::factor(largest, most)) + static_cast<double>(added);
  largest = most;
}

// Adds rows to the results of their columns.
template <typename acc_t>
void add_columns(const acc_t* const* rows, int64_t height, int64_t count, acc_t* largest,
                 acc_t* sum) {
  using State = SoftmaxSum<acc_t>;
  alignas(64) acc_t most[kStepCols], origin[kStepCols];
  std::copy_n(largest, count, most);
  for (int64_t r = 0; r < height; ++r) {
    const acc_t* x = rows[r];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) most[i] = x[i] > most[i] ? x[i] : most[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    origin[i] = State::origin(most[i]);
    sum[i] *= State::factor(largest[i], most[i]);
    largest[i] = most[i];
  }
  for (int64_t r = 0; r < height; ++r) {
    const acc_t* x = rows[r];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sum[i] += State::term(x[i] - origin[i]);
  }
}

template <typename acc_t>
void sums(const SoftmaxSumsArgs& args) {
  using State = SoftmaxSum<acc_t>;
  const int64_t high = softmax_sums_tile_rows(args.rows, args.cols);
  const int64_t tiles = (args.rows + high - 1) / high;
  acc_t factor = 1;
  if (args.factor) load(args.factor, args.factor_dtype, 0, 1, 1, &factor);
  acc_t* const partial_largest = static_cast<acc_t*>(args.workspace);
  acc_t* const partial_sums = partial_largest + tiles * args.cols;

  parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    Step<acc_t> step;
    for (int64_t tile = begin; tile < end; ++tile) {
      acc_t* const largest = partial_largest + tile * args.cols;
      acc_t* const sum = partial_sums + tile * args.cols;
      std::fill_n(largest, args.cols, -math::kInfinity<acc_t>);
      std::fill_n(sum, args.cols, acc_t(0));
      const int64_t last = std::min(args.rows, (tile + 1) * high);
      for (int64_t row = tile * high; row < last; row += kStepRows) {
        const int64_t height = std::min(kStepRows, last - row);
        acc_t row_largest[kStepRows];
        double row_sum[kStepRows] = {};
        std::fill_n(row_largest, kStepRows, -math::kInfinity<acc_t>);
        for (int64_t col = 0; col < args.cols; col += kStepCols) {
          const int64_t width = std::min(kStepCols, args.cols - col);
          step.read(args, row, height, col, width, factor);
          for (int64_t r = 0; r < height; ++r)
            add_row(step.rows[r], width, row_largest[r], row_sum[r]);
          add_columns(step.rows, height, width, largest + col, sum + col);
        }
        for (int64_t r = 0; r < height; ++r) {
          const State all{row_largest[r], static_cast<acc_t>(row_sum[r])};
          const State result = args.cols > 0 ? all.result() : all;
          static_cast<acc_t*>(args.row_largest)[row + r] = result.largest;
          static_cast<acc_t*>(args.row_sum)[row + r] = result.sum;
        }
      }
    }
  });

  parallel_for(0, args.cols, kMergeGrain, [&](int64_t first, int64_t last) {
    for (int64_t col = first; col < last; ++col) {
      State all = State::none();
      for (int64_t tile = 0; tile < tiles; ++tile)
        all.add({partial_largest[tile * args.cols + col], partial_sums[tile * args.cols + col]});
      const State result = args.rows > 0 ? all.result() : all;
      static_cast<acc_t*>(args.col_largest)[col] = result.largest;
      static_cast<acc_t*>(args.col_sum)[col] = result.sum;
    }
  });
}

}  // namespace
}  // namespace cpu

void softmax_sums(const SoftmaxSumsArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::sums<double>(args);
  cpu::sums<float>(args);
}

}  // namespace fused
