// dbeta from the sums over columns of V that a walk leaves.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

// Of a CTA. Sums lie by tokens, dbeta by heads. So that both are read and written in neighbouring lanes, they
// are transposed in shared memory.
constexpr int kStrengthThreads = 256, kStrengthTokens = 32, kStrengthHeads = 16;

// First a lane has a token and a warp some heads, then neighbouring lanes have a token's heads.
__global__ __launch_bounds__(kStrengthThreads) void delta_strength_kernel(
    const __grid_constant__ DeltaStrengthParams p) {
    TFLA_DEVICE_CODE {
        __shared__ float found[kStrengthTokens][kStrengthHeads + 1];  // one more: other banks for every token
        const DeltaShape& s = p.shape;
        const int head_tiles = (s.heads + kStrengthHeads - 1) / kStrengthHeads;
        const int token_tiles = (s.seq + kStrengthTokens - 1) / kStrengthTokens,
                  tile = blockIdx.x / head_tiles;
        const int first_head = blockIdx.x % head_tiles * kStrengthHeads, batch = tile / token_tiles;
        const int first_token = tile % token_tiles * kStrengthTokens, thread = threadIdx.x;
        const int heads = min(s.heads - first_head, kStrengthHeads);
        const int tokens = min(s.seq - first_token, kStrengthTokens);
        const int64_t part_size = static_cast<int64_t>(s.batch) * s.heads * s.seq;
        const int lane = thread % 32;
#pragma unroll
        for (int head = thread / 32; head < kStrengthHeads; head += kStrengthThreads / 32) {
            if (head >= heads || lane >= tokens) continue;
            const int64_t row = static_cast<int64_t>(batch) * s.heads + first_head + head;
            const float* const sums = p.sums + row * s.seq + first_token + lane;
            float sum = 0.f;
#pragma unroll 8
            for (int part = 0; part < p.parts; part++) sum += sums[part * part_size];
            found[lane][head] = sum;
        }
        __syncthreads();
        const int head = thread % kStrengthHeads;
        if (head >= heads) return;
#pragma unroll
        for (int token = thread / kStrengthHeads; token < kStrengthTokens;
             token += kStrengthThreads / kStrengthHeads) {
            if (token >= tokens) continue;
            store_gate(p.dbeta, batch, first_head + head, first_token + token, found[token][head]);
        }
    }
}

}  // namespace tfla_tk::delta_rule
