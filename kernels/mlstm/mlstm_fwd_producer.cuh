// Producer warpgroup of the mLSTM forward: TMA loads, gate scan, q n.
#pragma once

#include "config.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

// One warp feeds the rings. Packed sequences follow one another in memory: rows behind the last token of this
// one are another's, and zeros take their place in K and V.
template <class C> __device__ inline void load_tiles(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task& task = smem.task;
    int tails = 0;  // tiles that were loaded with zeros to fill in
    auto load = [&](auto& tile, const TensorMap& map, semaphore& arrived, int column, int chunk, bool fill) {
        const int rows = task.tokens - chunk * kChunk, row = task.first_row + chunk * kChunk;
        const bool tail = fill && g.packed() && rows < kChunk;
        semaphore& landed = tail ? smem.tail_landed : arrived;
        if (fresh_laneid() == 0) {
            tma::expect_bytes(landed, sizeof(tile));
            load_tile(tile, map, landed, column, row, task.head, task.batch);
        }
        if (!tail) return;
        wait(landed, tails++ & 1);
        zero_rows(tile, rows);
        fence_async_proxy();
        __syncwarp();
        if (fresh_laneid() == 0) arrive(arrived);
    };
    auto load_qk = [&](const TensorMap& map, typename C::QKUse use, int part, int chunk, bool fill) {
        wait_free(smem.qk_free[use.slot], use.phase);
        load(smem.qk[use.slot], map, smem.qk_arrived[use.slot], part * C::kPartQK, chunk, fill);
    };
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        for (int part = 0; part < C::kParts; part++) {
            load_qk(g.k, C::key(chunk, part), part, chunk, true);
            load_qk(g.q, C::query(chunk, part), part, chunk, false);
        }
        const auto [slot, phase] = C::value(chunk);
        wait_free(smem.v_free[slot], phase);
        load(smem.v[slot], g.v, smem.v_arrived[slot], task.column, chunk, true);
    }
}

template <class C, bool kSigmoid>
__device__ inline void scan_gates(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task& task = smem.task;
    const GateRows input(g.i, task.batch, task.head, task.first_row);
    const GateRows forget(g.f, task.batch, task.head, task.first_row);
    GateScan<kSigmoid> scan{kSigmoid ? 0. : task.initial_m(g) * kLog2eDouble};
    float2 i = input.pair(0, task.tokens, kNoInput), f = forget.pair(0, task.tokens, kNoForget);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        if (!kSigmoid && g.chunk_m && task.column == 0 && fresh_laneid() == 0)
            g.chunk_m[task.chunk + chunk] = scan.m;
        const auto [slot, phase] = C::gate_stage(chunk);
        wait_free(smem.gates_free[slot], phase);
        const float2 m = scan.chunk(
            smem.gates[slot], i, f, g.scale, g.log2_scale,
            [&] { return input.pair(chunk + 1, task.tokens, kNoInput); },
            [&] { return forget.pair(chunk + 1, task.tokens, kNoForget); });
        arrive_warp(smem.gates_ready[slot]);
        if (!kSigmoid && g.row_m && task.column == 0) {
            float* rows = task.rows_of_head(g, g.row_m) + chunk * kChunk;
            const int t = 2 * fresh_laneid(), tokens = task.tokens - chunk * kChunk;
            if (t < tokens) rows[t] = m.x;
            if (t + 1 < tokens) rows[t + 1] = m.y;
        }
    }
    if (!kSigmoid && g.last.m && task.last && task.column == 0 && fresh_laneid() == 0)
        g.last.m[task.index] = scan.m * kLn2;
}

// q n of one chunk: 32 rows per warp, by warp-level MMAs with n as two columns of B.
template <class C> __device__ inline void compute_qn(SharedMemoryPlan<C>& smem, int norm_warp) {
    using T = typename C::T;
    constexpr int kRowTiles = kChunk / 16 / C::kNormWarps;
    const int first_row = norm_warp * kRowTiles * 16;
    // B fragment: k = 2 (lane % 4) + {0, 1} (+ 8), column lane / 4: 0 is the high part of n, 1 the low part.
    const int column = laneid() / 4;
    for (int chunk = 0; chunk < smem.task.chunks; chunk++) {
        float qn[kRowTiles][2][4] = {};  // even and odd steps of k apart: two short chains of MMAs
        const auto buffer = C::norm_buffer(chunk);
        const T* n = &smem.norm_parts[buffer.slot][column & 1][2 * (laneid() % 4)];
        wait(smem.norm_ready[buffer.slot], buffer.phase);
        for (int part = 0; part < C::kParts; part++) {
            const auto query = C::query(chunk, part);
            wait(smem.qk_arrived[query.slot], query.phase);
            const uint32_t q = shared_address(&smem.qk[query.slot]);
#pragma unroll
            for (int k = 0; k < C::kPartQK; k += 16) {
                uint32_t b[2] = {0, 0};
                if (column < 2) {
                    b[0] = *reinterpret_cast<const uint32_t*>(&n[part * C::kPartQK + k]);
                    b[1] = *reinterpret_cast<const uint32_t*>(&n[part * C::kPartQK + k + 8]);
                }
#pragma unroll
                for (int tile = 0; tile < kRowTiles; tile++)
                    mma_16x8x16<T>(qn[tile][k / 16 % 2],
                                   load_rows_16x16<T>(q, kChunk, first_row + 16 * tile, k), b);
            }
            arrive_warp(smem.qk_free[query.slot], C::kQueryArrivalsNorm);
        }
        // NOTES: in this order: qn_free says that the previous phase of state_free has all its arrivals.
        wait_free(smem.qn_free, chunk & 1);
        arrive_warp(smem.state_free[0]);
        if (laneid() % 4 == 0) {
#pragma unroll
            for (int tile = 0; tile < kRowTiles; tile++) {
                const auto& [even, odd] = qn[tile];
                float* rows = &smem.qn[first_row + 16 * tile + laneid() / 4];
                rows[0] = (even[0] + odd[0]) + (even[1] + odd[1]);
                rows[8] = (even[2] + odd[2]) + (even[3] + odd[3]);
            }
        }
        arrive_warp(smem.qn_ready);
    }
}

}  // namespace tfla_tk::mlstm
