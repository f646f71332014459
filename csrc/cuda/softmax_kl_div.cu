#include "../kernels.h"
#include "../losses/softmax_kl_div.h"
#include "row_pair_strided.cuh"

void fused::softmax_kl_div_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<SoftmaxKlDiv>(args, stream);
}

void fused::softmax_kl_div_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<SoftmaxKlDiv>(args, stream);
}
