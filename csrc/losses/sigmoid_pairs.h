// The binary cross entropy of a number of a matrix, whose target is 0 or 1. That of a positive pair
// is that of a negative one whose number is negated, and so is its gradient.
#pragma once

#include "math.h"

namespace fused {

template <typename acc_t>
struct SigmoidPair {
  // Adds softplus(x), or softplus(-x) of a positive pair, to `sum`; returns its gradient. One
  // exponential makes both; neither cancels.
  static FUSED_HOST_DEVICE acc_t add(acc_t x, bool is_positive, acc_t& sum) {
    const acc_t negative = is_positive ? -x : x;
    const bool is_below = negative < acc_t(0);
    const acc_t decay = math::fast_exp(-math::absolute(negative));
    sum += (is_below ? acc_t(0) : negative) + math::log1p_unit(decay);
    const acc_t larger = math::fast_inverse(acc_t(1) + decay);
    const acc_t gradient = is_below ? decay * larger : larger;
    return is_positive ? -gradient : gradient;
  }
};

}  // namespace fused
