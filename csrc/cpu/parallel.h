// Parallel loops and conversions that every CPU kernel uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../arguments.h"
#include "../losses/math.h"

namespace fused::cpu {

// Calls body(context, first, last) over [begin, end) on torch's threads, at least `grain` indices a
// call. The binding defines it by torch's parallel_for.
void parallel_for_range(int64_t begin, int64_t end, int64_t grain,
                        void (*body)(void*, int64_t, int64_t), void* context);

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) {
  parallel_for_range(
      begin, end, grain,
      [](void* context, int64_t first, int64_t last) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(first, last);
      },
      &body);
}

// bfloat16 and float16 as bits. The conversions are integer and float arithmetic that vectorises
// for every instruction set.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename acc_t, typename scalar_t>
inline __attribute__((always_inline)) acc_t to_acc(scalar_t value) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    return static_cast<acc_t>(math::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16));
  } else if constexpr (std::is_same_v<scalar_t, Float16>) {
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    // The factor 2^112 changes the exponent bias from 15 to 127, and makes subnormals normal.
    const uint32_t finite = math::bit_cast<uint32_t>(math::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t result = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
    return static_cast<acc_t>(math::bit_cast<float>(result | sign));
  } else {
    return static_cast<acc_t>(value);
  }
}

// Rounds to nearest even, as torch's casts do.
template <typename scalar_t, typename acc_t>
inline __attribute__((always_inline)) scalar_t from_acc(acc_t value) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    const uint32_t bits = math::bit_cast<uint32_t>(static_cast<float>(value));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded)};
  } else if constexpr (std::is_same_v<scalar_t, Float16>) {
    const uint32_t bits = math::bit_cast<uint32_t>(static_cast<float>(value));
    const uint32_t sign = bits & 0x80000000;
    const uint32_t magnitude = bits ^ sign;
    // For a normal result, change the exponent bias and round the 13 lost bits. For a subnormal
    // result, add 0.5: its last bit is float16's smallest subnormal, so the addition aligns and
    // rounds.
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t subnormal =
        math::bit_cast<uint32_t>(math::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude >= 0x477ff000 ? 0x7c00 : result;
    result = magnitude > 0x7f800000 ? 0x7e00 : result;
    return {static_cast<uint16_t>(result | (sign >> 16))};
  } else {
    return static_cast<scalar_t>(value);
  }
}

// Calls function with a null pointer of dtype's C++ type.
template <typename Function>
inline void visit(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat64: return function(static_cast<double*>(nullptr));
    case DType::kFloat32: return function(static_cast<float*>(nullptr));
    case DType::kBFloat16: return function(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16: return function(static_cast<Float16*>(nullptr));
  }
}

// Copies count elements, stride apart, into or out of a contiguous tile of acc_t.
template <typename acc_t>
void load(const void* data, DType dtype, int64_t offset, int64_t stride, int64_t count,
          acc_t* tile) {
  visit(dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    const scalar_t* source = static_cast<const scalar_t*>(data) + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) tile[i] = to_acc<acc_t>(source[i]);
    } else if (stride == 0) {
      std::fill_n(tile, count, to_acc<acc_t>(source[0]));
    } else {
      for (int64_t i = 0; i < count; ++i) tile[i] = to_acc<acc_t>(source[i * stride]);
    }
  });
}

template <typename acc_t>
void store(void* data, DType dtype, int64_t offset, int64_t stride, int64_t count,
           const acc_t* tile) {
  visit(dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    scalar_t* destination = static_cast<scalar_t*>(data) + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) destination[i] = from_acc<scalar_t>(tile[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) destination[i * stride] = from_acc<scalar_t>(tile[i]);
    }
  });
}

// Prefetches `count` elements.
inline void prefetch(const void* data, DType dtype, int64_t offset, int64_t count) {
  constexpr int64_t kCacheLine = 64;
  const char* first = static_cast<const char*>(data) + offset * element_size(dtype);
  for (int64_t i = 0; i < count * element_size(dtype); i += kCacheLine)
    __builtin_prefetch(first + i);
}

template <typename acc_t>
constexpr DType dtype_of() {
  return std::is_same_v<acc_t, double> ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace fused::cpu
