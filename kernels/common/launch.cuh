// Host side of a launch: errors as exceptions, the device, the machine code, the shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/kernel.cuh"
#include "common/loaded_kernel.h"
#include "kittens.cuh"

namespace tfla_tk {

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

template <auto kKernel> inline LoadedKernel loaded_kernel{reinterpret_cast<const void*>(kKernel)};

// How many parts of `size` hold x.
template <class Size> Size parts_of(Size x, int size) { return (x + size - 1) / size; }

// A grid of `x` times `y` CTAs; throws std::runtime_error where x exceeds the limit of a grid.
inline dim3 grid_of(std::int64_t x, int y, const char* name) {
    if (x > std::numeric_limits<std::int32_t>::max())
        throw std::runtime_error(std::string(name) + ": more CTAs than a launch can have");
    return dim3(static_cast<unsigned>(x), y);
}

// Calls run<tile>() with that of kTiles which is `wanted`; throws std::runtime_error where none is.
template <int... kTiles, class Run> void with_tile(int wanted, const char* name, Run run) {
    const bool found = ((wanted == kTiles && (run.template operator()<kTiles>(), true)) || ...);
    if (!found)
        throw std::runtime_error(std::string(name) + ": no kernel has a tile of " + std::to_string(wanted));
}

// Calls run<T>() with the type of the operands.
template <class Run> void with_type(bool half, Run run) {
    half ? run.template operator()<kittens::half>() : run.template operator()<kittens::bf16>();
}

// Calls run<T, kKeys, kSlice>() with the type, the tile of the keys and the slice of the values of a CTA.
// There are none with 256 of both.
template <class Run> void with_type_and_tiles(bool half, int keys, int slice, const char* name, Run run) {
    with_type(half, [&]<class T>() {
        with_tile<64, 128, 256>(keys, name, [&]<int kKeys>() {
            auto with_slice = [&]<int kSlice>() { run.template operator()<T, kKeys, kSlice>(); };
            if constexpr (kKeys == 256)
                with_tile<64, 128>(slice, name, with_slice);
            else
                with_tile<64, 128, 256>(slice, name, with_slice);
        });
    });
}

// Launches a kernel on `device`, which is current, with kSharedBytes of dynamic shared memory and clusters of
// `cluster` consecutive CTAs.
template <auto kKernel, int kSharedBytes = 0, class Arguments>
void launch(const Arguments& arguments, dim3 grid, int threads, int device, void* stream, const char* name,
            int cluster = 1) {
    static_assert(kSharedBytes <= kittens::MAX_SHARED_MEMORY);
    launch_kernel(loaded_kernel<kKernel>, &arguments, grid, threads, kSharedBytes, device,
                  static_cast<cudaStream_t>(stream), name, cluster);
}
template <auto kKernel, int kSharedBytes = 0, class Arguments>
void launch(const Arguments& arguments, std::int64_t ctas, int threads, int device, void* stream,
            const char* name, int cluster = 1) {
    launch<kKernel, kSharedBytes>(arguments, grid_of(ctas, 1, name), threads, device, stream, name, cluster);
}
// Sets device memory to 0 before it.
inline void launch_zeros(void* memory, std::size_t bytes, void* stream, const char* name) {
    check_launch(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), name);
}

}  // namespace tfla_tk
