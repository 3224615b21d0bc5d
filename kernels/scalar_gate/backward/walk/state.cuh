// State warpgroups of the mLSTM backward's passes: the transposed state in registers, and n beside it, out^T
// = state Q^T + values^T scores^T, the state's update, row sums.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// columns of the values, 64 per block, and nothing of the state goes through shared memory.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// Of 16 columns of out . factor^T, this lane's products, summed over its two rows: columns 2 (lane % 4) and
// the next one, then those 8 further on.
struct Products {
    float2 x[2];

    template <class T, class Tile>
    __device__ inline Products(const Tile& out, const rt<T, 16, 16>& factor, int j) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 upper = to_float2(factor.tiles[0][0].data[2 * half]);
            const float2 lower = to_float2(factor.tiles[0][0].data[2 * half + 1]);
            const float2 a = out.tiles[0][j].data[2 * half], b = out.tiles[0][j].data[2 * half + 1];
            x[half] = {a.x * upper.x + b.x * lower.x, a.y * upper.y + b.y * lower.y};
        }
    }
};

// 16 columns of the factor, the transpose of a panel. `address`: the panel plus transposed_lane_offset.
template <class T> __device__ inline rt<T, 16, 16> load_factor(uint32_t address, int j) {
    rt<T, 16, 16> factor;
    load_transposed(factor, address + 16 * j * kPanelColumns * sizeof(T));
    return factor;
}

// sums[c] = sum over this warp's 16 rows of out . factor^T, by column. Of the factor's columns `a`, `b` and
// `c` have those from 0, 32 and 16 on; those from 48 on are loaded into a's place.
template <class T, class Tile>
__device__ inline void column_dots(float (&sums)[kChunk], const Tile& out, rt<T, 16, 16>& a,
                                   const rt<T, 16, 16>& b, const rt<T, 16, 16>& c, uint32_t address) {
    static_assert(Tile::width == 4);
    const int lane = fresh_laneid();
    // Over the eight lanes that share columns: each exchange halves the columns that a lane sums.
    auto exchange = [&](float2 first, float2 second, int distance) {
        auto kept = [&](float first, float second) {
            const bool keeps_second = lane & distance;
            const float other = __shfl_xor_sync(0xffffffff, keeps_second ? first : second, distance);
            return (keeps_second ? second : first) + other;
        };
        return float2{kept(first.x, second.x), kept(first.y, second.y)};
    };
    float2 x[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const Products first(out, j == 0 ? a : c, j), second(out, j == 0 ? b : a, j + 2);
        if (j == 0) a = load_factor<T>(address, 3);
#pragma unroll
        for (int half = 0; half < 2; half++) x[j][half] = exchange(first.x[half], second.x[half], 16);
        asm volatile("" ::: "memory");  // NOTES: two fragments at a time: registers
    }
#pragma unroll
    for (int half = 0; half < 2; half++) x[0][half] = exchange(x[0][half], x[1][half], 8);
    const float2 sum = exchange(x[0][0], x[0][1], 4);
    // the bits of lane / 4 have chosen columns 32, 16 and 8
    *reinterpret_cast<float2*>(&sums[2 * fresh_laneid()]) = sum;
}

// This lane's part of the sum of out . factor^T over the j-th 16 columns, which `factor` has.
template <class T, class Tile>
__device__ inline float sum_dots(const Tile& out, const rt<T, 16, 16>& factor, int j) {
    const Products products(out, factor, j);
    return (products.x[0].x + products.x[0].y) + (products.x[1].x + products.x[1].y);
}

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

