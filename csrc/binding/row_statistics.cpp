// fused::row_statistics_forward, _backward and _backward_.
#include "tensors.h"

namespace fused::binding {
namespace {

constexpr const char* kOp = "row_statistics";

// The logits [rows, classes] and the other arguments that forward and backward have in common.
struct RowsOfLogits {
  RowStatisticsArgs args;
  ScalarType acc;
  Tensor input;  // with contiguous rows
  std::optional<Tensor> target;

  RowsOfLogits(const Tensor& logits, const std::optional<Tensor>& targets, int64_t ignore_index,
               std::optional<double> softcap)
      : input(logits) {
    args.dtype = dtype_of(logits, kOp, "input");
    acc = accumulation_type(logits.scalar_type());
    const Sizes shape = sizes_of(logits);
    if (shape.size() != 2 || shape[1] < 1)
      throw std::runtime_error(
          "row_statistics: expected input of shape [rows, classes] with at "
          "least 1 class, got " +
          to_string(shape));
    args.rows = shape[0];
    args.cols = shape[1];
    if (args.cols > 1 && logits.strides()[1] != 1) input = as_contiguous(logits);
    args.input = input.data_ptr();
    args.row_stride = strides_of(input)[0];
    args.ignore_index = ignore_index;
    if (softcap) {
      if (!(*softcap > 0))
        throw std::runtime_error("row_statistics: expected softcap to be positive, got " +
                                 std::to_string(*softcap));
      args.softcap = *softcap;
    }
    if (!targets) return;
    if (!has_shape(*targets, Sizes{args.rows}) || targets->scalar_type() != ScalarType::Long)
      throw std::runtime_error("row_statistics: expected target to be int64 of shape " +
                               to_string({args.rows}) + ", got shape " +
                               to_string(sizes_of(*targets)));
    target = as_contiguous(*targets);
    args.target = static_cast<const int64_t*>(target->data_ptr());
  }

  RowGrad grad(const std::optional<Tensor>& tensor, const char* name) const {
    if (!tensor || tensor->numel() == 0) return {};
    if (!has_shape(*tensor, Sizes{args.rows}))
      throw std::runtime_error(std::string("row_statistics: expected ") + name + " of shape " +
                               to_string({args.rows}) + ", got " + to_string(sizes_of(*tensor)));
    return {tensor->data_ptr(), dtype_of(*tensor, kOp, name), strides_of(*tensor)[0]};
  }

  // Checks the stats that the forward saved. The returned tensor must outlive the kernel's launch.
  Tensor saved(const Tensor& stats) const {
    if (!has_shape(stats, Sizes{args.rows, 3}) || stats.scalar_type() != acc)
      throw std::runtime_error(std::string("row_statistics_backward: expected stats ") +
                               "as row_statistics_forward returns it, got shape " +
                               to_string(sizes_of(stats)));
    return as_contiguous(stats);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& input, const std::optional<Tensor>& target, int64_t ignore_index,
    std::optional<double> softcap) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  RowStatisticsArgs& args = problem.args;
  const auto result = [&](bool wanted = true) {
    return empty(input, {wanted ? args.rows : 0}, problem.acc);
  };
  const Tensor nll = result(target.has_value());
  const Tensor logsumexp = result(), entropy = result(), total = result(), maximum = result();
  const Tensor argmax = empty(input, {args.rows}, ScalarType::Long);
  const Tensor stats = empty(input, {args.rows, 3}, problem.acc);
  args.nll = target ? nll.data_ptr() : nullptr;
  args.logsumexp = logsumexp.data_ptr();
  args.entropy = entropy.data_ptr();
  args.total = total.data_ptr();
  args.maximum = maximum.data_ptr();
  args.argmax = static_cast<int64_t*>(argmax.data_ptr());
  args.stats = stats.data_ptr();
  const Launch launch(input);
  row_statistics_forward(args, launch.stream());
  return {nll, logsumexp, entropy, total, maximum, argmax, stats};
}

using Grad = const std::optional<Tensor>&;

void write_gradient(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy, Grad grad_total,
                    RowsOfLogits& problem, const Tensor& stats, const Tensor& result) {
  RowStatisticsArgs& args = problem.args;
  if (problem.target) args.grad_nll = problem.grad(grad_nll, "grad_nll");
  args.grad_logsumexp = problem.grad(grad_logsumexp, "grad_logsumexp");
  args.grad_entropy = problem.grad(grad_entropy, "grad_entropy");
  args.grad_total = problem.grad(grad_total, "grad_total");
  const Tensor saved = problem.saved(stats);
  args.stats = saved.data_ptr();
  args.grad_input = result.data_ptr();
  args.grad_row_stride = strides_of(result)[0];
  const Launch launch(result);
  row_statistics_backward(args, launch.stream());
}

Tensor backward(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy, Grad grad_total,
                const Tensor& input, const std::optional<Tensor>& target, const Tensor& stats,
                int64_t ignore_index, std::optional<double> softcap) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  const Tensor gradient = empty(input, sizes_of(input), input.scalar_type());
  write_gradient(grad_nll, grad_logsumexp, grad_entropy, grad_total, problem, stats, gradient);
  return gradient;
}

void backward_(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy, Grad grad_total,
               const Tensor& input, const std::optional<Tensor>& target, const Tensor& stats,
               int64_t ignore_index, std::optional<double> softcap) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  // If input's rows are not contiguous, problem.input is a copy and the gradient is copied back.
  write_gradient(grad_nll, grad_logsumexp, grad_entropy, grad_total, problem, stats, problem.input);
  if (problem.input.data_ptr() == input.data_ptr()) return;
  Tensor result = input;
  torch::stable::copy_(result, problem.input);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("row_statistics_forward", FUSED_BOX(&forward));
  library.impl("row_statistics_backward", FUSED_BOX(&backward));
  library.impl("row_statistics_backward_", FUSED_BOX(&backward_));
}

}  // namespace fused::binding
