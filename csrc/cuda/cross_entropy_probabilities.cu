#include "../kernels.h"
#include "../losses/cross_entropy_probabilities.h"
#include "row_pair_strided.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kWeightThreads = 128;

// The gradient of the class weights, for one share of the rows. A thread adds up the terms of one
// class. Bytes moved per row: both operands once.
template <typename acc_t>
__global__ void __launch_bounds__(kWeightThreads)
    weight_gradient_kernel(const __grid_constant__ RowPairArgs args,
                           const CrossEntropyProbabilities<acc_t> loss, int64_t shares) {
  const int64_t col = blockIdx.x * int64_t(kWeightThreads) + threadIdx.x;
  if (col >= args.cols) return;
  const int64_t share = blockIdx.y;
  double sum = 0;
  for (int64_t row = args.rows * share / shares; row < args.rows * (share + 1) / shares; ++row) {
    const auto gradient = row_gradient(args, loss, row, read_statistics<acc_t>(args, row));
    const acc_t x =
        load_as<acc_t>(args.input.data, args.input.dtype,
                       row_offset(args.input.layout, row) + col * args.input.layout.col_stride);
    const acc_t t =
        load_as<acc_t>(args.target.data, args.target.dtype,
                       row_offset(args.target.layout, row) + col * args.target.layout.col_stride);
    sum += static_cast<double>(gradient.weight(x, t));
  }
  args.workspace[share * args.cols + col] = sum;
}

template <typename acc_t>
__global__ void __launch_bounds__(kWeightThreads)
    weight_total_kernel(const double* sums,  // [shares, cols]
                        acc_t* grad_weight,  // [cols]
                        int64_t shares, int64_t cols) {
  const int64_t col = blockIdx.x * int64_t(kWeightThreads) + threadIdx.x;
  if (col >= cols) return;
  double sum = 0;
  for (int64_t share = 0; share < shares; ++share) sum += sums[share * cols + col];
  grad_weight[col] = static_cast<acc_t>(sum);
}

template <typename acc_t>
void weight_backward(const RowPairArgs& args, cudaStream_t stream) {
  const int64_t shares = weight_shares(args.rows, args.cols);  // at most 32768
  const unsigned blocks = blocks_for(args.cols, kWeightThreads);
  const CrossEntropyProbabilities<acc_t> loss(args.parameters);
  weight_gradient_kernel<acc_t>
      <<<dim3(blocks, static_cast<unsigned>(shares)), kWeightThreads, 0, stream>>>(args, loss,
                                                                                   shares);
  check_launch("weight_gradient_kernel");
  weight_total_kernel<acc_t><<<blocks, kWeightThreads, 0, stream>>>(
      args.workspace, static_cast<acc_t*>(args.grad_weight), shares, args.cols);
  check_launch("weight_total_kernel");
}

}  // namespace
}  // namespace cuda

void cross_entropy_probabilities_forward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_forward<CrossEntropyProbabilities>(args, stream);
}

void cross_entropy_probabilities_backward(const RowPairArgs& args, void* stream) {
  cuda::row_pair_backward<CrossEntropyProbabilities>(args, stream);
}

void cross_entropy_probabilities_weight_backward(const RowPairArgs& args, void* stream) {
  if (args.cols == 0) return;
  if (args.is_double()) return cuda::weight_backward<double>(args, cuda::as_stream(stream));
  cuda::weight_backward<float>(args, cuda::as_stream(stream));
}

}  // namespace fused
