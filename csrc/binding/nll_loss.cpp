// fused::nll_loss_forward, _value and _backward.
#include "class_targets.h"

namespace fused::binding {
namespace {

std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& target,
                                   const std::optional<Tensor>& weight, int64_t reduction,
                                   int64_t ignore_index, ScalarType dtype) {
  ClassTargets problem("nll_loss", input, target, weight, reduction, ignore_index, 0);
  problem.lay_out(input, std::nullopt);
  return problem.forward(&nll_loss_forward, input, dtype);
}

Tensor value(const Tensor& input, const Tensor& target, int64_t reduction, int64_t ignore_index) {
  ClassTargets problem("nll_loss", input, target, std::nullopt, reduction, ignore_index, 0);
  problem.lay_out(input, std::nullopt);
  return problem.value(&nll_loss_forward, input);
}

Tensor backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                const std::optional<Tensor>& weight, const Tensor& total_weight, int64_t reduction,
                int64_t ignore_index) {
  ClassTargets problem("nll_loss", input, target, weight, reduction, ignore_index, 0);
  Tensor gradient = empty_gradient(input);
  torch::stable::zero_(gradient);
  problem.lay_out(input, gradient);
  const Tensor dense = problem.set_saved(grad_output, total_weight);
  const Launch launch(input);
  nll_loss_backward(problem.args, launch.stream());
  return gradient;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("nll_loss_forward", FUSED_BOX(&forward));
  library.impl("nll_loss_value", FUSED_BOX(&value));
  library.impl("nll_loss_backward", FUSED_BOX(&backward));
}

}  // namespace fused::binding
