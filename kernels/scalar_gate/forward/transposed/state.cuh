// State warpgroups of the mLSTM forward at K = 256: C^T in registers, h^T = C^T Q^T + V^T P^T, C^T's update.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// 64 columns of V, and nothing of the state goes through shared memory.
//
// The steps of one chunk. Tokens are taken 16 at a time, the last ones first; V^T P^T and the update read the
// same fragments of V^T, as it is and scaled.
//    1. Wait for Q, K and gates.
//    2. h^T = C^T Q^T. Under its last GEMMs decay C^T where the decay falls due, wait for V, and load and
//       scale the first 16 tokens.
//    3. Free Q. Wait for P.
//    4. Issue C^T += (V . key_scale)^T K over the first 16 tokens, scale h^T by rows under it, and issue
//       h^T += V^T P^T over the same tokens.
//    5. The same over the next 32 tokens; V comes one step ahead.
//    6. The same over the last 16 tokens, but h^T first, since it is waited for first.
//    7. Wait for h^T. Under the last GEMM of C^T free P and the gates, and put h in V's place for the warp
//       that stores it.
//    8. Wait for C^T. Free K.
//    9. fp16, seldom: scale rows of h back, and free the gates and hand h over only then.
// With kSequential it waits for every GEMM when it is issued, and loads V when it is needed.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/transposed/config.cuh"

