// fused::cross_entropy_forward, _backward, _with_grad and _with_grad_, and fused::scale_.
#include "tensors.h"

namespace fused::binding {
namespace {

// The leading part of every call: logits [C], [N, C] or [N, C, d1, ...] with targets of the same
// shape less the classes.
struct Problem {
  CrossEntropyArgs args;
  ScalarType acc;
  Tensor target;                 // int64, contiguous
  std::optional<Tensor> weight;  // acc, contiguous
  std::optional<Tensor> weight_sum;
  Sizes row_shape;
  int64_t class_dim;

  Problem(const Tensor& input, const Tensor& target_tensor,
          const std::optional<Tensor>& weight_tensor, int64_t reduction, int64_t ignore_index,
          double label_smoothing)
      : acc(accumulation_type(input.scalar_type())), target(target_tensor) {
    args.dtype = dtype_of(input, "cross_entropy", "input");
    row_shape = sizes_of(input);
    if (row_shape.empty())
      throw std::runtime_error("cross_entropy: expected input to have at least 1 dimension, got 0");
    class_dim = row_shape.size() == 1 ? 0 : 1;
    args.cols = row_shape[class_dim];
    row_shape.erase(row_shape.begin() + class_dim);
    if (sizes_of(target) != row_shape)
      throw std::runtime_error("cross_entropy: expected target of shape " + to_string(row_shape) +
                               " for input of shape " + to_string(sizes_of(input)) + ", got " +
                               to_string(sizes_of(target)));
    if (target.scalar_type() != ScalarType::Long && target.scalar_type() != ScalarType::Byte)
      throw std::runtime_error(
          "cross_entropy: expected target of class indices to be int64 or uint8");
    args.rows = target.numel();
    target = torch::stable::contiguous(torch::stable::to(target, ScalarType::Long));
    args.target = static_cast<const int64_t*>(target.data_ptr());
    if (static_cast<Reduction>(reduction) > Reduction::kSum || reduction < 0)
      throw std::runtime_error("cross_entropy: expected reduction to be 0 (none), 1 (mean) or 2 " +
                               ("(sum), got " + std::to_string(reduction)));
    args.reduction = static_cast<Reduction>(reduction);
    args.ignore_index = ignore_index;
    args.label_smoothing = label_smoothing;
    args.input = input.data_ptr();
    if (!weight_tensor) return;
    if (sizes_of(*weight_tensor) != Sizes{args.cols})
      throw std::runtime_error("cross_entropy: expected weight of shape " + to_string({args.cols}) +
                               ", got " + to_string(sizes_of(*weight_tensor)));
    weight = torch::stable::contiguous(torch::stable::to(*weight_tensor, acc));
    args.weight = weight->data_ptr();
    if (label_smoothing > 0) {
      weight_sum = torch::stable::sum(*weight);
      args.weight_sum = weight_sum->data_ptr();
    }
  }

