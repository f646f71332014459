#include "../kernels.h"
#include "../losses/softmax_finite_kl_div.h"
#include "row_pair_strided.cuh"
#include "row_statistics_pair.cuh"

void fused::softmax_finite_kl_div_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<SoftmaxFiniteKlDiv>(args, stream);
}

void fused::softmax_finite_kl_div_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<SoftmaxFiniteKlDiv>(args, stream);
}

void fused::softmax_finite_kl_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                          const RowPairArgs& pair, bool reverse,
                                                          void* stream) {
  cuda::shared_backward<SoftmaxFiniteKlDiv>(args, pair, reverse, cuda::as_stream(stream));
}