namespace tfla_tk::mlstm {

// body(n) for n = 0, 1, ... while n is below a count, and seldom(n) after each body(n) that returns true.
// read_count reads the count; `count` is what body(n) has read of it.
//
// NOTES: code layout. ptxas leaves the code of a branch in the loop that it is in, and a jump over it costs
// 1 %. So the inner loop ends where seldom is due. And the outer loop reads the count itself: without work of
// its own ptxas takes both loops for one, and computes in every round what it could keep.
template <class ReadCount, class Body, class Seldom>
__device__ inline void loop_with_seldom(const int& count, ReadCount read_count, Body body, Seldom seldom) {
    int n = 0;
    while (n < read_count()) {
        bool due;
        do due = body(n);
        while (++n < count && !due);
        if (due) seldom(n - 1);
    }
}

// What a thread of a state warpgroup holds. NOTES: not members of TransposedStateWalk: a struct with arrays
// stays in memory until the loops over them are unrolled, and the compiler would know nothing of its other
// members.
template <class C> struct TransposedStateRegisters {
    using Fragment = rt<typename C::T, 16, 16>;

    rt_fl<16, C::kPart> state[C::kParts];
    rt_fl<16, kChunk> out;                // h^T
    Fragment fragments[C::kFragments];    // of C^T, then of V^T
    Fragment first_values, first_scaled;  // of V^T, made while the last fragments of C^T are read
    ScaledValues<typename C::T2> values;
};

template <class C> struct TransposedStateWalk {
    using T = typename C::T;
    using Scales = ValueScales<typename C::T2>;
    using Registers = TransposedStateRegisters<C>;
    using Fragment = typename Registers::Fragment;
    static constexpr int kTokenSteps = kChunk / 16;

    // GEMMs over 16 tokens each, by what they add to, in the order in which they are issued. They complete in
    // that order.
    enum class Gemm { state_0, out_0, state_1, out_1, state_2, out_2, out_3, state_3 };
    static_assert(kTokenSteps == 4);

    // A chunk, and where its tiles and gates are.
    struct Step {
        int chunk;
        Use<C::kStages> tile;
        Use<C::kKeyStages> keys;
        Use<C::kGateStages> stage;

        __device__ inline explicit Step(int chunk)
            : chunk(chunk), tile(C::tile(chunk)), keys(C::key_tile(chunk)), stage(C::gate_stage(chunk)) {}
    };

    const Globals& g;
    TransposedMemory<C>& smem;
    const Task& task;
    const int warpgroup_id;

    Registers& registers;
    rt_fl<16, C::kPart> (&state)[C::kParts] = registers.state;
    rt_fl<16, kChunk>& out = registers.out;
    Fragment (&fragments)[C::kFragments] = registers.fragments;
    ScaledValues<typename C::T2>& values = registers.values;

    int chunks;                   // of the task, as last read
    uint32_t place;               // of h, as transposed_lane_offset has it
    bool rows_scaled_up = false;  // of h, so that step 9 is due

    __device__ inline TransposedStateWalk(const Globals& g, TransposedMemory<C>& smem, int warpgroup_id,
                                          Registers& registers)
        : g(g), smem(smem), task(smem.task), warpgroup_id(warpgroup_id), registers(registers) {}

    __device__ inline void walk() {
        load_initial_state();
        chunks = task.chunks;
        loop_with_seldom(
            chunks, [&] { return read_chunks(); },
            [&](int chunk) {
                walk_chunk(Step(chunk));
                return rows_scaled_up;
            },
            [&](int chunk) {
                if constexpr (C::kHoldsRowsLarger) scale_rows_back(Step(chunk));  // 9
            });
        store_last_state();
    }

    __device__ inline void walk_chunk(const Step& step) {
        wait(smem.tiles_arrived[step.keys.slot], step.keys.phase);  // 1
        read(step);                                                 // 2
        if constexpr (!kSequential) load_values<1>(step);
        arrive_warp(smem.queries_free[step.tile.slot]);  // 3
        wait(smem.scores_ready, step.chunk & 1);

        issue_state<0>(step);  // 4
        scale_columns(out, smem.read_factors);
        issue_out<0>();
        multiply_second_tokens(step);  // 5
        multiply_third_tokens(step);
        multiply_last_tokens(step);  // 6

        arrive_warp_if(!rows_scaled_up, smem.gates_free[step.stage.slot]);
        wait_for<Gemm::out_3, Gemm::state_3>(out, values_of<1>(), values_of<2>(), values_of<3>());  // 7
        arrive_warp_in_cta(smem.scores_free, ScoreTurns::maker(step.chunk + 1));
        store_out(step);
        arrive_warp_if(!rows_scaled_up, smem.out_ready[step.tile.slot][warpgroup_id]);
        chunks = read_chunks();  // NOTES: early, since it is asked for at once
        wait_for_all();          // 8
        arrive_warp(smem.keys_free[step.keys.slot]);
        if (kSequential && step.chunk + 1 < task.chunks)
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
    }

    // out = C^T Q^T, and under its last GEMMs what the update needs.
    __device__ inline void read(const Step& step) {
        const auto queries = Operand128B::rows(&smem.queries[step.tile.slot]);
        read_state(
            out, state, fragments, [&](int k) { return queries.row_step(C::QueryTile::panel_bytes, k); },
            [&] { commit(); },
            [&] {
                decay_state(gates(step).decay);
                const Scales scales(gates(step), sixteen(0));
                wait(smem.values_arrived[step.tile.slot], step.tile.phase);
                load_values<0>(step);
                scale_values<0>(scales);
            });
    }

    // The second 16 tokens into both GEMMs, and V of the third.
    __device__ inline void multiply_second_tokens(const Step& step) {
        if constexpr (kSequential) load_values<1>(step);
        const Scales scales(gates(step), sixteen(1));
        if constexpr (!kSequential) load_values<2>(step);
        scale_values<1>(scales);
        issue_state<1>(step);
        issue_out<1>();
    }
    // The third 16 tokens into both GEMMs, and V of the last, in fragments that the first ones' GEMMs leave.
    // NOTES: the scales are loaded before that wait, since shared memory's answer takes a while.
    __device__ inline void multiply_third_tokens(const Step& step) {
        if constexpr (kSequential) load_values<2>(step);
        const Scales scales(gates(step), sixteen(2));
        wait_for<Gemm::out_0, Gemm::out_1>(values_of<0>(), scaled_values<0>());
        if constexpr (!kSequential) load_values<3>(step);
        if constexpr (C::kHoldsRowsLarger) rows_scaled_up = gates(step).has_larger_rows;
        scale_values<2>(scales);
        issue_state<2>(step);
        issue_out<2>();
    }
    // The last 16 tokens into h^T and then C^T, scaled in the place of the second ones.
    __device__ inline void multiply_last_tokens(const Step& step) {
        if constexpr (kSequential) load_values<3>(step);
        const Scales scales(gates(step), sixteen(3));
        wait_for<Gemm::out_1, Gemm::out_2>(values_of<1>(), scaled_values<1>());
        issue_out<3>();
        scale_values<3>(scales);
        issue_state<3>(step);
    }

    // --- where things are

    // NOTES: computed at every use, since the state takes the registers.
    __device__ static inline int warp() { return fresh_thread() % 128 / 32; }
    __device__ static inline uint32_t lane_offset() { return transposed_lane_offset(warp()); }
    __device__ inline int read_chunks() const { return load_anew(shared_address(&task.chunks)); }
    __device__ inline const auto& gates(const Step& step) const { return smem.gates[step.stage.slot]; }
    // Which 16 tokens of values and scores a step of 16 takes: the last ones first.
    __device__ static constexpr int sixteen(int step) { return kTokenSteps - 1 - step; }

    // The fragments that hold V^T of a step, as it is and scaled. Those of C^T serve from step 1 on; step 0,
    // made while C^T is still read, has fragments of its own, kFirst, which later steps take over. With
    // kSequential there are no others.
    static constexpr int kFirst = -1;
    template <int kStep> __device__ static constexpr int values_place() {
        constexpr int kPlaces[] = {kFirst, 0, 1, kFirst};
        return kSequential ? kFirst : kPlaces[kStep];
    }
    template <int kStep> __device__ static constexpr int scaled_place() {
        constexpr int kPlaces[] = {kFirst, 2, kFirst, 2};
        return kSequential ? kFirst : kPlaces[kStep];
    }
    template <int kStep> __device__ inline Fragment& values_of() {
        if constexpr (values_place<kStep>() == kFirst)
            return registers.first_values;
        else
            return fragments[values_place<kStep>()];
    }
    template <int kStep> __device__ inline Fragment& scaled_values() {
        if constexpr (scaled_place<kStep>() == kFirst)
            return registers.first_scaled;
        else
            return fragments[scaled_place<kStep>()];
    }

    // --- waits

    // Waits for a GEMM, where kLatest is the last one that has been issued: those between stay in flight.
    // done: tiles that the completed ones have read or written, and that may be used again.
    template <Gemm kGemm, Gemm kLatest, class... Tiles> __device__ inline void wait_for(Tiles&... done) {
        warpgroup::mma_async_wait<static_cast<int>(kLatest) - static_cast<int>(kGemm)>();
        (pin(done), ...);
    }
    __device__ inline void wait_for_all() {
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
        pin(registers.first_values);
        pin(registers.first_scaled);
#pragma unroll
        for (auto& tile : state) pin(tile);
    }
    // Commits a GEMM; with kSequential also waits for it.
    __device__ inline void commit() {
        warpgroup::mma_commit_group();
        if constexpr (kSequential) {
            wait_for_all();
            pin(out);
        }
    }

    // --- GEMMs over 16 tokens

    // out += V^T P^T in flight, by halves of the queries: the first one sees nothing of tokens in the second.
    template <int kStep> __device__ inline void issue_out() {
        auto& a = values_of<kStep>();
        pin(a);
        if constexpr (kStep == 0) pin(out);
        const auto scores = Operand128B::rows(&smem.scores);
        auto multiply = [&](auto& queries, int first) {
            constexpr uint32_t kRowBytes = kPanelColumns * sizeof(T);
            wgmma_step<false>(queries, a, 0, scores.at(first * kRowBytes + sixteen(kStep) * 32));
        };
        wgmma_fence();
        if constexpr (sixteen(kStep) < kTokenSteps / 2) multiply(half_of<0>(out), 0);
        multiply(half_of<1>(out), kChunk / 2);
        commit();
    }
    // C^T += (V . key_scale)^T K in flight.
    template <int kStep> __device__ inline void issue_state(const Step& step) {
        auto& a = scaled_values<kStep>();
        pin(a);
        if constexpr (kStep == 0)
#pragma unroll
            for (auto& tile : state) pin(tile);
        const auto keys = Operand128B::columns(&smem.keys[step.keys.slot], C::KeyTile::panel_bytes);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            wgmma_step<true>(
                state[part], a, 0,
                keys.column_step(sixteen(kStep), part * C::kPartPanels * C::KeyTile::panel_bytes));
        commit();
    }

    // --- arithmetic, loads and stores

    __device__ inline void decay_state(float decay) {
        if (decay == 1.f) return;
#pragma unroll
        for (auto& tile : state) warp::mul(tile, tile, decay);
        values.decay(decay);
    }
    template <int kStep> __device__ inline void load_values(const Step& step) {
        const auto& rows = smem.values[step.tile.slot].data[warpgroup_id];
        load_transposed(values_of<kStep>(), shared_address(rows[16 * sixteen(kStep)]) + lane_offset());
    }
    template <int kStep> __device__ inline void scale_values(const Scales& scales) {
        values.scale(scaled_values<kStep>(), values_of<kStep>(), scales);
    }
    // Each warp takes the place of its own columns of V, which none but it has read.
    __device__ inline void store_out(const Step& step) {
        place = shared_address(smem.values[step.tile.slot].data[warpgroup_id]) + lane_offset();
        store_transposed<T>(place, out);
    }
    __device__ inline void scale_rows_back(const Step& step) {
        multiply_back(place, gates(step), !C::kStabilised);
        arrive_warp(smem.gates_free[step.stage.slot]);
        arrive_warp(smem.out_ready[step.tile.slot][warpgroup_id]);
    }

    // --- the walk's beginning and end

    // body(tile, row, column): this warp's 16 columns of V are the tile's rows. NOTES: by the thread, before
    // whose warps are eight others, not by warpgroup_id: kept until the end it costs a register.
    template <class Body> __device__ inline void for_each_part(Body body) {
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            body(state[part], part * C::kPart, task.column + (fresh_thread() / 32 - 8) * 16);
    }
    __device__ inline void load_initial_state() {
        const float* initial = task.initial_c(g);
        for_each_part([&](auto& tile, int row, int column) {
            begin_state(tile, initial, [&](auto& tile) {
                load_state_transposed(tile, initial, row, column, g.dim_qk, g.dim_v, g.dim_v);
            });
        });
    }
    __device__ inline void store_last_state() {
        if (!g.last.c || !task.last) return;
        float* last = g.last.c + task.index * g.dim_qk * g.dim_v;
        const float unit = last_unit<C>(smem);
        for_each_part([&](auto& tile, int row, int column) {
            if constexpr (C::Owed::kFollowsWeights) warp::mul(tile, tile, unit);
            store_state_transposed(last, tile, row, column, g.dim_qk, g.dim_v, g.dim_v);
        });
    }
};

template <class C>
__device__ inline void walk_transposed_state(const Globals& g, TransposedMemory<C>& smem, int warpgroup_id) {
    TransposedStateRegisters<C> registers;
    TransposedStateWalk<C>(g, smem, warpgroup_id, registers).walk();
}

}  // namespace tfla_tk::mlstm
