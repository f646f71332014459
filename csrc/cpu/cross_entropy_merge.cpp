// Cross entropy of rows whose classes are sharded, from the parts that the shards computed.
// Bytes moved per row: shards * 3 or 4 numbers, the row's target, its loss, weight and statistics.
#include "../kernels.h"
#include "../losses/cross_entropy.h"
#include "class_targets.h"

namespace fused {
namespace cpu {
namespace {

template <typename acc_t>
void merge(const CrossEntropyArgs& args) {
  const double weights = sum_of_weights<acc_t>("cross_entropy", args);
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  const int64_t columns = args.label_smoothing > 0 ? kSmoothingPartColumns : kPartColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / (columns * args.shards));
  parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) merge_row<acc_t, RowTarget<acc_t>>(args, row);
  });
  reduce_losses<acc_t>(args, weights);
}

}  // namespace
}  // namespace cpu

void cross_entropy_merge(const CrossEntropyArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::merge<double>(args);
  cpu::merge<float>(args);
}

}  // namespace fused
