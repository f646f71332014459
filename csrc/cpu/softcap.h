// The soft-cap of a tile of logits.
#pragma once

#include <cstdint>

#include "../losses/softcap.h"

namespace fused::cpu {

// Writes the soft-capped logits and, unless null, the slopes. `capped` may be the buffer of
// `logits`. Never inlined: if the last product were fused with the subtraction of a row's largest
// logit, the difference would not be 0 for that logit itself, and the loss of a row of one class
// would not be 0.
template <typename acc_t>
__attribute__((noinline)) void cap_logits(const acc_t* logits, int64_t count, acc_t cap,
                                          acc_t* capped, acc_t* slopes) {
  if (!slopes) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) capped[i] = soft_capped(logits[i], cap).logit;
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Capped<acc_t> both = soft_capped(logits[i], cap);
    capped[i] = both.logit;
    slopes[i] = both.slope;
  }
}

}  // namespace fused::cpu
