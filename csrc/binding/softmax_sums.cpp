// fused::softmax_sums.
#include "tensors.h"

namespace fused::binding {
namespace {

using Sums = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Sums sums(const Tensor& input, const std::optional<Tensor>& factor) {
  SoftmaxSumsArgs args;
  args.dtype = dtype_of(input, "softmax_sums", "input");
  const ScalarType acc = accumulation_type(input.scalar_type());
  const Sizes shape = sizes_of(input);
  if (shape.size() != 2)
    throw std::runtime_error("softmax_sums: expected input of shape [rows, columns], got " +
                             to_string(shape));
  // Of a transposed matrix, what are columns to the caller are rows to the kernel.
  const Sizes strides = strides_of(input);
  const bool transposed = shape[1] > 1 && strides[1] != 1 && (shape[0] <= 1 || strides[0] == 1);
  const bool dense = shape[transposed ? 0 : 1] <= 1 || strides[transposed ? 0 : 1] == 1;
  const Tensor matrix = dense ? input : as_contiguous(input);
  args.rows = shape[transposed ? 1 : 0];
  args.cols = shape[transposed ? 0 : 1];
  args.input = matrix.data_ptr();
  args.row_stride = strides_of(matrix)[transposed ? 1 : 0];
  if (factor) {
    check_one_number(*factor, "softmax_sums", "factor");
    args.factor = factor->data_ptr();
    args.factor_dtype = dtype_of(*factor, "softmax_sums", "factor");
  }
  const Tensor row_largest = empty(input, {args.rows}, acc),
               row_sum = empty(input, {args.rows}, acc);
  const Tensor col_largest = empty(input, {args.cols}, acc),
               col_sum = empty(input, {args.cols}, acc);
  args.row_largest = row_largest.data_ptr();
  args.row_sum = row_sum.data_ptr();
  args.col_largest = col_largest.data_ptr();
  args.col_sum = col_sum.data_ptr();
  const int64_t size = acc == ScalarType::Double ? 8 : 4;
  const Scratch workspace(input, size * softmax_sums_numbers(args.rows, args.cols, args.dtype));
  args.workspace = workspace.data();
  const Launch launch(input);
  softmax_sums(args, launch.stream());
  if (transposed) return {col_largest, col_sum, row_largest, row_sum};
  return {row_largest, row_sum, col_largest, col_sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_sums", FUSED_BOX(&sums));
}

}  // namespace fused::binding
