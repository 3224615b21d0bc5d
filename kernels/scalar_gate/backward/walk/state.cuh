// State warpgroups of the mLSTM backward's passes: the transposed state in registers, and n beside it.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// columns of the values, 64 per block, and nothing of the state goes through shared memory. `out` is the
// transposed gradient of one block.
//
// The steps of one chunk:
//    1. dq, before every eighth chunk: store the state as an anchor.
//    2. Wait for the chunk's tiles and gates.
//   then, for every block of 64 columns of the values,
//    3. out = state Q^T; under its GEMMs hand the gradient before over to the warp that stores it.
//    4. state = decay state, where the decay falls due.
//    5. Issue state += (values . key_scale)^T keys over the first 32 tokens. Under these GEMMs scale out, and
//       (dq, dk) sum out . factor: the part of the row sums that comes through the entering state.
//    6. Issue out += values^T scores^T over the first 32 tokens.
//    7. Issue the same two over the last 32 tokens. The state's GEMM is the last one.
//    8. Under these GEMMs poll the next chunk's barriers, and (dq, dk) load the factor.
//    9. Wait for out. Under the state's last GEMM (dq, dk) sum out . factor by rows of the gradient, and put
//       out in the factor's place.
//   10. Wait for the state.
//   and at the chunk's end
//   11. Free keys, scores and gates.
//   12. dk, at dq's anchors: sum the product of the two states.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/backward/walk/anchors.cuh"
#include "scalar_gate/backward/walk/config.cuh"
#include "scalar_gate/backward/walk/dots.cuh"

