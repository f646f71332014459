// Conversions between storage and arithmetic types, and 16-byte packets of elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../arguments.h"

namespace fused::cuda {

template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename scalar_t>
constexpr DType dtype_of() {
  return std::is_same_v<scalar_t, double>          ? DType::kFloat64
         : std::is_same_v<scalar_t, float>         ? DType::kFloat32
         : std::is_same_v<scalar_t, __nv_bfloat16> ? DType::kBFloat16
                                                   : DType::kFloat16;
}

// Uses intrinsics only: torch's builds disable the conversion operators of cuda_fp16.h.
template <typename acc_t, typename scalar_t>
__device__ __forceinline__ acc_t to_acc(scalar_t value) {
  if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
    return static_cast<acc_t>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<scalar_t, __half>) {
    return static_cast<acc_t>(__half2float(value));
  } else {
    return static_cast<acc_t>(value);
  }
}

// Rounds to nearest even, as torch's casts do.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ scalar_t from_acc(acc_t value) {
  if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<scalar_t, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else {
    return static_cast<scalar_t>(value);
  }
}

// Loads one element whose dtype is known only at run time. The branch is uniform across the launch.
template <typename acc_t>
__device__ __forceinline__ acc_t load_as(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kFloat64: return to_acc<acc_t>(static_cast<const double*>(data)[offset]);
    case DType::kFloat32: return to_acc<acc_t>(static_cast<const float*>(data)[offset]);
    case DType::kBFloat16: return to_acc<acc_t>(static_cast<const __nv_bfloat16*>(data)[offset]);
    case DType::kFloat16: return to_acc<acc_t>(static_cast<const __half*>(data)[offset]);
  }
  __builtin_unreachable();
}

template <typename acc_t>
__device__ __forceinline__ void store_as(void* data, DType dtype, int64_t offset, acc_t value) {
  const auto store = [&]<typename scalar_t>(scalar_t* values) {
    values[offset] = from_acc<scalar_t>(value);
  };
  switch (dtype) {
    case DType::kFloat64: return store(static_cast<double*>(data));
    case DType::kFloat32: return store(static_cast<float*>(data));
    case DType::kBFloat16: return store(static_cast<__nv_bfloat16*>(data));
    case DType::kFloat16: return store(static_cast<__half*>(data));
  }
}

// kWidth neighbouring elements that start on a 16-byte boundary and fill whole 16-byte words. No
// load is non-coherent, because an output may share its buffer with an input.
template <typename scalar_t, int kWidth_ = 16 / sizeof(scalar_t)>
struct alignas(16) Packet {
  static constexpr int kWidth = kWidth_;
  static constexpr int kWords = kWidth * static_cast<int>(sizeof(scalar_t)) / 16;
  static_assert(kWords * 16 == kWidth * sizeof(scalar_t));

  union {
    uint4 words[kWords];
    scalar_t values[kWidth];
  };

  __device__ __forceinline__ Packet() {}

  // For data that is read once: evicted from the caches first. `source` points at the packet's
  // first element.
  static __device__ __forceinline__ Packet load_streaming(const scalar_t* source) {
    Packet packet;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      packet.words[w] = __ldcs(reinterpret_cast<const uint4*>(source) + w);
    return packet;
  }

  // For data that the same thread soon reads again: cached in L2, not in L1.
  static __device__ __forceinline__ Packet load_to_l2(const scalar_t* source) {
    Packet packet;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      packet.words[w] = __ldcg(reinterpret_cast<const uint4*>(source) + w);
    return packet;
  }

  __device__ __forceinline__ void store_streaming(scalar_t* destination) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) __stcs(reinterpret_cast<uint4*>(destination) + w, words[w]);
  }

  // Makes the compiler convert the elements again at their next use. Otherwise the compiler keeps
  // 16-bit elements as floats from one pass to the next, in twice the registers, and spills.
  __device__ __forceinline__ void keep_packed() {
    if constexpr (sizeof(scalar_t) == 2) {
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        asm("" : "+r"(words[w].x), "+r"(words[w].y), "+r"(words[w].z), "+r"(words[w].w));
    }
  }

  template <typename acc_t>
  __device__ __forceinline__ acc_t get(int i) const {
    // Takes either half from the whole word, so that no half needs a register of its own.
    if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(words)[i / 2];
      return static_cast<acc_t>(__uint_as_float(i % 2 ? word & 0xffff0000u : word << 16));
    } else if constexpr (std::is_same_v<scalar_t, __half>) {
      const __half2 pair = reinterpret_cast<const __half2*>(words)[i / 2];
      return static_cast<acc_t>(i % 2 ? __high2float(pair) : __low2float(pair));
    } else {
      return to_acc<acc_t>(values[i]);
    }
  }

  // The largest element of some packets, ignoring nans. The hardware compares pairs of 16-bit
  // floats.
  template <typename acc_t, int kCount>
  static __device__ __forceinline__ acc_t largest(const Packet (&packets)[kCount]) {
    if constexpr (sizeof(scalar_t) == 2) {
      using Pair = std::conditional_t<std::is_same_v<scalar_t, __half>, __half2, __nv_bfloat162>;
      const auto pair_of = [&](int i) {
        return reinterpret_cast<const Pair*>(packets[i / (kWidth / 2)].words)[i % (kWidth / 2)];
      };
      Pair pair = pair_of(0);
#pragma unroll
      for (int i = 1; i < kCount * kWidth / 2; ++i) pair = __hmax2(pair, pair_of(i));
      return ::max(to_acc<acc_t>(pair.x), to_acc<acc_t>(pair.y));
    } else {
      acc_t result = packets[0].template get<acc_t>(0);
#pragma unroll
      for (int i = 1; i < kCount * kWidth; ++i)
        result = ::max(result, packets[i / kWidth].template get<acc_t>(i % kWidth));
      return result;
    }
  }

  // Converts two elements at a time: one instruction converts and packs a pair of 16-bit floats.
  template <typename acc_t>
  __device__ __forceinline__ void set(const acc_t (&source)[kWidth]) {
    if constexpr (std::is_same_v<scalar_t, __nv_bfloat16> && std::is_same_v<acc_t, float>) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(source[i], source[i + 1]);
        values[i] = __low2bfloat16(pair);
        values[i + 1] = __high2bfloat16(pair);
      }
    } else if constexpr (std::is_same_v<scalar_t, __half> && std::is_same_v<acc_t, float>) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        const __half2 pair = __floats2half2_rn(source[i], source[i + 1]);
        values[i] = __low2half(pair);
        values[i + 1] = __high2half(pair);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = from_acc<scalar_t>(source[i]);
    }
  }
};

// Elements before the first 16-byte boundary at or after `data`.
template <typename scalar_t>
__host__ __device__ __forceinline__ int elements_to_boundary(const scalar_t* data) {
  const uintptr_t misalignment = reinterpret_cast<uintptr_t>(data) % 16;
  return static_cast<int>((16 - misalignment) % 16 / sizeof(scalar_t));
}

}  // namespace fused::cuda
