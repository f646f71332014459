// Elementwise losses on the CPU: value, sum and derivatives in one pass over the operands.
//
// The iteration space is cut into chunks of kChunk elements, for any number of threads, and the
// chunks' sums are added up in order. Results therefore do not depend on the number of threads. A
// chunk is processed in tiles that fit the L1 cache. A tile is used in place if its operand is
// contiguous and has the arithmetic's type. Rows of input, target and their gradients are also used
// in place if all have one 16-bit dtype. Any other operand is first converted into a buffer, so
// that strides, broadcasting and mixed dtypes need no code of their own. Bytes moved: each operand
// once, each output once.
#pragma once

#include <vector>

#include "../losses/gradient_scale.h"
#include "parallel.h"
#include "sum.h"

namespace fused::cpu {

constexpr int64_t kTile = 1024;
constexpr int64_t kChunk = 32 * kTile;

// Splits the linear range [begin, begin + count) into runs along the innermost dimension and calls
// body(offset in elements, stride, run length, position in the tile).
template <typename Body>
void for_each_run(const ElementwiseArgs& args, const int64_t* strides, int64_t begin, int64_t count,
                  Body&& body) {
  if (args.ndim == 0) return body(int64_t(0), int64_t(0), count, int64_t(0));
  int64_t digits[kMaxDims];
  int64_t offset = 0;
  for (int d = 0; d < args.ndim; ++d) {
    digits[d] = begin % args.sizes[d];
    offset += digits[d] * strides[d];
    begin /= args.sizes[d];
  }
  int64_t done = 0;
  while (true) {
    const int64_t run = std::min(args.sizes[0] - digits[0], count - done);
    body(offset, strides[0], run, done);
    done += run;
    if (done == count) return;
    // The run reached the end of its dimension. Advance the next dimension's index.
    offset -= digits[0] * strides[0];
    digits[0] = 0;
    for (int d = 1; d < args.ndim; ++d) {
      offset += strides[d];
      if (++digits[d] < args.sizes[d]) break;
      offset -= args.sizes[d] * strides[d];
      digits[d] = 0;
    }
  }
}

// Whether an operand's elements are contiguous in the order of the iteration.
inline bool is_dense(const ElementwiseArgs& args, const Operand& operand) {
  int64_t dense = 1;
  for (int d = 0; d < args.ndim; ++d) {
    if (operand.strides[d] != dense) return false;
    dense *= args.sizes[d];
  }
  return true;
}

// One operand's view of the current tile.
template <typename acc_t>
class Tile {
 public:
  Tile(const ElementwiseArgs& args, const Operand& operand)
      : args_(args),
        operand_(operand),
        constant_(true),
        direct_(operand.dtype == dtype_of<acc_t>() && is_dense(args, operand)) {
    for (int d = 0; d < args.ndim; ++d) constant_ = constant_ && operand.strides[d] == 0;
  }

  explicit operator bool() const { return operand_.data != nullptr; }

  // Whether the operand has one value for all elements.
  bool is_constant() const { return constant_; }

  // A pointer to the elements of a tile that is contiguous in memory.
  template <typename scalar_t>
  scalar_t* in_memory(int64_t begin) const {
    int64_t offset = 0;
    for_each_run(args_, operand_.strides, begin, 1,
                 [&](int64_t place, int64_t, int64_t, int64_t) { offset = place; });
    return static_cast<scalar_t*>(operand_.data) + offset;
  }

  template <typename scalar_t>
  const scalar_t* read_as(int64_t begin, int64_t count) {
    if constexpr (std::is_same_v<scalar_t, acc_t>)
      return read(begin, count);
    else
      return in_memory<scalar_t>(begin);
  }

  const acc_t* read(int64_t begin, int64_t count) {
    if (direct_) return static_cast<const acc_t*>(operand_.data) + begin;
    if (constant_ && filled_ >= count) return buffer_;
    for_each_run(args_, operand_.strides, begin, count,
                 [&](int64_t offset, int64_t stride, int64_t run, int64_t position) {
                   load(operand_.data, operand_.dtype, offset, stride, run, buffer_ + position);
                 });
    filled_ = count;
    return buffer_;
  }

  acc_t* write_pointer(int64_t begin) {
    return direct_ ? static_cast<acc_t*>(operand_.data) + begin : buffer_;
  }

