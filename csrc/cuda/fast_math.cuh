// exp and 1 / x: for float the hardware's approximations, for double the usual functions.
#pragma once

#include "../losses/math.h"

namespace fused::cuda {

using math::fast_exp;
using math::fast_inverse;

}  // namespace fused::cuda
