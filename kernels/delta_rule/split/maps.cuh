// What the segments of a split make of the state, S -> M S + own (bindings/params.h): walks of the forward
// that leave nothing but states. M are the states of a walk that begins with the identity and writes no
// values.
//
// So one program walks the columns of V and, behind them, those of M: W = V - e^b (K S) or W = -e^b (K S). A
// walker owns 64 of them and holds their transposed states in fp32 registers, as in the forward's walk.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

template <class Type, int kDim> struct MapsConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = 2, kWarpgroups = kWalkers + 1, kThreads = 128 * kWarpgroups;
    static constexpr bool kBackward = false, kStatesAlone = true;
    static constexpr int kStages = 4;  // chunks in shared memory
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 40, kWalkerRegisters = 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters <= 65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;
};

struct MapsGlobals : WalkGlobals {
    TensorMap v;  // boxes of a chunk
    float *maps, *transposed;

    // Columns of walkers whose values are those of V; behind them come M's.
    __host__ __device__ inline int value_columns() const {
        return (dim_v + kWalkerColumns - 1) / kWalkerColumns * kWalkerColumns;
    }
};

// Factors of a chunk's tokens, as in the forward's walk.
struct MapsGates {
    TokenFactors minus_read;  // -e^b
    TokenFactors beta;
    TokenFactors update;  // beta e^{b_L - b}
    float decay;          // e^{b_L}
};

template <class C> struct MapsStage {
    typename C::Tile keys;
    typename C::Square a;
    typename C::Columns values[C::kWalkers];  // of walkers of V
    MapsGates gates;
};

template <class C> struct MapsMemory {
    MapsStage<C> stages[C::kStages];
    GateRing gate_ring;
    semaphore arrived[C::kStages];  // tiles, gates
    semaphore free[C::kStages];
    WalkTask task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 1 + kArrivalsPerWarp);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        publish_barriers();
    }
};

// One warp: keys, A and values. The segments that are walked have whole chunks: all but the last one of a
// sequence.
template <class C> __device__ inline void load_map_tiles(const MapsGlobals& g, MapsMemory<C>& smem) {
    const Task& task = smem.task;
    const int head = task.batch * g.heads + task.head;
    const int of_values = min((g.value_columns() - task.column) / kWalkerColumns, C::kWalkers);
    const uint32_t bytes =
        C::Tile::loaded_bytes + C::Square::loaded_bytes + max(of_values, 0) * C::Columns::loaded_bytes;
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        MapsStage<C>& stage = smem.stages[slot];
        semaphore& arrived = smem.arrived[slot];
        wait_free(smem.free[slot], phase);
        if (fresh_laneid() == 0) {
            const int row = task.first_row + chunk * kChunk;
            tma::expect_bytes(arrived, bytes);
            load_panels(stage.keys, g.k, arrived, 0, row, task.key_head, task.batch);
            load_panels(stage.a, g.a, arrived, 0, (task.first_slot + chunk) * kChunk, head, 0);
            for (int walker = 0; walker < of_values; walker++)
                load_panels(stage.values[walker], g.v, arrived, task.column + walker * kWalkerColumns, row,
                            task.head, task.batch);
        }
        __syncwarp();
    }
}

// One warp; a lane has two tokens.
template <class C> __device__ inline void scan_map_gates(const MapsGlobals& g, MapsMemory<C>& smem) {
    const Task& task = smem.task;
    GatesAhead ahead(smem.gate_ring, g.g, g.beta, task);
    for (int chunk = 0; chunk < ahead.kSteps; chunk++) ahead.load(chunk, chunk);
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [log_decay, x] = ahead.take(chunk);
        const Decays decays(log_decay);
        const float2 read = decays.to_token, kept = decays.to_end;
        ahead.load(chunk + ahead.kSteps, chunk + ahead.kSteps);
        const auto [slot, phase] = Use<C::kStages>(chunk);
        wait_free(smem.free[slot], phase);
        MapsGates& gates = smem.stages[slot].gates;
        const int lane = fresh_laneid();
        gates.minus_read.write(lane, {-read.x, -read.y});
        gates.beta.write(lane, x);
        gates.update.write(lane, {x.x * kept.x, x.y * kept.y});
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(smem.arrived[slot]);
    }
    wait_copies();
}

