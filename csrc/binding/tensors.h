// Converts torch tensors to the kernels' plain arguments. The sources of this folder are compiled
// once for the CPU library and once, with FUSED_CUDA, for the CUDA library.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "../kernels.h"

#ifdef FUSED_CUDA
#define FUSED_DISPATCH_KEY CUDA
#else
#define FUSED_DISPATCH_KEY CPU
#endif

namespace fused::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// Holds the device guard and the current stream of the tensor's device. On the CPU it does nothing.
class Launch {
 public:
#ifdef FUSED_CUDA
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
#else
  explicit Launch(const Tensor& /*tensor*/) {}
#endif
  void* stream() const { return stream_; }

 private:
#ifdef FUSED_CUDA
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

std::string to_string(const Sizes& sizes);
Sizes sizes_of(const Tensor& tensor);
bool has_shape(const Tensor& tensor, const Sizes& shape);
// In elements. 0 in a dimension of size 1, where torch's stride is arbitrary.
Sizes strides_of(const Tensor& tensor);

// The kernels' DType of a floating-point tensor. Throws for any other dtype.
DType dtype_of(const Tensor& tensor, const char* op, const char* argument);
// Throws unless the tensor has one element.
void check_one_number(const Tensor& tensor, const char* op, const char* argument);
ScalarType accumulation_type(ScalarType dtype);

// The shape that input and target broadcast to. Throws if they don't.
Sizes broadcast_shape(const Tensor& input, const Tensor& target, const char* op);

// A contiguous tensor on the device of `like`.
Tensor empty(const Tensor& like, const Sizes& shape, ScalarType dtype);
// aten::empty_like(tensor.expand(shape), dtype=dtype): dense, in the order of tensor's strides.
Tensor empty_like(const Tensor& tensor, const Sizes& shape, ScalarType dtype);
// Dense, with the strides that torch's pointwise ops give the result of two tensors: those of the
// first, except where it is broadcast or expanded. computed: torch computes one tensor from the
// first alone, one from both, and the result from these two.
Tensor empty_pointwise(const Tensor& first, const Tensor& second, const Sizes& shape,
                       ScalarType dtype, bool computed);
// empty_like with tensor's shape and dtype, uninitialised.
Tensor empty_gradient(const Tensor& tensor);

// Uninitialised memory for the kernels of one call. On a GPU, the kernels may still run when it is
// freed: the caching allocator reuses it on the same stream, after them.
class Scratch {
 public:
  Scratch(const Tensor& like, int64_t bytes);
  void* data() const;

 private:
#ifdef FUSED_CUDA
  Tensor memory_;
#else
  std::unique_ptr<std::byte[]> memory_;  // creating a tensor takes longer than a small loss
#endif
};

// If the tensor needs no conversion, it is returned itself: the converting ops cost more than a
// small kernel.
Tensor as_contiguous(const Tensor& tensor, ScalarType dtype);
Tensor as_contiguous(const Tensor& tensor);

// Strides of tensor in the iteration space `shape`: 0 where it is broadcast. Throws if it does not
// broadcast to `shape`.
Sizes broadcast_strides(const Tensor& tensor, const Sizes& shape, const char* op,
                        const char* argument);

// Orders the dimensions by the first operand's strides (ties by the next operand's), unless
// keep_order. Drops dimensions of size 1 and merges neighbours whose strides allow it in every
// operand. Returns the sizes, innermost first, and replaces each operand's strides accordingly.
Sizes coalesce(const Sizes& shape, const std::vector<Sizes*>& operands, bool keep_order);

// An op that refuses tensors of different devices. The dispatcher does not refuse them, and the
// kernels would dereference the pointers of all tensors.
template <auto function>
struct OnOneDevice;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct OnOneDevice<function> {
  static Result call(Arguments... arguments) {
    std::optional<int32_t> device;
    (check(arguments, device), ...);
    return function(arguments...);
  }

 private:
  template <typename Argument>
  static void check(const Argument& argument, std::optional<int32_t>& device) {
    if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
      if (argument) check(*argument, device);
    } else if constexpr (std::is_same_v<Argument, Tensor>) {
      // If the schema has no `?`, a None arrives as an undefined tensor.
      if (!argument.defined()) throw std::runtime_error("expected a tensor, got None");
      const int32_t found = argument.get_device_index();  // -1 for the CPU
      if (device.value_or(found) != found)
        throw std::runtime_error("expected all tensors to be on the same device, got " +
                                 device_name(*device) + " and " + device_name(found));
      device = found;
    }
  }

  static std::string device_name(int32_t index) {
    return index < 0 ? "cpu" : "cuda:" + std::to_string(index);
  }
};

#define FUSED_BOX(function) TORCH_BOX((&OnOneDevice<function>::call))

}  // namespace fused::binding
