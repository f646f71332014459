// Properties of the current device, the check after every launch, and launches that overlap the end
// of the preceding kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../arguments.h"

namespace fused::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

struct Device {
  int multiprocessors;
  int arch;                       // compute capability as in __CUDA_ARCH__: 900 for 9.0
  int shared_per_multiprocessor;  // bytes
  int shared_per_block;           // bytes, the opt-in limit
  int shared_reserved;            // bytes of each block's share that the driver reserves
};

// The first call queries all devices. Later calls only ask which device is current. With
// COMPILE_LOSSES_CUDA_ARCH=800 in the environment, the paths of devices of compute capability 8.0
// are taken on newer devices, too: tests set it.
inline const Device& current_device() {
  static const std::vector<Device> devices = [] {
    const char* const most = std::getenv("COMPILE_LOSSES_CUDA_ARCH");
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<Device> all(count);
    for (int index = 0; index < count; ++index) {
      const auto get = [&](cudaDeviceAttr attribute) {
        int value = 0;
        check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
        return value;
      };
      all[index] = {get(cudaDevAttrMultiProcessorCount),
                    100 * get(cudaDevAttrComputeCapabilityMajor) +
                        10 * get(cudaDevAttrComputeCapabilityMinor),
                    get(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                    get(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                    get(cudaDevAttrReservedSharedMemoryPerBlock)};
      if (most) all[index].arch = std::min(all[index].arch, std::atoi(most));
    }
    return all;
  }();
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  return devices.at(index);
}

// Whether the code that runs on `device` was compiled for at least `arch`. For example, a build for
// 8.0 alone runs on 9.0, without the code that is compiled for 9.0 only.
inline bool compiled_for(int arch, const Device& device) {
  for (const int built : {__CUDA_ARCH_LIST__})
    if (arch <= built && built <= device.arch) return true;
  return false;
}

// Calls function with a null pointer of dtype's C++ type.
template <typename Function>
void visit(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat64: return function(static_cast<double*>(nullptr));
    case DType::kFloat32: return function(static_cast<float*>(nullptr));
    case DType::kBFloat16: return function(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat16: return function(static_cast<__half*>(nullptr));
  }
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks of a grid that goes through the rows by a grid-stride loop.
inline unsigned blocks_for(int64_t rows, int64_t rows_per_block) {
  return static_cast<unsigned>(std::min<int64_t>(divide_up(rows, rows_per_block), INT32_MAX));
}

// Throws if a row has more classes than the kernels' 32-bit indices can count.
inline void check_classes(const char* op, int64_t classes) {
  if (classes > INT32_MAX)
    throw std::runtime_error(std::string(op) + ": " + std::to_string(classes) +
                             " classes are more than the CUDA kernels count (2^31 - 1)");
}

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Lets the following kernel, if it is launched `behind`, start once every block has called this or
// ended. It makes no memory visible, so a kernel may call it first of all.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the preceding kernel has ended and its writes are visible. Every thread of a kernel
// that is launched `behind` calls it before any access to memory, with one exception: if the
// preceding kernel waited for an earlier kernel before it let this one start, the writes of that
// earlier kernel may be read before.
__device__ __forceinline__ void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int kMaxCluster = 8;  // the largest that every device with clusters supports

inline bool has_clusters(const Device& device) {
  return device.arch >= 900 && compiled_for(900, device);
}

struct Grid {
  dim3 blocks, threads;
  size_t shared = 0;  // dynamic, in bytes
  int cluster = 1;    // blocks; more than one only if the device has_clusters
  // Whether the launch may overlap the end of the preceding kernel, which saves about a
  // microsecond. The launched kernel must call await_previous().
  bool behind = false;
};

template <typename... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            std::type_identity_t<Parameters>... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (grid.behind && has_clusters(current_device())) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Launches a kernel that calls await_previous().
template <typename... Parameters>
void launch_behind(const char* name, void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                   cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  launch(name, kernel, {.blocks = blocks, .threads = threads, .behind = true}, stream,
         arguments...);
}

}  // namespace fused::cuda
