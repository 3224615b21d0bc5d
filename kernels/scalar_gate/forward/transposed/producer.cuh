// Producer warpgroup of the forward at K = 256: TMA loads, gates in three steps, stores of h.
#pragma once

#include "common/store_rows.cuh"
#include "common/tile_loader.cuh"
#include "scalar_gate/forward/rows.cuh"
#include "scalar_gate/forward/transposed/config.cuh"

namespace tfla_tk::mlstm {

// Writes value_scale: key_scale, and whether a token takes the rounding error of the token eight later
// (value_rounding.cuh), which it does unless its weight is far smaller. own, before: key_scale of the lane's
// two tokens in this chunk and in the chunk before.
template <class T2>
__device__ inline void write_value_scale(TransposedStage<T2>& gates, float2 own, float2 before) {
    using Scale = ValueScale<T2>;
    constexpr float kLeast = 1.f / 16;  // of the weight of the token whose error is taken
    const int lane = fresh_laneid();
    // the last eight tokens take from the first eight of the chunk before
    float2 giving = own;
    if (lane < 4) giving = {before.x * gates.decay, before.y * gates.decay};
    auto take = [&](float own, float giving) {
        return own >= kLeast * __shfl_sync(0xffffffff, giving, (lane + 4) % 32) ? Scale::kTakes : Scale::kNot;
    };
    gates.value_scale[lane] = Scale(own, {take(own.x, giving.x), take(own.y, giving.y)});
}

// Writes key_scale of the lane's two tokens to the operand of the sums of scaled keys.
template <class T> __device__ inline void write_weights(NormWeights<T>& weights, float2 key_scale) {
    using T2 = typename base_types::packing<T>::packed_type;
    const int t = 2 * fresh_laneid();
    auto write = [&](int row, T2 pair) { *reinterpret_cast<T2*>(&weights.data[t / 8][row][t % 8]) = pair; };
    constexpr float kUnit = NormWeights<T>::kUnit;
    const HighAndLow<T2> parts({key_scale.x * kUnit, key_scale.y * kUnit});
    write(NormWeights<T>::kHigh, parts.high), write(NormWeights<T>::kLow, parts.low);
    fence_async_proxy();
}

// Loads Q and K, and converts key_scale to the forms that the GEMM warpgroups read. NOTES: not done by the
// warp that computes key_scale, which is the slowest of the gate warps.
template <class C> __device__ inline void load_keys_and_queries(const Globals& g, TransposedMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader load{task, g.packed(), smem.tail_landed};
    float2 scale_before{};
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto keys = C::key_tile(chunk);
        const auto tile = C::tile(chunk);
        const auto stage = C::gate_stage(chunk);
        auto& arrived = smem.tiles_arrived[keys.slot];
        wait_free(smem.keys_free[keys.slot], keys.phase);
        load(smem.keys[keys.slot], g.k, arrived, 0, task.key_head, chunk);
        wait_free(smem.queries_free[tile.slot], tile.phase);
        load(smem.queries[tile.slot], g.q, arrived, 0, task.key_head, chunk);
        // one barrier, tiles_arrived, stands for tiles and gates
        wait(smem.gates_ready[stage.slot], stage.phase);
        typename C::Stage& gates = smem.gates[stage.slot];
        const float2 scale = *reinterpret_cast<const float2*>(&gates.key_scale[2 * fresh_laneid()]);
        write_value_scale(gates, scale, scale_before);
        if constexpr (C::kNormalize) write_weights(smem.norm_weights[stage.slot], scale);
        scale_before = scale;
        arrive_warp(arrived);
    }
}

// Calls run(policy) with the policy of a call's gates. It follows from the config; of those without
// stabiliser and normaliser from the call.
template <class C, class Run> __device__ inline void with_gate_of(const Globals& g, Run run) {
    if constexpr (C::kStabilised)
        run(ExponentialInput{});
    else if constexpr (C::kNormalize)
        run(SigmoidInput{});
    else
        with_gate_of_kernel<false>(g.gate_kind, run);
}

