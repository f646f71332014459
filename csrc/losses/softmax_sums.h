// The largest of some numbers x, and the sum of exp(x - largest), so far; and the gradient of a
// cross entropy with them.
//
// Results are those of torch.amax and of torch's sum of exponentials:
//   a nan                      both are nan
//   +inf, or nothing but -inf  the largest is that, the sum is nan
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

template <typename acc_t>
struct SoftmaxSum {
  acc_t largest, sum;

  // Of no numbers. Not the default: variables in shared memory must stay uninitialised.
  static FUSED_HOST_DEVICE SoftmaxSum none() { return {-math::kInfinity<acc_t>, 0}; }

  static FUSED_HOST_DEVICE bool is_infinite(acc_t x) {
    return x == math::kInfinity<acc_t> || x == -math::kInfinity<acc_t>;
  }

  // What exponentials are relative to. Never infinite: so their sum is nan only if a number is.
  static FUSED_HOST_DEVICE acc_t origin(acc_t largest) {
    return is_infinite(largest) ? acc_t(0) : largest;
  }

  // exp(difference).
  static FUSED_HOST_DEVICE acc_t term(acc_t difference) {
#ifdef __CUDA_ARCH__
    return math::fast_exp(difference);
#else
    // exp_term(+inf) would be nan.
    return math::host::exp_term(difference > acc_t(80) ? acc_t(80) : difference);
#endif
  }

  // The factor of a sum when `to`, no less than `from`, becomes the largest number.
  static FUSED_HOST_DEVICE acc_t factor(acc_t from, acc_t to) {
    const acc_t smaller = term(from - to);
    return from == to ? acc_t(1) : smaller;
  }

  // Adds what other numbers have.
  FUSED_HOST_DEVICE void add(const SoftmaxSum& other) {
    const acc_t most = math::larger(largest, other.largest);
    sum = sum * factor(largest, most) + other.sum * factor(other.largest, most);
    largest = most;
  }

  // What the op returns.
  FUSED_HOST_DEVICE SoftmaxSum result() const {
    if (sum != sum) return {sum, sum};
    return {largest, is_infinite(largest) ? math::kNan<acc_t> : sum};
  }
};

// The gradient of the cross entropy of a row or column, of which a SoftmaxSum is known:
// factor * (softmax(x) - the share of x in the target distribution).
template <typename acc_t>
struct SoftmaxGradient {
  acc_t origin, scale, factor;

  FUSED_HOST_DEVICE SoftmaxGradient() {}

  FUSED_HOST_DEVICE SoftmaxGradient(const SoftmaxSumsTargets& given, int64_t index)
      : origin(SoftmaxSum<acc_t>::origin(static_cast<const acc_t*>(given.largest)[index])),
        factor(static_cast<const acc_t*>(given.factor)[index]) {
    scale = factor / static_cast<const acc_t*>(given.sum)[index];
  }

  FUSED_HOST_DEVICE acc_t operator()(acc_t x, acc_t share) const {
    return scale * SoftmaxSum<acc_t>::term(x - origin) - factor * share;
  }
};

}  // namespace fused
