// Every kernel by name. The CPU and the CUDA library each define all of them; `stream` is the CUDA
// stream to launch on and null on the CPU.
#pragma once

#include "arguments.h"

namespace fused {

// Of an elementwise loss, by its Op (losses/elementwise.h). elementwise.cpp or elementwise.cu,
// which is compiled for each loss, defines it.
template <typename Op>
void elementwise_loss(const ElementwiseArgs& args, void* stream);

// Writes row_losses, total_weight, stats unless null and, unless the reduction is none, loss; with
// grad_input also the gradient, in the same pass over the logits.
void cross_entropy_forward(const CrossEntropyArgs& args, void* stream);
// Writes grad_input from stats and total_weight.
void cross_entropy_backward(const CrossEntropyArgs& args, void* stream);

// For logits whose classes are sharded. `parts` writes what a shard knows of each row; `merge`
// makes of all shards' parts what cross_entropy_forward writes, and checks the targets.
void cross_entropy_parts(const CrossEntropyArgs& args, void* stream);
void cross_entropy_merge(const CrossEntropyArgs& args, void* stream);

// The same two for nll_loss: row_losses, total_weight and loss; grad_input.
void nll_loss_forward(const CrossEntropyArgs& args, void* stream);
void nll_loss_backward(const CrossEntropyArgs& args, void* stream);

// Losses of row pairs. `forward` writes stats, and losses or loss; with grad_input also the
// gradient. `backward` writes grad_input and grad_target, those that are there, from stats.
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

// Statistics of rows of logits, and their gradient; both check the targets.
void row_statistics_forward(const RowStatisticsArgs& args, void* stream);
void row_statistics_backward(const RowStatisticsArgs& args, void* stream);

// data[i] *= factor, where data is dense; returns without touching data when factor is 1.
void scale_(void* data, DType dtype, int64_t numel, const void* factor, DType factor_dtype,
            void* stream);

}  // namespace fused
