// The ops X_forward, X_backward, X_with_grad, X_with_grad_ and X_row_statistics_backward_ of a
// divergence X of two softmaxes.
#pragma once

#include "row_pair.h"
#include "row_statistics.h"

namespace fused::binding {

inline void check_temperature(const char* name, double temperature) {
  if (!(temperature > 0))  // refuses nan too
    throw std::runtime_error(std::string(name) + ": expected temperature to be positive, got " +
                             std::to_string(temperature));
}

using SharedKernel = void (*)(const RowStatisticsArgs&, const RowPairArgs&, bool, void*);

// kName: the loss's name as a static array, for messages. Numbers: double or bool for each
// parameter of the loss, in the order of the schema and of the kernel. kCheck: throws for bad
// values of them.
template <const char* kName, RowPairKernel kForward, RowPairKernel kBackward, SharedKernel kShared,
          auto kCheck, typename... Numbers>
struct SoftmaxDivergence {
  // The divisors of the reductions are those of kl_div.
  static RowPair prepare(const Tensor& input, const Tensor& target, int64_t reduction, int64_t dim,
                         Numbers... numbers) {
    kCheck(numbers...);
    RowPair problem(kName, input, target, dim, reduction);
    RowPairArgs& args = problem.args;
    int i = 0;
    ((args.parameters[i++] = numbers), ...);
    if (static_cast<Reduction>(reduction) == Reduction::kMean)
      args.divisor = static_cast<double>(args.rows) * static_cast<double>(args.cols);
    if (static_cast<Reduction>(reduction) == Reduction::kBatchMean)
      args.divisor = static_cast<double>(input.sizes()[0]);
    return problem;
  }

  static std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& target,
                                            int64_t reduction, Numbers... numbers, int64_t dim,
                                            ScalarType dtype) {
    return prepare(input, target, reduction, dim, numbers...)
        .forward(kForward, input, target, reduction, dtype);
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                             const Tensor& target, const Tensor& stats,
                                             int64_t reduction, Numbers... numbers, int64_t dim,
                                             bool needs_grad_input, bool needs_grad_target) {
    return prepare(input, target, reduction, dim, numbers...)
        .backward(kBackward, grad_output, input, target, stats, reduction, needs_grad_input,
                  needs_grad_target);
  }

  static std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target,
                                              int64_t reduction, Numbers... numbers, int64_t dim,
                                              ScalarType dtype,
                                              const std::optional<Tensor>& grad_output) {
    const Tensor gradient = empty_gradient(input);
    return {
        prepare(input, target, reduction, dim, numbers...)
            .loss_and_gradient(kForward, input, target, reduction, dtype, gradient, grad_output),
        gradient};
  }

  static Tensor with_grad_(const Tensor& input, const Tensor& target, int64_t reduction,
                           Numbers... numbers, int64_t dim, ScalarType dtype,
                           const std::optional<Tensor>& grad_output) {
    return prepare(input, target, reduction, dim, numbers...)
        .loss_and_gradient(kForward, input, target, reduction, dtype, input, grad_output);
  }

  // The gradient of the statistics of `input` and of its divergence from `teacher`, over input.
  static void row_statistics_backward_(Grad grad_nll, Grad grad_logsumexp, Grad grad_entropy,
                                       Grad grad_total, const Tensor& input,
                                       const std::optional<Tensor>& target, const Tensor& stats,
                                       int64_t ignore_index, std::optional<double> softcap,
                                       const Tensor& grad_divergence, const Tensor& teacher,
                                       const Tensor& divergence_stats, bool reverse,
                                       Numbers... numbers) {
    if (teacher.scalar_type() != input.scalar_type())
      throw std::runtime_error(std::string(kName) + "_row_statistics_backward_: expected teacher " +
                               "to have input's dtype");
    RowsOfLogits rows(input, target, ignore_index, softcap);
    rows.set_gradients(grad_nll, grad_logsumexp, grad_entropy, grad_total);
    const Tensor dense = teacher.dim() == 2 ? with_contiguous_rows(teacher) : teacher;
    const Tensor& first = reverse ? dense : rows.input;
    const Tensor& second = reverse ? rows.input : dense;
    RowPair pair = prepare(first, second, static_cast<int64_t>(Reduction::kNone), -1, numbers...);
    pair.lay_out(first, second, std::nullopt, std::nullopt);
    const Tensor factors =
        pair.set_saved(grad_divergence, divergence_stats, static_cast<int64_t>(Reduction::kNone));
    rows.write_over(input, stats, [&](const RowStatisticsArgs& args, void* stream) {
      kShared(args, pair.args, reverse, stream);
    });
  }
};

}  // namespace fused::binding
