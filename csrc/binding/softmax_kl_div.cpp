// fused::softmax_kl_div_forward, _backward, _with_grad and _with_grad_.
#include "row_pair.h"

namespace fused::binding {
namespace {

// The reductions divide as kl_div's.
RowPair prepare(const Tensor& input, const Tensor& target, int64_t reduction, double temperature,
                int64_t dim) {
  RowPair problem("softmax_kl_div", input, target, dim, reduction);
  RowPairArgs& args = problem.args;
  args.parameters[0] = temperature;
  if (static_cast<Reduction>(reduction) == Reduction::kMean)
    args.divisor = static_cast<double>(args.rows) * static_cast<double>(args.cols);
  if (static_cast<Reduction>(reduction) == Reduction::kBatchMean)
    args.divisor = static_cast<double>(input.sizes()[0]);
  return problem;
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& target, int64_t reduction,
                                   double temperature, int64_t dim, ScalarType dtype) {
  return prepare(input, target, reduction, temperature, dim)
      .forward(&softmax_kl_div_forward, input, target, reduction, dtype);
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& target, const Tensor& stats, int64_t reduction,
                                    double temperature, int64_t dim, bool needs_grad_input,
                                    bool needs_grad_target) {
  return prepare(input, target, reduction, temperature, dim)
      .backward(&softmax_kl_div_backward, grad_output, input, target, stats, reduction,
                needs_grad_input, needs_grad_target);
}

std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target, int64_t reduction,
                                     double temperature, int64_t dim, ScalarType dtype,
                                     const std::optional<Tensor>& grad_output) {
  const Tensor gradient = empty_gradient(input);
  return {prepare(input, target, reduction, temperature, dim)
              .loss_and_gradient(&softmax_kl_div_forward, input, target, reduction, dtype, gradient,
                                 grad_output),
          gradient};
}

Tensor with_grad_(const Tensor& input, const Tensor& target, int64_t reduction, double temperature,
                  int64_t dim, ScalarType dtype, const std::optional<Tensor>& grad_output) {
  return prepare(input, target, reduction, temperature, dim)
      .loss_and_gradient(&softmax_kl_div_forward, input, target, reduction, dtype, input,
                         grad_output);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_kl_div_forward", FUSED_BOX(&forward));
  library.impl("softmax_kl_div_backward", FUSED_BOX(&backward));
  library.impl("softmax_kl_div_with_grad", FUSED_BOX(&with_grad));
  library.impl("softmax_kl_div_with_grad_", FUSED_BOX(&with_grad_));
}

}  // namespace fused::binding
