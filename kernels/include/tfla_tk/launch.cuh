// Launches: errors as exceptions, the device, the shared memory, and how one kernel follows another.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "kittens.cuh"

namespace tfla_tk {

// Throws std::runtime_error with the name of what was to be launched.
inline void check_launch(cudaError_t error, const char* name) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

// The current device for the life of the object.
struct DeviceGuard {
    int previous;

    DeviceGuard(int device, const char* name) {
        check_launch(cudaGetDevice(&previous), name);
        if (previous != device) check_launch(cudaSetDevice(device), name);
    }
    ~DeviceGuard() { cudaSetDevice(previous); }
};

// First statement of every kernel, by all its threads. CTAs of the next kernel may take the place of those
// that end; here they wait for all that the kernels before have written. NOTES: nothing of global memory
// comes before it, and no thread returns before it: the kernel after the next relies on that.
__device__ inline void follow_previous_kernel() {
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n" ::: "memory");
}

// Launches a kernel on `device`, the current one, with kSharedBytes of dynamic shared memory. It may start
// before the stream's last kernel ends (programmatic dependent launch), see follow_previous_kernel.
template <auto kKernel, int kSharedBytes = 0, class Arguments>
void launch(const Arguments& arguments, dim3 grid, int threads, int device, cudaStream_t stream,
            const char* name) {
    static_assert(kSharedBytes <= kittens::MAX_SHARED_MEMORY);
    static std::array<std::atomic<bool>, 64> allowed{};  // by device
    if (kSharedBytes > 0 && !allowed.at(device)) {
        check_launch(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                     name);
        allowed[device] = true;
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream, config.attrs = &early, config.numAttrs = 1;
    check_launch(cudaLaunchKernelEx(&config, kKernel, arguments), name);
}

}  // namespace tfla_tk
