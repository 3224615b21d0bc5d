// Producer warpgroup of the mLSTM forward at K = 256: TMA loads, gates in two steps, stores of h.
#pragma once

#include "mlstm_fwd_rows.cuh"
#include "mlstm_wide_config.cuh"
#include "tfla_tk/store_rows.cuh"
#include "tfla_tk/tile_loader.cuh"

namespace tfla_tk::mlstm {

template <class C> __device__ inline void load_keys_and_queries(const Globals& g, WideMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader load{task, g.packed(), smem.tail_landed};
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto keys = C::key_tile(chunk);
        const auto tile = C::tile(chunk);
        const auto gates = C::gate_stage(chunk);
        auto& arrived = smem.tiles_arrived[keys.slot];
        wait_free(smem.keys_free[keys.slot], keys.phase);
        load(smem.keys[keys.slot], g.k, arrived, 0, chunk);
        wait_free(smem.queries_free[tile.slot], tile.phase);
        load(smem.queries[tile.slot], g.q, arrived, 0, chunk);
        // so that one wait serves tiles and gates
        wait(smem.gates_ready[gates.slot], gates.phase);
        if (fresh_laneid() == 0) kittens::arrive(arrived);
    }
}

template <class C> __device__ inline void sum_wide_gates(const Globals& g, WideMemory<C>& smem) {
    const Task& task = smem.task;
    auto load = [&](const Gate& gate, int chunk, float none) {
        return GateRows(gate, task.batch, task.head, task.first_row).pair(chunk, task.tokens, none);
    };
    float2 f = load(g.f, 0, kNoForget), next_i = load(g.i, 0, kNoInput);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = C::sum_stage(chunk);
        const int lane = fresh_laneid();
        GateSums& sums = smem.gate_sums[slot];
        wait_free(smem.sums_free[slot], phase);
        TwoPairs a, b;
        auto take_i = [&] {
            sums.b[lane] = b;
            const float2 i = next_i;
            next_i = load(g.i, chunk + 1, kNoInput);
            return i;
        };
        sum_chunk_gates<C::kSigmoid>(b, a, f, lane, take_i, [&] { return load(g.f, chunk + 1, kNoForget); });
        sums.a[lane] = a;
        arrive_warp(smem.sums_ready[slot]);
    }
}

// key_scale of the lane's two tokens.
__device__ inline float2 key_scale_pair(const GateStage& gates) {
    return *reinterpret_cast<const float2*>(&gates.key_scale[2 * fresh_laneid()]);
}

// A token's values take what those of the token eight later have lost (mlstm_wide_values.cuh), unless their
// weight is far less. before: the stage of the chunk before; the first chunk's last tokens are given nothing,
// whatever it holds.
template <class Scale>
__device__ inline void write_value_scale(WideStage<Scale>& gates, const WideStage<Scale>& before) {
    constexpr float kLeast = 1.f / 16;  // of the giving token's weight
    const int lane = fresh_laneid();
    const float2 own = key_scale_pair(gates);
    // the last eight tokens are given to by the first ones of the chunk before
    float2 giving = own;
    if (lane < 4) {
        giving = key_scale_pair(before);
        giving = {giving.x * gates.decay, giving.y * gates.decay};
    }
    auto take = [&](float own, float giving) {
        return own >= kLeast * __shfl_sync(0xffffffff, giving, (lane + 4) % 32) ? Scale::kTakes : Scale::kNot;
    };
    gates.value_scale[lane] = Scale::of(own, {take(own.x, giving.x), take(own.y, giving.y)});
}

// Of the lane's two tokens.
template <class T> __device__ inline void write_weights(NormWeights<T>& weights, const GateStage& gates) {
    using T2 = typename base_types::packing<T>::packed_type;
    const int t = 2 * fresh_laneid();
    auto write = [&](int row, T2 pair) { *reinterpret_cast<T2*>(&weights.data[t / 8][row][t % 8]) = pair; };
    const float2 key_scale = key_scale_pair(gates);
    constexpr float kUnit = NormWeights<T>::kUnit;
    const HighAndLow<T2> parts({key_scale.x * kUnit, key_scale.y * kUnit});
    write(NormWeights<T>::kHigh, parts.high), write(NormWeights<T>::kLow, parts.low);
    fence_async_proxy();
}

template <class C> __device__ inline void scale_wide_gates(const Globals& g, WideMemory<C>& smem) {
    constexpr bool kSigmoid = C::kSigmoid;
    const Task& task = smem.task;
    GateScan<typename C::T, kSigmoid> scan{kSigmoid ? FloatPair{}
                                                    : finite_stabiliser(task.initial_m(g) * kLog2eDouble)};
    if constexpr (C::kNormalize)
        zero_units(reinterpret_cast<uint4*>(&smem.norm_weights), sizeof(smem.norm_weights) / sizeof(uint4));
    __syncwarp();
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        if (!kSigmoid && g.chunk_m && task.column == 0 && fresh_laneid() == 0)
            store_chunk_m(g.chunk_m, task.chunk + chunk, scan.m);
        const auto sums = C::sum_stage(chunk);
        const auto stage = C::gate_stage(chunk);
        wait_free(smem.gates_free[stage.slot], stage.phase);
        wait(smem.sums_ready[sums.slot], sums.phase);
        const GateSums& of_chunk = smem.gate_sums[sums.slot];
        const int lane = fresh_laneid();
        typename C::Stage& gates = smem.gates[stage.slot];
        const float2 m = scan.finish(gates, of_chunk.b[lane], of_chunk.a[lane], g.scale, g.log2_scale,
                                     chunk + 1 == task.chunks);
        __syncwarp();
        // of the chunk before the stage still has the gates: this warp is the next to write it
        write_value_scale(gates, smem.gates[C::gate_stage(chunk + C::kGateStages - 1).slot]);
        if constexpr (C::kNormalize) write_weights(smem.norm_weights[stage.slot], gates);
        arrive_warp(smem.sums_free[sums.slot]);
        arrive_warp(smem.gates_ready[stage.slot]);
        if constexpr (!kSigmoid) store_row_stabilisers(g, task, chunk, m);
    }
    if constexpr (!kSigmoid) store_last_stabiliser(g, task, scan.m);
}

// V, and in its place h as the state's warpgroups leave it.
// NOTES: by one warp: behind the stores of h, in the order of a loader of all tiles, K would come too late.
template <class C>
__device__ inline void load_values_and_store_outputs(const Globals& g, WideMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader load{task, g.packed(), smem.value_tail_landed};
    auto load_values = [&](int chunk) {
        if (chunk >= task.chunks) return;
        const int slot = C::tile(chunk).slot;
        load(smem.values[slot], g.v, smem.values_arrived[slot], task.column, chunk);
    };
    auto store_outputs = [&](int chunk) {
        const auto [slot, phase] = C::tile(chunk);
#pragma unroll 1
        for (int id = 0; id < C::kStateWarpgroups; id++) {
            wait(smem.out_ready[slot][id], phase);
            store_rows(task, g.packed(), g.h, g.h_row, smem.values[slot].data[id], chunk,
                       [&](const TensorMap& map, uint32_t from, int row) {
                           map.store_panel(from, task.column + id * 64, row, task.head, task.batch);
                       });
        }
        wait_stores_read();
        __syncwarp();  // each lane has waited for its own
    };
    for (int chunk = 0; chunk < C::kStages; chunk++) load_values(chunk);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        store_outputs(chunk);
        load_values(chunk + C::kStages);
    }
}

}  // namespace tfla_tk::mlstm
