// fused::softmax_finite_kl_div_forward, _backward, _with_grad, _with_grad_ and
// _row_statistics_backward_.
#include "softmax_divergence.h"

namespace fused::binding {
namespace {

constexpr char kName[] = "softmax_finite_kl_div";

void check(bool /*entropy*/, double temperature) { check_temperature(kName, temperature); }

using FiniteKlDiv =
    SoftmaxDivergence<kName, &softmax_finite_kl_div_forward, &softmax_finite_kl_div_backward,
                      &softmax_finite_kl_div_row_statistics_backward, &check, bool, double>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_finite_kl_div_forward", FUSED_BOX(&FiniteKlDiv::forward));
  library.impl("softmax_finite_kl_div_backward", FUSED_BOX(&FiniteKlDiv::backward));
  library.impl("softmax_finite_kl_div_with_grad", FUSED_BOX(&FiniteKlDiv::with_grad));
  library.impl("softmax_finite_kl_div_with_grad_", FUSED_BOX(&FiniteKlDiv::with_grad_));
  library.impl("softmax_finite_kl_div_row_statistics_backward_",
               FUSED_BOX(&FiniteKlDiv::row_statistics_backward_));
}

}  // namespace fused::binding
