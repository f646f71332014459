// The ops X_forward, X_backward, X_with_grad and X_with_grad_ of a divergence X of two softmaxes.
#pragma once

#include "row_pair.h"

namespace fused::binding {

inline void check_temperature(const char* name, double temperature) {
  if (!(temperature > 0))  // refuses nan too
    throw std::runtime_error(std::string(name) + ": expected temperature to be positive, got " +
                             std::to_string(temperature));
}

// kName: the loss's name as a static array, for messages. Numbers: double for each parameter of the
// loss, in the order of the schema and of the kernel. kCheck: throws for bad values of them.
template <const char* kName, RowPairKernel kForward, RowPairKernel kBackward, auto kCheck,
          typename... Numbers>
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
};

}  // namespace fused::binding
