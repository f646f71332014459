// exp and 1 / x of floats in the hardware's approximations; of doubles as usual.
#pragma once

#include "../losses/math.h"

namespace fused::cuda {

using math::fast_exp;
using math::fast_inverse;

}  // namespace fused::cuda