// A walker. X, W and U' share an accumulator; S^T is the state. Per chunk:
//   1. Round S^T to A operands, then scale it by its decay. Issue X^T = S^T K^T; load V^T under it.
//   2. Wait for X. W^T = V^T - e^b X^T; round beta W^T. Issue U'^T = W^T + (beta W^T) A^T and wait for it.
//   3. Issue S^T += (beta e^{b_L - b} U'^T) K and wait for it; hand the stage over.
template <class C> __device__ inline void walk_map(const MapsGlobals& g, MapsMemory<C>& smem, int walker) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    rt_fl<16, C::kDimK> state;     // S^T
    rt_fl<16, kChunk> x;           // X^T, then W^T, then U'^T
    Fragment read[kStateSteps];    // S^T, rounded; then U'^T, scaled
    Fragment tokens[kTokenSteps];  // V^T, then beta W^T
    static_assert(kStateSteps >= kTokenSteps);
    auto scaled = [&](int j) -> Fragment& { return read[j]; };

    const WalkTask& task = smem.task;
    const int lane = fresh_laneid();
    const int first = task.column + walker * kWalkerColumns;
    const bool of_values = first < g.value_columns();
    // of V or of M
    const int column = (of_values ? first : first - g.value_columns()) + warpgroup::warpid() * 16;
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());

    if (!of_values)
        for_each_pair(state, column, 0, [](float2& pair, int c, int r) {
            pair = {c == r ? 1.f : 0.f, c == r + 1 ? 1.f : 0.f};
        });
    else
        begin_state(state, task.entering, [&](auto& tile) {
            load_state_transposed(tile, task.entering, 0, column, g.dim_k, g.dim_v, g.dim_v);
        });
    pin(state);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        MapsStage<C>& stage = smem.stages[slot];
        wait(smem.arrived[slot], phase);
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });  // 1
        warp::mul(state, state, stage.gates.decay);
        pin(state);
        forget(x);
        const auto keys_of_rows = Operand128B::rows(&stage.keys);
        each<0, kStateSteps>([&](int k) {
            multiply_step<false>(x, read[k], keys_of_rows.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
        const uint32_t values = shared_address(&stage.values[walker]) + lane_offset;
        each<0, kTokenSteps>([&](int j) {
            if (of_values)
                load_transposed(tokens[j], values + 16 * j * kPanelColumns * sizeof(T));
            else
                each<0, 4>([&](int k) { tokens[j].tiles[0][0].data[k] = from_float2<T2>({0.f, 0.f}); });
        });
        warpgroup::mma_async_wait<0>();  // 2
        pin(x), pin_all(read);
        make_writers(tokens, x, LateFactors(stage.gates.minus_read, lane),
                     LateFactors(stage.gates.beta, lane));
        add_rows(x, tokens, stage.a);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(tokens);
        const auto keys = Operand128B::columns(&stage.keys, C::Tile::panel_bytes);
        each<0, kTokenSteps>([&](int j) {  // 3
            const auto factors = stage.gates.update.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 z = x.tiles[0][j].data[k], e = factors.of[k / 2];
                scaled(j).tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
            multiply_step<true>(state, scaled(j), keys.column_step(j), true, j == 0);
        });
        warpgroup::mma_async_wait<0>();
        pin(state);
        each<0, kTokenSteps>([&](int j) { pin(scaled(j)); });
        arrive_warp(smem.free[slot]);
    }
    if (of_values) {
        store_state_transposed(task.leaving, state, 0, column, g.dim_k, g.dim_v, g.dim_v);
        return;
    }
    const int64_t slot = (task.first_carried + task.number) * static_cast<int64_t>(g.heads) + task.head;
    const int64_t at = slot * g.dim_k * g.dim_k;
    store_state(g.transposed + at, state, column, 0, g.dim_k, g.dim_k, g.dim_k);
    if (g.maps) store_state_transposed(g.maps + at, state, 0, column, g.dim_k, g.dim_k, g.dim_k);
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void delta_maps_kernel(const __grid_constant__ MapsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<MapsMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if (!begin_task<C>(g, smem, blockIdx.x, [&] { g.k.prefetch(), g.v.prefetch(), g.a.prefetch(); }))
            return;
        // nobody asks for M of the first segment
        if (smem.task.number == 0 && smem.task.column >= g.value_columns()) return;
        if (warpgroup_id == 0) {
            set_registers<C::kProducerRegisters, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_map_tiles(g, smem);
            else if (warp == 1)
                scan_map_gates(g, smem);
        } else {
            set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            walk_map(g, smem, warpgroup_id - 1);
        }
    }
}

}  // namespace tfla_tk::delta_rule
