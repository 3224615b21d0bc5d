// State warpgroups of the mLSTM backward's passes: the transposed state in registers, out^T = state Q^T +
// values^T scores^T, the state's update, row sums.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// columns of the values, 64 per block, and nothing of the state goes through shared memory.
#pragma once

#include "mlstm_pass_config.cuh"
#include "tfla_tk/tiles.cuh"
#include "tfla_tk/wgmma.cuh"

namespace tfla_tk::mlstm {

// sums[c] = sum over this warp's 16 rows of out . factor^T, by column. `address`: the factor's panel plus
// transposed_lane_offset.
template <class T, class Tile>
__device__ inline void column_dots(float (&sums)[kChunk], const Tile& out, uint32_t address) {
    const int lane = fresh_laneid();
#pragma unroll
    for (int j = 0; j < Tile::width; j++) {
        rt<T, 16, 16> factor;
        load_transposed(factor, address + 16 * j * kPanelColumns * sizeof(T));
        auto dots = [&](int half) {
            const float2 upper = to_float2(factor.tiles[0][0].data[2 * half]);
            const float2 lower = to_float2(factor.tiles[0][0].data[2 * half + 1]);
            const float2 x = out.tiles[0][j].data[2 * half], y = out.tiles[0][j].data[2 * half + 1];
            return float2{x.x * upper.x + y.x * lower.x, x.y * upper.y + y.y * lower.y};
        };
        // Over the eight lanes of a column: each of the first two exchanges halves the columns that a lane
        // sums.
        auto exchange = [&](float first, float second, int distance) {
            const bool keeps_second = lane & distance;
            const float other = __shfl_xor_sync(0xffffffff, keeps_second ? first : second, distance);
            return (keeps_second ? second : first) + other;
        };
        const float2 left = dots(0), right = dots(1);
        const float even = exchange(left.x, right.x, 16), odd = exchange(left.y, right.y, 16);
        float sum = exchange(even, odd, 8);
        sum += __shfl_xor_sync(0xffffffff, sum, 4);
        const int column = (lane & 16) / 2 + 2 * (lane % 4) + (lane & 8) / 8;
        if ((lane & 4) == 0) sums[16 * j + column] = sum;
        asm volatile("" ::: "memory");  // NOTES: one fragment at a time: registers
    }
}

template <class C>
__device__ inline void walk_state(const PassGlobals& g, PassMemory<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kStepsPerPart = C::kPart / 16, kSteps = kChunk / 16;
    const PassTask& task = smem.task;
    // NOTES: computed anew where needed: the state takes the registers
    auto warp = [] { return fresh_thread() % 128 / 32; };
    auto lane_offset = [&] { return transposed_lane_offset(warp()); };
    auto out_panel = [&] { return shared_address(&smem.out[warpgroup_id]); };
    auto panel_of = [&](int block) { return warpgroup_id * C::kBlocks + block; };  // of the values

    rt_fl<16, C::kPart> state[C::kBlocks][C::kParts];
    rt_fl<16, kChunk> out;                   // of one block
    rt<T, 16, 16> fragments[C::kFragments];  // of state or values: one on its way, the others in a GEMM

    auto for_each_state = [&](auto body) {
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++)
#pragma unroll
            for (int part = 0; part < C::kParts; part++)
                body(state[block][part], task.column + panel_of(block) * 64 + warp() * 16, part * C::kPart);
    };
    // out = state Q^T, the state rounded into an operand 16 columns at a time
    auto read_state = [&](int block, int step) {
        const auto [slot, phase] = C::tile(step);
        forget(out);
#pragma unroll
        for (int k = 0; k < C::kParts * kStepsPerPart; k++) {
            const int part = k / kStepsPerPart, column = k % kStepsPerPart;
            auto& a = fragments[k % C::kFragments];
            if (block == 0 && column == 0) wait(smem.queries_arrived[slot][part], phase);
            convert_fragment(a, state[block][part], column);
            if (k + 1 >= C::kFragments) {
                warpgroup::mma_async_wait<C::kFragments - 2>();
                pin(fragments[(k + 1) % C::kFragments]);
            }
            pin(a);
            wgmma_fence();
            const auto queries = Operand128B::rows(&smem.queries[slot][part]);
            wgmma_step<false>(out, a, 0, queries.row_step(C::KeyTile::panel_bytes, column), k > 0);
            warpgroup::mma_commit_group();
        }
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
        pin(out);
    };
    // out += values^T scores^T
    auto issue_intra = [&](int block, int step) {
        const int slot = C::tile(step).slot;
        const auto values =
            Operand128B::columns(smem.values[slot].data[panel_of(block)], C::ValueTile::panel_bytes);
        const auto scores = Operand128B::rows(&smem.scores[slot]);
        pin(out);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; k++)
            wgmma_step<T, true>(out, values.column_step(k), scores.row_step(C::ScoreTile::panel_bytes, k));
        warpgroup::mma_commit_group();
    };
    // 16 tokens of (values . key_scale)^T; adds what they are to n
    auto load_values = [&](int block, int step, int k, const PassStage& gates, float2& norm) {
        auto& a = fragments[k % C::kFragments];
        const uint32_t panel = shared_address(smem.values[C::tile(step).slot].data[panel_of(block)]);
        load_transposed(a, panel + lane_offset() + 16 * k * kPanelColumns * sizeof(T));
        if constexpr (C::kNormalizer) add_row_dots(norm, a, gates.norm_key + 16 * k);
        scale_columns(a, gates.key_scale + 16 * k);
    };
    // state += (values . key_scale)^T keys, 16 tokens
    auto issue_update = [&](int block, int step, int k) {
        auto& a = fragments[k % C::kFragments];
        pin(a);
        if (k == 0)
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            const auto keys =
                Operand128B::columns(&smem.keys[C::tile(step).slot][part], C::KeyTile::panel_bytes);
            wgmma_step<true>(state[block][part], a, 0, keys.column_step(k));
        }
        warpgroup::mma_commit_group();
    };
    // n of the two rows of a block that this lane has: lane / 4 and + 8, the same in all four lanes
    auto norm_row = [&](int block) {
        return &smem.norm[panel_of(block) * 64 + warp() * 16 + fresh_laneid() / 4];
    };
    auto update_norm = [&](int block, float2 sums, float decay) {
        if constexpr (C::kNormalizer) {
            sums = {quad_sum(sums.x), quad_sum(sums.y)};
            float* n = norm_row(block);
            const float2 old{n[0], n[8]};
            __syncwarp();
            if (fresh_laneid() % 4 == 0) n[0] = decay * old.x + sums.x, n[8] = decay * old.y + sums.y;
            __syncwarp();
        }
    };
    auto sum_rows = [&](int block, bool whole) {
        if constexpr (C::kNormalizer) {
            auto& sums = smem.sums[warpgroup_id];
            column_dots<T>(whole ? sums.whole[warp()] : sums.inter[warp()], out,
                           shared_address(smem.factor[0].data[panel_of(block)]) + lane_offset());
        }
    };
    // The sums of the four warps, by one thread per token and kind.
    auto store_sums = [&](int block, int chunk) {
        if constexpr (C::kNormalizer) {
            const int thread = fresh_thread() % 128, t = thread % kChunk;
            const auto& warps =
                thread < kChunk ? smem.sums[warpgroup_id].whole : smem.sums[warpgroup_id].inter;
            if (chunk * kChunk + t >= task.tokens || task.column + panel_of(block) * 64 >= g.dim_values)
                return;
            const int64_t panel =
                (task.column / kSumColumns + panel_of(block)) * static_cast<int64_t>(g.batch) * g.heads;
            float* rows = (thread < kChunk ? g.whole : g.inter) + panel * g.seq + task.row;
            rows[chunk * kChunk + t] = (warps[0][t] + warps[1][t]) + (warps[2][t] + warps[3][t]);
        }
    };
    // Until the last store has read the panel, and the last sums are read.
    auto wait_out_panel = [&] {
        if (fresh_laneid() == 0) wait_stores_read();
        named_sync<128>(NamedBarrier::out_panel, warpgroup_id);
    };
    auto store_out = [&](int block, int chunk) {
        const int warp_row = warp() * 16;
        if (fresh_laneid() != 0) return;
        auto store = [&](const TensorMap& map, int r) {
            map.store_panel(out_panel() + (warp_row + r) * kPanelColumns * sizeof(T),
                            task.column + panel_of(block) * 64,
                            task.first_row + chunk * kChunk + warp_row + r, task.head, task.batch);
        };
        if (const int rows = task.tokens - chunk * kChunk - warp_row; g.packed() && rows < 16)
#pragma unroll 1
            for (int r = 0; r < rows; r++) store(g.out_row, r);  // a box would reach into the next sequence
        else
            store(g.out, 0);
        commit_stores();
    };

    // Anchors: before some chunks dq leaves its state as the next GEMM reads it, and n; dk, whose state there
    // is their gradient and lies in the same threads, sums the product.
    auto anchored = [](int chunk) { return chunk > 0 && chunk % kAnchorChunks == 0; };
    auto anchor_memory = [&](int chunk) {
        return static_cast<unsigned char*>(g.states) +
               (task.anchor(g, chunk) * g.slices + task.column / C::kSlice) * C::kAnchorBytes;
    };
    auto for_each_unit = [&](int chunk, auto body) {
        auto* units = reinterpret_cast<typename C::AnchorUnit*>(anchor_memory(chunk)) + fresh_thread() - 256;
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++)
#pragma unroll
            for (int k = 0; k < C::kParts * kStepsPerPart; k++) {
                body(*units, state[block][k / kStepsPerPart], k % kStepsPerPart);
                units += 128 * C::kStateWarpgroups;
                asm volatile("" ::: "memory");  // NOTES: one unit at a time: registers
            }
    };
    auto anchor_norm = [&](int chunk, int block) {
        constexpr int64_t kStateBytes = static_cast<int64_t>(C::kSlice) * C::kDimKeys * sizeof(T);
        return reinterpret_cast<float*>(anchor_memory(chunk) + kStateBytes) + (norm_row(block) - smem.norm);
    };
    auto leave_state = [&](int chunk) {
        for_each_unit(chunk, [&](auto& unit, auto& tile, int column) {
            rt<T, 16, 16> a;
            convert_fragment(a, tile, column);
            unit = reinterpret_cast<const uint4&>(a.tiles[0][0].data);
        });
        if (fresh_laneid() % 4 != 0) return;
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++) {
            float* left = anchor_norm(chunk, block);
            left[0] = norm_row(block)[0], left[8] = norm_row(block)[8];
        }
    };
    auto sum_flow = [&](int chunk) {
        float sum = 0.f;
        if (fresh_laneid() % 4 == 0)
#pragma unroll
            for (int block = 0; block < C::kBlocks; block++) {
                const float *left = anchor_norm(chunk, block), *own = norm_row(block);
                sum += left[0] * own[0] + left[8] * own[8];
            }
        for_each_unit(chunk, [&](auto& unit, auto& tile, int column) {
            rt<T, 16, 16> a;
            reinterpret_cast<uint4&>(a.tiles[0][0].data) = unit;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 left = to_float2(a.tiles[0][0].data[k]), own = tile.tiles[0][column].data[k];
                sum += left.x * own.x + left.y * own.y;
            }
        });
        const float flow = warp_sum(sum);
        const int part = task.column / C::kSlice * C::kStateWarps + warpgroup_id * 4 + warp();
        if (fresh_laneid() == 0) g.flows[task.anchor(g, chunk) * g.flow_parts + part] = flow;
    };

    // dv's state is [K, V] = [keys, values], that of the others its transpose
    const int64_t state_size = static_cast<int64_t>(g.dim_keys) * g.dim_values;
    const float* entering = g.entering_c ? g.entering_c + task.state * state_size : nullptr;
    for_each_state([&](auto& tile, int row, int column) {
        if (!entering)
            warp::zero(tile);
        else if constexpr (C::kGradient == Gradient::dv)
            load_state_transposed(tile, entering, column, row, g.dim_keys, g.dim_values);
        else
            load_state(tile, entering, row, column, g.dim_values, g.dim_keys);
        pin(tile);
    });
    if constexpr (C::kNormalizer) {
        for (int n = fresh_thread() % 128; n < 64 * C::kBlocks; n += 128) {
            const int own = warpgroup_id * 64 * C::kBlocks + n, column = task.column + own;
            smem.norm[own] = g.entering_n && column < g.dim_values
                                 ? g.entering_n[task.state * g.dim_values + column]
                                 : 0.f;
        }
        named_sync<128>(NamedBarrier::out_panel, warpgroup_id);
    }

    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::chunk(task, step);
        const auto stage = C::gate_stage(step);
        const auto [slot, phase] = C::tile(step);
        const PassStage& gates = smem.gates[stage.slot];
        if constexpr (C::kGradient == Gradient::dq)
            if (anchored(chunk)) leave_state(chunk);
        wait(smem.gates_ready[stage.slot], stage.phase);