namespace tfla_tk::mlstm {

// state += a keys over 16 tokens from 16 k on.
template <class C, class State, class A>
__device__ inline void add_keys(State (&state)[C::kParts], const A& a,
                                const typename C::KeyTile (&keys)[C::kParts], int k) {
#pragma unroll
    for (int part = 0; part < C::kParts; part++) {
        const auto operand = Operand128B::columns(&keys[part], C::KeyTile::panel_bytes);
        wgmma_step<true>(state[part], a, 0, operand.column_step(k));
    }
}

// What a thread of a state warpgroup holds. NOTES: not members of StateWalk: a struct with arrays stays in
// memory until the loops over them are unrolled, and the compiler would know nothing of its other members.
template <class C> struct StateRegisters {
    using Fragment = rt<typename C::T, 16, 16>;

    rt_fl<16, C::kPart> state[C::kBlocks][C::kParts];
    rt_fl<16, kChunk> out;                         // of one block
    Fragment value_fragments[C::kValueFragments];  // of the values
    Fragment fragments[C::kFragments];             // of the state, of scaled values or of the factor
    typename C::Norm norm;
};

template <class C> struct StateWalk {
    using T = typename C::T;
    using State = rt_fl<16, C::kPart>;
    using Out = rt_fl<16, kChunk>;
    using Fragment = typename StateRegisters<C>::Fragment;
    static constexpr int kStepsPerPart = C::kPart / 16, kStateSteps = C::kParts * kStepsPerPart;
    static constexpr bool kSumsRows = C::kSumsRows, kNormalizer = C::kNormalizer;
    static_assert(!kSumsRows || C::kBlocks == 1);

    // A block's GEMMs over 16 tokens each, by what they add to, in the order in which they are issued. They
    // complete in that order.
    enum class Gemm { state_0, state_1, out_0, out_1, state_2, out_2, out_3, state_3 };
    static_assert(kChunk / 16 == 4 && C::kValueFragments == 2);

    // A step of the walk: its chunk, and where its tiles and gates are.
    struct Step {
        int index, chunk;
        Use<C::kGateStages> stage;
        Use<C::kStages> tile;

        __device__ inline Step(const PassTask& task, int index)
            : index(index), chunk(C::chunk(task, index)), stage(C::gate_stage(index)), tile(C::tile(index)) {}
    };

    const PassGlobals& g;
    PassMemory<C>& smem;
    const PassTask& task;
    const int warpgroup_id;
    const uint32_t lane_offsets, own_lane_offset;  // in shared memory: of all threads, of this one

    StateRegisters<C>& registers;
    State (&state)[C::kBlocks][C::kParts] = registers.state;
    Out& out = registers.out;
    Fragment (&value_fragments)[C::kValueFragments] = registers.value_fragments;
    Fragment (&fragments)[C::kFragments] = registers.fragments;
    typename C::Norm& norm = registers.norm;

    // What polls have found. NOTES: a poll takes some 50 cycles, so it is made under earlier GEMMs and its
    // result kept in a predicate.
    bool more = false, at_anchor = false, tiles_arrived = false;  // of the next chunk
    bool place_ready = false, row_sums_free = false, scores_ready = false;

    __device__ inline StateWalk(const PassGlobals& g, PassMemory<C>& smem, int warpgroup_id,
                                StateRegisters<C>& registers)
        : g(g),
          smem(smem),
          task(smem.task),
          warpgroup_id(warpgroup_id),
          lane_offsets(shared_address(smem.lane_offsets)),
          own_lane_offset(lane_offsets + fresh_thread() % 128 * sizeof(uint32_t)),
          registers(registers) {}

    __device__ inline void walk() {
        load_entering_state();
        more = task.chunks > 0;
        at_anchor = anchored(0);
        for (int index = 0; more; index++) {
            const Step step(task, index);
            if (C::kGradient == Gradient::dq && at_anchor)  // 1
                store_anchor<C>(g, task, step.chunk, state[0], norm, [&] { return norm_row(); });
            if (!tiles_arrived) wait_for_tiles(step);  // 2
#pragma unroll
            for (int block = 0; block < C::kBlocks; block++) walk_block(step, block);
            free_keys_scores_and_gates(step);  // 11
            if constexpr (C::kGradient == Gradient::dk)
                if (anchored(step.index)) sum_flow(step.chunk);  // 12
        }
        if (task.chunks > 0) hand_over(task.chunks - 1, C::kBlocks - 1);
        if (!task.last) return;
        store_leaving_state();
    }

    __device__ inline void walk_block(const Step& step, int block) {
        const bool last_block = block == C::kBlocks - 1;
        read_state(step, block);  // 3
        if (last_block) free_queries(step);
        decay_state(block, gates(step).decay);  // 4
        multiply_first_tokens(step, block);     // 5, 6
        multiply_last_tokens(step, block);      // 7
        if (last_block) poll_next_chunk(step);  // 8
        if constexpr (kSumsRows)
            load_factor_columns(step, block);
        else
            poll_place(step, block);
        wait_for_out();  // 9
        if (last_block) free_values(step);
        if constexpr (kSumsRows)
            sum_rows(step, block);
        else
            wait_for_place(step, block);
        store_transposed<T>(place_of_out(step, block), out);
        wait_for_state(block);  // 10
    }

    // Tokens 0 .. 31: the state's GEMMs in flight, out scaled and summed under them, then out's GEMMs.
    __device__ inline void multiply_first_tokens(const Step& step, int block) {
        load_tokens(step, block, 0);
        load_tokens(step, block, 1);
        scale_tokens(step, 0);
        issue_state(step, block, 0);
        if constexpr (kSumsRows) poll_place_and_row_sums(step, block);
        scale_columns(out, gates(step).query_scale);
        scale_tokens(step, 1);
        issue_state(step, block, 1);
        if constexpr (kSumsRows) sum_entering_rows(step, block);
        if (block == 0) wait_for_scores(step);
        issue_out(step, 0);
        issue_out(step, 1);
    }

    // Tokens 32 .. 63, into fragments as GEMMs leave them.
    __device__ inline void multiply_last_tokens(const Step& step, int block) {
        wait_for<Gemm::out_0, Gemm::out_1>(tokens(0), scaled_tokens(0), scaled_tokens(1));
        load_tokens(step, block, 2);
        scale_tokens(step, 2);
        wait_for<Gemm::out_1, Gemm::out_1>(tokens(1));
        load_tokens(step, block, 3);
        issue_state(step, block, 2);
        issue_out(step, 2);
        issue_out(step, 3);
        scale_tokens(step, 3);
        issue_state(step, block, 3);
    }

    // --- where things are

    // NOTES: computed at every use, since the state takes the registers.
    __device__ static inline int warp() { return fresh_thread() % 128 / 32; }
    __device__ inline uint32_t lane_offset() const { return load_anew(own_lane_offset); }
    __device__ inline int panel(int block) const { return C::panel(block, warpgroup_id); }
    __device__ inline bool anchored(int index) const {
        return kSumsRows && task.anchored(C::chunk(task, index));
    }
    __device__ inline const auto& gates(const Step& step) const { return smem.gates[step.stage.slot]; }
    // Of the slice's columns of the values, the first whose n this lane has.
    __device__ inline int norm_row() const { return panel(0) * 64 + warp() * 16 + fresh_laneid() / 4; }

    // The k-th 16 tokens of values^T, as they are and scaled.
    __device__ inline Fragment& tokens(int k) { return value_fragments[k % C::kValueFragments]; }
    __device__ inline Fragment& scaled_tokens(int k) { return fragments[k % C::kValueFragments]; }
    // The j-th 16 columns of the factor, for j < 3, in fragments that the last 16 tokens do not use.
    __device__ inline Fragment& factor(int j) {
        return j == 0 ? scaled_tokens(2) : j == 1 ? fragments[C::kFragments - 1] : tokens(2);
    }
    // This warp's 16 columns of the factor, and of the gradient that takes its place.
    __device__ inline uint32_t place_of_out(const Step& step, int block) const {
        return shared_address(&smem.out[C::out(step.index, block).slot][warpgroup_id]) + lane_offset();
    }

    // --- waits and arrivals

    // Waits for a GEMM, where kLatest is the last one that has been issued: those between stay in flight.
    // done: tiles that the completed ones have read or written, and that may be used again.
    template <Gemm kGemm, Gemm kLatest, class... Tiles> __device__ inline void wait_for(Tiles&... done) {
        warpgroup::mma_async_wait<static_cast<int>(kLatest) - static_cast<int>(kGemm)>();
        (pin(done), ...);
    }
    __device__ inline void wait_for_out() {
        if constexpr (kSumsRows)  // load_factor_columns has waited for the others
            wait_for<Gemm::out_3, Gemm::state_3>(out);
        else
            wait_for<Gemm::out_3, Gemm::state_3>(out, scaled_tokens(2), tokens(2));
    }
    __device__ inline void wait_for_state(int block) {
        wait_for<Gemm::state_3, Gemm::state_3>(tokens(3), scaled_tokens(3));
        pin_state(block);
    }
    __device__ inline void pin_state(int block) {
#pragma unroll
        for (auto& tile : state[block]) pin(tile);
        if constexpr (kNormalizer) pin(norm.sums);
    }

    // body(barrier, phase) for all tiles and the gates of a step.
    template <class Body> __device__ inline void for_each_tile_barrier(int index, Body body) {
        const auto stage = C::gate_stage(index);
        const auto [slot, phase] = C::tile(index);
        body(smem.gates_ready[stage.slot], stage.phase);
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            body(smem.queries_arrived[slot][part], phase);
            body(smem.keys_arrived[slot][part], phase);
        }
        body(smem.values_arrived[slot], phase);
    }
    __device__ inline void wait_for_tiles(const Step& step) {
        for_each_tile_barrier(step.index, [](semaphore& barrier, uint32_t phase) { wait(barrier, phase); });
    }
    __device__ inline void poll_next_chunk(const Step& step) {
        more = step.index + 1 < task.chunks;
        if constexpr (C::kGradient == Gradient::dq) at_anchor = anchored(step.index + 1);
        tiles_arrived = true;
        for_each_tile_barrier(step.index + 1, [&](semaphore& barrier, uint32_t phase) {
            tiles_arrived = completed(barrier, phase) & tiles_arrived;
        });
    }

