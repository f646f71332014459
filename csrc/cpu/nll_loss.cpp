// Negative log likelihood on the CPU. The kernels read only the log-probability of a row's target
// and write only its gradient: grad_input already holds zeros.
#include "../losses/nll_loss.h"

#include "../kernels.h"
#include "class_targets.h"

namespace fused {
namespace cpu {
namespace {

constexpr int64_t kRows = 1 << 12;  // of a thread, at least

template <typename acc_t>
void forward(const CrossEntropyArgs& args) {
  const double weights = sum_of_weights<acc_t>("nll_loss", args);
  *static_cast<acc_t*>(args.total_weight) = static_cast<acc_t>(weights);
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    const scalar_t* input = static_cast<const scalar_t*>(args.input);
    acc_t* losses = static_cast<acc_t*>(args.row_losses);
    parallel_for(0, args.rows, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const RowTarget<acc_t> target(args, row);
        losses[row] = 0;
        if (target.index < 0) continue;
        const int64_t place =
            row_offset(args.input_layout, row) + target.index * args.input_layout.col_stride;
        losses[row] = NllLoss::value(to_acc<acc_t>(input[place]), target.weight);
      }
    });
  });
  reduce_losses<acc_t>(args, weights);
}

template <typename acc_t>
void backward(const CrossEntropyArgs& args) {
  const acc_t common = common_scale<acc_t>(args);
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    scalar_t* grad_input = static_cast<scalar_t*>(args.grad_input);
    parallel_for(0, args.rows, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const RowTarget<acc_t> target(args, row);
        if (target.index < 0) continue;
        const int64_t place =
            row_offset(args.grad_layout, row) + target.index * args.grad_layout.col_stride;
        grad_input[place] =
            from_acc<scalar_t>(NllLoss::grad(row_scale(args, row, target, common), target.weight));
      }
    });
  });
}

}  // namespace
}  // namespace cpu

void nll_loss_forward(const CrossEntropyArgs& args, void* /*stream*/) {
  if (args.dtype == DType::kFloat64) return cpu::forward<double>(args);
  cpu::forward<float>(args);
}

void nll_loss_backward(const CrossEntropyArgs& args, void* /*stream*/) {
  cpu::check_targets("nll_loss", args);
  if (args.dtype == DType::kFloat64) return cpu::backward<double>(args);
  cpu::backward<float>(args);
}

}  // namespace fused
