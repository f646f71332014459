// The arguments of the kernels: plain pointers, sizes and strides, the same for every device. This
// header includes no torch header, so that kernels compile without torch.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fused {

// The most dimensions that may remain after coalescing. torch's CUDA kernels have the same limit.
constexpr int kMaxDims = 25;

enum class DType : int8_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// none, mean and sum have the values that torch.nn.functional gives them. batchmean is kl_div's; it
// divides by input.size(0).
enum class Reduction : int8_t { kNone = 0, kMean = 1, kSum = 2, kBatchMean = 3 };

// A tensor, viewed in the iteration space of the struct that holds it. Strides are in elements, the
// innermost dimension first. If `data` is null, the operand is absent.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t strides[kMaxDims] = {};
};

// One elementwise loss over the broadcast of input and target. A kernel computes the outputs that
// are present:
//   losses                     weight * the loss of each element (reduction none)
//   total                      the sum of the losses over `divisor`, one number
//   grad_input, grad_target    (grad_output or 1) * weight * derivative / divisor
//   grad_weight                (grad_output or 1) * the loss without its weight / divisor
// If an argument or the loss is float64, arithmetic is in double, otherwise in float.
struct ElementwiseArgs {
  int ndim = 0;
  int64_t numel = 0;
  int64_t sizes[kMaxDims] = {};  // innermost first, dimensions of size 1 removed
  Operand input, target;
  Operand weight;       // of each element; absent: 1
  Operand pos_weight;   // binary cross entropy's weight of the positive class; absent: 1
  Operand grad_output;  // one element if there is a total; absent: 1
  Operand losses, grad_input, grad_target, grad_weight;
  Operand total;              // one element
  double divisor = 1;         // mean: numel; batchmean: input.size(0); sum and none: 1
  double parameters[2] = {};  // of this loss: beta, delta, flags
  void* workspace = nullptr;  // device scratch of kWorkspaceBytes; CPU kernels need none
};

// Without a total, grad_output has the loss's dtype. Beside a total, grad_output is a factor of any
// dtype and does not count.
inline bool uses_double(const ElementwiseArgs& args) {
  const Operand& loss = args.total.data ? args.total : args.grad_output;
  for (const Operand* operand : {&args.input, &args.target, &args.losses, &loss})
    if (operand->data && operand->dtype == DType::kFloat64) return true;
  return false;
}

// Room for one double per block of the largest grid that a CUDA reduction launches.
constexpr int64_t kWorkspaceBlocks = 4096;
constexpr int64_t kWorkspaceBytes = kWorkspaceBlocks * 8;

// The offsets of the rows of logits. Row r starts at sum_d index_d(r) * strides[d], where
// index_d(r) are the digits of r in the mixed radix `sizes`, innermost first.
struct RowLayout {
  int ndim = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
  int64_t col_stride = 1;
};

// Cross entropy of `rows` rows of `cols` logits with class indices, and nll_loss of rows of
// log-probabilities. acc_t is double for float64 logits and float otherwise.
//
// The rows may hold a shard of the classes: `cols` of `classes` classes, from first_class on.
// Targets and weights refer to all classes. If a target is in another shard, no logit here belongs
// to it.
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
  // acc_t [shards, rows, kPartColumns] or, with smoothing, [shards, rows, kSmoothingPartColumns],
  // see losses/cross_entropy.h. cross_entropy_parts writes the parts of one shard,
  // cross_entropy_merge reads the parts of all shards.
  void* parts = nullptr;
  int64_t shards = 1;
  const void* shard_weights = nullptr;  // acc_t [shards]: sums of weight; only with smoothing
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;  // 0 when off; never negative
  // Before all else, each logit is replaced by softcap * tanh(logit / softcap). 0: no soft-cap.
  double softcap = 0;
  // acc_t [rows, 2]: largest logit, log(sum(exp(logit - largest))). If null, a forward does not
  // write them; on the CPU a forward with the gradient needs them.
  void* stats = nullptr;
  void* row_losses = nullptr;    // acc_t [rows]
  void* loss = nullptr;          // one element of loss_dtype; null with reduction none
  void* total_weight = nullptr;  // acc_t, one element: sum of weight[target], 0 where ignored
  double* partials = nullptr;    // [row_sum_shares(rows), 2]: partial sums over the rows, on CUDA
  DType loss_dtype = DType::kFloat32;
  // [rows] with grad_output_stride, or one element; null: 1
  const void* grad_output = nullptr;
  DType grad_output_dtype = DType::kFloat32;
  int64_t grad_output_stride = 0;
  // Of each row's squared logsumexp, as in a z-loss: [rows] with grad_squares_stride, or one
  // element; null: none. Read by cross_entropy_backward alone.
  const void* grad_squares = nullptr;
  DType grad_squares_dtype = DType::kFloat32;
  int64_t grad_squares_stride = 0;
  void* grad_input = nullptr;  // addressed by grad_layout
  RowLayout grad_layout;       // has the sizes of input_layout
};

