// What a binding hands to a kernel: plain pointers, sizes and strides, the same for every device.
// No torch headers here, so that kernels compile without torch.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fused {

// Irreducible dimensions after coalescing; torch's own CUDA kernels stop at 25 as well.
constexpr int kMaxDims = 25;

enum class DType : int8_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Values of torch.nn.functional's reductions; batchmean is kl_div's and divides by input.size(0).
enum class Reduction : int8_t { kNone = 0, kMean = 1, kSum = 2, kBatchMean = 3 };

// A tensor seen through the iteration space of its argument struct. Strides are in elements, the
// innermost dimension first. A null `data` means that the operand takes no part.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t strides[kMaxDims] = {};
};

// One elementwise loss over the broadcast of input and target. Which outputs are present says what
// is computed:
//   losses                     weight * the loss of each element (reduction none)
//   total                      their sum over `divisor`, one number
//   grad_input, grad_target    (grad_output or 1) * weight * derivative / divisor
//   grad_weight                (grad_output or 1) * the loss without its weight / divisor
// Arithmetic is in double when an argument or the loss is float64, in float otherwise.
struct ElementwiseArgs {
  int ndim = 0;
  int64_t numel = 0;
  int64_t sizes[kMaxDims] = {};  // innermost first, dimensions of size 1 removed
  Operand input, target;
  Operand weight;       // of each element; absent: 1
  Operand pos_weight;   // binary cross entropy's, of the positive class; absent: 1
  Operand grad_output;  // one element where there is a total; absent: 1
  Operand losses, grad_input, grad_target, grad_weight;
  Operand total;              // one element
  double divisor = 1;         // mean: numel; batchmean: input.size(0); sum and none: 1
  double parameters[2] = {};  // the loss's own: beta, delta, flags
  void* workspace = nullptr;  // device scratch of kWorkspaceBytes; CPU kernels need none
};

// A grad_output counts only where it stands for the loss's dtype: beside a total it is a factor.
inline bool uses_double(const ElementwiseArgs& args) {
  const Operand& loss = args.total.data ? args.total : args.grad_output;
  for (const Operand* operand : {&args.input, &args.target, &args.losses, &loss})
    if (operand->data && operand->dtype == DType::kFloat64) return true;
  return false;
}

// Room for one double per block of the largest grid that a CUDA reduction launches.
constexpr int64_t kWorkspaceBlocks = 4096;
constexpr int64_t kWorkspaceBytes = kWorkspaceBlocks * 8;

// Where the rows of logits lie: row r starts at sum_d index_d(r) * strides[d], where index_d are
// the digits of r in the mixed radix `sizes`, innermost first.
struct RowLayout {
  int ndim = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
  int64_t col_stride = 1;
};

// Cross entropy of `rows` rows of `cols` logits with class indices, and nll_loss of rows of
// log-probabilities. acc_t is double for float64 logits and float otherwise.
//
// The rows may hold a shard of the classes: cols of `classes`, from first_class on. Targets and
// weights are those of all classes; a target in another shard is none of this shard's logits.
struct CrossEntropyArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t first_class = 0;
  int64_t classes = 0;
  DType dtype = DType::kFloat32;  // of input and grad_input
  const void* input = nullptr;    // logits, addressed by input_layout
  RowLayout input_layout;
  const int64_t* target = nullptr;   // [rows]
  const void* weight = nullptr;      // acc_t [classes]; null: all ones
  const void* weight_sum = nullptr;  // acc_t, one element: sum of weight; only with smoothing
  // acc_t [shards, rows, 3] or, with smoothing, [shards, rows, 4]: ShardPart. cross_entropy_parts
  // writes those of one shard, cross_entropy_merge reads those of all.
  void* parts = nullptr;
  int64_t shards = 1;
  const void* shard_weights = nullptr;  // acc_t [shards]: each shard's sum of weight; as weight_sum
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;  // 0 when off; never negative
  // Of the logits, before all else: they stand for softcap * tanh(logit / softcap). 0: none.
  double softcap = 0;
  // acc_t [rows, 2]: largest logit, log(sum(exp(logit - largest))). Null where a forward need
  // not write them; the CPU makes the gradient from them.
  void* stats = nullptr;
  void* row_losses = nullptr;    // acc_t [rows]
  void* loss = nullptr;          // one element of loss_dtype; null with reduction none
  void* total_weight = nullptr;  // acc_t, one element: sum of weight[target], 0 where ignored
  double* partials = nullptr;    // [row_sum_shares(rows), 2], of the sums over the rows on CUDA
  DType loss_dtype = DType::kFloat32;
  // [rows] with grad_output_stride, or one element; null: 1
  const void* grad_output = nullptr;
  DType grad_output_dtype = DType::kFloat32;
  int64_t grad_output_stride = 0;
  void* grad_input = nullptr;  // addressed by grad_layout
  RowLayout grad_layout;       // the same sizes as input_layout
};

