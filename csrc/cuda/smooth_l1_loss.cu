#include "../kernels.h"
#include "../losses/smooth_l1_loss.h"
#include "elementwise.cuh"

void fused::smooth_l1_loss(const ElementwiseArgs& args, void* stream) {
  cuda::weighted_elementwise<SmoothL1Loss>(args, stream);
}
