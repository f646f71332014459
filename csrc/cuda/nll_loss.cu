// Negative log likelihood on CUDA. The kernels read only the log-probability of a row's target and
// write only its gradient: grad_input already holds zeros. The sums over the rows are those of
// cross entropy.
// Bytes moved per row: forward a memory sector of the row, and twice the target (8), its weight and
// the loss, which the sums read again; backward the target, its weight and a memory sector.
#include "../kernels.h"
#include "../losses/nll_loss.h"
#include "cross_entropy_sums.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kNllThreads = 256;

template <typename scalar_t>
__global__ void __launch_bounds__(kNllThreads)
    nll_loss_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  let_next_start();
  for (int64_t row = blockIdx.x * int64_t(kNllThreads) + threadIdx.x; row < args.rows;
       row += gridDim.x * int64_t(kNllThreads)) {
    const RowTarget<acc_t> target(args, row);
    acc_t loss = 0;
    if (target.index >= 0) {
      const scalar_t* x =
          static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
      loss = NllLoss::value(to_acc<acc_t>(x[target.index * args.input_layout.col_stride]),
                            target.weight);
    }
    static_cast<acc_t*>(args.row_losses)[row] = loss;
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kNllThreads)
    nll_loss_gradient_kernel(const __grid_constant__ CrossEntropyArgs args) {
  using acc_t = acc_type<scalar_t>;
  for (int64_t row = blockIdx.x * int64_t(kNllThreads) + threadIdx.x; row < args.rows;
       row += gridDim.x * int64_t(kNllThreads)) {
    if (is_out_of_bounds(args, args.target[row])) report_target(args, row);
    const RowTarget<acc_t> target(args, row);
    if (target.index < 0) continue;
    acc_t scale = 1;
    if (args.grad_output)
      scale =
          load_as<acc_t>(args.grad_output, args.grad_output_dtype, row * args.grad_output_stride);
    if (args.reduction == Reduction::kMean) scale /= *static_cast<acc_t*>(args.total_weight);
    scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row);
    out[target.index * args.grad_layout.col_stride] =
        from_acc<scalar_t>(NllLoss::grad(scale, target.weight));
  }
}

}  // namespace
}  // namespace cuda

void nll_loss_forward(const CrossEntropyArgs& args, void* stream_pointer) {
  using namespace cuda;
  check_classes("nll_loss", args.cols);
  const cudaStream_t stream = as_stream(stream_pointer);
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    if (args.rows > 0) {
      nll_loss_kernel<scalar_t>
          <<<blocks_for(args.rows, kNllThreads), kNllThreads, 0, stream>>>(args);
      check_launch("nll_loss_kernel");
    }
    launch_sums<acc_type<scalar_t>>(args, true, stream);
  });
}

void nll_loss_backward(const CrossEntropyArgs& args, void* stream) {
  using namespace cuda;
  check_classes("nll_loss", args.cols);
  if (args.rows == 0 || args.cols == 0) return;
  visit(args.dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    nll_loss_gradient_kernel<scalar_t>
        <<<blocks_for(args.rows, kNllThreads), kNllThreads, 0, as_stream(stream)>>>(args);
    check_launch("nll_loss_gradient_kernel");
  });
}

}  // namespace fused
