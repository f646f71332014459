// How the headers of losses/elementwise/ declare their losses. X.h declares the loss X in namespace
// fused::X: functors with its mathematics, and `Op`. All other C++ code of the loss (the binding
// and the kernels of each device) is compiled from Op.
//
// A functor is a template of acc_t, the type of the arithmetic, and is constructed from the loss's
// parameters (const double*). Its members are
//   value, grad_input, grad_target    (input, target), or (input, target, pos_weight): the loss of
//                                     one element and its derivatives
//   kDerivativeSlope, kWeightLast     see gradient_scale.h
//   regular_value and is_regular      a cheaper value on the CPU, see cpu/elementwise.h
//   value_of_16_bit                   a cheaper value on CUDA, see cuda/elementwise.cuh
//   kLogarithms, kExponentials        the loss has much arithmetic, see cuda/elementwise.cuh
// Only value, grad_input and grad_target are required.
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

// The optional tensors of a loss, in the order of its schema. A weight multiplies the loss of each
// element outside the functor. A pos_weight is an argument of the functor.
enum class Weights { kNone, kWeight, kWeightAndPosWeight };

// With reduction none: the strides of the losses, as in torch.
//   kPair    of input and, where input is broadcast, of target
//   kInput   of input alone
//   kTarget  of a dense copy of target, then of input
enum class Like { kPair, kInput, kTarget };

template <typename...>
struct Types {};

// A tag that names a functor.
template <template <typename> class Loss>
struct Functor {};

// The defaults of an Op.
struct AnyOp {
  // The types of the loss's parameters in its schema: double or bool, at most two.
  using Parameters = Types<>;
  static constexpr Weights kWeights = Weights::kNone;
  static constexpr bool kWeightHasGradient = false;
  static constexpr Like kLike = Like::kPair;
};

// The Op of a loss with one functor. An Op with several functors defines its own `choose`, which
// calls run(Functor<...>()) with the functor that the arguments need.
template <template <typename> class Loss>
struct OpOf : AnyOp {
  template <typename Run>
  static void choose(const ElementwiseArgs& /*args*/, const Run& run) {
    run(Functor<Loss>());
  }
};

}  // namespace fused
