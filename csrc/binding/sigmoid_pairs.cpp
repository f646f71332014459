// fused::sigmoid_pairs_.
#include "tensors.h"

namespace fused::binding {
namespace {

Tensor pairs(const Tensor& input, const Tensor& target, const std::optional<Tensor>& bias,
             const Tensor& factor) {
  SigmoidPairsArgs args;
  args.dtype = dtype_of(input, "sigmoid_pairs_", "input");
  const ScalarType acc = accumulation_type(input.scalar_type());
  const Sizes shape = sizes_of(input), strides = strides_of(input);
  if (shape.size() != 2 || (shape[1] > 1 && strides[1] != 1))
    throw std::runtime_error(
        "sigmoid_pairs_: expected input of shape [rows, columns] with rows that are dense, got "
        "shape " +
        to_string(shape) + " and strides " + to_string(strides));
  args.rows = shape[0];
  args.cols = shape[1];
  args.input = input.data_ptr();
  args.row_stride = strides[0];
  const bool is_index = target.scalar_type() == ScalarType::Long;
  if (!target.is_contiguous() || !(is_index ? has_shape(target, {args.rows})
                                            : target.scalar_type() == ScalarType::Bool &&
                                                  has_shape(target, {args.rows, args.cols})))
    throw std::runtime_error("sigmoid_pairs_: expected target to be a contiguous int64 " +
                             to_string({args.rows}) + " or bool " + to_string(shape) +
                             ", got shape " + to_string(sizes_of(target)));
  if (is_index)
    args.target = static_cast<const int64_t*>(target.data_ptr());
  else
    args.positive = static_cast<const bool*>(target.data_ptr());
  if (bias) {
    if (!has_shape(*bias, {args.cols}) || bias->scalar_type() != acc || !bias->is_contiguous())
      throw std::runtime_error(
          "sigmoid_pairs_: expected bias to be contiguous, in the dtype of sums and of shape " +
          to_string({args.cols}) + ", got shape " + to_string(sizes_of(*bias)));
    args.bias = bias->data_ptr();
  }
  check_one_number(factor, "sigmoid_pairs_", "factor");
  if (factor.scalar_type() != acc)
    throw std::runtime_error("sigmoid_pairs_: expected factor in the dtype of sums");
  args.factor = factor.data_ptr();
  const Tensor sum = empty(input, {}, acc);
  args.sum = sum.data_ptr();
  const int64_t blocks = sigmoid_pairs_blocks(args.rows, args.cols, args.dtype);
  const Scratch workspace(input, static_cast<int64_t>(sizeof(double)) * blocks);
  args.workspace = static_cast<double*>(workspace.data());
  const Launch launch(input);
  sigmoid_pairs(args, launch.stream());
  return sum;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("sigmoid_pairs_", FUSED_BOX(&pairs));
}

}  // namespace fused::binding
