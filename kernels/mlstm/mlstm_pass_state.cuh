// State warpgroups of the mLSTM backward's passes: the transposed state in registers, and n beside it, out^T
// = state Q^T + values^T scores^T, the state's update, row sums.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// columns of the values, 64 per block, and nothing of the state goes through shared memory.
#pragma once

#include "mlstm_pass_config.cuh"
#include "tfla_tk/tiles.cuh"
#include "tfla_tk/wgmma.cuh"

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

// sums[c] = sum over this warp's 16 rows of out . factor^T, by column.
template <class T, class Tile>
__device__ inline void column_dots(float (&sums)[kChunk], const Tile& out, uint32_t address) {
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
        const auto first_factor = load_factor<T>(address, j), second_factor = load_factor<T>(address, j + 2);
        const Products first(out, first_factor, j), second(out, second_factor, j + 2);
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

// This lane's part of the sum of out . factor^T over kTiles times 16 columns, from 16 kFirst on.
template <class T, int kFirst, int kTiles, class Tile>
__device__ inline float sum_dots(const Tile& out, uint32_t address) {
    float sum = 0.f;
#pragma unroll
    for (int j = kFirst; j < kFirst + kTiles; j++) {
        const Products products(out, load_factor<T>(address, j), j);
        sum += (products.x[0].x + products.x[0].y) + (products.x[1].x + products.x[1].y);
    }
    return sum;
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
    auto lane_offset = [&] { return transposed_lane_offset(warp()); };
    auto panel_of = [&](int block) { return C::panel(block, warpgroup_id); };

    rt_fl<16, C::kPart> state[C::kBlocks][C::kParts];
    rt_fl<16, kChunk> out;                              // of one block
    rt<T, 16, 16> value_fragments[C::kValueFragments];  // of the values
    rt<T, 16, 16> fragments[C::kFragments];             // of the state or of scaled values
    typename C::Norm norm;
    static_assert(!C::kNormalizer || C::kBlocks == 1);
    // what reads n is multiplied with, and what is added to it
    auto norm_query = [&](int step) {
        return smem.norm_queries[C::kBackward ? 0 : C::gate_stage(step).slot].rows();
    };
    auto norm_key = [&](int step, int k) {
        return smem.norm_keys[C::gate_stage(step).slot].columns(k);
    };

    auto for_each_state = [&](auto body) {
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++)
#pragma unroll
            for (int part = 0; part < C::kParts; part++)
                body(state[block][part], task.column + panel_of(block) * 64 + warp() * 16, part * C::kPart);
    };
    // The queries' k-th 16 columns as an operand; the first block waits for them.
    auto query_step = [&](int block, int step, int k) {
        const auto [slot, phase] = C::tile(step);
        const int part = k / kStepsPerPart, column = k % kStepsPerPart;
        if (block == 0 && column == 0) wait(smem.queries_arrived[slot][part], phase);
        return Operand128B::rows(&smem.queries[slot][part]).row_step(C::KeyTile::panel_bytes, column);
    };
    // 16 tokens of values^T
    auto load_tokens = [&](int block, int step, int k) {
        const uint32_t panel = shared_address(smem.values[C::tile(step).slot].data[panel_of(block)]);
        load_transposed(value_fragments[k % C::kValueFragments],
                        panel + lane_offset() + 16 * k * kPanelColumns * sizeof(T));
    };
    // out += values^T scores^T over 16 tokens
    auto issue_intra = [&](int step, int k) {
        auto& a = value_fragments[k % C::kValueFragments];
        const auto scores = Operand128B::rows(&smem.scores[C::tile(step).slot]);
        pin(a);
        if (k == 0) pin(out);
        wgmma_fence();
        wgmma_step<false>(out, a, 0, scores.row_step(C::ScoreTile::panel_bytes, k));
        warpgroup::mma_commit_group();
    };
    // state += (values . key_scale)^T keys over 16 tokens, and n
    auto issue_update = [&](int block, int step, int k, const PassStage& gates) {
        auto& a = fragments[k % C::kValueFragments];
        warp::copy(a, value_fragments[k % C::kValueFragments]);
        scale_columns(a, gates.key_scale + 16 * k);
        pin(a);
        if (k == 0)
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
        if constexpr (C::kNormalizer)
            if (k == 0) pin(norm.sums);
        wgmma_fence();
        add_keys<C>(state[block], a, smem.keys[C::tile(step).slot], k);
        if constexpr (C::kNormalizer)
            wgmma_step_8<T>(norm.sums, value_fragments[k % C::kValueFragments], norm_key(step, k));
        warpgroup::mma_commit_group();
    };
    // of the state's rows, the first that this lane has of n, in the slice
    auto norm_row = [&] { return panel_of(0) * 64 + warp() * 16 + fresh_laneid() / 4; };
    // this warp's 16 columns of the factor, and of the gradient that takes its place
    auto out_columns = [&](int block, int step) {
        return shared_address(&smem.out[C::out(step, block).slot][warpgroup_id]) + lane_offset();
    };
    auto wait_out = [&](int block, int step) {
        const auto [slot, phase] = C::out(step, block);
        if constexpr (C::kNormalizer)
            wait(smem.factor_arrived[slot][warpgroup_id], phase);
        else if (g.has_factor<C>())
            wait(smem.factor_read[slot][warpgroup_id], phase);
        else
            wait_free(smem.out_free[slot][warpgroup_id], phase);
    };
    // Of a slow chunk the 16 tokens next to the state that enters, for their squares.
    auto sum_inter = [&](int block, int step, float slow) {
        constexpr int kNext = C::kBackward ? decltype(out)::width - 1 : 0;
        PartialSums& sums = smem.sums[C::tile(step).slot][warpgroup_id];
        const uint32_t columns = out_columns(block, step);
        const int thread = fresh_thread() % 128;
        sums.inter[thread] = slow > 0.f ? sum_dots<T, kNext, 1>(out, columns)
                                        : sum_dots<T, 0, decltype(out)::width>(out, columns);
        if (thread == 0) sums.slow = slow;
    };
    auto sum_rows = [&](int block, int step) {
        column_dots<T>(smem.sums[C::tile(step).slot][warpgroup_id].whole[warp()], out,
                       out_columns(block, step));
    };

    // out = state Q^T, and n's part of it. beside(a, k): what else is done with the state's k-th 16 columns,
    // which `a` has as an operand, under the GEMMs.
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
                return k < kNormSteps ? norm_query(step) : query_step(block, step, k - kNormSteps);
            },
            [&](const auto& a, uint64_t b, int k) {
                if (k < kNormSteps)
                    wgmma_step<false>(out, norm.as_bf16(a), 0, b, false);
                else
                    wgmma_step<false>(out, a, 0, b, k > 0);
            },
            [] { warpgroup::mma_commit_group(); });
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
        if (fresh_laneid() % 4 != 0) return;
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
        if (fresh_laneid() % 4 == 0) {
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

    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::chunk(task, step);
        const auto stage = C::gate_stage(step);
        const auto [slot, phase] = C::tile(step);
        const PassStage& gates = smem.gates[stage.slot];
        if constexpr (C::kGradient == Gradient::dq)
            if (task.anchored(chunk)) leave_state(chunk);
        wait(smem.gates_ready[stage.slot], stage.phase);
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++) {
            const bool last_block = block == C::kBlocks - 1;
            read(block, step);
            if (last_block)
                for (int part = 0; part < C::kParts; part++) arrive_warp(smem.queries_free[slot][part]);
            if (block == 0) {
                wait(smem.values_arrived[slot], phase);
                for (int part = 0; part < C::kParts; part++) wait(smem.keys_arrived[slot][part], phase);
            }
            if (gates.decay != 1.f)
#pragma unroll
                for (auto& tile : state[block]) warp::mul(tile, tile, gates.decay);
            if constexpr (C::kNormalizer) norm.scale(gates.decay);
            auto update = [&](int k) {
                load_tokens(block, step, k);
                issue_update(block, step, k, gates);
            };
            // The update's GEMMs are spread, so that the output's arithmetic is under some of them.
            update(0);
            scale_columns(out, gates.query_scale);
            update(1);
            if constexpr (C::kNormalizer) {
                wait_out(block, step);
                wait_free(smem.row_sums_free[slot], phase);
                sum_inter(block, step, gates.slow);
            }
            if (block == 0) wait(smem.scores_ready[slot], phase);
            issue_intra(step, 0);
            issue_intra(step, 1);
#pragma unroll
            for (int k = 2; k < kSteps; k++) {
                // for the scores' GEMM of k - 2; behind it come that of k - 1 and, from k = 3 on, an update
                if (k == 2)
                    warpgroup::mma_async_wait<1>();
                else
                    warpgroup::mma_async_wait<2>();
                pin(value_fragments[k % C::kValueFragments]);
                pin(fragments[k % C::kValueFragments]);
                if (k + 1 < kSteps) {
                    update(k);
                    issue_intra(step, k);
                } else {  // the output waits for the one of these
                    load_tokens(block, step, k);
                    issue_intra(step, k);
                    issue_update(block, step, k, gates);
                }
            }
            warpgroup::mma_async_wait<1>();  // all but the last one of the update
            pin(out);
#pragma unroll
            for (auto& a : value_fragments) pin(a);
            if (last_block) arrive_warp(smem.values_free[slot]);
            if constexpr (C::kNormalizer)
                sum_rows(block, step);  // under the update
            else
                wait_out(block, step);
            store_transposed<T>(out_columns(block, step), out);
            fence_async_proxy();
            arrive_warp(smem.out_ready[C::out(step, block).slot][warpgroup_id]);
            warpgroup::mma_async_wait<0>();
#pragma unroll
            for (auto& a : fragments) pin(a);
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
            if constexpr (C::kNormalizer) pin(norm.sums);
        }
        for (int part = 0; part < C::kParts; part++) arrive_warp(smem.keys_free[slot][part]);
        arrive_warp(smem.scores_free[slot]);
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (C::kGradient == Gradient::dk)
            if (task.anchored(chunk)) sum_flow(chunk);
    }
    if (!task.last) return;
    if constexpr (C::kGradient == Gradient::dv) {
        if (!g.leaving_c) return;
        float* leaving = g.leaving_c + task.state * g.state_size();
        for_each_state([&](auto& tile, int row, int column) {
            store_state_transposed(leaving, tile, column, row, g.dim_keys, g.dim_values, g.state_columns);
        });
    } else if constexpr (C::kGradient == Gradient::dk) {
        if (!g.leaving_n) return;
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
