#include "../kernels.h"
#include "../losses/binary_cross_entropy_with_logits.h"
#include "elementwise.cuh"

void fused::binary_cross_entropy_with_logits(const ElementwiseArgs& args, void* stream) {
  if (args.pos_weight.data)
    return cuda::weighted_elementwise<BinaryCrossEntropyWithPosWeight>(args, stream);
  cuda::weighted_elementwise<BinaryCrossEntropyWithLogits>(args, stream);
}