  // Rows in target's order; a gradient, when there is one, is walked together with the logits.
  void lay_out(const Tensor& input, const std::optional<Tensor>& gradient) {
    const auto split = [&](const Tensor& tensor, RowLayout& layout) {
      Sizes strides = broadcast_strides(tensor, sizes_of(tensor));
      layout.col_stride = args.cols == 1 ? 1 : strides[class_dim];
      strides.erase(strides.begin() + class_dim);
      return strides;
    };
    Sizes input_strides = split(input, args.input_layout);
    Sizes grad_strides = gradient ? split(*gradient, args.grad_layout) : Sizes(row_shape.size(), 0);
    const Sizes sizes = gradient ? coalesce(row_shape, {&input_strides, &grad_strides}, true)
                                 : coalesce(row_shape, {&input_strides}, true);
    for (RowLayout* layout : {&args.input_layout, &args.grad_layout}) {
      layout->ndim = static_cast<int>(sizes.size());
      std::copy(sizes.begin(), sizes.end(), layout->sizes);
    }
    std::copy(input_strides.begin(), input_strides.end(), args.input_layout.strides);
    if (gradient) {
      std::copy(grad_strides.begin(), grad_strides.end(), args.grad_layout.strides);
      args.grad_input = gradient->data_ptr();
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> run_forward(const Tensor& input, Problem& problem,
                                               const std::optional<Tensor>& gradient,
                                               ScalarType dtype) {
  CrossEntropyArgs& args = problem.args;
  problem.lay_out(input, gradient);
  const auto empty = [&](const Sizes& shape, ScalarType type) {
    return torch::stable::new_empty(
        input, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), type);
  };
  const bool each = args.reduction == Reduction::kNone;
  const Tensor stats = empty({args.rows, 2}, problem.acc);
  const Tensor row_losses = empty(problem.row_shape, problem.acc);
  const Tensor row_weights = empty({args.rows}, problem.acc);
  const Tensor total_weight = empty_scalar(input, problem.acc);
  args.stats = stats.data_ptr();
  args.row_losses = row_losses.data_ptr();
  args.row_weights = row_weights.data_ptr();
  args.total_weight = total_weight.data_ptr();
  std::optional<Tensor> loss;
  if (!each) {
    loss = empty_scalar(input, dtype);
    args.loss = loss->data_ptr();
    args.loss_dtype = dtype_of(*loss, "cross_entropy", "dtype");
  }
  const Launch launch(input);
  cross_entropy_forward(args, launch.stream());
  if (each) loss = torch::stable::to(row_losses, dtype);
  return {*loss, stats, total_weight};
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& target,
                                           const std::optional<Tensor>& weight, int64_t reduction,
                                           int64_t ignore_index, double label_smoothing,
                                           ScalarType dtype) {
  Problem problem(input, target, weight, reduction, ignore_index, label_smoothing);
  return run_forward(input, problem, std::nullopt, dtype);
}

Tensor backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                const std::optional<Tensor>& weight, const Tensor& stats,
                const Tensor& total_weight, int64_t reduction, int64_t ignore_index,
                double label_smoothing) {
  Problem problem(input, target, weight, reduction, ignore_index, label_smoothing);
  CrossEntropyArgs& args = problem.args;
  const bool each = args.reduction == Reduction::kNone;
  if (sizes_of(grad_output) != (each ? problem.row_shape : Sizes{}))
    throw std::runtime_error("cross_entropy_backward: expected grad_output of shape " +
                             to_string(each ? problem.row_shape : Sizes{}) + ", got " +
                             to_string(sizes_of(grad_output)));
  if (sizes_of(stats) != Sizes{args.rows, 2} || stats.scalar_type() != problem.acc ||
      !stats.is_contiguous())
    throw std::runtime_error("cross_entropy_backward: expected stats as cross_entropy_forward " +
                             ("returns them, got shape " + to_string(sizes_of(stats))));
  if (total_weight.numel() != 1 || total_weight.scalar_type() != problem.acc)
    throw std::runtime_error(
        "cross_entropy_backward: expected total_weight as " +
        ("cross_entropy_forward returns it, got shape " + to_string(sizes_of(total_weight))));
  const Tensor gradient = torch::stable::empty_like(input);
  problem.lay_out(input, gradient);
  const Tensor dense_grad_output = torch::stable::contiguous(grad_output);
  args.stats = stats.data_ptr();
  args.total_weight = total_weight.data_ptr();
  args.grad_output_dtype = dtype_of(grad_output, "cross_entropy_backward", "grad_output");
  args.grad_output = dense_grad_output.data_ptr();
  args.grad_output_stride = each ? 1 : 0;
  const Launch launch(input);
  cross_entropy_backward(args, launch.stream());
  return gradient;
}

Tensor loss_and_gradient(const Tensor& input, const Tensor& target,
                         const std::optional<Tensor>& weight, const Tensor& gradient,
                         int64_t reduction, int64_t ignore_index, double label_smoothing,
                         ScalarType dtype, const std::optional<Tensor>& grad_output) {
  Problem problem(input, target, weight, reduction, ignore_index, label_smoothing);
  if (grad_output) {
    if (grad_output->numel() != 1)
      throw std::runtime_error(
          "cross_entropy: expected grad_output to hold one number, got shape " +
          to_string(sizes_of(*grad_output)));
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
                                     const std::optional<Tensor>& grad_output) {
  const Tensor gradient = torch::stable::empty_like(input);
  return {loss_and_gradient(input, target, weight, gradient, reduction, ignore_index,
                            label_smoothing, dtype, grad_output),
          gradient};
}

Tensor with_grad_(const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
                  int64_t reduction, int64_t ignore_index, double label_smoothing, ScalarType dtype,
                  const std::optional<Tensor>& grad_output) {
  return loss_and_gradient(input, target, weight, input, reduction, ignore_index, label_smoothing,
                           dtype, grad_output);
}

// Dense in any order of its dimensions: its elements fill one span of memory.
bool is_dense(const Tensor& tensor) {
  Sizes strides = broadcast_strides(tensor, sizes_of(tensor));
  const Sizes sizes = coalesce(sizes_of(tensor), {&strides}, false);
  return sizes.empty() || (sizes.size() == 1 && strides[0] == 1);
}

void scale(const Tensor& grad, const Tensor& factor) {
  const DType dtype = dtype_of(grad, "scale_", "grad");
  const DType factor_dtype = dtype_of(factor, "scale_", "factor");
  if (factor.numel() != 1)
    throw std::runtime_error("scale_: expected factor to hold one number, got shape " +
                             to_string(sizes_of(factor)));
  if (!is_dense(grad)) {
    StableIValue stack[2] = {torch::stable::detail::from(grad),
                             torch::stable::detail::from(factor)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul_", "Tensor", stack, TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // the same tensor; takes its reference back
    return;
  }
  const Launch launch(grad);
  scale_(grad.data_ptr(), dtype, grad.numel(), factor.data_ptr(), factor_dtype, launch.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("cross_entropy_forward", TORCH_BOX(&forward));
  library.impl("cross_entropy_backward", TORCH_BOX(&backward));
  library.impl("cross_entropy_with_grad", TORCH_BOX(&with_grad));
  library.impl("cross_entropy_with_grad_", TORCH_BOX(&with_grad_));
  library.impl("scale_", TORCH_BOX(&scale));
}

}  // namespace fused::binding