    // body(barrier, phase) for what tells that the gradient may be put in its place. dq and dk: the factor is
    // there. dv: the factor has been read; without one, the gradient before has been stored.
    template <class Body> __device__ inline void with_place_barrier(const Step& step, int block, Body body) {
        const auto [slot, phase] = C::out(step.index, block);
        if constexpr (kSumsRows)
            body(smem.factor_arrived[slot][warpgroup_id], phase);
        else if (g.has_factor<C>())
            body(smem.factor_read[slot][warpgroup_id], phase);
        else
            body(smem.out_free[slot][warpgroup_id], phase ^ 1);
    }
    __device__ inline void poll_place(const Step& step, int block) {
        with_place_barrier(step, block, [&](semaphore& barrier, uint32_t phase) {
            place_ready = completed(barrier, phase);
        });
    }
    __device__ inline void wait_for_place(const Step& step, int block) {
        with_place_barrier(step, block, [&](semaphore& barrier, uint32_t phase) {
            wait_unless(place_ready, barrier, phase);
        });
    }
    __device__ inline void poll_place_and_row_sums(const Step& step, int block) {
        const auto [slot, phase] = step.tile;
        poll_place(step, block);
        row_sums_free = completed(smem.row_sums_free[slot], phase ^ 1);
    }
    __device__ inline void wait_for_scores(const Step& step) {
        const auto [slot, phase] = step.tile;
        wait_unless(kSumsRows && scores_ready, smem.scores_ready[slot], phase);
    }
    __device__ inline void free_queries(const Step& step) {
        for (int part = 0; part < C::kParts; part++) arrive_warp(smem.queries_free[step.tile.slot][part]);
    }
    __device__ inline void free_values(const Step& step) { arrive_warp(smem.values_free[step.tile.slot]); }
    __device__ inline void free_keys_scores_and_gates(const Step& step) {
        const int slot = step.tile.slot;
        for (int part = 0; part < C::kParts; part++) arrive_warp(smem.keys_free[slot][part]);
        arrive_warp_in_cta(smem.scores_free[slot], ScoreTurns::maker(step.index));
        arrive_warp(smem.gates_free[step.stage.slot]);
    }
    // Hands the gradient of a block, which is in its place, over to the warp that stores it. index < 0: there
    // is none.
    __device__ inline void hand_over(int index, int block) {
        fence_async_proxy();
        if (index >= 0) arrive_warp(smem.out_ready[C::out(index, block).slot][warpgroup_id]);
    }
    __device__ inline void hand_over_before(const Step& step, int block) {
        if (block > 0)
            hand_over(step.index, block - 1);
        else
            hand_over(step.index - 1, C::kBlocks - 1);
    }

