#include "../kernels.h"
#include "../losses/softmax_js_div.h"
#include "row_pair_strided.cuh"
#include "row_statistics_pair.cuh"

void fused::softmax_js_div_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<SoftmaxJsDiv>(args, stream);
}

void fused::softmax_js_div_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<SoftmaxJsDiv>(args, stream);
}

void fused::softmax_js_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                   const RowPairArgs& pair, bool reverse,
                                                   void* stream) {
  cuda::shared_backward<SoftmaxJsDiv>(args, pair, reverse, cuda::as_stream(stream));
}