#pragma unroll
        for (int block = 0; block < C::kBlocks; block++) {
            const bool last_block = block == C::kBlocks - 1;
            read_state(block, step);
            if (last_block)
                for (int part = 0; part < C::kParts; part++) arrive_warp(smem.queries_free[slot][part]);
            scale_columns(out, gates.query_scale);
            if constexpr (C::kNormalizer) {
                const float* n = norm_row(block);
                add_outer(out, float2{n[0], n[8]}, gates.norm_query);
                if (block == 0) wait(smem.factor_arrived[0], C::factor(step).phase);
            }
            wait_out_panel();
            sum_rows(block, false);

            if (block == 0) wait(smem.values_arrived[slot], phase);
            if (block == 0) wait(smem.scores_ready[slot], phase);
            issue_intra(block, step);
            float2 norm{0.f, 0.f};
            load_values(block, step, 0, gates, norm);
#pragma unroll
            for (auto& tile : state[block]) warp::mul(tile, tile, gates.decay);  // under the scores' GEMM
            if (block == 0)
                for (int part = 0; part < C::kParts; part++) wait(smem.keys_arrived[slot][part], phase);
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                issue_update(block, step, k);
                if (k == 1) {  // out is complete; the rest runs under the update
                    sum_rows(block, true);
                    store_transposed<T>(out_panel() + lane_offset(), out);
                    fence_async_proxy();
                    if (last_block && C::kNormalizer) arrive_warp(smem.factor_free[0]);
                }
                if (k + 1 < kSteps) load_values(block, step, k + 1, gates, norm);
                if (k == 2) {
                    named_sync<128>(NamedBarrier::out_panel, warpgroup_id);
                    store_out(block, chunk);
                    store_sums(block, chunk);
                }
                if (k + 2 == kSteps && last_block) arrive_warp(smem.values_free[slot]);
                if (k + 1 < kSteps)  // the scores' GEMM, and what reads the next fragment to be overwritten
                    warpgroup::mma_async_wait<C::kFragments == 2 ? 0 : 1>();
                else
                    warpgroup::mma_async_wait<0>();
                if constexpr (C::kFragments == 2) pin(fragments[k % 2]);
                if (k == 0) pin(out);
            }
            update_norm(block, norm, gates.decay);
