// Converts the tensors of a loss with class indices to its kernels' arguments.
#pragma once

#include "tensors.h"

namespace fused::binding {

// The common arguments of every call: logits [C], [N, C] or [N, C, d1, ...], and targets of the
// logits' shape without C.
struct ClassTargets {
  using Kernel = void (*)(const CrossEntropyArgs&, void*);

  const char* op;
  CrossEntropyArgs args;
  ScalarType acc;
  Tensor target;                 // int64, contiguous
  std::optional<Tensor> weight;  // acc, contiguous
  std::optional<Tensor> weight_sum;
  Sizes row_shape;
  int64_t class_dim;

  // classes: of all shards; input holds those from first_class on. By default input's.
  ClassTargets(const char* op, const Tensor& input, const Tensor& target_tensor,
               const std::optional<Tensor>& weight_tensor, int64_t reduction, int64_t ignore_index,
               double label_smoothing, int64_t first_class = 0, int64_t classes = -1)
      : ClassTargets(op, dtype_of(input, op, "input"), sizes_of(input), target_tensor,
                     weight_tensor, reduction, ignore_index, label_smoothing, first_class,
                     classes) {
    args.input = input.data_ptr();
  }

  // For logits of which only the shape and dtype are known.
  ClassTargets(const char* op, DType dtype, const Sizes& shape, const Tensor& target_tensor,
               const std::optional<Tensor>& weight_tensor, int64_t reduction, int64_t ignore_index,
               double label_smoothing, int64_t first_class = 0, int64_t classes = -1)
      : op(op),
        acc(dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float),
        target(target_tensor),
        row_shape(shape) {
    args.dtype = dtype;
    if (row_shape.empty())
      throw std::runtime_error(std::string(op) +
                               ": expected input to have at least 1 dimension, got 0");
    class_dim = row_shape.size() == 1 ? 0 : 1;
    args.cols = row_shape[class_dim];
    args.classes = classes < 0 ? args.cols : classes;
    args.first_class = first_class;
    if (first_class < 0 || first_class > args.classes)
      throw std::runtime_error(std::string(op) + ": expected first_class to be one of " +
                               std::to_string(args.classes) + " classes, got " +
                               std::to_string(first_class));
    row_shape.erase(row_shape.begin() + class_dim);
    if (!has_shape(target, row_shape))
      throw std::runtime_error(std::string(op) + ": expected target of shape " +
                               to_string(row_shape) + " for input of shape " + to_string(shape) +
                               ", got " + to_string(sizes_of(target)));
    if (target.scalar_type() != ScalarType::Long && target.scalar_type() != ScalarType::Byte)
      throw std::runtime_error(std::string(op) +
                               ": expected target of class indices to be int64 or uint8");
    args.rows = target.numel();
    target = as_contiguous(target, ScalarType::Long);
    args.target = static_cast<const int64_t*>(target.data_ptr());
    if (static_cast<Reduction>(reduction) > Reduction::kSum || reduction < 0)
      throw std::runtime_error(std::string(op) +
                               ": expected reduction to be 0 (none), 1 (mean) or 2 " +
                               ("(sum), got " + std::to_string(reduction)));
    args.reduction = static_cast<Reduction>(reduction);
    args.ignore_index = ignore_index;
    args.label_smoothing = label_smoothing > 0 ? label_smoothing : 0;  // 0 for nan, as in torch
    if (!weight_tensor) return;
    if (!has_shape(*weight_tensor, Sizes{args.classes}))
      throw std::runtime_error(std::string(op) + ": expected weight of shape " +
                               to_string({args.classes}) + ", got " +
                               to_string(sizes_of(*weight_tensor)));
    weight = as_contiguous(*weight_tensor, acc);
    args.weight = weight->data_ptr();
    if (label_smoothing > 0) {
      weight_sum = torch::stable::sum(*weight);
      args.weight_sum = weight_sum->data_ptr();
    }
  }

  void set_softcap(std::optional<double> softcap) {
    if (!softcap) return;
    if (!(*softcap > 0))
      throw std::runtime_error(std::string(op) + ": expected softcap to be positive, got " +
                               std::to_string(*softcap));
    args.softcap = *softcap;
  }

  // Lays out the rows of the logits, and of the gradient if there is one, in target's order.
  void lay_out(const Tensor& input, const std::optional<Tensor>& gradient) {
    const auto split = [&](const Tensor& tensor, RowLayout& layout) {
      Sizes strides = strides_of(tensor);
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

  // Returns the loss and the total weight. The kernel also writes row_losses.
  std::tuple<Tensor, Tensor> forward(Kernel kernel, const Tensor& input, ScalarType dtype) {
    const Tensor total_weight = empty(input, {}, acc);
    args.total_weight = total_weight.data_ptr();
    return {loss(kernel, input, dtype), total_weight};
  }

  // Returns the loss alone, in input's dtype.
  Tensor value(Kernel kernel, const Tensor& input) {
    const Scratch total_weight(input, acc_size());
    args.total_weight = total_weight.data();
    return loss(kernel, input, input.scalar_type());
  }

  // Sets the arguments that every backward reads. The returned tensor must outlive the kernel's
  // launch.
  Tensor set_saved(const Tensor& grad_output, const Tensor& total_weight) {
    if (total_weight.numel() != 1 || total_weight.scalar_type() != acc)
      throw std::runtime_error(std::string(op) + "_backward: expected total_weight as " + op +
                               "_forward returns it, got shape " +
                               to_string(sizes_of(total_weight)));
    args.total_weight = total_weight.data_ptr();
    return set_grad_output(grad_output);
  }

  Tensor set_grad_output(const Tensor& grad_output) {
    const bool each = args.reduction == Reduction::kNone;
    if (!has_shape(grad_output, each ? row_shape : Sizes{}))
      throw std::runtime_error(std::string(op) + "_backward: expected grad_output of shape " +
                               to_string(each ? row_shape : Sizes{}) + ", got " +
                               to_string(sizes_of(grad_output)));
    const Tensor dense = as_contiguous(grad_output);
    args.grad_output = dense.data_ptr();
    args.grad_output_dtype = dtype_of(grad_output, op, "grad_output");
    args.grad_output_stride = each ? 1 : 0;
    return dense;
  }

 private:
  int64_t acc_size() const { return acc == ScalarType::Double ? sizeof(double) : sizeof(float); }

  Tensor loss(Kernel kernel, const Tensor& input, ScalarType dtype) {
    const bool each = args.reduction == Reduction::kNone;
    const Tensor loss = each ? empty(input, row_shape, acc) : empty(input, {}, dtype);
    std::optional<Scratch> row_losses, partials;
    if (!each) {
      row_losses.emplace(input, args.rows * acc_size());
      args.loss = loss.data_ptr();
      args.loss_dtype = dtype_of(loss, op, "dtype");
    }
    args.row_losses = each ? loss.data_ptr() : row_losses->data();
    if (input.is_cuda() && row_sum_shares(args.rows) > 1) {
      partials.emplace(input, row_sum_shares(args.rows) * 2 * sizeof(double));
      args.partials = static_cast<double*>(partials->data());
    }
    const Launch launch(input);
    kernel(args, launch.stream());
    return each && dtype != acc ? torch::stable::to(loss, dtype) : loss;
  }
};

}  // namespace fused::binding
