// The elementwise loss for which a source is compiled. The build names the loss, for example by
// FUSED_LOSS=huber_loss.
#pragma once

#ifndef FUSED_LOSS
#error "this source is compiled for each header of losses/elementwise/, with its name as FUSED_LOSS"
#endif

#define FUSED_QUOTED_AS_IT_IS(text) #text
#define FUSED_QUOTED(text) FUSED_QUOTED_AS_IT_IS(text)

// clang-format off: it would insert spaces into the path
#include FUSED_QUOTED(losses/elementwise/FUSED_LOSS.h)
// clang-format on

namespace fused {

namespace this_loss = FUSED_LOSS;
constexpr char kThisLoss[] = FUSED_QUOTED(FUSED_LOSS);

}  // namespace fused
