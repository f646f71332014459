// fused::softmax_kl_div_forward, _backward, _with_grad, _with_grad_ and
// _row_statistics_backward_.
#include "softmax_divergence.h"

namespace fused::binding {
namespace {

constexpr char kName[] = "softmax_kl_div";

void check(double temperature) { check_temperature(kName, temperature); }

using KlDiv = SoftmaxDivergence<kName, &softmax_kl_div_forward, &softmax_kl_div_backward,
                                &softmax_kl_div_row_statistics_backward, &check, double>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_kl_div_forward", FUSED_BOX(&KlDiv::forward));
  library.impl("softmax_kl_div_backward", FUSED_BOX(&KlDiv::backward));
  library.impl("softmax_kl_div_with_grad", FUSED_BOX(&KlDiv::with_grad));
  library.impl("softmax_kl_div_with_grad_", FUSED_BOX(&KlDiv::with_grad_));
  library.impl("softmax_kl_div_row_statistics_backward_",
               FUSED_BOX(&KlDiv::row_statistics_backward_));
}

}  // namespace fused::binding
