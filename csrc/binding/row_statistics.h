// Converts the tensors of row statistics to their kernels' arguments.
#pragma once

#include "tensors.h"

namespace fused::binding {

using Grad = const std::optional<Tensor>&;

// logits [rows, classes], copied if the classes of a row do not lie side by side.
inline Tensor with_contiguous_rows(const Tensor& logits) {
  return logits.sizes()[1] > 1 && logits.strides()[1] != 1 ? as_contiguous(logits) : logits;
}

// The logits [rows, classes] and the other arguments that forward and backward have in common.
struct RowsOfLogits {
  RowStatisticsArgs args;
  ScalarType acc;
  Tensor input;  // with contiguous rows
  std::optional<Tensor> target;

  RowsOfLogits(const Tensor& logits, const std::optional<Tensor>& targets, int64_t ignore_index,
               std::optional<double> softcap)
      : input(logits) {
    args.dtype = dtype_of(logits, "row_statistics", "input");
    acc = accumulation_type(logits.scalar_type());
    const Sizes shape = sizes_of(logits);
    if (shape.size() != 2 || shape[1] < 1)
      throw std::runtime_error(
          "row_statistics: expected input of shape [rows, classes] with at "
          "least 1 class, got " +
          to_string(shape));
    args.rows = shape[0];
    args.cols = shape[1];
    input = with_contiguous_rows(logits);
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
    return {tensor->data_ptr(), dtype_of(*tensor, "row_statistics", name), strides_of(*tensor)[0]};
  }

  // Checks the stats that the forward saved. The returned tensor must outlive the kernel's launch.
  Tensor saved(const Tensor& stats) const {
    if (!has_shape(stats, Sizes{args.rows, 3}) || stats.scalar_type() != acc)
      throw std::runtime_error(std::string("row_statistics_backward: expected stats ") +
                               "as row_statistics_forward returns it, got shape " +
                               to_string(sizes_of(stats)));
    return as_contiguous(stats);
  }

  void set_gradients(Grad nll, Grad logsumexp, Grad entropy, Grad total) {
    if (target) args.grad_nll = grad(nll, "grad_nll");
    args.grad_logsumexp = grad(logsumexp, "grad_logsumexp");
    args.grad_entropy = grad(entropy, "grad_entropy");
    args.grad_total = grad(total, "grad_total");
  }

  // kernel(args, stream) writes the gradient to `result`, of contiguous rows.
  template <typename Kernel>
  void write(const Tensor& result, const Tensor& stats, Kernel&& kernel) {
    const Tensor from_forward = saved(stats);
    args.stats = from_forward.data_ptr();
    args.grad_input = result.data_ptr();
    args.grad_row_stride = strides_of(result)[0];
    const Launch launch(result);
    kernel(args, launch.stream());
  }

  // The same, over the logits. If their rows are not contiguous, `input` is a copy of them.
  template <typename Kernel>
  void write_over(const Tensor& logits, const Tensor& stats, Kernel&& kernel) {
    write(input, stats, kernel);
    if (input.data_ptr() == logits.data_ptr()) return;
    Tensor result = logits;
    torch::stable::copy_(result, input);
  }
};

}  // namespace fused::binding
