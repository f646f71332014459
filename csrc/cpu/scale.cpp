#include "../kernels.h"
#include "parallel.h"

void fused::scale_(void* data, DType dtype, int64_t numel, const void* factor, DType factor_dtype,
                   void* /*stream*/) {
  double scale = 1;
  cpu::load(factor, factor_dtype, 0, 1, 1, &scale);
  if (scale == 1) return;
  cpu::visit(dtype, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    scalar_t* values = static_cast<scalar_t*>(data);
    const acc_t multiplier = static_cast<acc_t>(scale);
    cpu::parallel_for(0, numel, int64_t(1) << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        values[i] = cpu::from_acc<scalar_t>(cpu::to_acc<acc_t>(values[i]) * multiplier);
    });
  });
}
