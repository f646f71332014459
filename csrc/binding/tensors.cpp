#include "tensors.h"

#include <algorithm>

#ifndef FUSED_CUDA
#include "../cpu/parallel.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

void fused::cpu::parallel_for_range(int64_t begin, int64_t end, int64_t grain,
                                    void (*body)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(begin, end, grain, [body, context](int64_t first, int64_t last) {
    body(context, first, last);
  });
}
#endif

namespace fused::binding {

std::string to_string(const Sizes& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

Sizes sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

bool has_shape(const Tensor& tensor, const Sizes& shape) {
  const auto sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

Sizes strides_of(const Tensor& tensor) {
  Sizes strides(tensor.strides().begin(), tensor.strides().end());
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < strides.size(); ++i)
    if (sizes[i] == 1) strides[i] = 0;
  return strides;
}

DType dtype_of(const Tensor& tensor, const char* op, const char* argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default:
      throw std::runtime_error(std::string(op) + ": expected " + argument +
                               " to be float64, float32, bfloat16 or float16");
  }
}

void check_one_number(const Tensor& tensor, const char* op, const char* argument) {
  if (tensor.numel() != 1)
    throw std::runtime_error(std::string(op) + ": expected " + argument +
                             " to hold one number, got shape " + to_string(sizes_of(tensor)));
}

ScalarType accumulation_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Sizes broadcast_shape(const Tensor& input, const Tensor& target, const char* op) {
  const Sizes a = sizes_of(input), b = sizes_of(target);
  Sizes shape(std::max(a.size(), b.size()), 1);
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t m = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t n = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (m != n && m != 1 && n != 1)
      throw std::runtime_error(std::string(op) + ": input of shape " + to_string(a) +
                               " and target of shape " + to_string(b) +
                               " can't be broadcast together");
    shape[shape.size() - 1 - i] = m == 1 ? n : m;
  }
  return shape;
}

namespace {

// Asks the operating system to back large new memory with huge pages, since the page faults of
// small pages take longer than the computation of a gradient. Only a hint, for systems that use
// huge pages on demand.
#if !defined(FUSED_CUDA) && defined(MADV_HUGEPAGE)
void prefer_huge_pages(const void* memory, int64_t bytes) {
  constexpr int64_t kFewestBytes = 4 << 20;  // two huge pages of the usual size
  if (bytes < kFewestBytes) return;
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (start + page - 1) / page * page;  // whole pages: others hold other data
  const uintptr_t last = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void prefer_huge_pages(const Tensor& tensor) {
  prefer_huge_pages(tensor.data_ptr(),
                    tensor.numel() * static_cast<int64_t>(tensor.element_size()));
}
#else
template <typename... Memory>
void prefer_huge_pages(const Memory&... /*memory*/) {}
#endif

// Calls the shim directly: a boxed call of the dispatcher costs several times an allocation.
Tensor empty_strided(const Tensor& like, const Sizes& shape, const int64_t* strides,
                     ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides, to<int32_t>(from(dtype)), device_type,
                                                  like.get_device_index(), &result));
  const Tensor tensor(result);
  prefer_huge_pages(tensor);
  return tensor;
}

// Strides in the iteration space `shape`: 0 in broadcast dimensions; in dimensions of size 1 of
// `shape`, torch's stride.
Sizes expanded(const Sizes& sizes, const int64_t* strides, const Sizes& shape) {
  Sizes result(shape.size(), 0);
  const size_t offset = shape.size() - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] == shape[offset + i]) result[offset + i] = strides[i];
  return result;
}

// The strides of a pointwise op's result, in TensorIterator's order of the dimensions. If strides
// are 0, the comparison is not transitive, so only TensorIterator's own sort gives the same order.
Sizes pointwise_strides(const Sizes& shape, const std::vector<Sizes>& operands) {
  const auto compare = [&](size_t inner, size_t outer) {
    for (const Sizes& strides : operands) {
      if (strides[inner] == 0 || strides[outer] == 0) continue;
      if (strides[inner] != strides[outer]) return strides[inner] < strides[outer] ? -1 : 1;
      if (shape[inner] > shape[outer]) return 1;
    }
    return 0;
  };
  Sizes order(shape.size());  // innermost first
  std::iota(order.rbegin(), order.rend(), int64_t(0));
  for (size_t i = 1; i < order.size(); ++i) {
    size_t at = i;
    for (size_t k = i; k-- > 0;) {
      const int found = compare(order[k], order[at]);
      if (found < 0) break;
      if (found > 0) {
        std::swap(order[k], order[at]);
        at = k;
      }
    }
  }
  Sizes strides(shape.size());
  int64_t step = 1;
  for (const int64_t d : order) {
    strides[d] = step;
    step *= std::max(shape[d], int64_t(1));
  }
  return strides;
}

}  // namespace

