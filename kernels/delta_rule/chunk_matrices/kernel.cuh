// A, and P where it is wanted, of all chunks and heads of v, in parallel. A CTA of one warpgroup makes those
// of one chunk and head. Two warps of a CTA scan the log decay and load beta.
#pragma once

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

template <class T, int kDimK, bool kWithScores>
__global__ __launch_bounds__(128, (kCtasOfMatrices<kDimK, kWithScores>)) void delta_matrices_kernel(
    const __grid_constant__ MatricesGlobals g) {
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
    make_matrices<T, kDimK>(
        smem, smem.beta, chunk.tokens, g.scale, warp, [] { __syncthreads(); }, [] {}, [] {});
    __syncthreads();
    if (threadIdx.x == 0) {
        // NOTES: reread, to save registers
        store_matrices(g, smem, load_anew(shared_address(&smem.slot)), load_anew(shared_address(&smem.head)));
        wait_stores_done();
    }
}

}  // namespace tfla_tk::delta_rule
