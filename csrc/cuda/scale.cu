// Multiplies dense data by one number on the device. If the factor is 1, as usual after
// loss.backward(), the kernel returns before it reads or writes the data.
// Bytes moved per element: 0 if the factor is 1, otherwise twice its size.
#include "../kernels.h"
#include "launch.cuh"
#include "packet.cuh"

namespace fused {
namespace cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocksPerMultiprocessor = 2;

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(scalar_t* data,  // [numel]
                 int64_t numel, int head, const void* factor, DType factor_dtype) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kWidth = Packet<scalar_t>::kWidth;
  await_previous();
  const acc_t scale = static_cast<acc_t>(load_as<double>(factor, factor_dtype, 0));
  if (scale == acc_t(1)) return;

  const int64_t thread = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t packets = (numel - head) / kWidth;
  for (int64_t i = thread; i < packets; i += gridDim.x * int64_t(kThreads)) {
    scalar_t* place = data + head + i * kWidth;
    auto packet = Packet<scalar_t>::load_streaming(place);
    acc_t values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = packet.template get<acc_t>(j) * scale;
    packet.set(values);
    packet.store_streaming(place);
  }
  const int64_t loose = numel - packets * kWidth;
  if (thread < loose) {
    scalar_t* place = data + (thread < head ? thread : thread + packets * kWidth);
    *place = from_acc<scalar_t>(to_acc<acc_t>(*place) * scale);
  }
}

}  // namespace
}  // namespace cuda

void scale_(void* data, DType dtype, int64_t numel, const void* factor, DType factor_dtype,
            void* stream) {
  using namespace cuda;
  if (numel == 0) return;
  visit(dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    scalar_t* values = static_cast<scalar_t*>(data);
    const int head = static_cast<int>(std::min<int64_t>(numel, elements_to_boundary(values)));
    const int64_t packets = divide_up(numel, Packet<scalar_t>::kWidth);
    const int64_t most = current_device().multiprocessors * kBlocksPerMultiprocessor;
    const int64_t blocks = std::min(most, divide_up(packets, kThreads));
    launch_behind("scale_kernel", scale_kernel<scalar_t>, static_cast<unsigned>(blocks), kThreads,
                  as_stream(stream), values, numel, head, factor, factor_dtype);
  });
}

}  // namespace fused
