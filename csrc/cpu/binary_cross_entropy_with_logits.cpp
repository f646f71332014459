#include "../losses/binary_cross_entropy_with_logits.h"

#include "../kernels.h"
#include "elementwise.h"

void fused::binary_cross_entropy_with_logits(const ElementwiseArgs& args, void* /*stream*/) {
  if (args.pos_weight.data) return cpu::weighted_elementwise<BinaryCrossEntropyWithPosWeight>(args);
  return cpu::weighted_elementwise<BinaryCrossEntropyWithLogits>(args);
}
