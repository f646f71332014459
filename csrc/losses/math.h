// exp, log and log1p for loss functors, on the device and on the host.
//
// The host versions have no branches, so that g++ and clang vectorise loops over them for the
// instruction set of the library. Errors stay below 2 ulp over the whole range. Infinities, zeros,
// subnormals and nan behave as in <cmath>. Range reductions and polynomials are those of Cephes
// (float) and fdlibm (double).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#define FUSED_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSED_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fused {

// Whether a loss's functions have pos_weight as a third argument.
template <typename Loss, typename acc_t>
constexpr bool takes_pos_weight = requires(const Loss loss, acc_t x) { loss.value(x, x, x); };

}  // namespace fused

namespace fused::math {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <typename T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
template <typename T>
constexpr T kLowest = std::numeric_limits<T>::lowest();
template <typename T>
constexpr T kSmallest = std::numeric_limits<T>::denorm_min();
template <typename T>
constexpr T kSmallestNormal = std::numeric_limits<T>::min();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename to_t, typename from_t>
FUSED_HOST_DEVICE to_t bit_cast(from_t value) {
  static_assert(sizeof(to_t) == sizeof(from_t));
  to_t result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

template <typename T>
FUSED_HOST_DEVICE T absolute(T x) {
#ifdef __CUDA_ARCH__
  return x < T(0) ? -x : x;
#else
  return std::fabs(x);  // one instruction; for the comparison g++ emits two and a mask
#endif
}

// If x is nan, the result is y.
template <typename T>
FUSED_HOST_DEVICE T larger(T x, T y) {
#ifdef __CUDA_ARCH__
  return ::max(x, y);
#else
  return x > y ? x : y;
#endif
}

template <typename T>
FUSED_HOST_DEVICE bool is_finite(T x) {
  return absolute(x) < kInfinity<T>;
}

// A positive number as T, at least the smallest normal number: 0 times an infinity would be nan.
template <typename T>
FUSED_HOST_DEVICE T positive(double value) {
  return larger(static_cast<T>(value), kSmallestNormal<T>);
}

namespace host {

// e^x - 1 for |x| <= log(2) / 2.
FUSED_HOST_DEVICE float expm1_reduced(float x) {
  float p = 1.9875691500e-4f;
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  return p * (x * x) + x;
}

// e^x - 1 - x for |x| <= log(2) / 2.
inline __attribute__((always_inline)) double expm1_less_x(double x) {
  const double t = x * x;
  double c = 4.13813679705723846039e-08;
  c = c * t - 1.65339022054652515390e-06;
  c = c * t + 6.61375632143793436117e-05;
  c = c * t - 2.77777777770155933842e-03;
  c = c * t + 1.66666666666666019037e-01;
  c = x - c * t;
  return x * c / (2. - c);
}

inline __attribute__((always_inline)) double expm1_reduced(double x) { return expm1_less_x(x) + x; }

// Adding and subtracting 1.5 * 2^(mantissa bits) rounds to the nearest integer without SSE4.1's
// roundps.
inline __attribute__((always_inline)) float exp(float x) {
  float clamped = x < -104.f ? -104.f : x;
  clamped = clamped > 89.f ? 89.f : clamped;
  const float shifted = clamped * 1.44269504088896341f + 12582912.f;
  const float n = shifted - 12582912.f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  const float p = expm1_reduced(r) + 1.f;
  // 2^n as two factors: n lies between -150 and 128, which exceeds the range of one exponent.
  const int32_t k = bit_cast<int32_t>(shifted) - 0x4b400000;
  const int32_t half = k >> 1;
  return p * bit_cast<float>((half + 127) << 23) * bit_cast<float>((k - half + 127) << 23);
}

inline __attribute__((always_inline)) double exp(double x) {
  double clamped = x < -746. ? -746. : x;
  clamped = clamped > 710. ? 710. : clamped;
  const double shifted = clamped * 1.44269504088896338700 + 6755399441055744.;
  const double n = shifted - 6755399441055744.;
  const double high = clamped - n * 6.93147180369123816490e-01;
  const double low = n * 1.90821492927058770002e-10;
  const double r = high - low;
  const double p = 1. + (expm1_less_x(r) - low + high);
  const int64_t k = bit_cast<int64_t>(shifted) - 0x4338000000000000;
  const int64_t half = k >> 1;
  return p * bit_cast<double>((half + 1023) << 52) * bit_cast<double>((k - half + 1023) << 52);
}

// e^x for x <= 0, as a term of a sum whose largest term is e^0. If e^x is below the smallest normal
// float, the result is 0. log2(e) is rounded and, without fused multiply-adds, so is its product
// with x. The relative error is at most |x| 2^-24; e^x is then so small that the sum is unaffected.
inline __attribute__((always_inline)) float exp_term(float x) {
  // 1.5 * 2^23 plus the exponent bias, so that the low bits are the exponent of 2^n.
  const float shifted = x * kLog2E + 12583039.f;
  const float r = x * kLog2E - (shifted - 12583039.f);
  float p = 1.535336188319500e-4f;  // 2^r for |r| <= 1/2
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.f;
  const float y = p * bit_cast<float>(bit_cast<int32_t>(shifted) << 23);
  return x < -87.33654f ? 0.f : y;
}

inline __attribute__((always_inline)) double exp_term(double x) { return exp(x); }

// log((1 + f) * 2^e) for 1 + f in [sqrt(1/2), sqrt(2)).
FUSED_HOST_DEVICE float log_of_parts(float f, float e) {
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = p * f * z;
  y += -2.12194440e-4f * e;
  y -= 0.5f * z;
  y += f;
  y += 0.693359375f * e;
  return y;
}

inline __attribute__((always_inline)) double log_of_parts(double f, double e) {
  const double s = f / (2. + f);
  const double z = s * s;
  double p = 1.479819860511658591e-01;
  p = p * z + 1.531383769920937332e-01;
  p = p * z + 1.818357216161805012e-01;
  p = p * z + 2.222219843214978396e-01;
  p = p * z + 2.857142874366239149e-01;
  p = p * z + 3.999999999940941908e-01;
  p = p * z + 6.666666666666735130e-01;
  p = p * z;
  const double half_square = 0.5 * f * f;
  return e * 6.93147180369123816490e-01 -
         ((half_square - (s * (half_square + p) + e * 1.90821492927058770002e-10)) - f);
}

// log(1 + x) for x in [0, 1]. 1 + x is never rounded.
template <typename T>
FUSED_HOST_DEVICE T log1p_unit(T x) {
  const bool above = x > T(0.41421356);
  return log_of_parts(above ? (x - T(1)) * T(0.5) : x, above ? T(1) : T(0));
}

// log(x) for normal x = 1 + f.
FUSED_HOST_DEVICE float log_near_one(float x, float f) {
  const int32_t bits = bit_cast<int32_t>(x) - 0x3f3504f3;
  const int32_t exponent = bits >> 23;
  const float mantissa = bit_cast<float>((bits & 0x007fffff) + 0x3f3504f3) - 1.f;
  return log_of_parts(exponent == 0 ? f : mantissa, static_cast<float>(exponent));
}

inline __attribute__((always_inline)) double log_near_one(double x, double f) {
  const int64_t bits = bit_cast<int64_t>(x) - 0x3fe6a09e667f3bcd;
  const int64_t exponent = bits >> 52;
  const double mantissa = bit_cast<double>((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd) - 1.;
  return log_of_parts(exponent == 0 ? f : mantissa, static_cast<double>(exponent));
}

inline __attribute__((always_inline)) bool is_positive_normal(float x) {
  return bit_cast<uint32_t>(x) - 0x00800000u < 0x7f000000u;
}

inline __attribute__((always_inline)) bool is_positive_normal(double x) {
  return bit_cast<uint64_t>(x) - 0x0010000000000000u < 0x7fe0000000000000u;
}

// log(x / 2^power) for positive normal x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
inline __attribute__((always_inline)) float log_normal(float x, int power = 0) {
  const int32_t bits = bit_cast<int32_t>(x) - 0x3f3504f3;
  const float e = static_cast<float>((bits >> 23) - power);
  return log_of_parts(bit_cast<float>((bits & 0x007fffff) + 0x3f3504f3) - 1.f, e);
}

inline __attribute__((always_inline)) double log_normal(double x, int power = 0) {
  const int64_t bits = bit_cast<int64_t>(x) - 0x3fe6a09e667f3bcd;
  const double e = static_cast<double>((bits >> 52) - power);
  return log_of_parts(bit_cast<double>((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd) - 1., e);
}

// Subnormals are scaled up first.
inline __attribute__((always_inline)) float log(float x) {
  const bool subnormal = x < 1.17549435e-38f;
  float y = log_normal(subnormal ? x * 8388608.f : x, subnormal ? 23 : 0);
  y = x == std::numeric_limits<float>::infinity() ? x : y;
  y = x == 0.f ? -std::numeric_limits<float>::infinity() : y;
  return x >= 0.f ? y : std::numeric_limits<float>::quiet_NaN();
}

inline __attribute__((always_inline)) double log(double x) {
  const bool subnormal = x < 2.2250738585072014e-308;
  double y = log_normal(subnormal ? x * 18014398509481984. : x, subnormal ? 54 : 0);
  y = x == std::numeric_limits<double>::infinity() ? x : y;
  y = x == 0. ? -std::numeric_limits<double>::infinity() : y;
  return x >= 0. ? y : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace host

template <typename T>
FUSED_HOST_DEVICE T exp(T x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);
#else
  return host::exp(x);
#endif
}

// e^(x * scale). For float on the device: two instructions, an error of 2 ulp, and 0 below the
// smallest normal float. The product with scale * log2(e) is rounded, which is harmless if x is a
// difference of logits. Callers therefore subtract first. A fused multiply-add with the reference
// would lose the low bits of logits near 700, and overflow if a mask fills rows with the lowest
// float.
template <typename T>
FUSED_HOST_DEVICE T fast_exp(T x, T scale = 1) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * (scale * kLog2E)));
    return result;
  }
#endif
  return exp(x * scale);
}

template <typename T>
FUSED_HOST_DEVICE T log(T x) {
#ifdef __CUDA_ARCH__
  return ::log(x);
#else
  return host::log(x);
#endif
}

// log(x). For float on the device: the hardware's logarithm. Between 1/2 and 2 its absolute error
// is 2^-22, so the logarithm of a number near 1 loses digits; elsewhere its error is a few ulp.
template <typename T>
FUSED_HOST_DEVICE T fast_log(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    float result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result * kLn2;
  }
#endif
  return log(x);
}

