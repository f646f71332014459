// fused::cross_entropy_probabilities_forward, _backward, _weight_backward, _with_grad and
// _with_grad_.
#include "row_pair.h"

namespace fused::binding {
namespace {

// Logits [C], [N, C] or [N, C, d1, ...]. The mean is over the rows. It is nan if there are no rows
// or no classes.
RowPair prepare(const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
                int64_t reduction, double label_smoothing) {
  RowPair problem("cross_entropy_probabilities", input, target, input.dim() > 1 ? 1 : 0, reduction);
  problem.set_weight(weight);
  RowPairArgs& args = problem.args;
  args.parameters[0] = label_smoothing > 0 ? label_smoothing : 0;  // 0 for nan, as in torch
  args.parameters[1] = static_cast<double>(args.cols);
  if (static_cast<Reduction>(reduction) == Reduction::kMean)
    args.divisor = args.cols > 0 ? static_cast<double>(args.rows) : 0;
  return problem;
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& target,
                                   const std::optional<Tensor>& weight, int64_t reduction,
                                   double label_smoothing, ScalarType dtype) {
  return prepare(input, target, weight, reduction, label_smoothing)
      .forward(&cross_entropy_probabilities_forward, input, target, reduction, dtype);
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& target, const std::optional<Tensor>& weight,
                                    const Tensor& stats, int64_t reduction, double label_smoothing,
                                    bool needs_grad_input, bool needs_grad_target) {
  return prepare(input, target, weight, reduction, label_smoothing)
      .backward(&cross_entropy_probabilities_backward, grad_output, input, target, stats, reduction,
                needs_grad_input, needs_grad_target);
}

Tensor weight_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                       const Tensor& weight, const Tensor& stats, int64_t reduction,
                       double label_smoothing) {
  RowPair problem = prepare(input, target, weight, reduction, label_smoothing);
  RowPairArgs& args = problem.args;
  const Tensor dense = problem.set_saved(grad_output, stats, reduction);
  problem.lay_out(input, target, std::nullopt, std::nullopt);
  const Tensor gradient = empty(input, {args.cols}, problem.acc);
  const Tensor workspace =
      empty(input, {weight_shares(args.rows, args.cols), args.cols}, ScalarType::Double);
  args.grad_weight = gradient.data_ptr();
  args.workspace = static_cast<double*>(workspace.data_ptr());
  const Launch launch(input);
  cross_entropy_probabilities_weight_backward(args, launch.stream());
  return torch::stable::to(gradient, weight.scalar_type());
}

std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target,
                                     const std::optional<Tensor>& weight, int64_t reduction,
                                     double label_smoothing, ScalarType dtype,
                                     const std::optional<Tensor>& grad_output) {
  const Tensor gradient = empty_gradient(input);
  return {prepare(input, target, weight, reduction, label_smoothing)
              .loss_and_gradient(&cross_entropy_probabilities_forward, input, target, reduction,
                                 dtype, gradient, grad_output),
          gradient};
}

Tensor with_grad_(const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
                  int64_t reduction, double label_smoothing, ScalarType dtype,
                  const std::optional<Tensor>& grad_output) {
  return prepare(input, target, weight, reduction, label_smoothing)
      .loss_and_gradient(&cross_entropy_probabilities_forward, input, target, reduction, dtype,
                         input, grad_output);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("cross_entropy_probabilities_forward", FUSED_BOX(&forward));
  library.impl("cross_entropy_probabilities_backward", FUSED_BOX(&backward));
  library.impl("cross_entropy_probabilities_weight_backward", FUSED_BOX(&weight_backward));
  library.impl("cross_entropy_probabilities_with_grad", FUSED_BOX(&with_grad));
  library.impl("cross_entropy_probabilities_with_grad_", FUSED_BOX(&with_grad_));
}

}  // namespace fused::binding
