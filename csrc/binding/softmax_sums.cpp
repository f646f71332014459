// fused::softmax_sums, softmax_sums_add_ and softmax_sums_gradient_.
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

void check_vector(const Tensor& tensor, int64_t count, ScalarType dtype, const char* what) {
  if (has_shape(tensor, {count}) && tensor.scalar_type() == dtype && tensor.is_contiguous()) return;
  throw std::runtime_error(std::string("softmax_sums: expected ") + what +
                           " as a contiguous tensor of shape " + to_string({count}) +
                           " in int64, or in the dtype of the sums, got shape " +
                           to_string(sizes_of(tensor)));
}

// Rows of a larger matrix, which begin at first_row.
struct SomeRows {
  DType dtype;
  ScalarType acc;
  int64_t rows, cols, row_stride, all_rows, first_row;

  SomeRows(const Tensor& input, const Tensor& of_rows, int64_t first)
      : dtype(dtype_of(input, "softmax_sums", "input")),
        acc(accumulation_type(input.scalar_type())),
        first_row(first) {
    const Sizes shape = sizes_of(input), strides = strides_of(input);
    if (shape.size() != 2 || (shape[1] > 1 && strides[1] != 1))
      throw std::runtime_error(
          "softmax_sums: expected input of shape [rows, columns] with rows that are dense, got "
          "shape " +
          to_string(shape) + " and strides " + to_string(strides));
    rows = shape[0];
    cols = shape[1];
    row_stride = strides[0];
    all_rows = of_rows.numel();
    if (first < 0 || first + rows > all_rows)
      throw std::runtime_error("softmax_sums: expected rows of a matrix of " +
                               std::to_string(all_rows) + " rows, got " + std::to_string(rows) +
                               " from row " + std::to_string(first));
  }

  // The numbers of these rows, of those of all.
  template <typename T = void>
  T* of_rows(const Tensor& tensor, const char* what, ScalarType type) const {
    check_vector(tensor, all_rows, type, what);
    const int64_t size = type == ScalarType::Float ? 4 : 8;
    return reinterpret_cast<T*>(static_cast<std::byte*>(tensor.data_ptr()) + first_row * size);
  }
  void* of_rows(const Tensor& tensor, const char* what) const { return of_rows(tensor, what, acc); }
  void* of_cols(const Tensor& tensor, const char* what) const {
    check_vector(tensor, cols, acc, what);
    return tensor.data_ptr();
  }
  const int64_t* row_targets(const Tensor& tensor) const {
    return of_rows<const int64_t>(tensor, "row_target", ScalarType::Long);
  }
  const int64_t* col_targets(const Tensor& tensor) const {
    check_vector(tensor, cols, ScalarType::Long, "column_target");
    return static_cast<const int64_t*>(tensor.data_ptr());
  }
};

void add(const Tensor& input, const Tensor& row_largest, const Tensor& row_sum,
         const Tensor& row_own, const Tensor& row_target, const Tensor& col_largest,
         const Tensor& col_sum, const Tensor& col_own, const Tensor& col_target, int64_t first_row,
         int64_t ignore_index) {
  const SomeRows some(input, row_largest, first_row);
  SoftmaxSumsArgs args;
  args.rows = some.rows;
  args.cols = some.cols;
  args.dtype = some.dtype;
  args.input = input.data_ptr();
  args.row_stride = some.row_stride;
  args.row_largest = some.of_rows(row_largest, "row_largest");
  args.row_sum = some.of_rows(row_sum, "row_sum");
  args.row_own = some.of_rows(row_own, "row_own");
  args.row_target = some.row_targets(row_target);
  args.col_largest = some.of_cols(col_largest, "column_largest");
  args.col_sum = some.of_cols(col_sum, "column_sum");
  args.col_own = some.of_cols(col_own, "column_own");
  args.col_target = some.col_targets(col_target);
  args.first_row = first_row;
  args.all_rows = some.all_rows;
  args.ignore_index = ignore_index;
  if (args.rows == 0 || args.cols == 0) return;
  const int64_t size = some.acc == ScalarType::Double ? 8 : 4;
  const Scratch workspace(input, size * softmax_sums_numbers(args.rows, args.cols, args.dtype));
  args.workspace = workspace.data();
  const Launch launch(input);
  softmax_sums(args, launch.stream());
}

void gradient(const Tensor& input, const Tensor& row_largest, const Tensor& row_sum,
              const Tensor& row_factor, const Tensor& row_target, const Tensor& col_largest,
              const Tensor& col_sum, const Tensor& col_factor, const Tensor& col_target,
              int64_t first_row, double label_smoothing) {
  const SomeRows some(input, row_largest, first_row);
  SoftmaxSumsGradientArgs args;
  args.rows = some.rows;
  args.cols = some.cols;
  args.dtype = some.dtype;
  args.input = input.data_ptr();
  args.row_stride = some.row_stride;
  const auto share = [&](int64_t classes) {
    return classes > 0 ? label_smoothing / static_cast<double>(classes) : 0.;
  };
  args.of_rows = {some.of_rows(row_largest, "row_largest"), some.of_rows(row_sum, "row_sum"),
                  some.of_rows(row_factor, "row_factor"), some.row_targets(row_target),
                  share(args.cols)};
  args.of_cols = {some.of_cols(col_largest, "column_largest"), some.of_cols(col_sum, "column_sum"),
                  some.of_cols(col_factor, "column_factor"), some.col_targets(col_target),
                  share(some.all_rows)};
  args.first_row = first_row;
  args.own = 1 - label_smoothing;
  const Launch launch(input);
  softmax_sums_gradient(args, launch.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("softmax_sums", FUSED_BOX(&sums));
  library.impl("softmax_sums_add_", FUSED_BOX(&add));
  library.impl("softmax_sums_gradient_", FUSED_BOX(&gradient));
}

}  // namespace fused::binding