  void write(int64_t begin, int64_t count) {
    if (direct_) return;
    for_each_run(args_, operand_.strides, begin, count,
                 [&](int64_t offset, int64_t stride, int64_t run, int64_t position) {
                   store(operand_.data, operand_.dtype, offset, stride, run, buffer_ + position);
                 });
  }

 private:
  const ElementwiseArgs& args_;
  const Operand& operand_;
  bool constant_;
  bool direct_;
  int64_t filled_ = 0;
  alignas(64) acc_t buffer_[kTile];
};

struct NoTile {
  NoTile(const ElementwiseArgs& /*args*/, const Operand& /*operand*/) {}
};

// If an instantiation never has the operand, no tile: a tile takes space on the stack.
template <typename acc_t, bool kPresent>
using OptionalTile = std::conditional_t<kPresent, Tile<acc_t>, NoTile>;

// Whether a loss has cheaper arithmetic for its value, valid for all but rare arguments.
template <typename Loss, typename acc_t>
constexpr bool has_regular_value = requires(const Loss loss, acc_t x) {
  loss.regular_value(x, x);
  loss.is_regular(x, x);
};

// An output may share the buffer of an input: in the loops below each index is read before it is
// written, and no other index is accessed.
// scalar_t: the type in which input, target and their gradients are read and written. If it is not
// acc_t, they are contiguous in each run of `run` elements.
template <bool kWeighted, typename acc_t, typename scalar_t, typename Loss>
Sum elementwise_chunk(const ElementwiseArgs& args, const Loss& loss, int64_t run, int64_t begin,
                      int64_t end) {
  constexpr bool kPosWeight = takes_pos_weight<Loss, acc_t>;
  Tile<acc_t> input(args, args.input), target(args, args.target);
  Tile<acc_t> grad_output(args, args.grad_output), losses(args, args.losses);
  Tile<acc_t> grad_input(args, args.grad_input), grad_target(args, args.grad_target);
  [[maybe_unused]] OptionalTile<acc_t, kWeighted> weight(args, args.weight);
  [[maybe_unused]] OptionalTile<acc_t, kWeighted> grad_weight(args, args.grad_weight);
  [[maybe_unused]] OptionalTile<acc_t, kPosWeight> pos_weight(args, args.pos_weight);
  const bool one_grad_output = grad_output && grad_output.is_constant();
  const acc_t common = one_grad_output ? *grad_output.read(begin, 1) : acc_t(1);
  const auto scale = GradientScale<acc_t>::of(kSlope<Loss> / args.divisor, common);
  [[maybe_unused]] const auto weight_scale = GradientScale<acc_t>::of(1 / args.divisor, common);
  Sum sum;

  for (int64_t first = begin, count; first < end; first += count) {
    count = std::min({kTile, end - first, run - first % run});
    const scalar_t* x = input.template read_as<scalar_t>(first, count);
    const scalar_t* y = target.template read_as<scalar_t>(first, count);
    [[maybe_unused]] const acc_t* w = nullptr;
    [[maybe_unused]] const acc_t* p = nullptr;
    if constexpr (kWeighted) w = weight.read(first, count);
    if constexpr (kPosWeight) p = pos_weight.read(first, count);
    // `plain` calls a function with the loss's arguments at index i; `weighted` also multiplies by
    // the weight. Captures are by value: a variable captured by reference is read again after every
    // store.
    const auto plain = [x, y, p](auto&& function, int64_t i) {
      if constexpr (kPosWeight)
        return function(to_acc<acc_t>(x[i]), to_acc<acc_t>(y[i]), p[i]);
      else
        return function(to_acc<acc_t>(x[i]), to_acc<acc_t>(y[i]));
    };
    const auto weighted = [w, plain](auto&& function, int64_t i) {
      if constexpr (kWeighted)
        return w[i] * plain(function, i);
      else
        return plain(function, i);
    };
    const auto value = [loss](auto... at) { return loss.value(at...); };
    if (args.total.data) {
      for (int64_t block = 0; block < count; block += kSumBlock) {
        const int64_t block_end = std::min(count, block + kSumBlock);
        if constexpr (has_regular_value<Loss, acc_t> && !kWeighted) {
          const auto of_regular = sum_where_all<acc_t>(
              block, block_end,
              [&](int64_t i) {
                return plain([loss](auto... at) { return loss.regular_value(at...); }, i);
              },
              [&](int64_t i) {
                return plain([loss](auto... at) { return loss.is_regular(at...); }, i);
              });
          if (of_regular) {
            sum.add(*of_regular);
            continue;
          }
        }
        sum.add(sum_of<acc_t>(block, block_end, [&](int64_t i) { return weighted(value, i); }));
      }
    }
    if (losses) {
      acc_t* out = losses.write_pointer(first);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = weighted(value, i);
      losses.write(first, count);
    }

    const bool each = grad_output && !one_grad_output;
    const acc_t* g = each ? grad_output.read(first, count) : nullptr;
    // scaled(i, scale): the derivative at index i times a GradientScale.
    const auto write = [&](auto* out, const GradientScale<acc_t> by, auto&& scaled) {
      using out_t = std::remove_pointer_t<decltype(out)>;
      if (g) {
        const acc_t factor = by.first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i)
          out[i] = from_acc<out_t>(scaled(i, GradientScale<acc_t>{g[i], factor}));
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = from_acc<out_t>(scaled(i, by));
      }
    };
    const auto differentiate = [&](Tile<acc_t>& grad, const auto& by, auto&& scaled) {
      write(grad.write_pointer(first), by, scaled);
      grad.write(first, count);
    };
    // Writes the gradient of input or target.
    const auto differentiate_operand = [&](Tile<acc_t>& grad, auto&& derivative) {
      const auto scaled = [=](int64_t i, const GradientScale<acc_t> by) {
        if constexpr (kWeighted)
          return by.template weighted<Loss>(plain(derivative, i), w[i]);
        else
          return by(plain(derivative, i));
      };
      if constexpr (std::is_same_v<scalar_t, acc_t>)
        differentiate(grad, scale, scaled);
      else
        write(grad.template in_memory<scalar_t>(first), scale, scaled);
    };
    // grad_input is written last, because it may share input's buffer.
    if constexpr (kWeighted) {
      if (grad_weight)
        differentiate(grad_weight, weight_scale, [=](int64_t i, const GradientScale<acc_t> by) {
          return by(plain(value, i));
        });
    }
    if (grad_target)
      differentiate_operand(grad_target, [=](auto... at) { return loss.grad_target(at...); });
    if (grad_input)
      differentiate_operand(grad_input, [=](auto... at) { return loss.grad_input(at...); });
  }
  return sum;
}

