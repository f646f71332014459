// fused::X_forward, X_backward, X_with_grad and X_with_grad_ of every elementwise loss X. A loss is
// one line at the end of this file; its schema is in compile_losses/ops/X.py.
#include "tensors.h"

namespace fused::binding {
namespace {

using Kernel = void (*)(const ElementwiseArgs&, void*);

struct Bound {
  Operand* operand;
  const Tensor* tensor;
  const char* name;
};

// Fills the iteration space from the operands that lie in it, the first ones deciding its order.
void lay_out(ElementwiseArgs& args, const char* op, const Sizes& shape,
             const std::vector<Bound>& operands) {
  std::vector<Sizes> strides(6, Sizes(shape.size(), 0));
  for (size_t i = 0; i < operands.size(); ++i) {
    operands[i].operand->data = operands[i].tensor->data_ptr();
    operands[i].operand->dtype = dtype_of(*operands[i].tensor, op, operands[i].name);
    strides[i] = broadcast_strides(*operands[i].tensor, shape);
  }
  const Sizes sizes = coalesce(
      shape, {&strides[0], &strides[1], &strides[2], &strides[3], &strides[4], &strides[5]}, false);
  args.ndim = static_cast<int>(sizes.size());
  args.numel = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>());
  std::copy(sizes.begin(), sizes.end(), args.sizes);
  for (size_t i = 0; i < operands.size(); ++i)
    std::copy(strides[i].begin(), strides[i].end(), operands[i].operand->strides);
}

double divisor(const Tensor& input, const Sizes& shape, int64_t reduction, const char* op) {
  switch (static_cast<Reduction>(reduction)) {
    case Reduction::kNone:
    case Reduction::kSum: return 1;
    case Reduction::kMean:
      return std::accumulate(shape.begin(), shape.end(), 1., std::multiplies<double>());
    case Reduction::kBatchMean: return input.dim() > 0 ? static_cast<double>(input.sizes()[0]) : 1;
  }
  throw std::runtime_error(std::string(op) + ": expected reduction to be 0 (none), 1 (mean), 2 " +
                           "(sum) or 3 (batchmean), got " + std::to_string(reduction));
}

void run(Kernel kernel, ElementwiseArgs& args, const Tensor& like) {
  const Launch launch(like);
#ifdef FUSED_CUDA
  std::optional<Tensor> workspace;
  if (args.total.data) {
    workspace = torch::stable::new_empty(like, {kWorkspaceBytes}, ScalarType::Byte);
    args.workspace = workspace->data_ptr();
  }
#endif
  kernel(args, launch.stream());
}

// kName: the loss's name as a static array, for messages. kLikeTarget: with reduction none the
// losses follow target's strides instead of input's.
template <Kernel kernel, const char* kName, bool kLikeTarget, typename... Parameters>
struct Elementwise {
  static ElementwiseArgs prepare(const Tensor& input, const Sizes& shape, int64_t reduction,
                                 Parameters... parameters) {
    ElementwiseArgs args;
    args.divisor = divisor(input, shape, reduction, kName);
    int i = 0;
    ((args.parameters[i++] = static_cast<double>(parameters)), ...);
    return args;
  }

  static Tensor forward(const Tensor& input, const Tensor& target, int64_t reduction,
                        Parameters... parameters, ScalarType dtype) {
    const Sizes shape = broadcast_shape(input, target, kName);
    ElementwiseArgs args = prepare(input, shape, reduction, parameters...);
    std::vector<Bound> operands = {{&args.input, &input, "input"},
                                   {&args.target, &target, "target"}};
    const bool each = static_cast<Reduction>(reduction) == Reduction::kNone;
    const Tensor loss =
        each ? empty_like(kLikeTarget ? target : input, shape, dtype) : empty_scalar(input, dtype);
    if (each) operands.push_back({&args.losses, &loss, "dtype"});
    lay_out(args, kName, shape, operands);
    if (!each) bind_total(args, loss);
    run(kernel, args, input);
    return loss;
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                             const Tensor& target, int64_t reduction,
                                             Parameters... parameters, bool needs_grad_input,
                                             bool needs_grad_target) {
    const Sizes shape = broadcast_shape(input, target, kName);
    ElementwiseArgs args = prepare(input, shape, reduction, parameters...);
    const auto empty_gradient = [&](const Tensor& tensor, bool needed) {
      return needed ? empty_like(tensor, shape, tensor.scalar_type())
                    : torch::stable::new_empty(tensor, {0});
    };
    const Tensor grad_input = empty_gradient(input, needs_grad_input);
    const Tensor grad_target = empty_gradient(target, needs_grad_target);
    std::vector<Bound> operands = {{&args.input, &input, "input"},
                                   {&args.target, &target, "target"},
                                   {&args.grad_output, &grad_output, "grad_output"}};
    if (needs_grad_input) operands.push_back({&args.grad_input, &grad_input, "input"});
    if (needs_grad_target) operands.push_back({&args.grad_target, &grad_target, "target"});
    lay_out(args, kName, shape, operands);
    if (needs_grad_input || needs_grad_target) run(kernel, args, input);
    return {grad_input, grad_target};
  }

