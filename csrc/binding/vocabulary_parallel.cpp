// fused::vocabulary_parallel_parts, _merge, _gradient and _gradient_: cross entropy with sharded
// classes.
#include "class_targets.h"

namespace fused::binding {
namespace {

constexpr const char* kOp = "cross_entropy";

Tensor parts(const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight,
             int64_t first_class, int64_t classes, int64_t ignore_index, double label_smoothing,
             std::optional<double> softcap) {
  ClassTargets problem(kOp, input, target, weight, 0, ignore_index, label_smoothing, first_class,
                       classes);
  problem.set_softcap(softcap);
  problem.lay_out(input, std::nullopt);
  const Tensor result = empty(input, {problem.args.rows, label_smoothing > 0 ? 4 : 3}, problem.acc);
  problem.args.parts = result.data_ptr();
  const Launch launch(input);
  cross_entropy_parts(problem.args, launch.stream());
  return result;
}

std::tuple<Tensor, Tensor, Tensor> merge(const Tensor& parts, const Tensor& target,
                                         const std::optional<Tensor>& weight,
                                         const std::optional<Tensor>& shard_weights,
                                         int64_t classes, int64_t reduction, int64_t ignore_index,
                                         double label_smoothing, ScalarType dtype) {
  const DType acc = dtype_of(parts, kOp, "parts");
  Sizes shape = sizes_of(target);
  shape.insert(shape.begin() + (shape.empty() ? 0 : 1), classes);
  ClassTargets problem(kOp, acc, shape, target, weight, reduction, ignore_index, label_smoothing);
  CrossEntropyArgs& args = problem.args;
  const Sizes expected = sizes_of(parts);
  const bool smoothing = label_smoothing > 0;
  if (expected.size() != 3 || expected[0] < 1 || expected[1] != args.rows ||
      expected[2] != (smoothing ? 4 : 3) || parts.scalar_type() != problem.acc)
    throw std::runtime_error("vocabulary_parallel_merge: expected parts of shape [shards, " +
                             std::to_string(args.rows) + (smoothing ? ", 4]" : ", 3]") + ", got " +
                             to_string(expected));
  const Tensor dense = as_contiguous(parts);
  args.parts = dense.data_ptr();
  args.shards = expected[0];
  std::optional<Tensor> masses;
  if (smoothing) {
    if (!shard_weights || !has_shape(*shard_weights, Sizes{args.shards}))
      throw std::runtime_error("vocabulary_parallel_merge: expected shard_weights of shape " +
                               to_string({args.shards}) + " with label smoothing");
    masses = as_contiguous(*shard_weights, problem.acc);
    args.shard_weights = masses->data_ptr();
  }
  const Tensor stats = empty(parts, {args.rows, 2}, problem.acc);
  args.stats = stats.data_ptr();
  const auto [loss, total_weight] = problem.forward(&cross_entropy_merge, parts, dtype);
  return {loss, stats, total_weight};
}

void write_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                    const std::optional<Tensor>& weight, const Tensor& stats, const Tensor& result,
                    int64_t first_class, int64_t classes, int64_t reduction, int64_t ignore_index,
                    double label_smoothing, std::optional<double> softcap,
                    const std::optional<Tensor>& grad_squares) {
  ClassTargets problem(kOp, input, target, weight, reduction, ignore_index, label_smoothing,
                       first_class, classes);
  problem.set_softcap(softcap);
  CrossEntropyArgs& args = problem.args;
  if (args.reduction == Reduction::kMean)
    throw std::runtime_error(
        "vocabulary_parallel_gradient: expected reduction to be 0 (none) or 2 (sum), got 1");
  if (!has_shape(stats, Sizes{args.rows, 2}) || stats.scalar_type() != problem.acc ||
      !stats.is_contiguous())
    throw std::runtime_error(
        "vocabulary_parallel_gradient: expected stats as " +
        ("vocabulary_parallel_merge returns them, got shape " + to_string(sizes_of(stats))));
  problem.lay_out(input, result);
  const Tensor dense = problem.set_grad_output(grad_output);
  args.stats = stats.data_ptr();
  std::optional<Tensor> squares;
  if (grad_squares) {
    const bool each = sizes_of(*grad_squares) == problem.row_shape;
    if (!each && !has_shape(*grad_squares, Sizes{}))
      throw std::runtime_error(
          "vocabulary_parallel_gradient: expected grad_squares of shape [] or " +
          to_string(problem.row_shape) + ", got " + to_string(sizes_of(*grad_squares)));
    squares = as_contiguous(*grad_squares);
    args.grad_squares = squares->data_ptr();
    args.grad_squares_dtype = dtype_of(*grad_squares, kOp, "grad_squares");
    args.grad_squares_stride = each ? 1 : 0;
  }
  const Launch launch(input);
  cross_entropy_backward(args, launch.stream());
}

Tensor gradient(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                const std::optional<Tensor>& weight, const Tensor& stats, int64_t first_class,
                int64_t classes, int64_t reduction, int64_t ignore_index, double label_smoothing,
                std::optional<double> softcap, const std::optional<Tensor>& grad_squares) {
  const Tensor result = empty_gradient(input);
  write_gradient(grad_output, input, target, weight, stats, result, first_class, classes, reduction,
                 ignore_index, label_smoothing, softcap, grad_squares);
  return result;
}

void gradient_(const Tensor& grad_output, const Tensor& input, const Tensor& target,
               const std::optional<Tensor>& weight, const Tensor& stats, int64_t first_class,
               int64_t classes, int64_t reduction, int64_t ignore_index, double label_smoothing,
               std::optional<double> softcap, const std::optional<Tensor>& grad_squares) {
  write_gradient(grad_output, input, target, weight, stats, input, first_class, classes, reduction,
                 ignore_index, label_smoothing, softcap, grad_squares);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, FUSED_DISPATCH_KEY, library) {
  library.impl("vocabulary_parallel_parts", FUSED_BOX(&parts));
  library.impl("vocabulary_parallel_merge", FUSED_BOX(&merge));
  library.impl("vocabulary_parallel_gradient", FUSED_BOX(&gradient));
  library.impl("vocabulary_parallel_gradient_", FUSED_BOX(&gradient_));
}

}  // namespace fused::binding
