#include "../losses/cross_entropy_probabilities.h"

#include "../kernels.h"
#include "row_pair_lanes.h"

namespace fused {
namespace cpu {
namespace {

// The gradient of the class weights: for each class a sum over the rows. The shares of rows do not
// depend on the number of threads.
template <typename acc_t>
void weight_backward(const RowPairArgs& args) {
  using Loss = CrossEntropyProbabilities<acc_t>;
  const Loss loss(args.parameters);
  const int64_t shares = weight_shares(args.rows, args.cols);
  const int64_t tiles = (args.cols + kRowTile - 1) / kRowTile;
  parallel_for(0, shares * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t share = block / tiles, first = block % tiles * kRowTile;
      const int64_t count = std::min(kRowTile, args.cols - first);
      double* sums = args.workspace + share * args.cols + first;
      std::fill_n(sums, count, 0.);
      for (int64_t row = args.rows * share / shares; row < args.rows * (share + 1) / shares;
           ++row) {
        RowTile<acc_t> input(args.input, row), target(args.target, row);
        const auto gradient = row_gradient<Loss, acc_t>(args, loss, row);
        const acc_t* x = input.read(first, count);
        const acc_t* t = target.read(first, count);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sums[i] += gradient.weight(x[i], t[i]);
      }
    }
  });
  for (int64_t col = 0; col < args.cols; ++col) {
    double sum = 0;
    for (int64_t share = 0; share < shares; ++share) sum += args.workspace[share * args.cols + col];
    static_cast<acc_t*>(args.grad_weight)[col] = static_cast<acc_t>(sum);
  }
}

}  // namespace
}  // namespace cpu

void cross_entropy_probabilities_forward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_forward<CrossEntropyProbabilities>(args);
}

void cross_entropy_probabilities_backward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_backward<CrossEntropyProbabilities>(args);
}

void cross_entropy_probabilities_weight_backward(const RowPairArgs& args, void* /*stream*/) {
  if (args.is_double()) return cpu::weight_backward<double>(args);
  cpu::weight_backward<float>(args);
}

}  // namespace fused
