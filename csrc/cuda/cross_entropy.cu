// Cross entropy on CUDA.
//
// Launches: the sums of the target weights, if the gradient of a mean needs them first; one kernel
// over the logits; the sums over the rows. If the device allows, the sums and the kernels of short
// rows and of bulk copies overlap the end of the preceding kernel.
#include "../kernels.h"
#include "cross_entropy_launch.cuh"
#include "cross_entropy_sums.cuh"

namespace fused {
namespace cuda {
namespace {

void launch_rows(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (args.softcap > 0) return forward_rows<true>(args, stream);
  forward_rows<false>(args, stream);
}

template <typename acc_t>
void launch_all(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (needs_total_weight(args)) launch_sums<acc_t>(args, false, stream);
  if (args.rows > 0) launch_rows(args, stream);
  launch_sums<acc_t>(args, true, stream);
}

}  // namespace
}  // namespace cuda

void cross_entropy_forward(const CrossEntropyArgs& args, void* stream) {
  using namespace cuda;
  check_classes("cross_entropy", args.cols);
  if (args.dtype == DType::kFloat64) return launch_all<double>(args, as_stream(stream));
  launch_all<float>(args, as_stream(stream));
}

void cross_entropy_parts(const CrossEntropyArgs& args, void* stream) {
  using namespace cuda;
  check_classes("cross_entropy", args.cols);
  if (args.rows > 0) launch_rows(args, as_stream(stream));
}

void cross_entropy_backward(const CrossEntropyArgs& args, void* stream) {
  using namespace cuda;
  check_classes("cross_entropy", args.cols);
  if (args.rows == 0 || args.cols == 0) return;
  if (args.softcap > 0) return backward_rows<true>(args, as_stream(stream));
  backward_rows<false>(args, as_stream(stream));
}

}  // namespace fused