// log(a) - log(b). On the device one logarithm, if the quotient is normal.
template <typename T>
FUSED_HOST_DEVICE T log_of_quotient(T a, T b) {
#ifdef __CUDA_ARCH__
  const T quotient = a / b;
  const bool exact = b > T(0) && quotient >= kSmallestNormal<T> && quotient <= -kLowest<T>;
  const T logarithm = ::log(exact ? quotient : a);
  return exact ? logarithm : logarithm - ::log(b);
#else
  return log(a) - log(b);
#endif
}

// log(1 + x) for x in [0, 1]. For float the device uses the host's version too, since log1p has
// branches.
template <typename T>
FUSED_HOST_DEVICE T log1p_unit(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, double>)
    return ::log1p(x);
  else
#endif
    return host::log1p_unit(x);
}

// 1 / x. For float on the device: one instruction, an error of 1 ulp.
template <typename T>
FUSED_HOST_DEVICE T fast_inverse(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return T(1) / x;
}

// e^x - 1 for x <= 0. exponential: e^x.
template <typename T>
FUSED_HOST_DEVICE T expm1_nonpositive(T x, T exponential) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, double>)
    return ::expm1(x);
  else
#endif
    return x > T(-0.34) ? host::expm1_reduced(x) : exponential - T(1);
}

// log(x) for a normal x = 1 + f in (0, 1]. If x is near 1, the rounding error of x has no effect.
// The result for a nan is unspecified.
template <typename T>
FUSED_HOST_DEVICE T log_near_one(T x, T f) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, double>)
    return f > -0.25 ? ::log1p(f) : ::log(x);
  else
#endif
    return host::log_near_one(x, f);
}

}  // namespace fused::math
