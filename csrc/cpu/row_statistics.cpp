// Statistics of rows of logits on the CPU, and their gradient, over the tiles of a row.
// Probabilities and their logarithms are never written to memory.
//
// Bytes moved per row: forward cols * sizeof(logit), backward twice that.
//
// In place: grad_input may be the buffer of input. A tile is read before it is written.
#include "row_statistics.h"

#include "../kernels.h"

namespace fused {
namespace cpu {
namespace {

// The state of a row so far, with sums in double.
template <typename acc_t, bool kSquares>
struct RowScan {
  using Sums = RowSums<acc_t, double, kSquares>;

  Sums sums = Sums::none();
  double total = 0;
  int64_t argmax = 0;
  bool has_nan = false;  // if true, argmax is the class of the first nan

  void add_block(const acc_t* x, int64_t first, int64_t last) {
    const acc_t origin = sums.origin();
    acc_t exponentials[kSumLanes] = {}, weighted[kSumLanes] = {}, values[kSumLanes] = {};
    [[maybe_unused]] acc_t squares[kSumLanes] = {};
    for_each_lane(first, last, [&](int64_t lane, int64_t i) {
      const RowTerm<acc_t> term(x[i] - origin);
      exponentials[lane] += term.exponential;
      weighted[lane] += term.weighted;
      if constexpr (kSquares) squares[lane] += term.square();
      values[lane] += x[i];
    });
    sums.exponentials += static_cast<double>(sum_of_lanes(exponentials));
    sums.weighted += static_cast<double>(sum_of_lanes(weighted));
    if constexpr (kSquares) sums.squares += static_cast<double>(sum_of_lanes(squares));
    const double value = static_cast<double>(sum_of_lanes(values));
    // A nan, or infinities of both signs.
    if (!has_nan && value != value) find_nan(x, first, last);
    total += value;
  }

  // Adds a tile, whose first class is first_class.
  template <typename Prefetch>
  void add(const acc_t* x, int64_t first_class, int64_t count, Prefetch&& prefetch_block) {
    acc_t largest = sums.largest;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
    if (largest > sums.largest) {
      if (!has_nan) argmax = first_class + (std::find(x, x + count, largest) - x);
      sums.raise(largest);
    }
    tile_class_ = first_class;
    for (int64_t block = 0; block < count; block += kSumBlock) {
      prefetch_block(block);
      add_block(x, block, std::min(count, block + kSumBlock));
    }
  }

 private:
  int64_t tile_class_ = 0;

  void find_nan(const acc_t* x, int64_t first, int64_t last) {
    const acc_t* found = std::find_if(x + first, x + last, [](acc_t v) { return v != v; });
    if (found == x + last) return;
    has_nan = true;
    argmax = tile_class_ + (found - x);
  }
};

template <typename acc_t, bool kSquares>
void forward_row(const RowStatisticsArgs& args, int64_t row) {
  alignas(64) acc_t buffer[kRowTile];
  const int64_t offset = row * args.row_stride;
  RowScan<acc_t, kSquares> scan;
  for (int64_t first = 0; first < args.cols; first += kRowTile) {
    const int64_t count = std::min(kRowTile, args.cols - first);
    const acc_t* x = read(args, offset + first, count, buffer);
    scan.add(x, first, count, [&](int64_t block) {
      prefetch(args.input, args.dtype, offset + first + count + block, kSumBlock);
    });
  }
  const int64_t target = target_of(args, row);
  acc_t own = 0;
  const acc_t target_logit = target < 0 ? acc_t(0) : *read(args, offset + target, 1, &own);
  const RowStatistics<acc_t> statistics(scan.sums, scan.has_nan, target_logit);
  const auto put = [row](void* results, acc_t value) { static_cast<acc_t*>(results)[row] = value; };
  if (args.nll) put(args.nll, target < 0 ? acc_t(0) : statistics.nll);
  put(args.logsumexp, statistics.logsumexp);
  statistics.save(static_cast<acc_t*>(args.stats) + 3 * row);
  put(args.entropy, statistics.entropy);
  put(args.total, static_cast<acc_t>(scan.total));
  put(args.maximum, scan.has_nan ? math::kNan<acc_t> : scan.sums.largest);
  if constexpr (kSquares) put(args.log_squares, scan.sums.log_squares(scan.has_nan));
  args.argmax[row] = scan.argmax;
}

template <typename acc_t>
void forward(const RowStatisticsArgs& args) {
  for_each_row(args, [&](int64_t row) {
    args.log_squares ? forward_row<acc_t, true>(args, row) : forward_row<acc_t, false>(args, row);
  });
}

template <typename acc_t>
void gradients(const RowStatisticsArgs& args) {
  for_each_row(args, [&](int64_t row) {
    gradient_row<acc_t>(args, row, [](int64_t, int64_t, const acc_t*) { return nullptr; });
  });
}

}  // namespace
}  // namespace cpu

void row_statistics_forward(const RowStatisticsArgs& args, void* /*stream*/) {
  cpu::check_targets(args);
  if (args.dtype == DType::kFloat64) return cpu::forward<double>(args);
  cpu::forward<float>(args);
}

void row_statistics_backward(const RowStatisticsArgs& args, void* /*stream*/) {
  cpu::check_targets(args);
  if (args.dtype == DType::kFloat64) return cpu::gradients<double>(args);
  cpu::gradients<float>(args);
}

}  // namespace fused
