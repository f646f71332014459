// The kernels of cross entropy for soft-capped logits; called from cross_entropy.cu.
#include "cross_entropy_launch.cuh"

namespace fused::cuda {

template void forward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);
template void backward_rows<true>(const CrossEntropyArgs& args, cudaStream_t stream);

}  // namespace fused::cuda
