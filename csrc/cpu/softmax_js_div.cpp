#include "../losses/softmax_js_div.h"

#include "../kernels.h"
#include "row_pair_lanes.h"

void fused::softmax_js_div_forward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_forward<SoftmaxJsDiv>(args);
}

void fused::softmax_js_div_backward(const RowPairArgs& args, void* /*stream*/) {
  cpu::row_pair_backward<SoftmaxJsDiv>(args);
}
