// Registers that a thread of one warpgroup hands over to the thread with the same number in another one.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"

namespace tfla_tk::delta_rule {

// kCount times 16 bytes for each thread of a warpgroup. Nobody but the two threads looks at them, so their
// order in memory is free.
template <int kCount> struct alignas(16) ThreadWords {
    uint4 data[kCount][128];

    // The address of this thread's first 16 bytes; the next ones are kStride bytes away.
    static constexpr uint32_t kStride = 128 * sizeof(uint4);
    __device__ inline uint32_t own() const {
        return shared_address(data) + fresh_thread() % 128 * static_cast<uint32_t>(sizeof(uint4));
    }
};

}  // namespace tfla_tk::delta_rule
