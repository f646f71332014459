// fused::row_statistics_forward, _backward and _backward_.
#include "row_statistics.h"

namespace fused::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& input, const std::optional<Tensor>& target, int64_t ignore_index,
    std::optional<double> softcap, bool squares) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  RowStatisticsArgs& args = problem.args;
  const auto result = [&](bool wanted = true) {
    return empty(input, {wanted ? args.rows : 0}, problem.acc);
  };
  const Tensor nll = result(target.has_value());
  const Tensor logsumexp = result(), entropy = result(), total = result(), maximum = result();
  const Tensor argmax = empty(input, {args.rows}, ScalarType::Long);
  const Tensor stats = empty(input, {args.rows, 3}, problem.acc);
  const Tensor log_squares = result(squares);
  args.nll = target ? nll.data_ptr() : nullptr;
  args.logsumexp = logsumexp.data_ptr();
  args.entropy = entropy.data_ptr();
  args.total = total.data_ptr();
  args.maximum = maximum.data_ptr();
  args.argmax = static_cast<int64_t*>(argmax.data_ptr());
  args.stats = stats.data_ptr();
  args.log_squares = squares ? log_squares.data_ptr() : nullptr;
  const Launch launch(input);
  row_statistics_forward(args, launch.stream());
  return {nll, logsumexp, entropy, total, maximum, argmax, stats, log_squares};
}

Tensor backward(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy, Grad grad_total,
                const Tensor& input, const std::optional<Tensor>& target, const Tensor& stats,
                int64_t ignore_index, std::optional<double> softcap) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  problem.set_gradients(grad_nll, grad_logsumexp, grad_entropy, grad_total);
  const Tensor gradient = empty(input, sizes_of(input), input.scalar_type());
  problem.write(gradient, stats, row_statistics_backward);
  return gradient;
}

void backward_(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy, Grad grad_total,
               const Tensor& input, const std::optional<Tensor>& target, const Tensor& stats,
               int64_t ignore_index, std::optional<double> softcap) {
  RowsOfLogits problem(input, target, ignore_index, softcap);
  problem.set_gradients(grad_nll, grad_logsumexp, grad_entropy, grad_total);
  problem.write_over(input, stats, row_statistics_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("row_statistics_forward", FUSED_BOX(&forward));
  library.impl("row_statistics_backward", FUSED_BOX(&backward));
  library.impl("row_statistics_backward_", FUSED_BOX(&backward_));
}

}  // namespace fused::binding
