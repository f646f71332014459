// fused::cross_entropy_forward, _value, _backward, _with_grad and _with_grad_, and fused::scale_.
#include "class_targets.h"

namespace fused::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor> run_forward(const Tensor& input, ClassTargets& problem,
                                               const std::optional<Tensor>& gradient,
                                               ScalarType dtype) {
  CrossEntropyArgs& args = problem.args;
  problem.lay_out(input, gradient);
  // On the CPU the gradient is computed from the statistics.
  const bool wanted = !gradient || !input.is_cuda();
  const Tensor stats = empty(input, {wanted ? args.rows : 0, 2}, problem.acc);
  args.stats = wanted ? stats.data_ptr() : nullptr;
  const auto [loss, total_weight] = problem.forward(&cross_entropy_forward, input, dtype);
  return {loss, stats, total_weight};
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& target,
                                           const std::optional<Tensor>& weight, int64_t reduction,
                                           int64_t ignore_index, double label_smoothing,
                                           ScalarType dtype, std::optional<double> softcap) {
  ClassTargets problem("cross_entropy", input, target, weight, reduction, ignore_index,
                       label_smoothing);
  problem.set_softcap(softcap);
  return run_forward(input, problem, std::nullopt, dtype);
}

Tensor value(const Tensor& input, const Tensor& target, int64_t reduction, int64_t ignore_index,
             double label_smoothing) {
  ClassTargets problem("cross_entropy", input, target, std::nullopt, reduction, ignore_index,
                       label_smoothing);
  problem.lay_out(input, std::nullopt);
  return problem.value(&cross_entropy_forward, input);
}

Tensor backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                const std::optional<Tensor>& weight, const Tensor& stats,
                const Tensor& total_weight, int64_t reduction, int64_t ignore_index,
                double label_smoothing, std::optional<double> softcap) {
  ClassTargets problem("cross_entropy", input, target, weight, reduction, ignore_index,
                       label_smoothing);
  problem.set_softcap(softcap);
  CrossEntropyArgs& args = problem.args;
  if (!has_shape(stats, Sizes{args.rows, 2}) || stats.scalar_type() != problem.acc ||
      !stats.is_contiguous())
    throw std::runtime_error("cross_entropy_backward: expected stats as cross_entropy_forward " +
                             ("returns them, got shape " + to_string(sizes_of(stats))));
  const Tensor gradient = empty_gradient(input);
  problem.lay_out(input, gradient);
  const Tensor dense = problem.set_saved(grad_output, total_weight);
  args.stats = stats.data_ptr();
  const Launch launch(input);
  cross_entropy_backward(args, launch.stream());
  return gradient;
}

Tensor loss_and_gradient(const Tensor& input, const Tensor& target,
                         const std::optional<Tensor>& weight, const Tensor& gradient,
                         int64_t reduction, int64_t ignore_index, double label_smoothing,
                         ScalarType dtype, std::optional<double> softcap,
                         const std::optional<Tensor>& grad_output) {
  ClassTargets problem("cross_entropy", input, target, weight, reduction, ignore_index,
                       label_smoothing);
  problem.set_softcap(softcap);
  if (grad_output) {
    check_one_number(*grad_output, "cross_entropy", "grad_output");
    problem.args.grad_output = grad_output->data_ptr();
    problem.args.grad_output_dtype = dtype_of(*grad_output, "cross_entropy", "grad_output");
  }
  if (problem.args.reduction == Reduction::kNone)
    throw std::runtime_error("cross_entropy: a loss with its gradient needs a reduction");
  return std::get<0>(run_forward(input, problem, gradient, dtype));
}

std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target,
                                     const std::optional<Tensor>& weight, int64_t reduction,
                                     int64_t ignore_index, double label_smoothing, ScalarType dtype,
                                     std::optional<double> softcap,
                                     const std::optional<Tensor>& grad_output) {
  const Tensor gradient = empty_gradient(input);
  return {loss_and_gradient(input, target, weight, gradient, reduction, ignore_index,
                            label_smoothing, dtype, softcap, grad_output),
          gradient};
}

Tensor with_grad_(const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
                  int64_t reduction, int64_t ignore_index, double label_smoothing, ScalarType dtype,
                  std::optional<double> softcap, const std::optional<Tensor>& grad_output) {
  return loss_and_gradient(input, target, weight, input, reduction, ignore_index, label_smoothing,
                           dtype, softcap, grad_output);
}

// Whether the elements fill one span of memory, in any order of the dimensions.
bool is_dense(const Tensor& tensor) {
  Sizes strides = strides_of(tensor);
  const Sizes sizes = coalesce(sizes_of(tensor), {&strides}, false);
  return sizes.empty() || (sizes.size() == 1 && strides[0] == 1);
}

void scale(const Tensor& grad, const Tensor& factor) {
  const DType dtype = dtype_of(grad, "scale_", "grad");
  const DType factor_dtype = dtype_of(factor, "scale_", "factor");
  check_one_number(factor, "scale_", "factor");
  if (!is_dense(grad)) {
    StableIValue stack[2] = {torch::stable::detail::from(grad),
                             torch::stable::detail::from(factor)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul_", "Tensor", stack, TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // takes ownership of the returned reference
    return;
  }
  const Launch launch(grad);
  scale_(grad.data_ptr(), dtype, grad.numel(), factor.data_ptr(), factor_dtype, launch.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("cross_entropy_forward", FUSED_BOX(&forward));
  library.impl("cross_entropy_value", FUSED_BOX(&value));
  library.impl("cross_entropy_backward", FUSED_BOX(&backward));
  library.impl("cross_entropy_with_grad", FUSED_BOX(&with_grad));
  library.impl("cross_entropy_with_grad_", FUSED_BOX(&with_grad_));
  library.impl("scale_", FUSED_BOX(&scale));
}

}  // namespace fused::binding
