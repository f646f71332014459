#include "../losses/kl_div.h"

#include "../kernels.h"
#include "elementwise.h"

void fused::kl_div(const ElementwiseArgs& args, void* /*stream*/) {
  const bool log_target = args.parameters[0] != 0, log_input = args.parameters[1] != 0;
  if (log_input) {
    if (log_target) return cpu::elementwise<KlDiv<true, true>::Loss>(args);
    return cpu::elementwise<KlDiv<true, false>::Loss>(args);
  }
  if (log_target) return cpu::elementwise<KlDiv<false, true>::Loss>(args);
  return cpu::elementwise<KlDiv<false, false>::Loss>(args);
}
