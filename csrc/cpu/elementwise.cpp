// The kernels of an elementwise loss. The build compiles this file once for each loss.
#include "elementwise.h"

#include "../kernels.h"
#include "../this_loss.h"

template <>
void fused::elementwise_loss<fused::this_loss::Op>(const ElementwiseArgs& args, void* /*stream*/) {
  this_loss::Op::choose(args, [&]<template <typename> class Loss>(Functor<Loss>) {
    if constexpr (this_loss::Op::kWeights == Weights::kNone)
      cpu::elementwise<Loss>(args);
    else
      cpu::weighted_elementwise<Loss>(args);
  });
}
