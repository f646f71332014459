#include "../kernels.h"
#include "../losses/softmax_kl_div.h"
#include "row_pair_strided.cuh"
#include "row_statistics_pair.cuh"

void fused::softmax_kl_div_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<SoftmaxKlDiv>(args, stream);
}

void fused::softmax_kl_div_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<SoftmaxKlDiv>(args, stream);
}

void fused::softmax_kl_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                   const RowPairArgs& pair, bool reverse,
                                                   void* stream) {
  cuda::shared_backward<SoftmaxKlDiv>(args, pair, reverse, cuda::as_stream(stream));
}
