// Producer warpgroup of the mLSTM forward: TMA loads, gate scan.
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
    // NOTES: addressed anew for every chunk: registers
    auto load = [&](const Gate& gate, int chunk, float none) {
        return GateRows(gate, task.batch, task.head, task.first_row).pair(chunk, task.tokens, none);
    };
    GateScan<typename C::T, kSigmoid> scan{kSigmoid ? FloatPair{}
                                                    : finite_stabiliser(task.initial_m(g) * kLog2eDouble)};
    float2 i = load(g.i, 0, kNoInput), f = load(g.f, 0, kNoForget);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        if (!kSigmoid && g.chunk_m && task.column == 0 && fresh_laneid() == 0)
            g.chunk_m[task.chunk + chunk] = static_cast<double>(scan.m);
        const auto [slot, phase] = C::gate_stage(chunk);
        wait_free(smem.gates_free[slot], phase);
        const float2 m = scan.chunk(
            smem.gates[slot], i, f, g.scale, g.log2_scale, chunk + 1 == task.chunks,
            [&] { return load(g.i, chunk + 1, kNoInput); }, [&] { return load(g.f, chunk + 1, kNoForget); });
        arrive_warp(smem.gates_ready[slot]);
        if (!kSigmoid && g.row_m && task.column == 0) {
            float* rows = task.rows_of_head(g, g.row_m) + chunk * kChunk;
            const int t = 2 * fresh_laneid(), tokens = task.tokens - chunk * kChunk;
            if (t < tokens) rows[t] = m.x;
            if (t + 1 < tokens) rows[t + 1] = m.y;
        }
    }
    if (!kSigmoid && g.last.m && task.last && task.column == 0 && fresh_laneid() == 0)
        g.last.m[task.index] =
            task.chunks == 0 ? task.initial_m(g) : static_cast<float>(static_cast<double>(scan.m) * kLn2);
}

}  // namespace tfla_tk::mlstm
