// Producer warps of the walk that makes dq, dk and dv: loads, stores, and the gradient of n. Steps go from
// the last chunk to the first.
#pragma once

#include "common/bulk_load.cuh"
#include "scalar_gate/backward/gradients/config.cuh"

namespace tfla_tk::mlstm {

// The gates of a step's chunk, and e, which is 0 past the last token.
template <class C>
__device__ inline void load_gates(const GradientsGlobals& g, GradientsMemory<C>& smem, int step) {
    const GradientsTask& task = smem.task;
    if (step >= task.chunks) return;
    const int chunk = task.chunks - 1 - step;
    const auto [slot, phase] = Use<C::kStages>(step);
    wait_free(smem.free[slot], phase);
    if constexpr (C::kNormalizer) {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        const float* const rows = g.e + task.row;
        write_lane_pair(smem.e[slot], t < task.tokens ? rows[t] : 0.f,
                        t + 1 < task.tokens ? rows[t + 1] : 0.f);
    }
    arrive_warp_expecting(smem.gates_ready[slot], sizeof(ChunkGates));
    if (fresh_laneid() == 0)
        load_bulk(&smem.gates[slot], &g.gates[task.first_slot + chunk], sizeof(ChunkGates),
                  smem.gates_ready[slot]);
    __syncwarp();
}

// A vector over K by one warp: a lane has eight neighbouring channels, and lanes with the same ones share the
// tokens of a sum.
template <class C> struct LaneChannels {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    static constexpr int kCount = 8, kLanes = C::kDimK / kCount;
    static constexpr int kTokens = kChunk * kLanes / 32;  // of a lane's part of a sum

    // sum_t factors[t] x_t, in all lanes.
    __device__ static inline void sum_tokens(float (&sums)[kCount], const typename C::Tile& x,
                                             const float* factors) {
        const int lane = fresh_laneid(), column = lane % kLanes * kCount;
        const int first = lane / kLanes * kTokens;
        const uint32_t panel = shared_address(x.data[column / kPanelColumns]);
#pragma unroll
        for (float& sum : sums) sum = 0.f;
#pragma unroll 1
        for (int t = first; t < first + kTokens; t += 2) {
            T2 pairs[2][4];
            each<0, 2>([&](int n) {
                load_shared(pairs[n], panel + panel_offset(t + n, column % kPanelColumns / kCount));
            });
            const float2 of = *reinterpret_cast<const float2*>(&factors[t]);
            each<0, 8>([&](int n) {
                const float2 y = to_float2(pairs[n / 4][n % 4]);
                const float by = n / 4 ? of.y : of.x;
                sums[2 * (n % 4)] += by * y.x, sums[2 * (n % 4) + 1] += by * y.y;
            });
        }
#pragma unroll
        for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
            for (float& sum : sums) sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
    // body(n, channel) for the lane's channels.
    template <class Body> __device__ static inline void for_each(Body body) {
        const int first = fresh_laneid() % kLanes * kCount;
        each<0, kCount>([&](int n) { body(n, first + n); });
    }
};

// dn, in shared memory, by one warp: backward in time dn <- decay dn + sum_t received_t e_t q_t.
template <class C>
__device__ inline void carry_norm_gradient(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    using Channels = LaneChannels<C>;
    auto publish = [&](auto of) {
        if (fresh_laneid() < Channels::kLanes)
            Channels::for_each([&](int n, int channel) { smem.norm_gradient[channel] = of(n, channel); });
        arrive_warp(smem.norm_gradient_ready);
    };
    publish([&](int, int channel) {
        const float* const entering = smem.task.entering_n;
        return entering && channel < g.dim_k ? entering[channel] : 0.f;
    });
    load_gates(g, smem, 0);
#pragma unroll 1
    for (int step = 0; step < smem.task.chunks; step++) {
        load_gates(g, smem, step + 1);
        const auto [slot, phase] = Use<C::kStages>(step);
        wait(smem.gates_ready[slot], phase);
        const int t = 2 * fresh_laneid();
        __syncwarp();  // the sum before has read the weights
        each<0, 2>([&](int n) {
            smem.norm_weights[t + n] = smem.gates[slot].received[t + n] * smem.e[slot][t + n];
        });
        __syncwarp();
        wait(smem.arrived[slot], phase);
        float sums[Channels::kCount];
        Channels::sum_tokens(sums, smem.queries[slot], smem.norm_weights);
        const float decay = exp2f(smem.gates[slot].decay);
        arrive_warp(smem.qk_read[slot]);
        arrive_warp(smem.free[slot]);
        wait(smem.norm_gradient_free, step & 1);
        publish([&](int n, int channel) { return decay * smem.norm_gradient[channel] + sums[n]; });
    }
    __syncwarp();
    if (float* const to = smem.task.leaving_n)
        for (int channel = fresh_laneid(); channel < g.dim_k; channel += 32)
            to[channel] = smem.norm_gradient[channel];
}

// What dn adds to a chunk's flow, by one warp: dn . sum_t sent_t k_t and, where the state enters the chunk,
// decay <n, dn>.
template <class C>
__device__ inline void leave_flow_of_norm(const GradientsGlobals& g, GradientsMemory<C>& smem, int step) {
    using Channels = LaneChannels<C>;
    const GradientsTask& task = smem.task;
    const int chunk = task.chunks - 1 - step;
    const auto [slot, phase] = Use<C::kStages>(step);
    wait(smem.gates_ready[slot], phase);
    wait(smem.arrived[slot], phase);
    float sums[Channels::kCount];
    Channels::sum_tokens(sums, smem.keys[slot], smem.gates[slot].sent);
    arrive_warp(smem.qk_read[slot]);
    if (GradientsTask::enters_with_state(chunk)) {
        wait(smem.state_arrived, task.states_before(chunk) & 1);
        const float decay = smem.state_scale * exp2f(smem.gates[slot].decay);
        Channels::for_each([&](int n, int channel) { sums[n] += decay * smem.norm[channel]; });
        arrive_warp(smem.state_free);
    }
    arrive_warp(smem.free[slot]);
    wait(smem.norm_gradient_ready, step & 1);
    float flow = 0.f;
    Channels::for_each([&](int n, int channel) { flow += sums[n] * smem.norm_gradient[channel]; });
    arrive_warp(smem.norm_gradient_free);
    flow = warp_sum(fresh_laneid() < Channels::kLanes ? flow : 0.f);
    if (fresh_laneid() == 0) g.flows[(task.first_slot + chunk) * kFlowParts + 4 * C::kWalkers] = flow;
}

// One warp: the states that enter every second chunk, and dh a chunk ahead; with a normaliser a part of the
// flows.
template <class C> __device__ inline void load_states(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[0]);
    auto load_dh = [&](int step) {
        if (step >= task.chunks) return;
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        load(smem.douts[slot], g.dh, smem.arrived[slot], 0, task.head, task.chunks - 1 - step);
    };
    load_dh(0);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        if (task.begins_state(chunk)) {
            const int state = task.state_slot(chunk);
            const float unit = g.units[state];
            wait_free(smem.state_free, task.states_before(chunk) & 1);
            if (fresh_laneid() == 0) {
                smem.state_scale = exp2f(unit);
                const uint32_t norm_bytes = C::kNormalizer ? g.dim_k * sizeof(float) : 0;
                tma::expect_bytes(smem.state_arrived, C::State::loaded_bytes + norm_bytes);
                load_panels(smem.state, g.states, smem.state_arrived, 0, 0, state, 0);
                if constexpr (C::kNormalizer)
                    load_bulk(smem.norm, g.norms + static_cast<int64_t>(state) * g.dim_k, norm_bytes,
                              smem.state_arrived);
            }
            __syncwarp();
        }
        load_dh(step + 1);
        if constexpr (C::kNormalizer) leave_flow_of_norm(g, smem, step);
    }
}

