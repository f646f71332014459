#include "../kernels.h"
#include "../losses/mse_loss.h"
#include "elementwise.cuh"

void fused::mse_loss(const ElementwiseArgs& args, void* stream) {
  cuda::weighted_elementwise<MseLoss>(args, stream);
}
