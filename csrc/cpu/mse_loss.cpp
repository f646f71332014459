#include "../losses/mse_loss.h"

#include "../kernels.h"
#include "elementwise.h"

void fused::mse_loss(const ElementwiseArgs& args, void* /*stream*/) {
  cpu::weighted_elementwise<MseLoss>(args);
}
