#include "../losses/l1_loss.h"

#include "../kernels.h"
#include "elementwise.h"

void fused::l1_loss(const ElementwiseArgs& args, void* /*stream*/) {
  cpu::weighted_elementwise<L1Loss>(args);
}