template <class C, class P>
__device__ inline void sum_transposed_gates(const Globals& g, TransposedMemory<C>& smem) {
    const Task& task = smem.task;
    auto stream = [&](const GateWords& gate) {
        return GateStream(gate, task.batch, task.head, task.first_row, task.tokens);
    };
    GateStream forget = stream(g.f_words);
    auto input = [&] {
        if constexpr (P::kHasInput)
            return stream(g.i_words);
        else
            return 0;
    }();
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = C::sum_stage(chunk);
        const int lane = fresh_laneid();
        GateSums& sums = smem.gate_sums[slot];
        wait_free(smem.sums_free[slot], phase);
        const float2 f = P::forget([&](float none) { return forget.take(chunk, task.tokens, none); });
        const TwoPairs b = inclusive_sums(log2_forget<P>(f), lane);
        sums.b[lane] = b;
        const float2 i = P::input([&](float none) {
            if constexpr (P::kHasInput)
                return input.take(chunk, task.tokens, none);
            else
                return float2{};
        });
        sums.a[lane] = input_over_forget<P>(i, b);
        arrive_warp(smem.sums_ready[slot]);
    }
}

template <class C, class P>
__device__ inline void scale_transposed_gates(const Globals& g, TransposedMemory<C>& smem) {
    const Task& task = smem.task;
    using Owed = typename C::Owed;
    GateScan<typename C::T, P, Owed> scan{
        P::kStabilised ? finite_stabiliser(task.initial_m(g) * kLog2eDouble) : FloatPair{},
        Owed(task.initial_c(g) != nullptr)};
    if constexpr (C::kNormalize)
        zero_units(reinterpret_cast<uint4*>(&smem.norm_weights), sizeof(smem.norm_weights) / sizeof(uint4));
    __syncwarp();
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        if (P::kStabilised && g.chunk_m && task.column == 0 && fresh_laneid() == 0)
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
        if constexpr (Owed::kFollowsWeights)
            if (lane == 0) gates.log2_unit = scan.owed.log2;
        if constexpr (C::kHoldsRowsLarger)
            if (const bool any = __any_sync(0xffffffff, may_be_held_larger(fminf(m.x, m.y))); lane == 0)
                gates.has_larger_rows = any;
        arrive_warp(smem.sums_free[sums.slot]);
        arrive_warp(smem.gates_ready[stage.slot]);
        if constexpr (P::kStabilised) store_row_stabilisers(g, task, chunk, m);
    }
    if constexpr (P::kStabilised) store_last_stabiliser(g, task, scan.m);
}

// Loads V, and stores the h that the state's warpgroups write in its place. NOTES: a warp of its own: in the
// warp that loads Q and K, K would wait for the stores of h.
template <class C>
__device__ inline void load_values_and_store_outputs(const Globals& g, TransposedMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader load{task, g.packed(), smem.value_tail_landed};
    auto load_values = [&](int chunk) {
        if (chunk >= task.chunks) return;
        const int slot = C::tile(chunk).slot;
        load(smem.values[slot], g.v, smem.values_arrived[slot], task.column, task.head, chunk);
    };
    auto store_outputs = [&](int chunk) {
        const auto [slot, phase] = C::tile(chunk);
#pragma unroll 1
        for (int id = 0; id < C::kStateWarpgroups; id++) {
            wait(smem.out_ready[slot][id], phase);
            fence_async_proxy();  // NOTES: here, since the state's warps would wait for their own writes
            store_chunk(task, g.packed(), g.h, smem.values[slot].data[id], chunk,
                        [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, task.column + id * 64, row, task.head, task.batch);
                        });
        }
        wait_stores_read();
        __syncwarp();  // every lane has waited for its own stores
    };
    for (int chunk = 0; chunk < C::kStages; chunk++) load_values(chunk);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        store_outputs(chunk);
        load_values(chunk + C::kStages);
    }
}

}  // namespace tfla_tk::mlstm
