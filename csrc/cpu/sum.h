// Sums of many numbers whose rounding errors do not grow with their count.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace fused::cpu {

constexpr int64_t kSumBlock = 256;  // numbers of one call of `sum_of`, at most
constexpr int64_t kSumLanes = 32;   // partial sums of `sum_of`

// A sum in double and the rounding errors of its additions (Knuth's TwoSum). Without them, sums of
// equal numbers, as in a constant tensor, would all be rounded in the same direction.
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
    return std::isfinite(lost_) ? sum : total_;  // infinite numbers make lost_ nan
  }

 private:
  double total_ = 0;
  double lost_ = 0;
};

// Calls body(lane, i) for i in [first, last), in vectors of kSumLanes.
template <typename Body>
inline __attribute__((always_inline)) void for_each_lane(int64_t first, int64_t last, Body&& body) {
  int64_t i = first;
  for (; i + kSumLanes <= last; i += kSumLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kSumLanes; ++lane) body(lane, i + lane);
  }
#pragma omp simd
  for (int64_t lane = 0; lane < last - i; ++lane) body(lane, i + lane);
}

// The sum of the lanes, added in pairs.
template <typename acc_t>
inline __attribute__((always_inline)) acc_t sum_of_lanes(acc_t (&lanes)[kSumLanes]) {
  for (int64_t width = kSumLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// The sum of value(i) over [first, last), at most kSumBlock numbers. Each lane adds up at most
// eight of them, and the lanes are added in pairs.
template <typename acc_t, typename Value>
inline __attribute__((always_inline)) acc_t sum_of(int64_t first, int64_t last, Value&& value) {
  static_assert(kSumBlock == 8 * kSumLanes);
  acc_t lanes[kSumLanes] = {};
  for_each_lane(first, last, [&](int64_t lane, int64_t i) { lanes[lane] += value(i); });
  return sum_of_lanes(lanes);
}

// As sum_of, but nullopt unless holds(i) is true for all i.
template <typename acc_t, typename Value, typename Holds>
inline __attribute__((always_inline)) std::optional<acc_t> sum_where_all(int64_t first,
                                                                         int64_t last,
                                                                         Value&& value,
                                                                         Holds&& holds) {
  acc_t lanes[kSumLanes] = {};
  std::conditional_t<sizeof(acc_t) == 8, int64_t, int32_t> failed[kSumLanes] = {};
  for_each_lane(first, last, [&](int64_t lane, int64_t i) {
    lanes[lane] += value(i);
    failed[lane] |= holds(i) ? 0 : 1;
  });
  for (int64_t lane = 1; lane < kSumLanes; ++lane) failed[0] |= failed[lane];
  if (failed[0]) return std::nullopt;
  return sum_of_lanes(lanes);
}

}  // namespace fused::cpu
