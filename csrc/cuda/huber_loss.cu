#include "../kernels.h"
#include "../losses/huber_loss.h"
#include "elementwise.cuh"

void fused::huber_loss(const ElementwiseArgs& args, void* stream) {
  cuda::weighted_elementwise<HuberLoss>(args, stream);
}
