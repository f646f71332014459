#include "../losses/softmax_finite_kl_div.h"

#include "../kernels.h"
#include "row_pair_lanes.h"
#include "row_statistics.h"

void fused::softmax_finite_kl_div_forward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_forward<SoftmaxFiniteKlDiv>(args);
}

void fused::softmax_finite_kl_div_backward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_backward<SoftmaxFiniteKlDiv>(args);
}

void fused::softmax_finite_kl_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                          const RowPairArgs& pair, bool reverse,
                                                          void* /*stream*/) {
  cpu::shared_backward<SoftmaxFiniteKlDiv>(args, pair, reverse);
}
