// Producer warps of the walk that makes dq, dk and dv: loads, stores, and the gradient of n. Steps go from
// the last chunk to the first.
#pragma once

#include "scalar_gate/backward/gradients/config.cuh"

namespace tfla_tk::mlstm {

// Starts a copy to shared memory; 16-byte aligned.
__device__ inline void load_bulk(void* to, const void* from, uint32_t bytes, semaphore& arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&arrived))
        : "memory");
}

// One warp: dh, and the states that enter every second chunk.
template <class C> __device__ inline void load_states(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[0]);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        load(smem.douts[slot], g.dh, smem.arrived[slot], 0, task.head, chunk);
        if (!task.begins_state(chunk)) continue;
        const float unit = g.units[task.state_slot(chunk)];
        wait_free(smem.state_free, task.states_before(chunk) & 1);
        if (fresh_laneid() == 0) {
            const int state = task.state_slot(chunk);
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
}

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

// dn, by one warp: a lane has kDimK / 32 neighbouring channels. Backward in time
//   dn <- decay dn + sum_t received_t e_t q_t
// It leaves its part of a chunk's flow: dn . sum_t sent_t k_t and, of every second chunk, decay <n, dn>.
template <class C> struct NormGradient {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    static constexpr int kPairs = C::kDimK / 64;

    const GradientsGlobals& g;
    GradientsMemory<C>& smem;
    float2 own[kPairs];

    __device__ static inline int channel() { return 2 * kPairs * fresh_laneid(); }

    __device__ inline NormGradient(const GradientsGlobals& g, GradientsMemory<C>& smem) : g(g), smem(smem) {
        const float* const entering = smem.task.entering_n;
        auto entry = [&](int at) { return entering && at < g.dim_k ? entering[at] : 0.f; };
#pragma unroll
        for (int p = 0; p < kPairs; p++) own[p] = {entry(channel() + 2 * p), entry(channel() + 2 * p + 1)};
    }

    // sums += sum_t factor(t) x_t of the lane's channels.
    template <class Factor>
    __device__ static inline void add_tokens(float2 (&sums)[kPairs], const typename C::Tile& x,
                                             Factor factor) {
        const int panel = channel() / kPanelColumns, column = channel() % kPanelColumns;
        const uint32_t base = shared_address(x.data[panel]);
#pragma unroll 2
        for (int t = 0; t < kChunk; t++) {
            T2 pairs[kPairs];
            load_pairs(pairs, base + panel_offset(t, column / 8) + column % 8 * sizeof(typename C::T));
            const float by = factor(t);
#pragma unroll
            for (int p = 0; p < kPairs; p++) {
                const float2 y = to_float2(pairs[p]);
                sums[p] = {sums[p].x + by * y.x, sums[p].y + by * y.y};
            }
        }
    }
    __device__ static inline void load_pairs(T2 (&to)[kPairs], uint32_t address) {
        auto* const bits = reinterpret_cast<uint32_t*>(to);
        if constexpr (kPairs == 1)
            asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(bits[0]) : "r"(address) : "memory");
        else
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
                         : "=r"(bits[0]), "=r"(bits[1])
                         : "r"(address)
                         : "memory");
    }
    // This lane's part of the product of dn with a vector of its channels.
    __device__ inline float dot(const float2 (&x)[kPairs]) const {
        float sum = 0.f;
#pragma unroll
        for (int p = 0; p < kPairs; p++) sum += own[p].x * x[p].x + own[p].y * x[p].y;
        return sum;
    }

    __device__ inline void publish(int step) {
        wait_free(smem.norm_gradient_free, step & 1);
#pragma unroll
        for (int p = 0; p < kPairs; p++)
            *reinterpret_cast<float2*>(&smem.norm_gradient[channel() + 2 * p]) = own[p];
        arrive_warp(smem.norm_gradient_ready);
    }
    __device__ inline void leave_flow(int slot, int chunk) {
        float2 sums[kPairs]{};
        add_tokens(sums, smem.keys[slot], [&](int t) { return smem.gates[slot].sent[t]; });
        float flow = dot(sums);
        if (GradientsTask::enters_with_state(chunk)) {
            wait(smem.state_arrived, smem.task.states_before(chunk) & 1);
#pragma unroll
            for (int p = 0; p < kPairs; p++)
                sums[p] = *reinterpret_cast<const float2*>(&smem.norm[channel() + 2 * p]);
            flow += smem.state_scale * exp2f(smem.gates[slot].decay) * dot(sums);
            arrive_warp(smem.state_free);
        }
        flow = warp_sum(flow);
        if (fresh_laneid() == 0)
            g.flows[(smem.task.first_slot + chunk) * kFlowParts + 4 * C::kWalkers] = flow;
    }
    __device__ inline void walk_chunk(int step) {
        const auto [slot, phase] = Use<C::kStages>(step);
        publish(step);
        wait(smem.gates_ready[slot], phase);
        wait(smem.arrived[slot], phase);
        if constexpr (C::kSums) leave_flow(slot, smem.task.chunks - 1 - step);
        const float decay = exp2f(smem.gates[slot].decay);
#pragma unroll
        for (auto& x : own) x = {decay * x.x, decay * x.y};
        add_tokens(own, smem.queries[slot],
                   [&](int t) { return smem.gates[slot].received[t] * smem.e[slot][t]; });
        arrive_warp(smem.qk_read[slot]);
        arrive_warp(smem.free[slot]);
    }
    __device__ inline void store_leaving() const {
        float* const to = smem.task.leaving_n;
        if (!to) return;
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
            if (channel() + 2 * p < g.dim_k) to[channel() + 2 * p] = own[p].x;
            if (channel() + 2 * p + 1 < g.dim_k) to[channel() + 2 * p + 1] = own[p].y;
        }
    }
};