template <template <typename> class Loss, typename acc_t, typename scalar_t, bool kWeighted>
void elementwise_as(const ElementwiseArgs& args, int64_t run) {
  const Loss<acc_t> loss(args.parameters);
  const int64_t chunks = (args.numel + kChunk - 1) / kChunk;
  std::vector<Sum> sums(chunks);
  parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk * kChunk;
      sums[chunk] = elementwise_chunk<kWeighted, acc_t, scalar_t>(
          args, loss, run, begin, std::min(args.numel, begin + kChunk));
    }
  });
  if (args.total.data) {
    Sum total;
    for (const Sum& sum : sums) total.add(sum.value());
    const acc_t value = static_cast<acc_t>(total.value() / args.divisor);
    store(args.total.data, args.total.dtype, 0, 1, 1, &value);
  }
}

// How many elements are contiguous in input, target and their gradients: all elements, those of a
// row that is not short, or 0, also if not all have `dtype`.
inline int64_t run_of(const ElementwiseArgs& args, DType dtype) {
  int64_t run = args.numel;
  for (const Operand* operand : {&args.input, &args.target, &args.grad_input, &args.grad_target}) {
    if (!operand->data || (operand->dtype == dtype && is_dense(args, *operand))) continue;
    if (operand->dtype != dtype || operand->strides[0] != 1 || args.sizes[0] < kSumBlock) return 0;
    run = args.sizes[0];
  }
  return run;
}

template <template <typename> class Loss, bool kWeighted = false>
void elementwise(const ElementwiseArgs& args) {
  if (uses_double(args)) return elementwise_as<Loss, double, double, kWeighted>(args, args.numel);
  if (const int64_t run = run_of(args, DType::kBFloat16))
    return elementwise_as<Loss, float, BFloat16, kWeighted>(args, run);
  if (const int64_t run = run_of(args, DType::kFloat16))
    return elementwise_as<Loss, float, Float16, kWeighted>(args, run);
  elementwise_as<Loss, float, float, kWeighted>(args, args.numel);
}

// For a loss whose elements may have weights.
template <template <typename> class Loss>
void weighted_elementwise(const ElementwiseArgs& args) {
  if (args.weight.data) return elementwise<Loss, true>(args);
  return elementwise<Loss>(args);
}

}  // namespace fused::cpu
