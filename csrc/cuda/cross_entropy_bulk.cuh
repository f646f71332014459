// Cross entropy with its gradient on Hopper. Asynchronous bulk copies load the row into shared
// memory. The gradient overwrites it there, and bulk copies store it to global memory. If a row is
// too long for one block, a cluster shares it: each block keeps a slice, and the blocks exchange
// their (largest, sum) through distributed shared memory.
//
// Fused, and never written to memory: as in cross_entropy_rows.cuh.
//
// Bytes moved per row: 2 * cols * sizeof(logit), and 20 for target and statistics.
//
// In place: a whole slice is read before any of it is written, and no other block reads the slice.
#pragma once

#include "cross_entropy.cuh"
#include "launch.cuh"

namespace fused::cuda {

constexpr int kBulkThreads = 256;  // at most
constexpr int kBulkChunks = 8;     // copies of a slice, at most
constexpr int kBulkUnroll = 2;     // packets that a thread adds to its sum at a time

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Makes the barrier complete once `bytes` have arrived. One thread calls it, once.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void wait_for(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
}

// Both addresses must be on 16-byte boundaries.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}
#endif

// A cluster of `cluster` blocks handles one row. Block `rank` keeps `slice` packets of the row,
// from packet rank * slice on, in chunks of `chunk` packets. The first block also handles the loose
// logits. Dynamic shared memory: 16 * slice bytes. Input and gradient rows must be equally aligned.
template <typename scalar_t, bool kCapped, bool kSmoothing>
__global__ void __launch_bounds__(kBulkThreads, kSmoothing ? 4 : 6)
    cross_entropy_bulk_kernel(const __grid_constant__ CrossEntropyArgs args, int cluster, int slice,
                              int chunk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using acc_t = acc_type<scalar_t>;
  using State = Softmax<acc_t, kSmoothing>;
  constexpr int kWidth = Packet<scalar_t>::kWidth;
  extern __shared__ __align__(128) uint4 buffer[];
  __shared__ uint64_t arrived[kBulkChunks];
  __shared__ State scratch[kBulkThreads / kWarp];
  __shared__ State own;

  let_next_start();
  const int rank = static_cast<int>(blockIdx.x % cluster);
  const int64_t row = blockIdx.x / cluster;
  const int threads = blockDim.x;
  const scalar_t* x = static_cast<const scalar_t*>(args.input) + row_offset(args.input_layout, row);
  const RowSpan<scalar_t> span(x, args.cols);
  const int begin = min(rank * slice, span.packets);
  const int count = min(slice, span.packets - begin);
  const int chunks = (count + chunk - 1) / chunk;

  if (threadIdx.x == 0) {
    for (int i = 0; i < chunks; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[i])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < chunks; ++i) {
      const uint32_t bytes = 16 * min(chunk, count - i * chunk);
      expect_bytes(&arrived[i], bytes);
      bulk_load(buffer + i * chunk, x + span.col_of_packet(begin + i * chunk), bytes, &arrived[i]);
    }
  }
  __syncthreads();

  const RowTarget<acc_t> target(args, row);
  const acc_t* weight = class_weights<acc_t>(args);
  const Softcap<acc_t, kCapped> cap(args.softcap);
  const bool has_loose = rank == 0 && threadIdx.x < span.loose;
  const int loose_col = span.col_of_loose(threadIdx.x);
  const acc_t loose = has_loose ? to_acc<acc_t>(x[loose_col]) : acc_t(0);

  auto softmax = State::none();
  for (int i = 0; i < chunks; ++i) {
    wait_for(&arrived[i]);
    const int end = min((i + 1) * chunk, count);
    int index = i * chunk + threadIdx.x;
    for (; index + (kBulkUnroll - 1) * threads < end; index += kBulkUnroll * threads) {
      Packet<scalar_t> packets[kBulkUnroll];
#pragma unroll
      for (int u = 0; u < kBulkUnroll; ++u) packets[u].words[0] = buffer[index + u * threads];
      softmax.add(packets, kBulkUnroll, weight, span.col_of_packet(begin + index), threads * kWidth,
                  cap);
    }
#pragma unroll 1
    for (; index < end; index += threads) {
      Packet<scalar_t> packets[1];
      packets[0].words[0] = buffer[index];
      softmax.add(packets, 1, weight, span.col_of_packet(begin + index), 0, cap);
    }
  }
  if (has_loose) softmax.add(cap(loose), kSmoothing && weight ? weight[loose_col] : acc_t(1));

  // One thread writes the row's outputs. If the target's logit is loose, it is the thread that
  // holds the logit. If it is in a slice, it is the first thread of that block. If the row is
  // ignored, it is the first thread of the first block. The gradient will overwrite the target's
  // logit.
  const int place = target.index - span.col_of_packet(begin);
  const bool in_slice = place >= 0 && place < count * kWidth;
  bool writes_row = has_loose && loose_col == target.index;
  acc_t target_logit = cap(loose);
  if (threadIdx.x == 0 && in_slice && target.index >= 0) {
    target_logit = cap(to_acc<acc_t>(reinterpret_cast<const scalar_t*>(buffer)[place]));
    writes_row = true;
  }
  if (threadIdx.x == 0 && rank == 0 && target.index < 0) writes_row = true;

  softmax.combine_block(scratch);
  if (cluster > 1) {
    if (threadIdx.x == 0) own = softmax;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    const int lane = threadIdx.x % kWarp;
    softmax = State::none();
    if (lane < cluster) softmax = *static_cast<const State*>(__cluster_map_shared_rank(&own, lane));
    softmax.combine();
    // The matching wait is at the end: no block may exit while another block reads its `own`.
    __cluster_barrier_arrive();
  }
  // The preceding kernel may have run until here: only its total weight is needed.
  await_previous();
  const acc_t scale = row_scale(args, row, target, common_scale<acc_t>(args));
  if (writes_row) finish_row(args, row, softmax, target, target_logit);

  const RowGradient<acc_t, kCapped, kSmoothing> gradient(args, target, scale, softmax.largest,
                                                         fast_inverse(softmax.sum));
  scalar_t* out = static_cast<scalar_t*>(args.grad_input) + row_offset(args.grad_layout, row);
  for (int i = 0; i < chunks; ++i) {
    const int end = min((i + 1) * chunk, count);
#pragma unroll 1
    for (int index = i * chunk + threadIdx.x; index < end; index += threads) {
      Packet<scalar_t> packet;
      packet.words[0] = buffer[index];
      gradient.apply(packet, span.col_of_packet(begin + index));
      buffer[index] = packet.words[0];
    }
    // Makes the ordinary stores above visible to the bulk copy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0)
      bulk_store(out + span.col_of_packet(begin + i * chunk), buffer + i * chunk,
                 16 * (end - i * chunk));
  }
  if (has_loose) out[loose_col] = from_acc<scalar_t>(gradient(loose, loose_col));
  // The block may exit only when the copies have read its shared memory.
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  if (cluster > 1) __cluster_barrier_wait();
#endif
}

}  // namespace fused::cuda
