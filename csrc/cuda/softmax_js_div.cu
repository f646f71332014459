#include "../kernels.h"
#include "../losses/softmax_js_div.h"
#include "row_pair_strided.cuh"

void fused::softmax_js_div_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<SoftmaxJsDiv>(args, stream);
}

void fused::softmax_js_div_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<SoftmaxJsDiv>(args, stream);
}
