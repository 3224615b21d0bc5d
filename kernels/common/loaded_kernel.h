// The machine code of a kernel, which a launcher loads apart from itself.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace tfla_tk {

// Throws std::runtime_error with the name of what was to be launched.
inline void check_launch(cudaError_t error, const char* name) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

// A kernel's machine code, as far as it has been looked up.
struct LoadedKernel {
    const void* stub;  // the host function by which the compiler knows the kernel's name
    std::atomic<cudaKernel_t> kernel{};
    std::array<std::atomic<int>, 64> shared_bytes{};  // that a launch may have, by device
};

// Launches it with `arguments`, a pointer to its only parameter; throws std::runtime_error where no machine
// code of it has been loaded, or where CUDA refuses.
void launch_kernel(LoadedKernel& kernel, const void* arguments, dim3 grid, int threads, int shared_bytes,
                   int device, cudaStream_t stream, const char* name, int cluster);

}  // namespace tfla_tk
