// fused::softmax_js_div_forward, _backward, _with_grad, _with_grad_ and
// _row_statistics_backward_.
#include "softmax_divergence.h"

namespace fused::binding {
namespace {

constexpr char kName[] = "softmax_js_div";

void check(double beta, double temperature) {
  if (!(beta > 0 && beta < 1))  // refuses nan too
    throw std::runtime_error(
        "softmax_js_div: expected beta to be between 0 and 1, without these, got " +
        std::to_string(beta));
  check_temperature(kName, temperature);
}

using JsDiv = SoftmaxDivergence<kName, &softmax_js_div_forward, &softmax_js_div_backward,
                                &softmax_js_div_row_statistics_backward, &check, double, double>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_js_div_forward", FUSED_BOX(&JsDiv::forward));
  library.impl("softmax_js_div_backward", FUSED_BOX(&JsDiv::backward));
  library.impl("softmax_js_div_with_grad", FUSED_BOX(&JsDiv::with_grad));
  library.impl("softmax_js_div_with_grad_", FUSED_BOX(&JsDiv::with_grad_));
  library.impl("softmax_js_div_row_statistics_backward_",
               FUSED_BOX(&JsDiv::row_statistics_backward_));
}

}  // namespace fused::binding
