// The offsets of rows, and their distribution over threads.
#pragma once

#include "parallel.h"
#include "sum.h"

namespace fused::cpu {

constexpr int64_t kGrain = 1 << 15;  // logits of a thread, at least

inline int64_t row_offset(const RowLayout& layout, int64_t row) {
  const int last = layout.ndim - 1;
  int64_t offset = 0;
  for (int d = 0; d < last; ++d) {
    offset += row % layout.sizes[d] * layout.strides[d];
    row /= layout.sizes[d];
  }
  return last < 0 ? 0 : offset + row * layout.strides[last];
}

// The sum of value(row) over the rows.
template <typename Value>
double sum_over_rows(int64_t rows, Value&& value) {
  Sum sum;
  for (int64_t first = 0; first < rows; first += kSumBlock)
    sum.add(sum_of<double>(first, std::min(rows, first + kSumBlock), value));
  return sum.value();
}

// Calls body(row, lanes) for blocks of at most `most` rows with stride 1 between them. If rows must
// be handled one by one, calls body(row, 0) for each row.
template <typename Body>
void for_each_block(const RowLayout& layout, int64_t rows, int64_t cols, int64_t most,
                    Body&& body) {
  const bool columns = layout.ndim > 0 && layout.col_stride != 1 && layout.strides[0] == 1;
  const int64_t inner = layout.ndim > 0 ? layout.sizes[0] : 1;
  const int64_t outer = inner > 0 ? rows / inner : 0;
  const int64_t lanes = columns ? most : 1;
  const int64_t blocks = (inner + lanes - 1) / lanes;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols * lanes));
  parallel_for(0, outer * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block % blocks * lanes;
      const int64_t row = block / blocks * inner + begin;
      body(row, columns ? std::min(lanes, inner - begin) : 0);
    }
  });
}

}  // namespace fused::cpu
