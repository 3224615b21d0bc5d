// Host side of a launch: errors as exceptions, the device, the shared memory.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
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
    int previous, device;

    DeviceGuard(int device, const char* name) : device(device) {
        static thread_local bool has_context = false;
        check_launch(cudaGetDevice(&previous), name);
        // also where it is current: a thread that has not called the runtime yet, as one of autograd's, has
        // no context, which tensor maps need
        if (previous != device || !has_context) check_launch(cudaSetDevice(device), name);
        has_context = true;
    }
    ~DeviceGuard() {
        if (previous != device) cudaSetDevice(previous);
    }
};

inline int multiprocessors_of(int device, const char* name) {
    int multiprocessors = 0;
    check_launch(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name);
    return multiprocessors;
}

// Sets a function attribute of a kernel once per device.
template <auto kKernel, cudaFuncAttribute kAttribute> void allow(int value, int device, const char* name) {
    static std::array<std::atomic<bool>, 64> allowed{};  // by device
    if (allowed.at(device)) return;
    check_launch(cudaFuncSetAttribute(kKernel, kAttribute, value), name);
    allowed[device] = true;
}

// A grid of `x` times `y` CTAs; throws std::runtime_error where x exceeds the limit of a grid.
inline dim3 grid_of(std::int64_t x, int y, const char* name) {
    if (x > std::numeric_limits<std::int32_t>::max())
        throw std::runtime_error(std::string(name) + ": more CTAs than a launch can have");
    return dim3(static_cast<unsigned>(x), y);
}

// Launches a kernel on `device`, which is current, with kSharedBytes of dynamic shared memory and clusters of
// `cluster` consecutive CTAs.
template <auto kKernel, int kSharedBytes = 0, class Arguments>
void launch(const Arguments& arguments, dim3 grid, int threads, int device, cudaStream_t stream,
            const char* name, int cluster = 1) {
    static_assert(kSharedBytes <= kittens::MAX_SHARED_MEMORY);
    constexpr int kPortable = 8;  // largest portable cluster size
    if (kSharedBytes > 0)
        allow<kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(kSharedBytes, device, name);
    if (cluster > kPortable) allow<kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed>(1, device, name);
    cudaLaunchAttribute of_cluster{};
    of_cluster.id = cudaLaunchAttributeClusterDimension;
    of_cluster.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream, config.attrs = &of_cluster, config.numAttrs = cluster > 1;
    check_launch(cudaLaunchKernelEx(&config, kKernel, arguments), name);
}

}  // namespace tfla_tk
