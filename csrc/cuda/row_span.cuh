// Where rows lie, and dense rows as 16-byte packets, wherever they start.
#pragma once

#include <limits>

#include "packet.cuh"

namespace fused::cuda {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

__device__ __forceinline__ int64_t row_offset(const RowLayout& layout, int64_t row) {
  int64_t offset = 0;
#pragma unroll 1  // mostly there is nothing to do
  for (int d = 0; d + 1 < layout.ndim; ++d) {
    const int64_t size = layout.sizes[d];
    const int64_t quotient = (row | size) >> 32 == 0
                                 ? static_cast<uint32_t>(row) / static_cast<uint32_t>(size)
                                 : row / size;
    offset += (row - quotient * size) * layout.strides[d];
    row = quotient;
  }
  return layout.ndim > 0 ? offset + row * layout.strides[layout.ndim - 1] : offset;
}

// A dense row: `head` logits before the first 16-byte boundary, whole packets, and a tail shorter
// than a packet. The head's and the tail's logits are the row's `loose` ones, at most
// 2 * (kWidth - 1).
template <typename scalar_t>
struct RowSpan {
  static constexpr int kWidth = Packet<scalar_t>::kWidth;
  int head, packets, loose;

  __device__ __forceinline__ RowSpan(const scalar_t* row, int64_t cols)
      : head(min(elements_to_boundary(row), static_cast<int>(cols))),
        packets((static_cast<int>(cols) - head) / kWidth),
        loose(static_cast<int>(cols) - packets * kWidth) {}

  __device__ __forceinline__ int col_of_packet(int packet) const { return head + packet * kWidth; }
  __device__ __forceinline__ int col_of_loose(int index) const {
    return index < head ? index : index + packets * kWidth;
  }
};

template <typename scalar_t>
__device__ __forceinline__ Packet<scalar_t> lowest_packet() {
  // By bits: the compiler would convert and pack every element at run time.
  constexpr bool kDouble = std::is_same_v<scalar_t, double>;
  constexpr uint32_t kHigh = kDouble                                   ? 0xfff00000
                             : std::is_same_v<scalar_t, float>         ? 0xff800000
                             : std::is_same_v<scalar_t, __nv_bfloat16> ? 0xff80ff80
                                                                       : 0xfc00fc00;
  constexpr uint32_t kLow = kDouble ? 0 : kHigh;
  Packet<scalar_t> packet;
  packet.words[0] = make_uint4(kLow, kHigh, kLow, kHigh);
  return packet;
}

// `aligned`: whether the destination, like the source, starts on a 16-byte boundary.
template <typename scalar_t>
__device__ __forceinline__ void store_packet(const Packet<scalar_t>& packet, scalar_t* destination,
                                             bool aligned) {
  if (aligned) return packet.store_streaming(destination);
#pragma unroll
  for (int j = 0; j < Packet<scalar_t>::kWidth; ++j) destination[j] = packet.values[j];
}

template <typename scalar_t>
__device__ __forceinline__ bool is_aligned(const scalar_t* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

}  // namespace fused::cuda
