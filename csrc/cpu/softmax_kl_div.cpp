#include "../losses/softmax_kl_div.h"

#include "../kernels.h"
#include "row_pair_lanes.h"
#include "row_statistics.h"

void fused::softmax_kl_div_forward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_forward<SoftmaxKlDiv>(args);
}

void fused::softmax_kl_div_backward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_backward<SoftmaxKlDiv>(args);
}

void fused::softmax_kl_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                   const RowPairArgs& pair, bool reverse,
                                                   void* /*stream*/) {
  cpu::shared_backward<SoftmaxKlDiv>(args, pair, reverse);
}
