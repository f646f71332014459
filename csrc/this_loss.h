// The elementwise loss that a source is compiled for. The build names it: FUSED_LOSS=huber_loss.
#pragma once

#ifndef FUSED_LOSS
#error "this source is compiled for each header of losses/elementwise/, with its name as FUSED_LOSS"
#endif

#define FUSED_QUOTED_AS_IT_IS(text) #text
#define FUSED_QUOTED(text) FUSED_QUOTED_AS_IT_IS(text)

// clang-format off: it would put spaces into the path
#include FUSED_QUOTED(losses/elementwise/FUSED_LOSS.h)
// clang-format on

namespace fused {

namespace this_loss = FUSED_LOSS;
constexpr char kThisLoss[] = FUSED_QUOTED(FUSED_LOSS);

}  // namespace fused