  static Tensor loss_and_gradient(const Tensor& input, const Tensor& target,
                                  const Tensor& grad_input, int64_t reduction, ScalarType dtype,
                                  const std::optional<Tensor>& grad_output,
                                  Parameters... parameters) {
    const Sizes shape = broadcast_shape(input, target, kName);
    if (shape != sizes_of(input))
      throw std::runtime_error(
          std::string(kName) + ": a loss with its gradient needs an input of " +
          "the broadcast shape " + to_string(shape) + ", got " + to_string(sizes_of(input)));
    if (static_cast<Reduction>(reduction) == Reduction::kNone)
      throw std::runtime_error(std::string(kName) + ": a loss with its gradient needs a reduction");
    ElementwiseArgs args = prepare(input, shape, reduction, parameters...);
    lay_out(args, kName, shape,
            {{&args.input, &input, "input"},
             {&args.target, &target, "target"},
             {&args.grad_input, &grad_input, "input"}});
    if (grad_output) bind_one(args.grad_output, *grad_output, input);
    const Tensor loss = empty_scalar(input, dtype);
    bind_total(args, loss);
    run(kernel, args, input);
    return loss;
  }

  static std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target,
                                              int64_t reduction, Parameters... parameters,
                                              ScalarType dtype, std::optional<Tensor> grad_output) {
    const Tensor gradient = empty_like(input, sizes_of(input), input.scalar_type());
    return {
        loss_and_gradient(input, target, gradient, reduction, dtype, grad_output, parameters...),
        gradient};
  }

  static Tensor with_grad_(const Tensor& input, const Tensor& target, int64_t reduction,
                           Parameters... parameters, ScalarType dtype,
                           std::optional<Tensor> grad_output) {
    return loss_and_gradient(input, target, input, reduction, dtype, grad_output, parameters...);
  }

  // A factor on the device, read by the kernel: its strides stay 0.
  static void bind_one(Operand& operand, const Tensor& factor, const Tensor& input) {
    if (factor.numel() != 1)
      throw std::runtime_error(std::string(kName) +
                               ": expected grad_output to hold one number, got shape " +
                               to_string(sizes_of(factor)));
    if (factor.get_device_index() != input.get_device_index())
      throw std::runtime_error(std::string(kName) +
                               ": expected grad_output to be on input's device");
    operand.data = factor.data_ptr();
    operand.dtype = dtype_of(factor, kName, "grad_output");
  }

  static void bind_total(ElementwiseArgs& args, const Tensor& loss) {
    args.total.data = loss.data_ptr();
    args.total.dtype = dtype_of(loss, kName, "dtype");
  }

  static void implement(torch::stable::detail::StableLibrary& library) {
    const std::string name = kName;
    library.impl((name + "_forward").c_str(), TORCH_BOX(&forward));
    library.impl((name + "_backward").c_str(), TORCH_BOX(&backward));
    library.impl((name + "_with_grad").c_str(), TORCH_BOX(&with_grad));
    library.impl((name + "_with_grad_").c_str(), TORCH_BOX(&with_grad_));
  }
};

constexpr char kMseLoss[] = "mse_loss";
constexpr char kSmoothL1Loss[] = "smooth_l1_loss";
constexpr char kHuberLoss[] = "huber_loss";
constexpr char kKlDiv[] = "kl_div";

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  Elementwise<&mse_loss, kMseLoss, false>::implement(library);
  Elementwise<&smooth_l1_loss, kSmoothL1Loss, false, double>::implement(library);
  Elementwise<&huber_loss, kHuberLoss, false, double>::implement(library);
  Elementwise<&kl_div, kKlDiv, true, bool, bool>::implement(library);
}

}  // namespace fused::binding