#pragma unroll
            for (auto& a : fragments) pin(a);
#pragma unroll
            for (auto& tile : state[block]) pin(tile);
        }
        for (int part = 0; part < C::kParts; part++) arrive_warp(smem.keys_free[slot][part]);
        arrive_warp(smem.scores_free[slot]);
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (C::kGradient == Gradient::dk)
            if (anchored(chunk)) sum_flow(chunk);
    }
    if (fresh_laneid() == 0) wait_stores_read();

    if (g.leaving_c) {
        float* leaving = g.leaving_c + task.state * state_size;
        for_each_state([&](auto& tile, int row, int column) {
            if constexpr (C::kGradient == Gradient::dv)
                store_state_transposed(leaving, tile, column, row, g.dim_keys, g.dim_values);
            else
                store_state(leaving, tile, row, column, g.dim_values, g.dim_keys);
        });
    }
    if constexpr (C::kNormalizer) {
        if (!g.leaving_n) return;
        named_sync<128>(NamedBarrier::out_panel, warpgroup_id);
        for (int n = fresh_thread() % 128; n < 64 * C::kBlocks; n += 128) {
            const int own = warpgroup_id * 64 * C::kBlocks + n, column = task.column + own;
            if (column < g.dim_values) g.leaving_n[task.state * g.dim_values + column] = smem.norm[own];
        }
    }
}

}  // namespace tfla_tk::mlstm