    // --- GEMMs

    // out = state Q^T by 16 columns of the state at a time, n's part first: one fragment is filled while the
    // others are in GEMMs.
    __device__ inline void read_state(const Step& step, int block) {
        constexpr int kNormSteps = kNormalizer ? 1 : 0;
        forget(out);
#pragma unroll
        for (int k = 0; k < kNormSteps + kStateSteps; k++) {
            // NOTES: under GEMMs, since its fence waits for the gradient's way into shared memory
            if (k == kNormSteps + 2) hand_over_before(step, block);
            const bool of_norm = k < kNormSteps;
            auto& a = fragments[k % C::kFragments];
            const uint64_t queries = of_norm ? norm_queries(step) : query_columns(step, k - kNormSteps);
            if (of_norm)
                norm.fill(a);
            else
                fill_from_state(a, block, k - kNormSteps);
            if (k + 1 >= C::kFragments) {
                warpgroup::mma_async_wait<C::kFragments - 2>();
                pin(fragments[(k + 1) % C::kFragments]);
            }
            pin(a);
            wgmma_fence();
            if (of_norm)
                wgmma_step<false>(out, norm.as_bf16(a), 0, queries, false);
            else
                wgmma_step<false>(out, a, 0, queries, k > 0);
            warpgroup::mma_commit_group();
        }
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
        pin(out);
    }
    __device__ inline void fill_from_state(Fragment& a, int block, int k) const {
        convert_fragment(a, state[block][k / kStepsPerPart], k % kStepsPerPart);
    }
    __device__ inline uint64_t norm_queries(const Step& step) const {
        return smem.norm_queries[C::kBackward ? 0 : step.stage.slot].rows();
    }
    __device__ inline uint64_t query_columns(const Step& step, int k) const {
        const auto* tile = &smem.queries[step.tile.slot][k / kStepsPerPart];
        return Operand128B::rows(tile).row_step(C::KeyTile::panel_bytes, k % kStepsPerPart);
    }
    // state += (values . key_scale)^T keys over 16 tokens in flight, and n.
    __device__ inline void issue_state(const Step& step, int block, int k) {
        auto& a = scaled_tokens(k);
        pin(a);
        if (k == 0) pin_state(block);
        wgmma_fence();
        add_keys<C>(state[block], a, smem.keys[step.tile.slot], k);
        if constexpr (kNormalizer)
            wgmma_step_8<T>(norm.sums, C::Norm::kOfScaled ? a : tokens(k),
                            smem.norm_keys[step.stage.slot].columns(k));
        warpgroup::mma_commit_group();
    }
    // out += values^T scores^T over 16 tokens in flight.
    __device__ inline void issue_out(const Step& step, int k) {
        auto& a = tokens(k);
        const auto scores = Operand128B::rows(&smem.scores[step.tile.slot]);
        pin(a);
        if (k == 0) pin(out);
        wgmma_fence();
        wgmma_step<false>(out, a, 0, scores.row_step(C::ScoreTile::panel_bytes, k));
        warpgroup::mma_commit_group();
    }

