// Cross entropy of rows whose classes are sharded, from the parts that the shards computed. One
// thread merges a row; then the sums over the rows follow.
// Bytes moved per row: shards * 3 or 4 numbers, the row's target, its loss, weight and statistics.
#include "../kernels.h"
#include "cross_entropy_sums.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kMergeThreads = 256;

template <typename acc_t>
__global__ void __launch_bounds__(kMergeThreads)
    cross_entropy_merge_kernel(const __grid_constant__ CrossEntropyArgs args) {
  const bool smoothing = args.label_smoothing > 0;
  const int64_t columns = smoothing ? kSmoothingPartColumns : kPartColumns;
  for (int64_t row = blockIdx.x * int64_t(kMergeThreads) + threadIdx.x; row < args.rows;
       row += gridDim.x * int64_t(kMergeThreads)) {
    const MergedParts<acc_t> merged(
        static_cast<const acc_t*>(args.parts) + row * columns, args.rows * columns, args.shards,
        smoothing ? static_cast<const acc_t*>(args.shard_weights) : nullptr);
    const CrossEntropyRow<acc_t> summary{merged.largest, math::log(merged.sum)};
    const RowTarget<acc_t> target(args, row);
    static_cast<acc_t*>(args.stats)[2 * row] = summary.largest;
    static_cast<acc_t*>(args.stats)[2 * row + 1] = summary.log_sum;
    static_cast<acc_t*>(args.row_losses)[row] =
        target.ignored
            ? acc_t(0)
            : summary.loss(merged.target_logit, target.weight,
                           static_cast<acc_t>(args.label_smoothing), weight_sum<acc_t>(args),
                           merged.weighted_sum, static_cast<acc_t>(args.classes));
  }
}

template <typename acc_t>
void launch_merge(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (args.rows > 0) {
    cross_entropy_merge_kernel<acc_t>
        <<<blocks_for(args.rows, kMergeThreads), kMergeThreads, 0, stream>>>(args);
    check_launch("cross_entropy_merge_kernel");
  }
  launch_sums<acc_t>(args, true, stream);
}

}  // namespace
}  // namespace cuda

void cross_entropy_merge(const CrossEntropyArgs& args, void* stream) {
  using namespace cuda;
  if (args.dtype == DType::kFloat64) return launch_merge<double>(args, as_stream(stream));
  launch_merge<float>(args, as_stream(stream));
}

}  // namespace fused