template <class C>
__device__ inline void walk_state(const PassGlobals& g, PassMemory<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kStepsPerPart = C::kPart / 16, kStateSteps = C::kParts * kStepsPerPart,
                  kSteps = kChunk / 16;
    const PassTask& task = smem.task;
    // NOTES: computed anew where needed: the state takes the registers
    auto warp = [] { return fresh_thread() % 128 / 32; };
    const uint32_t lane_offsets = shared_address(smem.lane_offsets);
    const uint32_t own_lane_offset = lane_offsets + fresh_thread() % 128 * sizeof(uint32_t);
    auto lane_offset = [&] { return load_anew(own_lane_offset); };
    auto panel_of = [&](int block) { return C::panel(block, warpgroup_id); };

    rt_fl<16, C::kPart> state[C::kBlocks][C::kParts];
    rt_fl<16, kChunk> out;                              // of one block
    rt<T, 16, 16> value_fragments[C::kValueFragments];  // of the values
    rt<T, 16, 16> fragments[C::kFragments];             // of the state or of scaled values
    typename C::Norm norm;
    static_assert(!C::kSumsRows || C::kBlocks == 1);
    // what reads n is multiplied with, and what is added to it
    auto norm_query = [&](int step) {
        return smem.norm_queries[C::kBackward ? 0 : C::gate_stage(step).slot].rows();
    };
    auto norm_key = [&](int step, int k) { return smem.norm_keys[C::gate_stage(step).slot].columns(k); };

    auto for_each_state = [&](auto body) {
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++)
#pragma unroll
            for (int part = 0; part < C::kParts; part++)
                body(state[block][part], task.column + panel_of(block) * 64 + warp() * 16, part * C::kPart);
    };
    // The queries' k-th 16 columns as an operand.
    auto query_step = [&](int step, int k) {
        const auto* tile = &smem.queries[C::tile(step).slot][k / kStepsPerPart];
        return Operand128B::rows(tile).row_step(C::KeyTile::panel_bytes, k % kStepsPerPart);
    };
    // the k-th 16 tokens of values^T, as they are and scaled
    auto tokens = [&](int k) -> auto& { return value_fragments[k % C::kValueFragments]; };
    auto scaled_tokens = [&](int k) -> auto& { return fragments[k % C::kValueFragments]; };
    auto load_tokens = [&](int block, int step, int k) {
        const uint32_t panel = shared_address(smem.values[C::tile(step).slot].data[panel_of(block)]);
        load_transposed(tokens(k), panel + lane_offset() + 16 * k * kPanelColumns * sizeof(T));
    };
    // out += values^T scores^T over 16 tokens
    auto issue_intra = [&](int step, int k) {
        auto& a = tokens(k);
        const auto scores = Operand128B::rows(&smem.scores[C::tile(step).slot]);
        pin(a);
        if (k == 0) pin(out);
        wgmma_fence();
        wgmma_step<false>(out, a, 0, scores.row_step(C::ScoreTile::panel_bytes, k));
        warpgroup::mma_commit_group();
    };
    auto scale_tokens = [&](int k, const typename C::Stage& gates) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto scale = gates.key_scale[8 * k + 4 * half + fresh_laneid() % 4];
