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
  for (int64_t row = blockIdx.x * int64_t(kMergeThreads) + threadIdx.x; row < args.rows;
       row += gridDim.x * int64_t(kMergeThreads))
    merge_row<acc_t, RowTarget<acc_t>>(args, row);
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
