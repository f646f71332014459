#include "../kernels.h"
#include "../losses/l1_loss.h"
#include "elementwise.cuh"

void fused::l1_loss(const ElementwiseArgs& args, void* stream) {
  cuda::weighted_elementwise<L1Loss>(args, stream);
}
