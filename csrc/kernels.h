// Declares every kernel. The CPU library and the CUDA library each define all of them. `stream` is
// the CUDA stream of the launches; on the CPU it is null.
#pragma once

#include "arguments.h"

namespace fused {

// The kernel of the elementwise loss that Op names (see losses/elementwise.h). elementwise.cpp or
// elementwise.cu, compiled once for each loss, defines it.
template <typename Op>
void elementwise_loss(const ElementwiseArgs& args, void* stream);

// Writes row_losses, total_weight, stats (unless null) and loss (unless the reduction is none). If
// grad_input is present, also writes the gradient, in the same kernel.
void cross_entropy_forward(const CrossEntropyArgs& args, void* stream);
// Writes grad_input from stats and total_weight.
void cross_entropy_backward(const CrossEntropyArgs& args, void* stream);

// For logits whose classes are sharded. `parts` writes one shard's partial results of each row.
// `merge` computes the outputs of cross_entropy_forward from the parts of all shards, and checks
// the targets.
void cross_entropy_parts(const CrossEntropyArgs& args, void* stream);
void cross_entropy_merge(const CrossEntropyArgs& args, void* stream);

// The forward writes row_losses, total_weight and loss, the backward grad_input.
void nll_loss_forward(const CrossEntropyArgs& args, void* stream);
void nll_loss_backward(const CrossEntropyArgs& args, void* stream);

// Losses of row pairs. `forward` writes stats, and losses or loss; if grad_input is present, also
// the gradient. `backward` computes grad_input and grad_target, if present, from stats.
// `weight_backward` writes grad_weight.
// parameters: label smoothing, number of classes
void cross_entropy_probabilities_forward(const RowPairArgs& args, void* stream);
void cross_entropy_probabilities_backward(const RowPairArgs& args, void* stream);
void cross_entropy_probabilities_weight_backward(const RowPairArgs& args, void* stream);
// parameters: temperature
void softmax_kl_div_forward(const RowPairArgs& args, void* stream);
void softmax_kl_div_backward(const RowPairArgs& args, void* stream);
// parameters: beta, temperature
void softmax_js_div_forward(const RowPairArgs& args, void* stream);
void softmax_js_div_backward(const RowPairArgs& args, void* stream);
// parameters: 1 for the divergence and 0 for the cross entropy, temperature
void softmax_finite_kl_div_forward(const RowPairArgs& args, void* stream);
void softmax_finite_kl_div_backward(const RowPairArgs& args, void* stream);

// Statistics of rows of logits, and their gradient. Both functions check the targets.
void row_statistics_forward(const RowStatisticsArgs& args, void* stream);
void row_statistics_backward(const RowStatisticsArgs& args, void* stream);

// The gradient of the statistics of rows of logits and of their divergence from the rows of a
// teacher, written over the logits at args.grad_input. pair: of the divergence's backward, with
// these logits and the teacher's of one dtype, side by side; its gradients are not written.
// reverse: the logits are pair.target, otherwise pair.input. Logits of the pair are those after the
// soft-cap of args.
void softmax_kl_div_row_statistics_backward(const RowStatisticsArgs& args, const RowPairArgs& pair,
                                            bool reverse, void* stream);
void softmax_js_div_row_statistics_backward(const RowStatisticsArgs& args, const RowPairArgs& pair,
                                            bool reverse, void* stream);
void softmax_finite_kl_div_row_statistics_backward(const RowStatisticsArgs& args,
                                                   const RowPairArgs& pair, bool reverse,
                                                   void* stream);

// For each row and each column of a matrix, the largest number and the sum of exponentials.
void softmax_sums(const SoftmaxSumsArgs& args, void* stream);
void softmax_sums_gradient(const SoftmaxSumsGradientArgs& args, void* stream);

// The sum of the binary cross entropies of a matrix; their gradient is written over it.
void sigmoid_pairs(const SigmoidPairsArgs& args, void* stream);

// data[i] *= factor, for dense data. If factor is 1, data is neither read nor written.
void scale_(void* data, DType dtype, int64_t numel, const void* factor, DType factor_dtype,
            void* stream);

}  // namespace fused
