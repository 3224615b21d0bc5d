// A, and P where it is wanted, of all chunks and heads of v, in parallel. A CTA of one warpgroup makes those
// of one chunk and head. Two warps of a CTA scan the log decay and load beta.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/chunk_matrices/chunk.cuh"

namespace tfla_tk::delta_rule {

// CTAs that a multiprocessor holds.
template <int kDimK, bool kWithScores> constexpr int kCtasOfMatrices = !kWithScores ? 8 : kDimK > 128 ? 3 : 5;

// The results replace the inputs once the GEMMs have read these.
template <class Of> struct InputsOrResults {
    using Tiles = Of;
    union {
        typename Tiles::Inputs in;
        typename Tiles::Results out;
    };
};

template <class T, int kDimK, bool kWithScores>
struct MatricesMemory : InputsOrResults<MatricesTiles<T, kDimK, kWithScores>> {
    Log2Decay log2_decay;
    alignas(16) float beta[kChunk];
    int slot, head;  // of the results in their tensors
    semaphore arrived;
};

// A warp's part of a chunk's bounds: of its 16 tokens, in all lanes. A token takes a state S to
// e^g (I - beta k k^T) S, whose norm is at most e^g max(1, |1 - beta |k|^2|) times that of S. |k|^2 is on the
// diagonal of K K^T, of which the warp has 16 rows. NOTES: NaN stays NaN, so that nothing is left out then.
template <class Scores>
__device__ inline ChunkBounds part_of_bounds(const Scores& of_keys, const Log2Decay& b, const float* beta,
                                             int warp, int tokens) {
    const int lane = fresh_laneid(), row = lane / 4;
    const bool has_diagonal = lane % 4 == row / 2;  // of this row and the one eight behind it
    float erasing = 0.f;
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 pair = of_keys.tiles[0][j].data[3 * half];
            const int token = 16 * j + 8 * half + row;
            const float kept = fabsf(1.f - beta[token] * (row % 2 ? pair.y : pair.x));
            if (j == warp && has_diagonal && token < tokens) erasing += log2f(kept <= 1.f ? 1.f : kept);
        }
    float decay = 0.f;
    if (lane < 16) {
        const int token = 16 * warp + lane;
        const float2 here = b.of[token], before = token > 0 ? b.of[token - 1] : float2{0.f, 0.f};
        decay = (here.x - before.x) + (here.y - before.y);
    }
    return {warp_sum(erasing + decay), warp_sum(erasing + (decay > 0.f ? decay : 0.f))};
}

template <class T, int kDimK, bool kWithScores>
__global__ __launch_bounds__(128, (kCtasOfMatrices<kDimK, kWithScores>)) void delta_matrices_kernel(
    const __grid_constant__ MatricesGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        using Memory = MatricesMemory<T, kDimK, kWithScores>;
        auto& smem = *reinterpret_cast<Memory*>(shared_memory);
        const int warp = threadIdx.x / 32;
        const int head = blockIdx.x % g.heads, index = blockIdx.x / g.heads;

        const Segment found = find_segment(g.cut, g.seq, index);
        if (found.tokens <= 0) return;
        const ChunkOfHead chunk{g.packed() ? 0 : found.sequence, head, found.first_row, found.tokens,
                                g.packed() ? index : found.number};
        auto load_gates = [&](const GateWords& gate) {
            return GateStream(gate, chunk.batch, head, chunk.first_row, gate.data ? chunk.tokens : 0);
        };
        auto take = [&](GateStream& gates) { return gates.take(0, gates.gate.data ? chunk.tokens : 0, 0.f); };
        if (warp == 0) {
            GateStream decays = load_gates(g.g);
            if (threadIdx.x == 0) {
                smem.slot = chunk.slot, smem.head = chunk.batch * g.heads + head;
                init_semaphore(smem.arrived, 1);
                publish_barriers();
                tma::expect_bytes(smem.arrived, sizeof(smem.in));
                load_inputs(g, smem, chunk);
            }
            __syncwarp();
            smem.log2_decay.write(fresh_laneid(), cumulative_log2_decay(take(decays)));
        } else if (warp == 1) {
            GateStream betas = load_gates(g.beta);
            write_pair(smem.beta, 2 * fresh_laneid(), take(betas));
        }
        __syncthreads();
        wait(smem.arrived, 0);
        auto leave_bound = [&](const auto& of_keys) {
            if (g.bounds == nullptr) return;
            const ChunkBounds part = part_of_bounds(of_keys, smem.log2_decay, smem.beta, warp, chunk.tokens);
            if (fresh_laneid() == 0) g.bounds[4 * (smem.head * g.slots + smem.slot) + warp] = part;
        };
        make_matrices<T, kDimK>(
            smem, smem.beta, chunk.tokens, g.scale, warp, [] { __syncthreads(); }, leave_bound, [] {});
        __syncthreads();
        if (threadIdx.x == 0) {
            // NOTES: reread, to save registers
            store_matrices(g, smem, load_anew(shared_address(&smem.slot)),
                           load_anew(shared_address(&smem.head)));
            wait_stores_done();
        }
    }
}

}  // namespace tfla_tk::delta_rule
