#include "../kernels.h"
#include "../losses/kl_div.h"
#include "elementwise.cuh"

void fused::kl_div(const ElementwiseArgs& args, void* stream) {
  const bool log_target = args.parameters[0] != 0, log_input = args.parameters[1] != 0;
  if (log_input) {
    if (log_target) return cuda::elementwise<KlDiv<true, true>::Loss>(args, stream);
    return cuda::elementwise<KlDiv<true, false>::Loss>(args, stream);
  }
  if (log_target) return cuda::elementwise<KlDiv<false, true>::Loss>(args, stream);
  cuda::elementwise<KlDiv<false, false>::Loss>(args, stream);
}
