// Scores warpgroup of the backward's walks: queries . keys, e and the gate.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// Writes (S + e) s W / w, causal in the walk's direction, to shared memory. The complete weight is applied
// before rounding, so that dq and dk round the same numbers and their errors cancel in the gradient of f.
template <class C, class Scores>
__device__ inline void gate_pass_scores(uint32_t out, const Scores& s, const typename C::Stage& gates) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    const int lane = fresh_laneid(), warp_row = fresh_thread() % 128 / 32 * 16;
    const int row = warp_row + lane / 4;  // and row + 8
    const int lane_column = 2 * (lane % 4);
    const uint32_t address = out + panel_offset(warp_row + lane % 16, lane / 16);
    const auto& of_rows = C::kBackward ? gates.sends : gates.receives;
    const auto& of_columns = C::kBackward ? gates.receives : gates.sends;
    auto weighted = [&](float score, float2 of_row, float2 of_column, float e, bool visible) {
        const float gate = C::kBackward ? pass_gate(of_row, of_column) : pass_gate(of_column, of_row);
        return visible ? (C::kNormalizer ? score + e : score) * gate : 0.f;
    };
    auto visible = [](int query, int key) { return C::kBackward ? key >= query : key <= query; };
#pragma unroll
    for (int j = 0; j < Scores::width; j++) {
        const float2 upper_row = of_rows[row], lower_row = of_rows[row + 8];
        T2 x[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = 16 * j + 8 * half + lane_column;
            const float4 pair = *reinterpret_cast<const float4*>(&of_columns[column]);
            const float2 left{pair.x, pair.y}, right{pair.z, pair.w};
            float2 e_upper{0.f, 0.f}, e_lower{0.f, 0.f};
            if constexpr (C::kNormalizer) {
                if constexpr (C::kBackward)
                    e_upper = e_lower = *reinterpret_cast<const float2*>(&gates.e[column]);
                else
                    e_upper = {gates.e[row], gates.e[row]}, e_lower = {gates.e[row + 8], gates.e[row + 8]};
            }
            const float2 upper = s.tiles[0][j].data[2 * half], lower = s.tiles[0][j].data[2 * half + 1];
            x[2 * half] =
                from_float2<T2>({weighted(upper.x, upper_row, left, e_upper.x, visible(row, column)),
                                 weighted(upper.y, upper_row, right, e_upper.y, visible(row, column + 1))});
            x[2 * half + 1] = from_float2<T2>(
                {weighted(lower.x, lower_row, left, e_lower.x, visible(row + 8, column)),
                 weighted(lower.y, lower_row, right, e_lower.y, visible(row + 8, column + 1))});
        }
        move<T2>::stsm4(address ^ (j * 32), x[0], x[1], x[2], x[3]);
        asm volatile("" ::: "memory");  // NOTES: loads gates when they are needed, to save registers
    }
}

// dv: row sums of values . factor, dh_t.h_t over this slice. Two lanes take a row, half a panel each.
template <class C>
__device__ inline void sum_value_rows(const PassGlobals& g, PassMemory<C>& smem, int step) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    const PassTask& task = smem.task;
    const int thread = fresh_thread() % 128, row = thread / 2, first_unit = thread % 2 * 4;
    const auto [slot, phase] = C::tile(step);
    float sum = 0.f;
    wait(smem.values_arrived[slot], phase);
    for (int block = 0; block < C::kBlocks; block++)
        for (int id = 0; id < C::kStateWarpgroups; id++) {
            const auto out = C::out(step, block);
            const auto* values =
                reinterpret_cast<const unsigned char*>(smem.values[slot].data[C::panel(block, id)]);
            const auto* factor = reinterpret_cast<const unsigned char*>(&smem.out[out.slot][id]);
            wait(smem.factor_arrived[out.slot][id], out.phase);
#pragma unroll
            for (int unit = 0; unit < 4; unit++) {
                const uint32_t at = panel_offset(row, first_unit + unit);
                sum += dot<T2>(*reinterpret_cast<const uint4*>(values + at),
                               *reinterpret_cast<const uint4*>(factor + at));
            }
            arrive_warp(smem.factor_read[out.slot][id]);
        }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    const int t = C::chunk(task, step) * kChunk + row;
    if (first_unit == 0 && t < task.tokens)
        g.whole[task.column / C::kSlice * g.whole_stride + task.row + t] = sum;
}

template <class C> __device__ inline void make_pass_scores(const PassGlobals& g, PassMemory<C>& smem) {
    using T = typename C::T;
    constexpr int kSteps = C::kPart / 16;
    const int chunks = smem.task.chunks;
    auto warp_row = [] { return fresh_thread() % 128 / 32 * 16; };
    constexpr uint32_t kSentBytes = 16 * kPanelColumns * sizeof(T);  // per warp
    rt_fl<16, kChunk> scores;
    auto wait_for_operands = [&](int step, int part) {
        const auto [slot, phase] = C::tile(step);
        wait(smem.keys_arrived[slot][part], phase);
        wait(smem.queries_arrived[slot][part], phase);
    };
    auto issue_scores = [&](int step) {
        const int slot = C::tile(step).slot;
        forget(scores);
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            wait_for_operands(step, part);
            const auto keys = Operand128B::rows(&smem.keys[slot][part]);
            const auto queries = Operand128B::rows(&smem.queries[slot][part]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSteps; k++)
                wgmma_step<T, false>(scores, queries.row_step(C::KeyTile::panel_bytes, k),
                                     keys.row_step(C::KeyTile::panel_bytes, k), part > 0 || k > 0);
        }
        warpgroup::mma_commit_group();
    };
    auto free_operands = [&](int slot) {
        for (int part = 0; part < C::kParts; part++) {
            arrive_warp(smem.keys_free[slot][part]);
            arrive_warp(smem.queries_free[slot][part]);
        }
    };
    // Copies this warp's rows to the other CTA.
    auto send_scores = [&](int slot) {
        __syncwarp();
        if (cluster_ctas() == 1) return;
        if (fresh_laneid() == 0)
            send_to_cta(smem.scores[slot].data[0][warp_row()], kSentBytes, smem.scores_ready[slot],
                        1 - cta_in_cluster());
        __syncwarp();
    };
    for (int step = 0; step < chunks; step++) {
        const auto [slot, phase] = C::tile(step);
        const auto stage = C::gate_stage(step);
        if (ScoreTurns::makes(step)) {
            issue_scores(step);
            wait(smem.gates_ready[stage.slot], stage.phase);
            wait_free(smem.scores_free[slot], phase);
            warpgroup::mma_async_wait<0>();
            pin(scores);
            free_operands(slot);

            gate_pass_scores<C>(shared_address(&smem.scores[slot]), scores, smem.gates[stage.slot]);
            fence_async_proxy();
            send_scores(slot);
            arrive_warp(smem.scores_ready[slot]);
        } else {
            for (int part = 0; part < C::kParts; part++) wait_for_operands(step, part);
            free_operands(slot);
            wait(smem.gates_ready[stage.slot], stage.phase);
            // wait for the stage's previous phase, or this arrival would count for it
            wait_free(smem.scores_ready[slot], phase);
            arrive_warp_expecting(smem.scores_ready[slot], kSentBytes);
        }
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (C::kGradient == Gradient::dv) {
            if (g.has_factor<C>()) sum_value_rows(g, smem, step);
            arrive_warp(smem.values_free[slot]);
        }
    }
}

}  // namespace tfla_tk::mlstm