struct RowOperand {
  void* data = nullptr;  // null: takes no part
  DType dtype = DType::kFloat32;
  RowLayout layout;
};

// A loss of `rows` rows of `cols` logits against target rows of the same classes. acc_t is double
// when input or target is float64, and float otherwise. Which outputs are present says what is
// computed.
struct RowPairArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  RowOperand input, target;      // layouts of all operands have the same sizes
  const void* weight = nullptr;  // acc_t [cols]; null: all ones
  double parameters[2] = {};     // the loss's own
  double divisor = 1;            // of the reduction
  void* stats = nullptr;         // acc_t [rows, kRowPairStats]: RowPairStatistics
  void* losses = nullptr;        // [rows] of loss_dtype: reduction none
  void* loss = nullptr;          // one element of loss_dtype: the other reductions
  DType loss_dtype = DType::kFloat32;
  // [rows] with grad_output_stride, or one element; null: 1
  const void* grad_output = nullptr;
  DType grad_output_dtype = DType::kFloat32;
  int64_t grad_output_stride = 0;
  RowOperand grad_input, grad_target;  // grad_input may be the very buffer of input
  void* grad_weight = nullptr;         // acc_t [cols]
  // On CUDA of [row_sum_shares(rows)] for the loss; of [weight_shares(rows, cols), cols] for
  // grad_weight.
  double* workspace = nullptr;

  bool is_double() const {
    return input.dtype == DType::kFloat64 || target.dtype == DType::kFloat64;
  }
};

// Into how many shares the rows are cut, at most, for the sums over them: few rows are summed
// faster by one block than by two launches.
constexpr int64_t row_sum_shares(int64_t rows) { return rows <= 8192 ? 1 : 256; }

constexpr int64_t kRowPairStats = 6;

// What a statistic of each row has as its gradient.
struct RowGrad {
  const void* data = nullptr;  // [rows] with stride; null: 0
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
};

// Statistics of `rows` rows of `cols` logits that lie side by side, see losses/row_statistics.h, or
// their gradient. acc_t is double for float64 logits and float otherwise.
struct RowStatisticsArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;  // of input and grad_input
  const void* input = nullptr;
  int64_t row_stride = 0;
  const int64_t* target = nullptr;  // [rows]; null: none
  int64_t ignore_index = -100;
  double softcap = 0;  // as in CrossEntropyArgs
  // acc_t [rows]. The forward writes all of them, and what the backward reads.
  void* nll = nullptr;  // null without targets
  void* logsumexp = nullptr;
  void* entropy = nullptr;
  void* total = nullptr;
  void* maximum = nullptr;
  int64_t* argmax = nullptr;  // [rows]
  void* stats = nullptr;      // acc_t [rows, 3], see RowStatistics
  // The backward's.
  RowGrad grad_nll, grad_logsumexp, grad_entropy, grad_total;
  void* grad_input = nullptr;  // may be the buffer of input, with its row_stride
  int64_t grad_row_stride = 0;
};

// Into how many shares the rows are cut for the sums over them that are a weight's gradient.
constexpr int64_t weight_shares(int64_t rows, int64_t cols) {
  const int64_t most = cols > 0 && cols < 32768 ? 32768 / cols : 1;
  return rows < most ? (rows > 0 ? rows : 1) : most;
}

}  // namespace fused
