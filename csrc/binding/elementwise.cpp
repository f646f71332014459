// fused::X_forward, X_backward, X_with_grad and X_with_grad_ of an elementwise loss X. The build
// compiles this file once for each loss. The schemas of X are in compile_losses/ops/X.py.
#include "../this_loss.h"
#include "tensors.h"

namespace fused::binding {
namespace {

using this_loss::Op;

constexpr const char* kName = kThisLoss;

using OptionalTensor = std::optional<Tensor>;

struct Bound {
  Operand* operand;
  const Tensor* tensor;
  const char* name;
};

// Sets the iteration space and the operands' strides in it. The first operands decide its order.
void lay_out(ElementwiseArgs& args, const char* op, const Sizes& shape,
             const std::vector<Bound>& operands) {
  std::vector<Sizes> strides(operands.size());
  std::vector<Sizes*> all(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    operands[i].operand->data = operands[i].tensor->data_ptr();
    operands[i].operand->dtype = dtype_of(*operands[i].tensor, op, operands[i].name);
    strides[i] = broadcast_strides(*operands[i].tensor, shape, op, operands[i].name);
    all[i] = &strides[i];
  }
  const Sizes sizes = coalesce(shape, all, false);
  args.ndim = static_cast<int>(sizes.size());
  args.numel = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>());
  std::copy(sizes.begin(), sizes.end(), args.sizes);
  for (size_t i = 0; i < operands.size(); ++i)
    std::copy(strides[i].begin(), strides[i].end(), operands[i].operand->strides);
}

ScalarType accumulation_type(const Tensor& a, const Tensor& b, const Tensor& c) {
  for (const Tensor* tensor : {&a, &b, &c})
    if (tensor->scalar_type() == ScalarType::Double) return ScalarType::Double;
  return ScalarType::Float;
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

void run(ElementwiseArgs& args, const Tensor& like) {
  const Launch launch(like);
#ifdef FUSED_CUDA
  std::optional<Tensor> workspace;
  if (args.total.data) {
    workspace = empty(like, {kWorkspaceBytes}, ScalarType::Byte);
    args.workspace = workspace->data_ptr();
  }
#endif
  elementwise_loss<Op>(args, launch.stream());
}

// The tensors that a loss reads.
struct Inputs {
  const Tensor& input;
  const Tensor& target;
  const OptionalTensor* weight = nullptr;      // null if the loss has none
  const OptionalTensor* pos_weight = nullptr;  // likewise
};

// The types of the loss's optional tensors, in the order of Inputs.
template <Weights>
struct OptionalTensors;
template <>
struct OptionalTensors<Weights::kNone> {
  using Of = Types<>;
};
template <>
struct OptionalTensors<Weights::kWeight> {
  using Of = Types<const OptionalTensor&>;
};
template <>
struct OptionalTensors<Weights::kWeightAndPosWeight> {
  using Of = Types<const OptionalTensor&, const OptionalTensor&>;
};

// bool for each argument after input and target that has a gradient.
using WeightNeeds = std::conditional_t<Op::kWeightHasGradient, Types<bool>, Types<>>;

template <typename Optional, typename Needs, typename Parameters>
struct Elementwise;

template <typename... Optional, typename... Needs, typename... Parameters>
struct Elementwise<Types<Optional...>, Types<Needs...>, Types<Parameters...>> {
  static_assert(sizeof...(Parameters) <= std::size(ElementwiseArgs().parameters));

  using Gradients = std::conditional_t<sizeof...(Needs) == 0, std::tuple<Tensor, Tensor>,
                                       std::tuple<Tensor, Tensor, Tensor>>;

  // The part of a call that does not depend on its outputs.
  struct Call {
    Inputs inputs;
    Sizes shape;
    ElementwiseArgs args;
    std::vector<Bound> operands;

    Call(const Inputs& given, int64_t reduction, Parameters... parameters)
        : inputs(given), shape(broadcast_shape(given.input, given.target, kName)) {
      args.divisor = divisor(given.input, shape, reduction, kName);
      [[maybe_unused]] int i = 0;
      ((args.parameters[i++] = static_cast<double>(parameters)), ...);
      operands = {{&args.input, &given.input, "input"}, {&args.target, &given.target, "target"}};
      bind_optional(args.weight, given.weight, "weight");
      bind_optional(args.pos_weight, given.pos_weight, "pos_weight");
    }

    void bind_optional(Operand& operand, const OptionalTensor* tensor, const char* name) {
      if (tensor && *tensor) operands.push_back({&operand, &**tensor, name});
    }

    void launch() {
      lay_out(args, kName, shape, operands);
      run(args, inputs.input);
    }
  };

  static Tensor forward(const Tensor& input, const Tensor& target, Optional... optional,
                        int64_t reduction, Parameters... parameters, ScalarType dtype) {
    Call call({input, target, &optional...}, reduction, parameters...);
    if (static_cast<Reduction>(reduction) != Reduction::kNone) {
      const Tensor loss = empty(input, {}, dtype);
      bind_total(call.args, loss);
      call.launch();
      return loss;
    }
    const Tensor losses = Op::kLike == Like::kInput ? empty_like(input, call.shape, dtype)
                          : Op::kLike == Like::kTarget
                              ? empty_pointwise(target, input, call.shape, dtype, true)
                              : empty_pointwise(input, target, call.shape, dtype, false);
    call.operands.push_back({&call.args.losses, &losses, "dtype"});
    call.launch();
    return losses;
  }

  static Gradients backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                            Optional... optional, int64_t reduction, Parameters... parameters,
                            bool needs_grad_input, bool needs_grad_target, Needs... needs) {
    Call call({input, target, &optional...}, reduction, parameters...);
    call.operands.push_back({&call.args.grad_output, &grad_output, "grad_output"});
    // If a gradient is still to be summed over broadcast dimensions, it is not rounded before.
    const ScalarType wide = accumulation_type(grad_output, input, target);
    const auto gradient = [&](const Tensor& tensor, bool needed) {
      const ScalarType own = tensor.scalar_type();
      return needed ? empty_like(tensor, call.shape, has_shape(tensor, call.shape) ? own : wide)
                    : empty(tensor, {0}, own);
    };
    Tensor grad_input = gradient(input, needs_grad_input);
    Tensor grad_target = gradient(target, needs_grad_target);
    if (needs_grad_input) call.operands.push_back({&call.args.grad_input, &grad_input, "input"});
    if (needs_grad_target)
      call.operands.push_back({&call.args.grad_target, &grad_target, "target"});
    if constexpr (sizeof...(Needs) == 0) {
      if (needs_grad_input || needs_grad_target) call.launch();
      return {grad_input, grad_target};
    } else {
      const OptionalTensor& weight = *call.inputs.weight;
      const bool needs_grad_weight = (needs && ...) && weight.has_value();
      if (needs_grad_weight) broadcast_strides(*weight, call.shape, kName, "weight");  // or throws
      Tensor grad_weight = gradient(weight ? *weight : input, needs_grad_weight);
      if (needs_grad_weight)
        call.operands.push_back({&call.args.grad_weight, &grad_weight, "weight"});
      if (needs_grad_input || needs_grad_target || needs_grad_weight) call.launch();
      return {grad_input, grad_target, grad_weight};
    }
  }

  static Tensor loss_and_gradient(const Inputs& inputs, const Tensor& grad_input, int64_t reduction,
                                  Parameters... parameters, ScalarType dtype,
                                  const OptionalTensor& grad_output) {
    Call call(inputs, reduction, parameters...);
    if (!has_shape(inputs.input, call.shape))
      throw std::runtime_error(std::string(kName) +
                               ": a loss with its gradient needs an input of " +
                               "the broadcast shape " + to_string(call.shape) + ", got " +
                               to_string(sizes_of(inputs.input)));
    if (static_cast<Reduction>(reduction) == Reduction::kNone)
      throw std::runtime_error(std::string(kName) + ": a loss with its gradient needs a reduction");
    call.operands.push_back({&call.args.grad_input, &grad_input, "input"});
    if (grad_output) bind_one(call.args.grad_output, *grad_output, inputs.input);
    const Tensor loss = empty(inputs.input, {}, dtype);
    bind_total(call.args, loss);
    call.launch();
    return loss;
  }

  static std::tuple<Tensor, Tensor> with_grad(const Tensor& input, const Tensor& target,
                                              Optional... optional, int64_t reduction,
                                              Parameters... parameters, ScalarType dtype,
                                              const OptionalTensor& grad_output) {
    const Tensor gradient = empty_like(input, sizes_of(input), input.scalar_type());
    return {loss_and_gradient({input, target, &optional...}, gradient, reduction, parameters...,
                              dtype, grad_output),
            gradient};
  }

  static Tensor with_grad_(const Tensor& input, const Tensor& target, Optional... optional,
                           int64_t reduction, Parameters... parameters, ScalarType dtype,
                           const OptionalTensor& grad_output) {
    return loss_and_gradient({input, target, &optional...}, input, reduction, parameters..., dtype,
                             grad_output);
  }

  // Binds a factor that the kernel reads on the device. Its strides stay 0.
  static void bind_one(Operand& operand, const Tensor& factor, const Tensor& input) {
    check_one_number(factor, kName, "grad_output");
    operand.data = factor.data_ptr();
    operand.dtype = dtype_of(factor, kName, "grad_output");
  }

  static void bind_total(ElementwiseArgs& args, const Tensor& loss) {
    args.total.data = loss.data_ptr();
    args.total.dtype = dtype_of(loss, kName, "dtype");
  }

  static void implement(torch::stable::detail::StableLibrary& library) {
    const std::string name = kName;
    library.impl((name + "_forward").c_str(), FUSED_BOX(&forward));
    library.impl((name + "_backward").c_str(), FUSED_BOX(&backward));
    library.impl((name + "_with_grad").c_str(), FUSED_BOX(&with_grad));
    library.impl((name + "_with_grad_").c_str(), FUSED_BOX(&with_grad_));
  }
};

using Ops = Elementwise<OptionalTensors<Op::kWeights>::Of, WeightNeeds, typename Op::Parameters>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) { Ops::implement(library); }

}  // namespace fused::binding
