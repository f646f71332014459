// Negative log likelihood on the CPU. Of a row only the log-probability of its target is read, and
// only its gradient written: grad_input holds zeros already.
#include "../losses/nll_loss.h"

#include "../kernels.h"
#include "class_targets.h"

namespace fused {
namespace cpu {
namespace {

constexpr int64_t kRows = 1 << 12;  // a thread should have at least

template <typename acc_t>
void forward(const CrossEntropyArgs& args) {
  const double weights = sum_of_weights<acc_t>("nll_loss", args);
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  parallel_for(0, args.rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowTarget<acc_t> target(args, row);
      acc_t log_probability = 0;
      if (target.index >= 0)
        load(args.input, args.dtype,
             row_offset(args.input_layout, row) + target.index * args.input_layout.col_stride, 1, 1,
             &log_probability);
      static_cast<acc_t*>(args.row_losses)[row] =
          target.index < 0 ? acc_t(0) : NllLoss::value(log_probability, target.weight);
    }
  });
  reduce_losses<acc_t>(args, weights);
}

template <typename acc_t>
void backward(const CrossEntropyArgs& args) {
  const acc_t total_weight = *static_cast<const acc_t*>(args.total_weight);
  parallel_for(0, args.rows, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowTarget<acc_t> target(args, row);
      if (target.index < 0) continue;
      const acc_t gradient =
          NllLoss::grad(row_scale(args, row, target, total_weight), target.weight);
      store(args.grad_input, args.dtype,
            row_offset(args.grad_layout, row) + target.index * args.grad_layout.col_stride, 1, 1,
            &gradient);
    }
  });
}

}  // namespace
}  // namespace cpu

void nll_loss_forward(const CrossEntropyArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::forward<double>(args);
  cpu::forward<float>(args);
}

void nll_loss_backward(const CrossEntropyArgs& args, void* /*stream*/) {
  for (int64_t row = 0; row < args.rows; ++row) cpu::check_target("nll_loss", args, row);
  if (args.dtype == DType::kFloat64) return cpu::backward<double>(args);
  cpu::backward<float>(args);
}

}  // namespace fused
