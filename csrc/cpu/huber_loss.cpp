#include "../losses/huber_loss.h"

#include "../kernels.h"
#include "elementwise.h"

void fused::huber_loss(const ElementwiseArgs& args, void* /*stream*/) {
  cpu::weighted_elementwise<HuberLoss>(args);
}
