// Instantiates the cross-entropy kernels for soft-capped logits, which cross_entropy.cu launches.
#include "cross_entropy_launch.cuh"

namespace fused::cuda {

template void forward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);
template void backward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);

}  // namespace fused::cuda