struct RowOperand {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  RowLayout layout;
};

// A loss of `rows` rows of `cols` logits and of target rows of the same classes. If input or target
// is float64, acc_t is double, otherwise float. A kernel computes the outputs that are present.
struct RowPairArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  RowOperand input, target;      // the layouts of all operands have the same sizes
  const void* weight = nullptr;  // acc_t [cols]; null: all ones
  double parameters[2] = {};     // of this loss
  double divisor = 1;            // of the reduction
  void* stats = nullptr;         // acc_t [rows, kRowPairStats]: RowPairStatistics
  void* losses = nullptr;        // [rows] of loss_dtype, with reduction none
  void* loss = nullptr;          // one element of loss_dtype, with the other reductions
  DType loss_dtype = DType::kFloat32;
  // [rows] with grad_output_stride, or one element; null: 1
  const void* grad_output = nullptr;
  DType grad_output_dtype = DType::kFloat32;
  int64_t grad_output_stride = 0;
  RowOperand grad_input, grad_target;  // grad_input may be the buffer of input
  void* grad_weight = nullptr;         // acc_t [cols]
  // For grad_weight [weight_shares(rows, cols), cols]; for the loss, on CUDA only,
  // [row_sum_shares(rows)].
  double* workspace = nullptr;

  bool is_double() const {
    return input.dtype == DType::kFloat64 || target.dtype == DType::kFloat64;
  }
};

// The most shares into which the rows are cut for the sums over them. For few rows, one block is
// faster than two launches.
constexpr int64_t row_sum_shares(int64_t rows) { return rows <= 8192 ? 1 : 256; }

constexpr int64_t kRowPairStats = 6;

// The gradient of a statistic of each row.
struct RowGrad {
  const void* data = nullptr;  // [rows] with stride; null: 0
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
};

// Statistics of `rows` rows of `cols` contiguous logits (see losses/row_statistics.h), or their
// gradient. acc_t is double for float64 logits and float otherwise.
struct RowStatisticsArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;  // of input and grad_input
  const void* input = nullptr;
  int64_t row_stride = 0;
  const int64_t* target = nullptr;  // [rows]; null: none
  int64_t ignore_index = -100;
  double softcap = 0;  // as in CrossEntropyArgs
  // acc_t [rows]. The forward writes all of them, and stats for the backward.
  void* nll = nullptr;  // null without targets
  void* logsumexp = nullptr;
  void* entropy = nullptr;
  void* total = nullptr;
  void* maximum = nullptr;
  int64_t* argmax = nullptr;    // [rows]
  void* stats = nullptr;        // acc_t [rows, 3], see RowStatistics
  void* log_squares = nullptr;  // null if it is not asked for
  // Of the backward.
  RowGrad grad_nll, grad_logsumexp, grad_entropy, grad_total;
  void* grad_input = nullptr;  // may be the buffer of input, with input's row_stride
  int64_t grad_row_stride = 0;
};

