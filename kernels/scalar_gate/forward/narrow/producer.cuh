// Producer warpgroup of the forward up to K = 128: TMA loads, gate scan.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/narrow/config.cuh"
#include "scalar_gate/forward/rows.cuh"

namespace tfla_tk::mlstm {

// Loads K, Q and V into their rings, by one warp. Rows past the last token of a packed sequence belong to the
// next sequence; in K and V they are zeroed.
template <class C> __device__ inline void load_tiles(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task& task = smem.task;
    int tails = 0;  // tiles so far that had rows to zero
    auto load = [&](auto& tile, const TensorMap& map, semaphore& arrived, int column, int head, int chunk,
                    bool fill) {
        const int rows = task.tokens - chunk * kChunk, row = task.first_row + chunk * kChunk;
        const bool tail = fill && g.packed() && rows < kChunk;
        semaphore& landed = tail ? smem.tail_landed : arrived;
        if (fresh_laneid() == 0) {
            tma::expect_bytes(landed, sizeof(tile));
            load_tile(tile, map, landed, column, row, head, task.batch);
        }
        if (!tail) return;
        wait(landed, tails++ & 1);
        zero_rows(tile, rows);
        fence_async_proxy();
        __syncwarp();
        if (fresh_laneid() == 0) arrive(arrived);
    };
    auto load_qk = [&](const TensorMap& map, typename C::QKUse use, int chunk, bool fill) {
        wait_free(smem.qk_free[use.slot], use.phase);
        load(smem.qk[use.slot], map, smem.qk_arrived[use.slot], 0, task.key_head, chunk, fill);
    };
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        load_qk(g.k, C::key(chunk), chunk, true);
        load_qk(g.q, C::query(chunk), chunk, false);
        const auto [slot, phase] = C::value(chunk);
        wait_free(smem.v_free[slot], phase);
        load(smem.v[slot], g.v, smem.v_arrived[slot], task.column, task.head, chunk, true);
    }
}

template <class C, class P> __device__ inline void scan_gates(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task& task = smem.task;
    // NOTES: addresses are recomputed for every chunk, to save registers
    auto loader = [&](const Gate& gate, int chunk) {
        return [&, chunk](float none) {
            return GateRows(gate, task.batch, task.head, task.first_row).pair(chunk, task.tokens, none);
        };
    };
    auto load_input = [&](int chunk) { return P::input(loader(g.i, chunk)); };
    auto load_forget = [&](int chunk) { return P::forget(loader(g.f, chunk)); };
    GateScan<typename C::T, P> scan{P::kStabilised ? finite_stabiliser(task.initial_m(g) * kLog2eDouble)
                                                   : FloatPair{}};
    float2 i = load_input(0), f = load_forget(0);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        if (P::kStabilised && g.chunk_m && task.column == 0 && fresh_laneid() == 0)
            store_chunk_m(g.chunk_m, task.chunk + chunk, scan.m);
        if (task.leaves_state(chunk) && task.column == 0 && fresh_laneid() == 0)
            g.left.units[task.state_slot(chunk)] = scan.owed.log2;
        const auto [slot, phase] = C::gate_stage(chunk);
        wait_free(smem.gates_free[slot], phase);
        const float2 m = scan.chunk(
            smem.gates[slot], i, f, g.scale, g.log2_scale, chunk + 1 == task.chunks,
            [&] { return load_input(chunk + 1); }, [&] { return load_forget(chunk + 1); });
        arrive_warp(smem.gates_ready[slot]);
        if constexpr (P::kStabilised) store_row_stabilisers(g, task, chunk, m);
    }
    if constexpr (P::kStabilised) store_last_stabiliser(g, task, scan.m);
}

// Leaves states for the backward, by one warp: C^T as it lies in shared memory.
template <class C> __device__ inline void leave_states(const Globals& g, SharedMemoryPlan<C>& smem) {
    static_assert(C::kPasses == 1);
    constexpr uint32_t kPanelBytes = C::StateTile::rows * kPanelColumns * sizeof(typename C::T);
    const Task& task = smem.task;
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        wait(smem.state_ready[0], chunk & 1);
        if (task.leaves_state(chunk) && fresh_laneid() == 0) {
            for (int panel = 0; panel < C::kDimQK / kPanelColumns; panel++)
                g.states.store_panel(shared_address(&smem.state[0]) + panel * kPanelBytes,
                                     panel * kPanelColumns, task.column, task.state_slot(chunk), 0);
            commit_stores();
            wait_stores_read();
        }
        arrive_warp(smem.state_free[0]);
    }
    if (fresh_laneid() == 0) wait_stores_done();
}

}  // namespace tfla_tk::mlstm
