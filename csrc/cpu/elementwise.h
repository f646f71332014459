// Elementwise losses on the CPU: value, sum and derivatives in one pass over the operands.
//
// The iteration space is cut into chunks of kChunk elements, whatever the number of threads, and
// the chunks' sums are added up in order: results do not depend on the threads. A chunk is worked
// off in tiles that fit the L1 cache. A tile of a contiguous operand that has the arithmetic's own
// type is used where it lies; any other operand is converted into a buffer first, so strides,
// broadcasting and mixed dtypes need no code of their own. Bytes moved: each operand once, each
// output once.
#pragma once

#include <vector>

#include "parallel.h"

namespace fused::cpu {

constexpr int64_t kTile = 1024;
constexpr int64_t kChunk = 32 * kTile;

// Splits the linear range [begin, begin + count) into runs along the innermost dimension and calls
// body(offset in elements, stride, run length, position in the tile).
template <typename Body>
void for_each_run(const ElementwiseArgs& args, const int64_t* strides, int64_t begin, int64_t count,
                  Body&& body) {
  int64_t done = 0;
  while (done < count) {
    int64_t remainder = begin + done;
    int64_t offset = 0;
    const int64_t inner = args.ndim > 0 ? remainder % args.sizes[0] : 0;
    for (int d = 0; d < args.ndim; ++d) {
      offset += remainder % args.sizes[d] * strides[d];
      remainder /= args.sizes[d];
    }
    const int64_t row = args.ndim > 0 ? args.sizes[0] - inner : 1;
    const int64_t run = std::min(row, count - done);
    body(offset, args.ndim > 0 ? strides[0] : 0, run, done);
    done += run;
  }
}

// One operand's view of the current tile.
template <typename acc_t>
class Tile {
 public:
  Tile(const ElementwiseArgs& args, const Operand& operand)
      : args_(args),
        operand_(operand),
        constant_(true),
        direct_(operand.dtype == dtype_of<acc_t>() && args.ndim <= 1 &&
                (args.ndim == 0 || operand.strides[0] == 1)) {
    for (int d = 0; d < args.ndim; ++d) constant_ = constant_ && operand.strides[d] == 0;
  }

  explicit operator bool() const { return operand_.data != nullptr; }

  // Whether the operand is one number for all elements.
  bool is_constant() const { return constant_; }

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

// The loops below allow an output to be the very buffer of an input: each index is read before it
// is written, and no other index is touched.
template <typename acc_t, typename Loss>
double elementwise_chunk(const ElementwiseArgs& args, const Loss& loss, int64_t begin,
                         int64_t end) {
  Tile<acc_t> input(args, args.input), target(args, args.target);
  Tile<acc_t> grad_output(args, args.grad_output), losses(args, args.losses);
  Tile<acc_t> grad_input(args, args.grad_input), grad_target(args, args.grad_target);
  acc_t scale = static_cast<acc_t>(1 / args.divisor);
  const bool one_grad_output = grad_output && grad_output.is_constant();
  if (one_grad_output) scale *= *grad_output.read(begin, 1);
  double sum = 0;

  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t count = std::min(kTile, end - first);
    const acc_t* x = input.read(first, count);
    const acc_t* y = target.read(first, count);
    if (args.total.data) {
      acc_t tile_sum = 0;
#pragma omp simd reduction(+ : tile_sum)
      for (int64_t i = 0; i < count; ++i) tile_sum += loss.value(x[i], y[i]);
      sum += static_cast<double>(tile_sum);
    }
    if (losses) {
      acc_t* out = losses.write_pointer(first);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = loss.value(x[i], y[i]);
      losses.write(first, count);
    }
    if (!grad_input && !grad_target) continue;

    // grad_target is written first: grad_input may lie over input.
    const bool each = grad_output && !one_grad_output;
    const acc_t* g = each ? grad_output.read(first, count) : nullptr;
    const auto differentiate = [&](Tile<acc_t>& grad, auto&& derivative) {
      acc_t* out = grad.write_pointer(first);
      if (g) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = derivative(x[i], y[i]) * (g[i] * scale);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = derivative(x[i], y[i]) * scale;
      }
      grad.write(first, count);
    };
    if (grad_target)
      differentiate(grad_target, [&](acc_t a, acc_t b) { return loss.grad_target(a, b); });
    if (grad_input)
      differentiate(grad_input, [&](acc_t a, acc_t b) { return loss.grad_input(a, b); });
  }
  return sum;
}

template <template <typename> class Loss, typename acc_t>
void elementwise_as(const ElementwiseArgs& args) {
  const Loss<acc_t> loss(args.parameters);
  const int64_t chunks = (args.numel + kChunk - 1) / kChunk;
  std::vector<double> sums(chunks);
  parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk * kChunk;
      sums[chunk] =
          elementwise_chunk<acc_t>(args, loss, begin, std::min(args.numel, begin + kChunk));
    }
  });
  if (args.total.data) {
    double total = 0;
    for (const double sum : sums) total += sum;
    const acc_t value = static_cast<acc_t>(total / args.divisor);
    store(args.total.data, args.total.dtype, 0, 1, 1, &value);
  }
}

template <template <typename> class Loss>
void elementwise(const ElementwiseArgs& args) {
  if (uses_double(args)) return elementwise_as<Loss, double>(args);
  return elementwise_as<Loss, float>(args);
}

}  // namespace fused::cpu