// For each row of a matrix, and for each column, the largest number and the sum of exponentials
// relative to it (see losses/softmax_sums.h). acc_t is double for a float64 matrix and float
// otherwise.
struct SoftmaxSumsArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
  const void* input = nullptr;  // the numbers of a row lie side by side
  int64_t row_stride = 0;
  const void* factor = nullptr;  // one element, which each number is multiplied by; null: 1
  DType factor_dtype = DType::kFloat32;
  void* row_largest = nullptr;  // acc_t [rows]
  void* row_sum = nullptr;
  void* col_largest = nullptr;  // acc_t [cols]
  void* col_sum = nullptr;
  void* workspace = nullptr;  // of softmax_sums_numbers acc_t
  // If these rows are some of a larger matrix, each with a target: the results of the columns are
  // added to those of other rows, and the numbers of the targets are picked.
  const int64_t* row_target = nullptr;  // the column of each row; null if there are no targets
  const int64_t* col_target = nullptr;  // the row of each column, in the larger matrix
  void* row_own = nullptr;              // acc_t [rows], [cols]
  void* col_own = nullptr;
  int64_t first_row = 0;  // in the larger matrix, which has all_rows
  int64_t all_rows = 0;
  int64_t ignore_index = 0;  // a target that is none
};

// The cross entropies of the rows of a matrix, or of its columns. acc_t as above.
struct SoftmaxSumsTargets {
  const void* largest = nullptr;    // acc_t, one for each row or column, and so are the others
  const void* sum = nullptr;        // of exponentials relative to the largest
  const void* factor = nullptr;     // of the gradient; 0 where it is ignored
  const int64_t* target = nullptr;  // the column of a row, or the row of a column
  double uniform = 0;               // the share of each class in the target distribution
};

// The gradient of the cross entropies of rows and of columns, over the numbers of a matrix.
struct SoftmaxSumsGradientArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
  void* input = nullptr;  // the numbers of a row lie side by side
  int64_t row_stride = 0;
  SoftmaxSumsTargets of_rows, of_cols;
  int64_t first_row = 0;  // what the targets of columns call the first row
  double own = 1;         // what the target has besides its uniform share
};

// The binary cross entropies of all numbers of a matrix, added up, and their gradient over it.
struct SigmoidPairsArgs {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
  void* input = nullptr;  // the numbers of a row lie side by side
  int64_t row_stride = 0;
  const int64_t* target = nullptr;  // the positive column of each row, if it has one
  const bool* positive = nullptr;   // [rows, cols], in the place of target
  const void* bias = nullptr;       // acc_t [cols], added to the numbers; may be null
  const void* factor = nullptr;     // acc_t, of the gradient
  void* sum = nullptr;              // acc_t
  double* workspace = nullptr;      // [sigmoid_pairs_blocks]
};

// A block goes through so many rows, and a part of their columns.
constexpr int64_t kSigmoidPairsRows = 64;
constexpr int64_t sigmoid_pairs_cols(DType dtype) { return 4 * 512 / element_size(dtype); }
constexpr int64_t sigmoid_pairs_blocks(int64_t rows, int64_t cols, DType dtype) {
  const int64_t wide = sigmoid_pairs_cols(dtype);
  return (rows + kSigmoidPairsRows - 1) / kSigmoidPairsRows * ((cols + wide - 1) / wide);
}

// A warp reads tiles of so many columns, 16 bytes a lane.
constexpr int64_t softmax_sums_tile_cols(DType dtype) { return 512 / element_size(dtype); }
// The rows of a tile. Of a small matrix the tiles are lower, so that there are enough of them.
constexpr int64_t softmax_sums_tile_rows(int64_t rows, int64_t cols) {
  return rows > (int64_t(1) << 25) / (cols > 0 ? cols : 1) ? 128 : 32;
}
// For the partial results of tiles: two numbers for each row or column of each.
constexpr int64_t softmax_sums_numbers(int64_t rows, int64_t cols, DType dtype) {
  const int64_t high = softmax_sums_tile_rows(rows, cols), wide = softmax_sums_tile_cols(dtype);
  return 2 * ((rows + high - 1) / high * cols + (cols + wide - 1) / wide * rows);
}

// The number of shares into which the rows are cut for the gradient of a class weight, which is a
// sum over the rows.
constexpr int64_t weight_shares(int64_t rows, int64_t cols) {
  const int64_t most = cols > 0 && cols < 32768 ? 32768 / cols : 1;
  return rows < most ? (rows > 0 ? rows : 1) : most;
}

}  // namespace fused
