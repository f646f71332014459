// Sums of many numbers whose rounding errors do not grow with their count.
#pragma once

#include <cmath>
#include <cstdint>

namespace fused::cpu {

constexpr int64_t kSumBlock = 256;  // numbers that `sum_of` may add up at a time

// A sum in double and what its additions lost. (Knuth's TwoSum; equal numbers, as of a constant
// tensor, would otherwise all be rounded in the same direction.)
class Sum {
 public:
  void add(double value) {
    const double sum = total_ + value;
    const double added = sum - total_;
    lost_ += (total_ - (sum - added)) + (value - added);
    total_ = sum;
  }

  double value() const {
    const double sum = total_ + lost_;
    return std::isfinite(lost_) ? sum : total_;  // inf - inf is lost of infinite numbers
  }

 private:
  double total_ = 0;
  double lost_ = 0;
};

// The sum of value(i) over [first, last), at most kSumBlock of them: each lane adds up eight at
// most, and the lanes are added in pairs.
template <typename acc_t, typename Value>
inline __attribute__((always_inline)) acc_t sum_of(int64_t first, int64_t last, Value&& value) {
  constexpr int64_t kLanes = 32;
  static_assert(kSumBlock == 8 * kLanes);
  acc_t lanes[kLanes] = {};
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
  }
#pragma omp simd
  for (int64_t lane = 0; lane < last - i; ++lane) lanes[lane] += value(i + lane);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

}  // namespace fused::cpu
