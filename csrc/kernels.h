// Every kernel by name. The CPU and the CUDA library each define all of them; `stream` is the CUDA
// stream to launch on and null on the CPU.
#pragma once

#include "arguments.h"

namespace fused {

void mse_loss(const ElementwiseArgs& args, void* stream);
void l1_loss(const ElementwiseArgs& args, void* stream);
void smooth_l1_loss(const ElementwiseArgs& args, void* stream);
void huber_loss(const ElementwiseArgs& args, void* stream);
// parameters: log_target, log_input (0 or 1 each)
void kl_div(const ElementwiseArgs& args, void* stream);
void binary_cross_entropy_with_logits(const ElementwiseArgs& args, void* stream);

// Writes stats, row_losses, row_weights, total_weight and, unless the reduction is none, loss; with
// grad_input also the gradient, in the same pass over the logits.
void cross_entropy_forward(const CrossEntropyArgs& args, void* stream);
// Writes grad_input from stats and total_weight.
void cross_entropy_backward(const CrossEntropyArgs& args, void* stream);

// data[i] *= factor, where data is dense; returns without touching data when factor is 1.
void scale_(void* data, DType dtype, int64_t numel, const void* factor, DType factor_dtype,
            void* stream);

}  // namespace fused
