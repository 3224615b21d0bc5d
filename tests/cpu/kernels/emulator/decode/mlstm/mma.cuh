// In the place of kernels/decode/mlstm/mma.cuh.
#pragma once

#include "machine.h"

namespace tfla_tk::decode {

// Of fp32 operands the tensor cores read the bits of tf32.
inline float tf32(unsigned bits) { return __uint_as_float(bits & 0xffffe000); }

inline void multiply_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static unsigned operands[emulator::kMostThreads][6];
    unsigned(&own)[6] = operands[emulator::current];
    std::memcpy(own, a, sizeof a), std::memcpy(own + 4, b, sizeof b);
    __syncwarp();
    const auto* lanes = &operands[emulator::current / 32 * 32];
    const int g = emulator::current % 32 / 4, t = emulator::current % 4;
    for (int n = 0; n < 4; n++)
        for (int k = 0; k < 8; k++)
            d[n] += tf32(lanes[4 * g + k % 4][n / 2 + k / 4 * 2]) *
                    tf32(lanes[4 * (2 * t + n % 2) + k % 4][4 + k / 4]);
    __syncwarp();
}

}  // namespace tfla_tk::decode
