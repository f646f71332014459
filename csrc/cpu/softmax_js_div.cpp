#include "../losses/softmax_js_div.h"

#include "../kernels.h"
#include "row_pair_lanes.h"
#include "row_statistics.h"

void fused::softmax_js_div_forward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_forward<SoftmaxJsDiv>(args);
}

void fused::softmax_js_div_backward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_backward<SoftmaxJsDiv>(args);
}

void fused::softmax_js_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                   const RowPairArgs& pair, bool reverse,
                                                   void* /*stream*/) {
  cpu::shared_backward<SoftmaxJsDiv>(args, pair, reverse);
}
