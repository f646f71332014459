// Cross entropy on the CPU. Log-probabilities are never written to memory.
//
// Two paths:
//   rows     an online softmax over the tiles of a row, with any stride between its logits. The
//            forward reads the logits from memory once, also with the gradient if a row fits the
//            L2 cache; the backward reads them once. Bytes moved per row: forward cols *
//            sizeof(logit); backward, and forward with the gradient, twice that.
//   columns  for rows with stride 1 between them, as in [N, C, H, W] or a transposed matrix. A
//            block of kLanes rows goes through the classes together, one lane a row: once for the
//            largest logit, once for the sum and, with smoothing, once for the weighted sum. If a
//            block (kLanes * cols logits) fits the L2 cache, only the first pass reads memory.
#include <limits>

#include "../kernels.h"
#include "cross_entropy_gradient.h"

namespace fused {
namespace cpu {
namespace {

constexpr int64_t kColumnBlock = 32;  // classes of a partial sum in the column path

// Writes a shard's part of a row, instead of the row's loss.
template <typename acc_t>
void finish_part(const CrossEntropyArgs& args, int64_t row, int64_t offset, acc_t largest,
                 acc_t sum, acc_t weighted_sum) {
  const bool smoothing = args.label_smoothing > 0;
  acc_t* part =
      static_cast<acc_t*>(args.parts) + row * (smoothing ? kSmoothingPartColumns : kPartColumns);
  const RowTarget<acc_t> target(args, row);
  part[0] = largest;
  part[1] = sum;
  part[2] = target.index < 0 ? acc_t(0) : logit_at<acc_t>(args, offset, target.index);
  if (smoothing) part[3] = weighted_sum;
}

template <typename acc_t>
void finish_row(const CrossEntropyArgs& args, int64_t row, int64_t offset, acc_t largest, acc_t sum,
                acc_t weighted_sum) {
  if (args.parts) return finish_part(args, row, offset, largest, sum, weighted_sum);
  const RowTarget<acc_t> target(args, row);
  const CrossEntropyRow<acc_t> summary{largest, math::log(sum)};
  if (args.stats) {
    static_cast<acc_t*>(args.stats)[2 * row] = summary.largest;
    static_cast<acc_t*>(args.stats)[2 * row + 1] = summary.log_sum;
  }
  static_cast<acc_t*>(args.row_losses)[row] =
      target.index < 0
          ? acc_t(0)
          : summary.loss(logit_at<acc_t>(args, offset, target.index), target.weight,
                         static_cast<acc_t>(args.label_smoothing), weight_sum<acc_t>(args),
                         weighted_sum, static_cast<acc_t>(args.classes));
}

template <typename acc_t>
void forward_row(const CrossEntropyArgs& args, int64_t row) {
  alignas(64) acc_t buffer[kTile];
  const int64_t offset = row_offset(args.input_layout, row);
  const int64_t stride = args.input_layout.col_stride;
  const acc_t* weight = class_weights<acc_t>(args);
  const bool smoothing = args.label_smoothing > 0;
  acc_t largest = -std::numeric_limits<acc_t>::infinity();
  acc_t sum = 0, weighted_sum = 0, weights_seen = 0;

  for (int64_t first = 0; first < args.cols; first += kTile) {
    const int64_t count = std::min(kTile, args.cols - first);
    const acc_t* x = read_capped(args, offset + first * stride, stride, count, buffer);
    acc_t tile_largest = largest;
#pragma omp simd reduction(max : tile_largest)
    for (int64_t i = 0; i < count; ++i) tile_largest = x[i] > tile_largest ? x[i] : tile_largest;
    // While all logits are -inf, the reference is 0: -inf - -inf would make the sum nan.
    const bool finite = tile_largest > -std::numeric_limits<acc_t>::infinity();
    const acc_t reference = finite ? tile_largest : acc_t(0);
    if (tile_largest > largest) sum *= math::exp(largest - tile_largest);
    for (int64_t block = 0; block < count; block += kSumBlock) {
      // Prefetches a block of the next tile, of this row or the next one: the loops over this tile
      // do not load it. One block at a time, since a core stalls if too many cache lines are in
      // flight.
      if (stride == 1) prefetch(args.input, args.dtype, offset + first + count + block, kSumBlock);
      sum += sum_of<acc_t>(block, std::min(count, block + kSumBlock),
                           [&](int64_t i) { return math::host::exp_term(x[i] - reference); });
    }
    if (smoothing) {
      if (weights_seen > 0 && finite) weighted_sum += weights_seen * (reference - largest);
      acc_t tile_weighted = 0, tile_weights = 0;
      for (int64_t i = 0; i < count; ++i) {
        const acc_t w = weight ? weight[first + i] : acc_t(1);
        tile_weighted += w * (reference - x[i]);
        tile_weights += w;
      }
      weighted_sum += tile_weighted;
      weights_seen += tile_weights;
    }
    largest = tile_largest;
  }
  finish_row(args, row, offset, largest, sum, weighted_sum);
}

// The column path: rows [row, row + lanes) have stride 1 between them.
template <typename acc_t>
void forward_lanes(const CrossEntropyArgs& args, int64_t row, int64_t lanes) {
  alignas(64) acc_t buffer[kLanes], largest[kLanes], origin[kLanes];
  alignas(64) acc_t sum[kLanes], weighted_sum[kLanes], block_sum[kLanes];
  const int64_t offset = row_offset(args.input_layout, row);
  const acc_t* weight = class_weights<acc_t>(args);
  const auto for_each_col = [&](auto&& body) {
    for (int64_t col = 0; col < args.cols; ++col)
      body(col, read_capped(args, offset + col * args.input_layout.col_stride, 1, lanes, buffer));
  };
  std::fill_n(largest, kLanes, -std::numeric_limits<acc_t>::infinity());
  std::fill_n(sum, kLanes, acc_t(0));
  std::fill_n(block_sum, kLanes, acc_t(0));
  std::fill_n(weighted_sum, kLanes, acc_t(0));
  // The soft-cap is monotone, so the largest logit is capped only once, after the search.
  for (int64_t col = 0; col < args.cols; ++col) {
    const acc_t* x = read_tile(args, offset + col * args.input_layout.col_stride, 1, lanes, buffer);
    for (int64_t i = 0; i < lanes; ++i) largest[i] = x[i] > largest[i] ? x[i] : largest[i];
  }
  if (args.softcap > 0)
    cap_logits<acc_t>(largest, lanes, static_cast<acc_t>(args.softcap), largest, nullptr);
  // As in forward_row: if all logits are -inf, -inf - -inf would make the sum nan.
  for (int64_t i = 0; i < lanes; ++i)
    origin[i] = largest[i] > -std::numeric_limits<acc_t>::infinity() ? largest[i] : acc_t(0);
  // Sums go by blocks of classes, since a sum of fewer terms rounds less.
  for_each_col([&](int64_t col, const acc_t* x) {
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) block_sum[i] += math::host::exp_term(x[i] - origin[i]);
    if ((col + 1) % kColumnBlock != 0 && col + 1 < args.cols) return;
    for (int64_t i = 0; i < lanes; ++i) sum[i] += block_sum[i];
    std::fill_n(block_sum, kLanes, acc_t(0));
  });
  if (args.label_smoothing > 0)
    for_each_col([&](int64_t col, const acc_t* x) {
      const acc_t w = weight ? weight[col] : acc_t(1);
      for (int64_t i = 0; i < lanes; ++i) block_sum[i] += w * (origin[i] - x[i]);
      if ((col + 1) % kColumnBlock != 0 && col + 1 < args.cols) return;
      for (int64_t i = 0; i < lanes; ++i) weighted_sum[i] += block_sum[i];
      std::fill_n(block_sum, kLanes, acc_t(0));
    });
  for (int64_t i = 0; i < lanes; ++i)
    finish_row(args, row + i, offset + i, largest[i], sum[i], weighted_sum[i]);
}

template <typename acc_t>
void forward(const CrossEntropyArgs& args) {
  const double weights = sum_of_weights<acc_t>("cross_entropy", args);
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  const acc_t common = common_scale<acc_t>(args);
  for_each_block(args.input_layout, args.rows, args.cols, kLanes, [&](int64_t row, int64_t lanes) {
    if (lanes > 0) {
      forward_lanes<acc_t>(args, row, lanes);
      if (args.grad_input) gradient_lanes<acc_t>(args, row, lanes, common);
    } else {
      forward_row<acc_t>(args, row);
      if (args.grad_input) gradient_row<acc_t>(args, row, common);
    }
  });
  reduce_losses<acc_t>(args, weights);
}

template <typename acc_t>
void parts(const CrossEntropyArgs& args) {
  for_each_block(args.input_layout, args.rows, args.cols, kLanes, [&](int64_t row, int64_t lanes) {
    if (lanes > 0) return forward_lanes<acc_t>(args, row, lanes);
    forward_row<acc_t>(args, row);
  });
}

}  // namespace
}  // namespace cpu

void cross_entropy_parts(const CrossEntropyArgs& args, void* /*stream*/) {
  cpu::check_targets("cross_entropy", args);
  if (args.dtype == DType::kFloat64) return cpu::parts<double>(args);
  cpu::parts<float>(args);
}

void cross_entropy_forward(const CrossEntropyArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::forward<double>(args);
  cpu::forward<float>(args);
}

void cross_entropy_backward(const CrossEntropyArgs& args, void* /*stream*/) {
  cpu::check_targets("cross_entropy", args);
  if (args.dtype == DType::kFloat64) return cpu::gradients<double>(args);
  cpu::gradients<float>(args);
}

}  // namespace fused
