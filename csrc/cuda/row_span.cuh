// The offsets of rows, and dense rows of any alignment as 16-byte packets.
#pragma once

#include <limits>

#include "packet.cuh"

namespace fused::cuda {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

__device__ __forceinline__ int64_t row_offset(const RowLayout& layout, int64_t row) {
  int64_t offset = 0;
#pragma unroll 1  // usually no iterations
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
// than a packet. The at most 2 * (kWidth - 1) logits of head and tail are the row's `loose` logits.
template <typename scalar_t>
struct RowSpan {
  static constexpr int kWidth = Packet<scalar_t>::kWidth;
  int head, packets, loose;

  __device__ __forceinline__ RowSpan(const scalar_t* row, int64_t cols)
      : head(min(elements_to_boundary(row), static_cast<int>(cols))),
        packets((static_cast<int>(cols) - head) / kWidth),
        loose(static_cast<int>(cols) - packets * kWidth) {}

  // For a row that is read beside another row whose boundaries lie elsewhere.
  __device__ __forceinline__ void read_one_by_one(int64_t cols) {
    head = packets = 0;
    loose = static_cast<int>(cols);
  }

  __device__ __forceinline__ int col_of_packet(int packet) const { return head + packet * kWidth; }
  __device__ __forceinline__ int col_of_loose(int index) const {
    return index < head ? index : index + packets * kWidth;
  }
};

template <typename scalar_t>
__device__ __forceinline__ Packet<scalar_t> lowest_packet() {
  // Set by bits, because the compiler would convert and pack every element at run time.
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

// Packets that a thread has in flight. For double the exponential needs the registers.
template <typename scalar_t>
constexpr int kRowUnroll = std::is_same_v<scalar_t, double> ? 1 : 4;

// Loads the packets first, first + stride, ... of a row. Packets beyond its end are -inf. Returns
// the number of packets within the row.
template <bool kToL2, typename scalar_t, int kPackets>
__device__ __forceinline__ int load_packets(Packet<scalar_t> (&packets)[kPackets],
                                            const scalar_t* row, const RowSpan<scalar_t>& span,
                                            int first, int stride) {
  int count = 0;
#pragma unroll
  for (int u = 0; u < kPackets; ++u) {
    const int index = first + u * stride;
    if (index >= span.packets) {
      packets[u] = lowest_packet<scalar_t>();
      continue;
    }
    const scalar_t* place = row + span.col_of_packet(index);
    packets[u] =
        kToL2 ? Packet<scalar_t>::load_to_l2(place) : Packet<scalar_t>::load_streaming(place);
    count = u + 1;
  }
  return count;
}

// aligned: whether the destination starts on a 16-byte boundary.
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

// Writes the gradient of a row of logits, which `stride` threads share. `out` may be the row
// itself: each thread writes only elements that it has read.
//   gradient.apply(packet, col)   replaces a packet, whose first class is col, by its gradient
//   gradient(logit, col)          returns the gradient of one logit
template <typename scalar_t, typename Gradient>
__device__ __forceinline__ void write_gradient(const scalar_t* row, scalar_t* out,
                                               const RowSpan<scalar_t>& span, bool aligned,
                                               int thread, int stride, const Gradient& gradient) {
  for (int first = thread; first < span.packets; first += kRowUnroll<scalar_t> * stride) {
    Packet<scalar_t> packets[kRowUnroll<scalar_t>];
#pragma unroll
    for (int u = 0; u < kRowUnroll<scalar_t>; ++u) {
      const int index = first + u * stride;
      if (index < span.packets)
        packets[u] = Packet<scalar_t>::load_streaming(row + span.col_of_packet(index));
    }
#pragma unroll
    for (int u = 0; u < kRowUnroll<scalar_t>; ++u) {
      const int index = first + u * stride;
      if (index >= span.packets) break;
      const int col = span.col_of_packet(index);
      gradient.apply(packets[u], col);
      store_packet(packets[u], out + col, aligned);
    }
  }
  for (int index = thread; index < span.loose; index += stride) {
    const int col = span.col_of_loose(index);
    out[col] = from_acc<scalar_t>(gradient(to_acc<acc_type<scalar_t>>(row[col]), col));
  }
}

}  // namespace fused::cuda
