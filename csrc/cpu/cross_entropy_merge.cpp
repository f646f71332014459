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
  const bool smoothing = args.label_smoothing > 0;
  const int64_t columns = smoothing ? kSmoothingPartColumns : kPartColumns;
  const acc_t all = args.weight_sum ? *static_cast<const acc_t*>(args.weight_sum)
                                    : static_cast<acc_t>(args.classes);
  const int64_t grain = std::max<int64_t>(1, kGrain / (columns * args.shards));
  parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const MergedParts<acc_t> merged(
          static_cast<const acc_t*>(args.parts) + row * columns, args.rows * columns, args.shards,
          smoothing ? static_cast<const acc_t*>(args.shard_weights) : nullptr);
      const CrossEntropyRow<acc_t> summary{merged.largest, math::log(merged.sum)};
      const RowTarget<acc_t> target(args, row);
      static_cast<acc_t*>(args.stats)[2 * row] = summary.largest;
      static_cast<acc_t*>(args.stats)[2 * row + 1] = summary.log_sum;
      static_cast<acc_t*>(args.row_losses)[row] =
          target.ignored ? acc_t(0)
                         : summary.loss(merged.target_logit, target.weight,
                                        static_cast<acc_t>(args.label_smoothing), all,
                                        merged.weighted_sum, static_cast<acc_t>(args.classes));
    }
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