    // --- arithmetic

    __device__ inline void decay_state(int block, float decay) {
        if (decay != 1.f)
#pragma unroll
            for (auto& tile : state[block]) warp::mul(tile, tile, decay);
        if constexpr (kNormalizer) norm.scale(decay);
    }
    __device__ inline void load_tokens(const Step& step, int block, int k) {
        const uint32_t values = shared_address(smem.values[step.tile.slot].data[panel(block)]);
        load_transposed(tokens(k), values + lane_offset() + 16 * k * kPanelColumns * sizeof(T));
    }
    __device__ inline void scale_tokens(const Step& step, int k) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto scale = gates(step).key_scale[8 * k + 4 * half + fresh_laneid() % 4];
#pragma unroll
            for (int n = 2 * half; n < 2 * half + 2; n++)
                scaled_tokens(k).tiles[0][0].data[n] = scale.scaled(tokens(k).tiles[0][0].data[n]);
        }
    }

    // The row sums' part through the entering state, while out has nothing else. Of a slow chunk only the 16
    // tokens next to the state are summed, for their squares.
    __device__ inline void sum_entering_rows(const Step& step, int block) {
        constexpr int kTiles = Out::width, kNext = C::kBackward ? kTiles - 1 : 0;
        const auto [slot, phase] = step.tile;
        wait_for_place(step, block);
        scores_ready = completed(smem.scores_ready[slot], phase);
        const float slow = gates(step).slow;
        PartialSums& sums = smem.sums[slot][warpgroup_id];
        const uint32_t columns = place_of_out(step, block);
        const auto next = load_factor<T>(columns, kNext);
        wait_unless(row_sums_free, smem.row_sums_free[slot], phase ^ 1);
        const int thread = (own_lane_offset - lane_offsets) / sizeof(uint32_t);
        float sum = sum_dots(out, next, kNext);
        if (!(slow > 0.f))
#pragma unroll
            for (int j = 0; j < kTiles; j++)
                if (j != kNext) sum += sum_dots(out, load_factor<T>(columns, j), j);
        sums.inter[thread] = sum;
        if (thread == 0) sums.slow = slow;
    }
    // The factor's first 48 columns, into fragments that are free when the GEMMs of tokens 32 .. 47 are done.
    __device__ inline void load_factor_columns(const Step& step, int block) {
        wait_for<Gemm::out_2, Gemm::state_3>(factor(0), factor(2), factor(1));
        const uint32_t columns = place_of_out(step, block);
        factor(0) = load_factor<T>(columns, 0);
        factor(2) = load_factor<T>(columns, 2);
        factor(1) = load_factor<T>(columns, 1);
    }
    // The row sums of the gradient, by this warp's columns; loads the factor's last 16.
    __device__ inline void sum_rows(const Step& step, int block) {
        column_dots<T>(smem.sums[step.tile.slot][warpgroup_id].whole[warp()], out, factor(0), factor(2),
                       factor(1), place_of_out(step, block));
    }
    __device__ inline void sum_flow(int chunk) {
        const float flow = anchor_dot<C>(g, task, chunk, state[0], norm, [&] { return norm_row(); });
        const int part = task.share_and_slice<C>(g) * C::kStateWarps + warpgroup_id * 4 + warp();
        if (fresh_laneid() == 0) g.flows[task.anchor(g, chunk) * g.flow_parts + part] = flow;
    }

    // --- the walk's beginning and end

    // body(tile, row, column) for all tiles of the state, whose first row is a column of the values.
    template <class Body> __device__ inline void for_each_tile(Body body) {
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++)
#pragma unroll
            for (int part = 0; part < C::kParts; part++)
                body(state[block][part], task.column + panel(block) * 64 + warp() * 16, part * C::kPart);
    }
    __device__ inline void load_entering_state() {
        const float* entering = task.entering_c<C>(g);
        for_each_tile([&](auto& tile, int row, int column) {
            if (!entering)
                warp::zero(tile);
            else if constexpr (C::kGradient == Gradient::dv)
                load_state_transposed(tile, entering, column, row, g.dim_keys, g.dim_values, g.state_columns);
            else
                load_state(tile, entering, row, column, g.dim_values, g.dim_keys - task.keys_column<C>(),
                           g.state_columns);
            pin(tile);
        });
        if constexpr (kNormalizer) load_entering_norm();
    }
    __device__ inline void load_entering_norm() {
        const float* entering = task.entering_n<C>(g);
        if (entering && fresh_laneid() % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = task.column + norm_row() + 8 * half;
                if (column < g.dim_values) norm.set(half, entering[column]);
            }
        pin(norm.sums);
    }
    // The gradient of the initial state: of C by dv, of n by dk.
    __device__ inline void store_leaving_state() {
        if constexpr (C::kGradient == Gradient::dv) {
            if (!g.leaving_c) return;
            float* leaving = g.leaving_c + task.state * g.state_size();
            for_each_tile([&](auto& tile, int row, int column) {
                store_state_transposed(leaving, tile, column, row, g.dim_keys, g.dim_values, g.state_columns);
            });
        } else if constexpr (C::kGradient == Gradient::dk) {
            if (!kNormalizer || !g.leaving_n) return;
            const int64_t states = static_cast<int64_t>(g.cut.sequences) * g.heads;
            float* leaving = g.leaving_n + (task.share * states + task.state) * g.dim_values;
            if (fresh_laneid() % 4 != 0) return;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = task.column + norm_row() + 8 * half;
                if (column < g.dim_values) leaving[column] = norm.row(half);
            }
        }
    }
};

template <class C>
__device__ inline void walk_state(const PassGlobals& g, PassMemory<C>& smem, int warpgroup_id) {
    StateRegisters<C> registers;
    StateWalk<C>(g, smem, warpgroup_id, registers).walk();
}

}  // namespace tfla_tk::mlstm