// One warp: the gates a step ahead, and dn.
template <class C>
__device__ inline void load_gates_and_carry_norm(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    load_gates(g, smem, 0);
    if constexpr (C::kNormalizer) {
        NormGradient<C> norm(g, smem);
#pragma unroll 1
        for (int step = 0; step < smem.task.chunks; step++) {
            load_gates(g, smem, step + 1);
            norm.walk_chunk(step);
        }
        norm.store_leaving();
    } else {
#pragma unroll 1
        for (int step = 1; step < smem.task.chunks; step++) load_gates(g, smem, step);
    }
}

// Stores what has taken the place of tiles, and loads tiles of a later chunk there, by one warp.
//   store(slot, chunk), load(slot, chunk), by all lanes
template <class C, class Store, class Load>
__device__ inline void store_and_load(const GradientsTask& task, semaphore (&ready)[C::kStages], Store store,
                                      Load load) {
#pragma unroll 1
    for (int step = 0; step < task.chunks + C::kStages; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        if (step >= C::kStages) {
            wait(ready[slot], phase ^ 1);
            store(slot, chunk + C::kStages);
            wait_stores_read();
            __syncwarp();
        }
        if (chunk >= 0) load(slot, chunk);
    }
    wait_stores_done();
}

// Stores the panels of a tile of tokens that begin before `columns`.
template <class Tile>
__device__ inline void store_panels_of(const GradientsGlobals& g, const GradientsTask& task,
                                       const ResultMaps& to, const Tile& tile, int chunk, int columns) {
#pragma unroll 1
    for (int panel = 0; panel < Tile::panels && panel * kPanelColumns < columns; panel++)
        store_chunk(task, g.packed(), to, tile.data[panel], chunk,
                    [&](const TensorMap& map, uint32_t from, int row) {
                        map.store_panel(from, panel * kPanelColumns, row, task.head, task.batch);
                    });
}

// One warp: v, and dv out of its place.
template <class C> __device__ inline void move_values(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[1]);
    store_and_load<C>(
        task, smem.dv_ready,
        [&](int slot, int chunk) { store_panels_of(g, task, g.dv, smem.values[slot], chunk, g.dim_v); },
        [&](int slot, int chunk) { load(smem.values[slot], g.v, smem.arrived[slot], 0, task.head, chunk); });
}

// One warp: q and k, and dk and dq out of their places.
template <class C> __device__ inline void move_keys(const GradientsGlobals& g, GradientsMemory<C>& smem) {
    const GradientsTask& task = smem.task;
    TileLoader<GradientsTask> load(task, g.packed(), smem.tail_landed[2]);
    store_and_load<C>(
        task, smem.dq_dk_ready,
        [&](int slot, int chunk) {
            store_panels_of(g, task, g.dq, smem.keys[slot], chunk, g.dim_k);
            store_panels_of(g, task, g.dk, smem.queries[slot], chunk, g.dim_k);
        },
        [&](int slot, int chunk) {
            load(smem.queries[slot], g.q, smem.arrived[slot], 0, task.key_head, chunk);
            load(smem.keys[slot], g.k, smem.arrived[slot], 0, task.key_head, chunk);
        });
}

}  // namespace tfla_tk::mlstm