#pragma unroll
            for (int n = 2 * half; n < 2 * half + 2; n++)
                scaled_tokens(k).tiles[0][0].data[n] = scale.scaled(tokens(k).tiles[0][0].data[n]);
        }
    };
    // state += (values . key_scale)^T keys over 16 tokens, and n
    auto issue_update = [&](int block, int step, int k) {
        auto& a = scaled_tokens(k);
        pin(a);
        if (k == 0)
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
        if constexpr (C::kNormalizer)
            if (k == 0) pin(norm.sums);
        wgmma_fence();
        add_keys<C>(state[block], a, smem.keys[C::tile(step).slot], k);
        if constexpr (C::kNormalizer)
            wgmma_step_8<T>(norm.sums, C::Norm::kOfScaled ? a : tokens(k), norm_key(step, k));
        warpgroup::mma_commit_group();
    };
    // of the state's rows, the first that this lane has of n, in the slice
    auto norm_row = [&] { return panel_of(0) * 64 + warp() * 16 + fresh_laneid() / 4; };
    // this warp's 16 columns of the factor, and of the gradient that takes its place
    auto out_columns = [&](int block, int step) {
        return shared_address(&smem.out[C::out(step, block).slot][warpgroup_id]) + lane_offset();
    };
    // ask(barrier, phase): of the place of the gradient, with the factor in it
    auto ask_for_out = [&](int block, int step, auto ask) {
        const auto [slot, phase] = C::out(step, block);
        if constexpr (C::kSumsRows)
            return ask(smem.factor_arrived[slot][warpgroup_id], phase);
        else if (g.has_factor<C>())
            return ask(smem.factor_read[slot][warpgroup_id], phase);
        else
            return ask(smem.out_free[slot][warpgroup_id], phase ^ 1);
    };
    auto wait_for_out = [&](bool there, int block, int step) {
        ask_for_out(block, step,
                    [&](semaphore& barrier, uint32_t phase) { wait_unless(there, barrier, phase); });
    };
    // ask(barrier, phase): of every tile and the gates of a step
    auto ask_for_tiles = [&](int step, auto ask) {
        const auto stage = C::gate_stage(step);
        const auto [slot, phase] = C::tile(step);
        ask(smem.gates_ready[stage.slot], stage.phase);
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            ask(smem.queries_arrived[slot][part], phase);
            ask(smem.keys_arrived[slot][part], phase);
        }
        ask(smem.values_arrived[slot], phase);
    };
    // Of a slow chunk the 16 tokens next to the state that enters, for their squares.
    auto sum_inter = [&](bool sums_free, int block, int step, float slow) {
        constexpr int kTiles = decltype(out)::width, kNext = C::kBackward ? kTiles - 1 : 0;
        const auto [slot, phase] = C::tile(step);
        PartialSums& sums = smem.sums[slot][warpgroup_id];
        const uint32_t columns = out_columns(block, step);
        const auto next = load_factor<T>(columns, kNext);
        wait_unless(sums_free, smem.row_sums_free[slot], phase ^ 1);
        const int thread = (own_lane_offset - lane_offsets) / sizeof(uint32_t);
        float sum = sum_dots(out, next, kNext);
        if (!(slow > 0.f))
#pragma unroll
            for (int j = 0; j < kTiles; j++)
                if (j != kNext) sum += sum_dots(out, load_factor<T>(columns, j), j);
        sums.inter[thread] = sum;
        if (thread == 0) sums.slow = slow;
    };

    // The gradient of a block, staged, goes to the warp that stores it. NOTES: late, under the GEMMs that
    // read the state for the next one: the fence waits for what has been staged.
    auto hand_over = [&](int block, int step) {
        fence_async_proxy();
        if (step >= 0) arrive_warp(smem.out_ready[C::out(step, block).slot][warpgroup_id]);
    };
    auto hand_over_before = [&](int block, int step) {
        block > 0 ? hand_over(block - 1, step) : hand_over(C::kBlocks - 1, step - 1);
    };
    // out = state Q^T, and n's part of it.
    auto read = [&](int block, int step) {
        constexpr int kNormSteps = C::kNormalizer ? 1 : 0;  // before the state's
        multiply_in_turns<kNormSteps + kStateSteps>(
            out, fragments,
            [&](auto& a, int k) {
                if (k < kNormSteps) {
                    norm.fill(a);
                } else {
                    const int own = k - kNormSteps;
                    convert_fragment(a, state[block][own / kStepsPerPart], own % kStepsPerPart);
                }
            },
            [&](int k) {
                if (k == kNormSteps + 2) hand_over_before(block, step);
                return k < kNormSteps ? norm_query(step) : query_step(step, k - kNormSteps);
            },
            [&](const auto& a, uint64_t b, int k) {
                if (k < kNormSteps)
                    wgmma_step<false>(out, norm.as_bf16(a), 0, b, false);
                else
                    wgmma_step<false>(out, a, 0, b, k > 0);
            },
            [] { warpgroup::mma_commit_group(); }, [] {});
    };

    // Anchors: before some chunks dq leaves its state as the next GEMM reads it, and n; dk, whose state there
    // is their gradient and lies in the same threads, sums the product.
    using Unit = typename C::AnchorUnit;
    constexpr int kUnitStride = 128 * C::kStateWarpgroups;
    auto anchor_units = [&](int chunk) {
        return reinterpret_cast<Unit*>(task.anchor_memory<C>(g, chunk)) + fresh_thread() - 256;
    };
    auto anchor_norm = [&](int chunk) {
        constexpr int64_t kStateBytes = static_cast<int64_t>(C::kSlice) * C::kDimKeys * sizeof(T);
        return reinterpret_cast<float*>(task.anchor_memory<C>(g, chunk) + kStateBytes) + norm_row();
    };
    auto leave_state = [&](int chunk) {
        Unit* units = anchor_units(chunk);
#pragma unroll
        for (int k = 0; k < kStateSteps; k++) {
            rt<T, 16, 16> a;
            convert_fragment(a, state[0][k / kStepsPerPart], k % kStepsPerPart);
            *units = reinterpret_cast<const Unit&>(a.tiles[0][0].data);
            units += kUnitStride;
            asm volatile("" ::: "memory");  // NOTES: one unit at a time: registers
        }
        if (!C::kNormalizer || fresh_laneid() % 4 != 0) return;
        float* left = anchor_norm(chunk);
        left[0] = norm.row(0), left[8] = norm.row(1);
    };
    // of the state's k-th 16 columns
    auto unit_dot = [&](const Unit& unit, int k) {
        const auto& tile = state[0][k / kStepsPerPart].tiles[0][k % kStepsPerPart];
        const auto* pairs = reinterpret_cast<const typename rt<T, 16, 16>::dtype*>(&unit);
        float sum = 0.f;
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            const float2 left = to_float2(pairs[pair]), own = tile.data[pair];
            sum += left.x * own.x + left.y * own.y;
        }
        return sum;
    };
    auto sum_flow = [&](int chunk) {
        constexpr int kAhead = 4;  // units on their way
        const Unit* units = anchor_units(chunk);
        Unit ahead[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; k++) ahead[k] = units[k * kUnitStride];
        float sum = 0.f;
        if (C::kNormalizer && fresh_laneid() % 4 == 0) {
            const float* left = anchor_norm(chunk);
            sum += left[0] * norm.row(0) + left[8] * norm.row(1);
        }
#pragma unroll
        for (int k = 0; k < kStateSteps; k++) {
            sum += unit_dot(ahead[k % kAhead], k);
            asm volatile("" ::: "memory");  // NOTES: no more units at a time: registers
            if (k + kAhead < kStateSteps) ahead[k % kAhead] = units[(k + kAhead) * kUnitStride];
        }
        const float flow = warp_sum(sum);
        const int part = task.share_and_slice<C>(g) * C::kStateWarps + warpgroup_id * 4 + warp();
        if (fresh_laneid() == 0) g.flows[task.anchor(g, chunk) * g.flow_parts + part] = flow;
    };

    const float* entering = task.entering_c<C>(g);
    for_each_state([&](auto& tile, int row, int column) {
        if (!entering)
            warp::zero(tile);
        else if constexpr (C::kGradient == Gradient::dv)
            load_state_transposed(tile, entering, column, row, g.dim_keys, g.dim_values, g.state_columns);
        else
            load_state(tile, entering, row, column, g.dim_values, g.dim_keys - task.keys_column<C>(),
                       g.state_columns);
        pin(tile);
    });
    if constexpr (C::kNormalizer) {
        const float* entering_n = task.entering_n<C>(g);
        if (entering_n && fresh_laneid() % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = task.column + norm_row() + 8 * half;
                if (column < g.dim_values) norm.set(half, entering_n[column]);
            }
        pin(norm.sums);
    }

    // NOTES: what barriers and shared memory tell of the next step is asked under GEMMs, and kept in
    // predicates: an answer takes some 50 cycles.
    auto at_anchor = [&](int step) { return C::kSumsRows && task.anchored(C::chunk(task, step)); };
    bool more = task.chunks > 0, arrived = false, anchored = at_anchor(0);
    for (int step = 0; more; step++) {
        const int chunk = C::chunk(task, step);
        const auto stage = C::gate_stage(step);
        const auto [slot, phase] = C::tile(step);
        const typename C::Stage& gates = smem.gates[stage.slot];
        if (C::kGradient == Gradient::dq && anchored) leave_state(chunk);
        if (!arrived) ask_for_tiles(step, [](semaphore& barrier, uint32_t phase) { wait(barrier, phase); });
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++) {
            const bool last_block = block == C::kBlocks - 1;
            read(block, step);
            if (last_block)
                for (int part = 0; part < C::kParts; part++) arrive_warp(smem.queries_free[slot][part]);
            if (gates.decay != 1.f)
#pragma unroll
                for (auto& tile : state[block]) warp::mul(tile, tile, gates.decay);
            if constexpr (C::kNormalizer) norm.scale(gates.decay);

            // The update's GEMMs are spread, so that the output's arithmetic is under some of them.
            static_assert(kSteps == 4 && C::kValueFragments == 2);
            load_tokens(block, step, 0);
            load_tokens(block, step, 1);
            scale_tokens(0, gates);
            issue_update(block, step, 0);
            bool out_there = C::kSumsRows && ask_for_out(block, step, completed);
            const bool sums_free = C::kSumsRows && completed(smem.row_sums_free[slot], phase ^ 1);
            scale_columns(out, gates.query_scale);
            scale_tokens(1, gates);
            issue_update(block, step, 1);
            bool scores_there = false;
            if constexpr (C::kSumsRows) {
                wait_for_out(out_there, block, step);
                if (block == 0) scores_there = completed(smem.scores_ready[slot], phase);
                sum_inter(sums_free, block, step, gates.slow);
            }
            if (block == 0) wait_unless(scores_there, smem.scores_ready[slot], phase);
            issue_intra(step, 0);
            issue_intra(step, 1);

            warpgroup::mma_async_wait<1>();  // all but that of the second 16 tokens with the scores
            pin(tokens(0)), pin(scaled_tokens(0)), pin(scaled_tokens(1));
            load_tokens(block, step, 2);
            scale_tokens(2, gates);
            warpgroup::mma_async_wait<0>();
            pin(tokens(1));
            load_tokens(block, step, 3);
            issue_update(block, step, 2);
            issue_intra(step, 2);
            issue_intra(step, 3);
            scale_tokens(3, gates);
            issue_update(block, step, 3);

            if (last_block) {
                more = step + 1 < task.chunks;
                if constexpr (C::kGradient == Gradient::dq) anchored = at_anchor(step + 1);
                arrived = true;
                ask_for_tiles(step + 1, [&](semaphore& barrier, uint32_t phase) {
                    arrived = completed(barrier, phase) & arrived;
                });
            }
            auto &a = scaled_tokens(2), &b = tokens(2), &c = fragments[C::kFragments - 1];  // of the factor
            if constexpr (C::kSumsRows) {
                warpgroup::mma_async_wait<2>();  // all but those of the last 16 tokens
                pin(a), pin(b), pin(c);
                const uint32_t columns = out_columns(block, step);
                a = load_factor<T>(columns, 0), b = load_factor<T>(columns, 2),
                c = load_factor<T>(columns, 1);
            } else {
                out_there = ask_for_out(block, step, completed);
            }
            warpgroup::mma_async_wait<1>();  // all but the last one of the update
            pin(out);
            if constexpr (!C::kSumsRows) pin(a), pin(b);
            if (last_block) arrive_warp(smem.values_free[slot]);
            if constexpr (C::kSumsRows)  // under the update
                column_dots<T>(smem.sums[slot][warpgroup_id].whole[warp()], out, a, b, c,
                               out_columns(block, step));
            else
                wait_for_out(out_there, block, step);
            store_transposed<T>(out_columns(block, step), out);
            warpgroup::mma_async_wait<0>();
            pin(tokens(3)), pin(scaled_tokens(3));
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
            if constexpr (C::kNormalizer) pin(norm.sums);
        }
        for (int part = 0; part < C::kParts; part++) arrive_warp(smem.keys_free[slot][part]);
        arrive_warp_in_cta(smem.scores_free[slot], ScoreTurns::maker(step));
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (C::kGradient == Gradient::dk)
            if (at_anchor(step)) sum_flow(chunk);
    }
    if (task.chunks > 0) hand_over(C::kBlocks - 1, task.chunks - 1);

    if (!task.last) return;
    if constexpr (C::kGradient == Gradient::dv) {
        if (!g.leaving_c) return;
        float* leaving = g.leaving_c + task.state * g.state_size();
        for_each_state([&](auto& tile, int row, int column) {
            store_state_transposed(leaving, tile, column, row, g.dim_keys, g.dim_values, g.state_columns);
        });
    } else if constexpr (C::kGradient == Gradient::dk) {
        if (!C::kNormalizer || !g.leaving_n) return;
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

}  // namespace tfla_tk::mlstm