// One warp: the gates a chunk ahead, and dn.
template <class C>
__device__ inline void load_gates_and_carry_norm(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    if constexpr (C::kNormalizer)
        carry_norm_gradient(g, smem);
    else
#pragma unroll 1
        for (int step = 0; step < smem.task.chunks; step++) load_gates(g, smem, step);
}

// One warp: v, and dv out of its place.
template <class C> __device__ inline void move_values(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[1]);
    store_and_load(
        task, smem.dv_ready,
        [&](int slot, int chunk) {
            store_panels_of(task, g.packed(), g.dv, smem.values[slot], chunk, 0, g.dim_v);
        },
        [&](int slot, int chunk) { load(smem.values[slot], g.v, smem.arrived[slot], 0, task.head, chunk); });
}

// One warp: q and k, and dk and dq out of their places.
template <class C> __device__ inline void move_keys(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[2]);
    store_and_load(
        task, smem.dq_dk_ready,
        [&](int slot, int chunk) {
            store_panels_of(task, g.packed(), g.dq, smem.keys[slot], chunk, 0, g.dim_k);
            store_panels_of(task, g.packed(), g.dk, smem.queries[slot], chunk, 0, g.dim_k);
        },
        [&](int slot, int chunk) {
            load(smem.queries[slot], g.q, smem.arrived[slot], 0, task.key_head, chunk);
            load(smem.keys[slot], g.k, smem.arrived[slot], 0, task.key_head, chunk);
        });
}

}  // namespace tfla_tk::mlstm
