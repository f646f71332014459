// The current device's figures, the check after every launch, and launches that overlap the end of
// the kernel in front.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
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
  int shared_reserved;            // bytes the driver takes from each block's share
};

// Queried once for every device; later calls only ask which device is current.
inline const Device& current_device() {
  static const std::vector<Device> devices = [] {
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
    }
    return all;
  }();
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  return devices.at(index);
}

// Whether the code that runs on `device` was compiled for at least `arch`: a build for 8.0 alone
// also runs on 9.0, without the parts that are compiled for 9.0 only.
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

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// In a kernel that launch_behind's kernel follows: that one may be launched once every block has
// called this or ended. Nothing is handed over here, so it may be called first of all.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In launch_behind's kernel, in every thread and before any access to memory: returns when the
// kernel in front has ended and what it wrote is visible.
__device__ __forceinline__ void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that begins with await_previous(). Where the device allows, its launch overlaps
// the end of the kernel in front, which saves about a microsecond.
template <typename... Parameters>
void launch_behind(const char* name, void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                   cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const Device& device = current_device();
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = device.arch >= 900 && compiled_for(900, device) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

}  // namespace fused::cuda
