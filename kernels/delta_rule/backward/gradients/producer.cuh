// Producer warps of the walk that makes dq, dk and dv: loads, factors of the gates, stores. Steps go from the
// last chunk to the first.
#pragma once

#include "delta_rule/backward/gradients/turns.cuh"

namespace tfla_tk::delta_rule {

// One warp: A, the states and, a chunk ahead, the writes.
template <class C> __device__ inline void load_states(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
    auto load_writes = [&](int step) {
        if (step >= task.chunks) return;
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        load(smem.writes[slot], g.writes, smem.arrived[slot], task.column, task.head, task.chunks - 1 - step);
    };
    load_writes(0);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        wait_free(smem.a_free, step & 1);
        if (fresh_laneid() == 0) load_matrices<C>(g, task, smem, smem.a_arrived, chunk);
        __syncwarp();
        wait_free(smem.state_free, step & 1);
        if (fresh_laneid() == 0) {
            const int state = task.batch_head * g.slots + task.first_slot + chunk;
            tma::expect_bytes(smem.state_arrived, C::State::loaded_bytes);
            load_panels(smem.state, g.states, smem.state_arrived, 0, task.column, state, 0);
        }
        __syncwarp();
        load_writes(step + 1);
    }
}

// One warp; a lane has two tokens. It also waits for this slice's turn: who has a chunk's gates may add to dq
// and dk. NOTES: it is two chunks ahead of who needs the factors, so it loads no chunk's gates before it
// needs them, which saves registers.
template <class C> __device__ inline void scan_gates(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    GateRegisters registers;
    GatesAhead ahead(registers, g.g, g.beta, task);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        await_turn(g, task, chunk);
        ahead.load(step, chunk);
        const auto [log_decay, beta] = ahead.take(step);
        const TwoPairs b = cumulative_log2_decay(log_decay);
        const Decays decays(b);
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        GradientsGates& gates = smem.gates[slot];
        const int lane = fresh_laneid();
        gates.log2_decay.write(lane, b);
        write_pair(gates.read, 2 * lane, decays.to_token);
        write_pair(gates.kept, 2 * lane, decays.to_end);
        write_pair(gates.beta, 2 * lane, beta);
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(smem.gates_ready[slot]);
    }
}

// One warp: dO, and dV out of its place.
template <class C> __device__ inline void move_values(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1]);
    store_and_load(
        task, smem.dv_done,
        [&](int slot, int chunk) {
            store_panels_of(task, g.packed(), g.dv, smem.douts[slot], chunk, task.column, g.dim_v);
        },
        [&](int slot, int chunk) {
            load(smem.douts[slot], g.dout, smem.arrived[slot], task.column, task.head, chunk);
        });
}

// One warp: q and k, and dq and dk out of their places where V is one slice.
template <class C> __device__ inline void move_keys(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[2]);
    store_and_load(
        task, smem.dq_dk_ready,
        [&](int slot, int chunk) {
            if (g.slices > 1) return;
            store_panels_of(task, g.packed(), g.dq, smem.queries[slot], chunk, 0, g.dim_k);
            store_panels_of(task, g.packed(), g.dk, smem.keys[slot], chunk, 0, g.dim_k);
        },
        [&](int slot, int chunk) {
            load(smem.queries[slot], g.q, smem.arrived[slot], 0, task.key_head, chunk);
            load(smem.keys[slot], g.k, smem.arrived[slot], 0, task.key_head, chunk);
        });
}

}  // namespace tfla_tk::delta_rule
