// In the place of kernels/common/launch.cuh: a launch runs on the CPU.
#pragma once

#include <stdexcept>
#include <string>

#include "machine.h"

namespace tfla_tk {

struct DeviceGuard {
    DeviceGuard(int, const char*) {}
};

inline int multiprocessors_of(int, const char*) { return 1; }

template <class Size> Size parts_of(Size x, int size) { return (x + size - 1) / size; }
template <int... kTiles, class Run> void with_tile(int wanted, const char* name, Run run) {
    const bool found = ((wanted == kTiles && (run.template operator()<kTiles>(), true)) || ...);
    if (!found) throw std::runtime_error(std::string(name) + ": no kernel has this tile");
}

template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, dim3 grid, int threads, int, void*, const char*,
            int = 1) {
    emulator::run([&] { kKernel(arguments); }, grid, threads);
}

}  // namespace tfla_tk
