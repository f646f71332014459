// What the headers of losses/elementwise/ say of their losses. X.h there holds the loss fused::X,
// in namespace fused::X: functors with its mathematics, and `Op`. All other code of the loss in C++
// is compiled from Op: the binding, and the kernels of each device.
//
// A functor is a template of the type of the arithmetic, acc_t, made from the loss's parameters
// (const double*). Its members are
//   value, grad_input, grad_target    (input, target), or (input, target, pos_weight): the loss of
//                                     one element and its derivatives
//   kDerivativeSlope, kWeightLast     see gradient_scale.h
//   regular_value and is_regular      a shorter way to the value on the CPU, see cpu/elementwise.h
//   kLogarithms, kExponentials,       of much arithmetic, and a shorter way to the value on CUDA,
//   value_of_16_bit                   see cuda/elementwise.cuh
// of which only those of the first line have to be there.
#pragma once

#include "../arguments.h"
#include "math.h"

namespace fused {

// The optional tensors of a loss, in the order of its schema. A weight multiplies the loss of each
// element; a functor takes a pos_weight as an argument.
enum class Weights { kNone, kWeight, kWeightAndPosWeight };

// Whose strides the losses follow with reduction none, as torch's do: those of input and, where it
// is broadcast, of target; of input alone; or those that target has in memory of its own, then
// input's.
enum class Like { kPair, kInput, kTarget };

template <typename...>
struct Types {};

// Names a functor.
template <template <typename> class Loss>
struct Functor {};

// What an Op has where it says nothing else.
struct AnyOp {
  // The types of the loss's own parameters in its schema: double or bool, two at most.
  using Parameters = Types<>;
  static constexpr Weights kWeights = Weights::kNone;
  static constexpr bool kWeightHasGradient = false;
  static constexpr Like kLike = Like::kPair;
};

// Of a loss with one functor. A loss with several has a `choose` of its own, which calls
// run(Functor<...>()) with that of the arguments.
template <template <typename> class Loss>
struct OpOf : AnyOp {
  template <typename Run>
  static void choose(const ElementwiseArgs& /*args*/, const Run& run) {
    run(Functor<Loss>());
  }
};

}  // namespace fused
