// The largest number and the sum of exponentials of each row and each column of a matrix, on the
// CPU. Never written to memory: exponentials, and the matrix times its factor. And the gradient of
// the cross entropies of rows and columns, over the matrix.
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
constexpr int64_t kGradientRows = 32;  // that read the numbers of their columns once

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

// Reads the numbers of the targets that lie in these rows, and are no other number. The caller has
// refused targets out of bounds.
template <typename acc_t>
void pick_own(const SoftmaxSumsArgs& args) {
  const auto pick = [&](int64_t row, int64_t col, void* own, int64_t index) {
    if (row < 0 || row >= args.rows || col < 0 || col >= args.cols) return;
    load(args.input, args.dtype, row * args.row_stride + col, 1, 1,
         static_cast<acc_t*>(own) + index);
  };
  for (int64_t row = 0; row < args.rows; ++row)
    if (args.row_target[row] != args.ignore_index)
      pick(row, args.row_target[row], args.row_own, row);
  for (int64_t col = 0; col < args.cols; ++col)
    if (args.col_target[col] != args.ignore_index)
      pick(args.col_target[col] - args.first_row, col, args.col_own, col);
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
          const State result = args.cols > 0 && !args.row_target ? all.result() : all;
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
      State result = args.rows > 0 && !args.row_target ? all.result() : all;
      acc_t& col_largest = static_cast<acc_t*>(args.col_largest)[col];
      acc_t& col_sum = static_cast<acc_t*>(args.col_sum)[col];
      if (args.row_target) {
        result = {col_largest, col_sum};
        result.add(all);
      }
      col_largest = result.largest;
      col_sum = result.sum;
    }
  });
  if (args.row_target) pick_own<acc_t>(args);
}

// The numbers of a step's columns, side by side.
template <typename acc_t>
struct GradientColumns {
  alignas(64) acc_t origin[kStepCols], scale[kStepCols], factor[kStepCols];

  void read(const SoftmaxSumsTargets& given, int64_t col, int64_t width) {
    for (int64_t i = 0; i < width; ++i) {
      const SoftmaxGradient<acc_t> each(given, col + i);
      origin[i] = each.origin;
      scale[i] = each.scale;
      factor[i] = each.factor;
    }
  }
};

template <typename acc_t>
void gradient(const SoftmaxSumsGradientArgs& args) {
  using State = SoftmaxSum<acc_t>;
  const acc_t own = static_cast<acc_t>(args.own);
  const acc_t of_row = static_cast<acc_t>(args.of_rows.uniform);
  const acc_t of_col = static_cast<acc_t>(args.of_cols.uniform);
  const int64_t steps = (args.rows + kGradientRows - 1) / kGradientRows;

  parallel_for(0, steps, 1, [&](int64_t begin, int64_t end) {
    GradientColumns<acc_t> columns;
    alignas(64) acc_t buffer[kStepCols];
    for (int64_t step = begin; step < end; ++step) {
      const int64_t last = std::min(args.rows, (step + 1) * kGradientRows);
      for (int64_t col = 0; col < args.cols; col += kStepCols) {
        const int64_t width = std::min(kStepCols, args.cols - col);
        columns.read(args.of_cols, col, width);
        for (int64_t row = step * kGradientRows; row < last; ++row) {
          const SoftmaxGradient<acc_t> of_this(args.of_rows, row);
          const int64_t offset = row * args.row_stride + col;
          load(args.input, args.dtype, offset, 1, width, buffer);
          const acc_t origin = of_this.origin, scale = of_this.scale;
          const acc_t uniform = of_this.factor * of_row;
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) {
            const acc_t x = buffer[i];
            buffer[i] = (scale * State::term(x - origin) - uniform) +
                        (columns.scale[i] * State::term(x - columns.origin[i]) -
                         columns.factor[i] * of_col);
          }
          const int64_t place = args.of_rows.target[row] - col;
          if (place >= 0 && place < width) buffer[place] -= of_this.factor * own;
          const int64_t* const targets = args.of_cols.target + col;
          const int64_t named = row + args.first_row;
          for (int64_t i = 0; i < width; ++i)
            if (targets[i] == named) buffer[i] -= columns.factor[i] * own;
          store(args.input, args.dtype, offset, 1, width, buffer);
        }
      }
    }
  });
}

}  // namespace
}  // namespace cpu

void softmax_sums(const SoftmaxSumsArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::sums<double>(args);
  cpu::sums<float>(args);
}

void softmax_sums_gradient(const SoftmaxSumsGradientArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::gradient<double>(args);
  cpu::gradient<float>(args);
}

}  // namespace fused