Tensor empty(const Tensor& like, const Sizes& shape, ScalarType dtype) {
  Sizes strides(shape.size(), 1);
  for (size_t i = shape.size(); i > 1; --i)
    strides[i - 2] = strides[i - 1] * std::max(shape[i - 1], int64_t(1));
  return empty_strided(like, shape, strides.data(), dtype);
}

Tensor empty_like(const Tensor& tensor, const Sizes& shape, ScalarType dtype) {
  const bool same_shape = has_shape(tensor, shape);
  if (same_shape && tensor.is_contiguous())
    return empty_strided(tensor, shape, tensor.strides().data(), dtype);
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[6] = {from(tensor)};
  if (!same_shape) {
    stack[1] = from(torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()));
    stack[2] = from(false);
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::expand", "", stack, TORCH_ABI_VERSION));
  }
  // stack[0] holds the tensor, expanded or not: empty_like's first argument.
  stack[1] = from(std::optional<ScalarType>(dtype));
  for (int i = 2; i < 6; ++i) stack[i] = from(std::nullopt);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION));
  const Tensor result = to<Tensor>(stack[0]);
  prefer_huge_pages(result);
  return result;
}

Tensor empty_pointwise(const Tensor& first, const Tensor& second, const Sizes& shape,
                       ScalarType dtype, bool computed) {
  const auto own = first.strides();
  const bool decides = computed || std::find(own.begin(), own.end(), 0) == own.end();
  if (decides && has_shape(first, shape)) return empty_like(first, shape, dtype);
  const Sizes first_sizes = sizes_of(first);
  Sizes strides =
      pointwise_strides(shape, {expanded(first_sizes, own.data(), shape),
                                expanded(sizes_of(second), second.strides().data(), shape)});
  if (computed) {
    const Sizes dense =
        pointwise_strides(first_sizes, {Sizes(first.strides().begin(), first.strides().end())});
    strides = pointwise_strides(shape, {expanded(first_sizes, dense.data(), shape), strides});
  }
  return empty_strided(first, shape, strides.data(), dtype);
}

Tensor empty_gradient(const Tensor& tensor) {
  return empty_like(tensor, sizes_of(tensor), tensor.scalar_type());
}

#ifdef FUSED_CUDA
Scratch::Scratch(const Tensor& like, int64_t bytes)
    : memory_(empty(like, {bytes}, ScalarType::Byte)) {}
void* Scratch::data() const { return memory_.data_ptr(); }
#else
Scratch::Scratch(const Tensor& /*like*/, int64_t bytes) : memory_(new std::byte[bytes]) {
  prefer_huge_pages(memory_.get(), bytes);
}
void* Scratch::data() const { return memory_.get(); }
#endif

Tensor as_contiguous(const Tensor& tensor, ScalarType dtype) {
  return as_contiguous(tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype));
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Sizes broadcast_strides(const Tensor& tensor, const Sizes& shape, const char* op,
                        const char* argument) {
  const Sizes sizes = sizes_of(tensor), strides = strides_of(tensor);
  Sizes result(shape.size(), 0);
  const size_t offset = shape.size() - sizes.size();
  bool fits = sizes.size() <= shape.size();
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == 1 || sizes[i] == shape[offset + i];
    result[offset + i] = strides[i];
  }
  if (!fits)
    throw std::runtime_error(std::string(op) + ": expected " + argument + " to broadcast to " +
                             to_string(shape) + ", got shape " + to_string(sizes));
  return result;
}

Sizes coalesce(const Sizes& shape, const std::vector<Sizes*>& operands, bool keep_order) {
  std::vector<int> order;  // innermost first
  for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d)
    if (shape[d] != 1) order.push_back(d);
  if (!keep_order)
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      for (const Sizes* strides : operands)
        if ((*strides)[a] != (*strides)[b]) return (*strides)[a] < (*strides)[b];
      return false;
    });

  Sizes sizes;
  std::vector<Sizes> merged(operands.size());
  for (const int d : order) {
    bool extends = !sizes.empty();
    size_t k = 0;
    for (const Sizes* strides : operands) {
      extends = extends && (*strides)[d] == merged[k].back() * sizes.back();
      ++k;
    }
    if (extends) {
      sizes.back() *= shape[d];
      continue;
    }
    sizes.push_back(shape[d]);
    k = 0;
    for (const Sizes* strides : operands) merged[k++].push_back((*strides)[d]);
  }
  if (sizes.size() > kMaxDims)
    throw std::runtime_error("tensors with more than " + std::to_string(kMaxDims) +
                             " dimensions that can't be merged are not supported");
  size_t k = 0;
  for (Sizes* strides : operands) *strides = std::move(merged[k++]);
  return sizes;
}

}  // namespace fused::binding
