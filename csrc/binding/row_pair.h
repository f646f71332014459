// Converts the tensors of a loss of row pairs to its kernels' arguments.
#pragma once

#include "tensors.h"

namespace fused::binding {

using RowPairKernel = void (*)(const RowPairArgs&, void*);

// input and target, of one shape. Their rows lie along dimension `class_dim`.
struct RowPair {
  const char* op;
  RowPairArgs args;
  ScalarType acc;
  Sizes row_shape;
  int64_t class_dim;
  std::optional<Tensor> weight;  // acc, contiguous

  RowPair(const char* op, const Tensor& input, const Tensor& target, int64_t class_dim,
          int64_t reduction)
      : op(op), row_shape(sizes_of(input)), class_dim(class_dim) {
    args.input.data = input.data_ptr();
    args.input.dtype = dtype_of(input, op, "input");
    args.target.data = target.data_ptr();
    args.target.dtype = dtype_of(target, op, "target");
    acc = args.is_double() ? ScalarType::Double : ScalarType::Float;
    if (!has_shape(target, row_shape))
      throw std::runtime_error(std::string(op) + ": expected target of input's shape " +
                               to_string(row_shape) + ", got " + to_string(sizes_of(target)));
    const int64_t dims = static_cast<int64_t>(row_shape.size());
    if (class_dim < -dims || class_dim >= dims)
      throw std::out_of_range(std::string(op) + ": expected input to have a dimension " +
                              std::to_string(class_dim) + ", got shape " + to_string(row_shape));
    if (class_dim < 0) this->class_dim += dims;
    args.cols = row_shape[this->class_dim];
    row_shape.erase(row_shape.begin() + this->class_dim);
    args.rows =
        std::accumulate(row_shape.begin(), row_shape.end(), int64_t(1), std::multiplies<int64_t>());
    if (reduction < 0 || static_cast<Reduction>(reduction) > Reduction::kBatchMean)
      throw std::runtime_error(std::string(op) + ": expected reduction to be 0 (none), 1 (mean), " +
                               "2 (sum) or 3 (batchmean), got " + std::to_string(reduction));
  }

  void set_weight(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    if (!has_shape(*tensor, Sizes{args.cols}))
      throw std::runtime_error(std::string(op) + ": expected weight of shape " +
                               to_string({args.cols}) + ", got " + to_string(sizes_of(*tensor)));
    weight = as_contiguous(*tensor, acc);
    args.weight = weight->data_ptr();
  }

  void set_one_grad_output(const Tensor& input, const std::optional<Tensor>& grad_output) {
    if (!grad_output) return;
    check_one_number(*grad_output, op, "grad_output");
    args.grad_output = grad_output->data_ptr();
    args.grad_output_dtype = dtype_of(*grad_output, op, "grad_output");
  }

  // Lays out the rows of all operands, in one order.
  void lay_out(const Tensor& input, const Tensor& target, const std::optional<Tensor>& grad_input,
               const std::optional<Tensor>& grad_target) {
    RowOperand* operands[4] = {&args.input, &args.target, &args.grad_input, &args.grad_target};
    const Tensor* tensors[4] = {&input, &target, grad_input ? &*grad_input : nullptr,
                                grad_target ? &*grad_target : nullptr};
    Sizes strides[4];
    for (int i = 0; i < 4; ++i) {
      strides[i] = Sizes(row_shape.size(), 0);
      if (!tensors[i]) continue;
      strides[i] = strides_of(*tensors[i]);
      operands[i]->layout.col_stride = args.cols == 1 ? 1 : strides[i][class_dim];
      strides[i].erase(strides[i].begin() + class_dim);
      operands[i]->data = tensors[i]->data_ptr();
      operands[i]->dtype = dtype_of(*tensors[i], op, "a gradient");
    }
    const Sizes sizes =
        coalesce(row_shape, {&strides[0], &strides[1], &strides[2], &strides[3]}, true);
    for (int i = 0; i < 4; ++i) {
      RowLayout& layout = operands[i]->layout;
      layout.ndim = static_cast<int>(sizes.size());
      std::copy(sizes.begin(), sizes.end(), layout.sizes);
      std::copy(strides[i].begin(), strides[i].end(), layout.strides);
    }
  }

  // Returns the loss and the rows' statistics. If `gradient` is given, the kernel writes the
  // gradient of input to it.
  std::tuple<Tensor, Tensor> forward(RowPairKernel kernel, const Tensor& input,
                                     const Tensor& target, int64_t reduction, ScalarType dtype,
                                     const std::optional<Tensor>& gradient = std::nullopt) {
    lay_out(input, target, gradient, std::nullopt);
    const bool each = static_cast<Reduction>(reduction) == Reduction::kNone;
    const Tensor stats = empty(input, {args.rows, kRowPairStats}, acc);
    const Tensor loss = each ? empty(input, row_shape, dtype) : empty(input, {}, dtype);
    args.stats = stats.data_ptr();
    (each ? args.losses : args.loss) = loss.data_ptr();
    args.loss_dtype = dtype_of(loss, op, "dtype");
    std::optional<Tensor> workspace;
    if (input.is_cuda() && !each && row_sum_shares(args.rows) > 1) {
      workspace = empty(input, {row_sum_shares(args.rows)}, ScalarType::Double);
      args.workspace = static_cast<double*>(workspace->data_ptr());
    }
    const Launch launch(input);
    kernel(args, launch.stream());
    return {loss, stats};
  }

  Tensor loss_and_gradient(RowPairKernel kernel, const Tensor& input, const Tensor& target,
                           int64_t reduction, ScalarType dtype, const Tensor& gradient,
                           const std::optional<Tensor>& grad_output) {
    if (static_cast<Reduction>(reduction) == Reduction::kNone)
      throw std::runtime_error(std::string(op) + ": a loss with its gradient needs a reduction");
    set_one_grad_output(input, grad_output);
    return std::get<0>(forward(kernel, input, target, reduction, dtype, gradient));
  }

  // Sets the arguments that every backward reads. The returned tensor must outlive the kernel's
  // launch.
  Tensor set_saved(const Tensor& grad_output, const Tensor& stats, int64_t reduction) {
    const bool each = static_cast<Reduction>(reduction) == Reduction::kNone;
    if (!has_shape(grad_output, each ? row_shape : Sizes{}))
      throw std::runtime_error(std::string(op) + ": expected grad_output of shape " +
                               to_string(each ? row_shape : Sizes{}) + ", got " +
                               to_string(sizes_of(grad_output)));
    if (!has_shape(stats, Sizes{args.rows, kRowPairStats}) || stats.scalar_type() != acc ||
        !stats.is_contiguous())
      throw std::runtime_error(std::string(op) + ": expected stats as " + op +
                               "_forward returns them, got shape " + to_string(sizes_of(stats)));
    const Tensor dense = as_contiguous(grad_output);
    args.stats = stats.data_ptr();
    args.grad_output = dense.data_ptr();
    args.grad_output_dtype = dtype_of(grad_output, op, "grad_output");
    args.grad_output_stride = each ? 1 : 0;
    return dense;
  }

  std::tuple<Tensor, Tensor> backward(RowPairKernel kernel, const Tensor& grad_output,
                                      const Tensor& input, const Tensor& target,
                                      const Tensor& stats, int64_t reduction, bool needs_grad_input,
                                      bool needs_grad_target) {
    const Tensor dense = set_saved(grad_output, stats, reduction);
    std::optional<Tensor> grad_input, grad_target;
    if (needs_grad_input) grad_input = empty_gradient(input);
    if (needs_grad_target) grad_target = empty_gradient(target);
    lay_out(input, target, grad_input, grad_target);
    const Launch launch(input);
    if (grad_input || grad_target) kernel(args, launch.stream());
    return {grad_input ? *grad_input : empty(input, {0}, input.scalar_type()),
            grad_target ? *grad_target : empty(target, {0}, target.scalar_type())};
  }
};

}  // namespace fused::binding
