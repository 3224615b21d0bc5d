// The warpgroup of the keys: dq and dk of a chunk, off the chain of the walkers. With the reads
// R_ij = s W_ij / w_i (dh_i.v_j + e_i), j <= i, W_ij = 2^{a_j - M_i}, and `sent` and `received` of
// walk/gates.cuh:
//   dk = sent (v dS^T + dn) + R^T Q        dq = received (dh S^T + e n) + R K
// Where S does not enter the chunk itself but the one before, with its keys K', values V' and decay':
//   dq = received (decay' (dh S^T + e n) + (sent' (dh V'^T + e)) K') + R K
// Per chunk:
//   1. Issue the scores dh V^T and v dS^T. Gate R. Meet: all of R is there.
//   2. Issue dk += R^T Q and dh S^T. Under it the sums k.dk; round dk.
//   3. Where S enters the chunk: scale dq and issue dq += R K. Else issue the scores dh V'^T, scale dq, issue
//      dq += R K, gate R' under it and issue dq += R' K'.
//   4. The sums q.dq. dk takes the place of q, dq that of k.
// R' stays in registers.
#pragma once

#include "scalar_gate/backward/gradients/config.cuh"

namespace tfla_tk::mlstm {

template <class C> struct GradientsOfKeys {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Tile = typename C::Tile;
    using Result = rt_fl<16, C::kDimK>;
    using Scores = rt_fl<16, kChunk>;
    using Fragment = rt<T, 16, 16>;

    const GradientsGlobals& g;
    GradientsMemory<C>& smem;

    __device__ static inline void meet() { named_sync<128>(NamedBarrier::columns); }

    // A number per row of this lane, `row` and `row + 8`.
    struct OfRows {
        float upper, lower;
        __device__ inline OfRows(const float* rows, int row) : upper(rows[row]), lower(rows[row + 8]) {}
        __device__ inline float at(int k) const { return k % 2 ? lower : upper; }
        __device__ inline void scale(float by) { upper *= by, lower *= by; }
    };
    __device__ static inline int lane_row() { return own_token() + fresh_laneid() / 4; }

    // d = (d + weight_i vector) factor_i of rows i. weights: null for ones.
    __device__ static inline void scale_rows(Result& d, OfRows factor, const float* vector = nullptr,
                                             const float* weights = nullptr) {
        if constexpr (C::kNormalizer) {
            const int lane = fresh_laneid();
            OfRows weight = factor;
            if (weights) {
                const OfRows of_rows(weights, lane_row());
                weight.upper *= of_rows.upper, weight.lower *= of_rows.lower;
            }
            each<0, Result::width>([&](int j) {
                each<0, 4>([&](int k) {
                    const float2 x =
                        *reinterpret_cast<const float2*>(&vector[16 * j + 8 * (k / 2) + 2 * (lane % 4)]);
                    const float by = factor.at(k), of = weight.at(k);
                    fma_in_place(d.tiles[0][j].data[k], {by, by}, {of * x.x, of * x.y});
                });
            });
        } else {
            each<0, Result::width>([&](int j) {
                each<0, 4>(
                    [&](int k) { scale_in_place(d.tiles[0][j].data[k], {factor.at(k), factor.at(k)}); });
            });
        }
    }

    // Gates the scores of a chunk with itself and hands them over in a tile.
    __device__ inline void gate_reads(const Scores& scores, int slot) {
        const ChunkGates& gates = smem.gates[slot];
        store_gated<T, false>(smem.reads, scores, 0, [&](int row, int column, float2 score) {
            const float2 gate = gates_between(gates, row, column), with = with_e(score, slot, row);
            return float2{gate.x * with.x, gate.y * with.y};
        });
    }
    __device__ inline const float* e_of(int slot) const { return C::kNormalizer ? smem.e[slot] : nullptr; }
    __device__ inline float2 with_e(float2 score, int slot, int row) const {
        if constexpr (!C::kNormalizer) return score;
        const float e = e_of(slot)[row];
        return {score.x + e, score.y + e};
    }
    // The j-th 16 columns of R', gated.
    __device__ inline void gate_reads_before(Fragment& to, const Scores& scores, int j, int slot) {
        const OfRows received(smem.gates[slot].received, lane_row());
        const float* const sent = smem.gates[slot ^ 1].sent;
        const int lane = fresh_laneid();
        each<0, 4>([&](int k) {
            const float2 of = *reinterpret_cast<const float2*>(&sent[16 * j + 8 * (k / 2) + 2 * (lane % 4)]);
            const float2 score = with_e(scores.tiles[0][j].data[k], slot, lane_row() + 8 * (k % 2));
            const float by = received.at(k);
            to.tiles[0][0].data[k] = from_float2<T2>({by * of.x * score.x, by * of.y * score.y});
        });
    }

    // Leaves sums over a result's rows, times those of a tile, for the gradients of the gates.
    __device__ inline void leave_sums(float* sums, int step, const Result& result, const Tile& by) const {
        const int lane = fresh_laneid();
        const uint32_t rows = shared_address(&by) + panel_offset(own_token() + lane % 16, lane / 16);
        float upper = 0.f, lower = 0.f;
        each<0, Result::width>([&](int j) {
            T2 x[4];
            move<T2>::ldsm4(x[0], x[1], x[2], x[3], (rows ^ (j % 4 * 32)) + j / 4 * Tile::panel_bytes);
            each<0, 4>([&](int k) {
                const float2 u = to_float2(x[k]), y = result.tiles[0][j].data[k];
                float& sum = k % 2 ? lower : upper;
                sum += u.x * y.x, sum += u.y * y.y;
            });
            if (j % 4 == 3) asm volatile("" : "+f"(upper), "+f"(lower)::"memory");
        });
        upper = quad_sum(upper), lower = quad_sum(lower);
        const GradientsTask& task = smem.task;
        const int first = (task.chunks - 1 - anew(step)) * kChunk, row = lane_row();
        if (lane % 4 != 0) return;
        float* const to = sums + task.row + first;
        if (first + row < task.tokens) to[row] = upper;
        if (first + row + 8 < task.tokens) to[row + 8] = lower;
    }

    __device__ inline void make_chunk(int step) {
        const auto [slot, phase] = Use<C::kStages>(step);
        const int chunk = smem.task.chunks - 1 - step;
        const bool has_state = GradientsTask::enters_with_state(chunk);
        const uint32_t state_phase = smem.task.states_before(chunk) & 1;
        Tile &queries = smem.queries[slot], &keys = smem.keys[slot];
        Scores scores;
        Result dk, dq;
        Fragment rounded[C::kDimK / 16];  // dk
        // 1
        issue_scores<T, C::kDimV>(scores, smem.douts[slot], smem.values[slot]);
        wait(smem.gradient_ready, step & 1);
        issue_through<T, C::kDimV>(dk, smem.values[slot], smem.gradient);
        warpgroup::mma_async_wait<1>();
        pin(scores);
        gate_reads(scores, slot);
        if constexpr (C::kNormalizer) wait(smem.norm_gradient_ready, step & 1);
        warpgroup::mma_async_wait<0>();
        pin(dk);
        arrive_warp(smem.values_read[slot]);
        scale_rows(dk, OfRows(smem.gates[slot].sent, lane_row()), smem.norm_gradient);
        if constexpr (C::kNormalizer) arrive_warp(smem.norm_gradient_free);
        meet();
        // 2
        issue_add<T, 1>(dk, smem.reads, queries);
        wait(smem.state_arrived, state_phase);
        issue_through<T, C::kDimV>(dq, smem.douts[slot], smem.state);
        warpgroup::mma_async_wait<1>();
        pin(dk);
        if constexpr (C::kSums) leave_sums(g.k_dk, step, dk, keys);
        each<0, C::kDimK / 16>([&](int j) { convert_fragment(rounded[j], dk, j); });
        pin_all(rounded);
        // 3
        OfRows received(smem.gates[slot].received, lane_row());
        received.scale(smem.state_scale);
        const int before = slot ^ 1;  // of two: of the chunk before in time, the next one of the walk
        if (has_state) {
            warpgroup::mma_async_wait<0>();
            pin(dq);
            scale_rows(dq, received, smem.norm, e_of(slot));
            arrive_warp(smem.state_free);  // the chunk behind in time has read the same state already
            issue_add<T, 0>(dq, smem.reads, keys);
        } else {
            const uint32_t phase_before = Use<C::kStages>(anew(step) + 1).phase;
            wait(smem.arrived[before], phase_before);
            issue_scores<T, C::kDimV>(scores, smem.douts[slot], smem.values[before]);
            wait(smem.gates_ready[before], phase_before);
            const float decay = exp2f(smem.gates[before].decay);
            received.scale(decay);
            warpgroup::mma_async_wait<1>();
            pin(dq);
            scale_rows(dq, received, smem.norm, e_of(slot));
            issue_add<T, 0>(dq, smem.reads, keys);
            warpgroup::mma_async_wait<1>();
            pin(scores);
            Fragment reads[kChunk / 16];
            const auto columns = Operand128B::columns(&smem.keys[before], Tile::panel_bytes);
            each<0, kChunk / 16>([&](int j) {
                gate_reads_before(reads[j], scores, j, slot);
                multiply_step<true>(dq, reads[j], columns.column_step(j), true, j == 0);
            });
            warpgroup::mma_async_wait<0>();
            pin_all(reads);
        }
        warpgroup::mma_async_wait<0>();
        pin(dq);
        // 4
        if constexpr (C::kSums) leave_sums(g.q_dq, step, dq, queries);
        wait(smem.qk_read[slot], phase);
        meet();  // all warps have read q, k and R
        each<0, C::kDimK / 16>([&](int j) {
            store_fragment<T, kChunk>(shared_address(&queries), own_token(), j, rounded[j].tiles[0][0].data);
        });
        store_panels<T, kChunk>(shared_address(&keys), own_token(), dq);
        fence_async_proxy();
        arrive_warp(smem.dq_dk_ready[slot]);
        arrive_warp(smem.free[slot]);
    }

    __device__ inline void walk() {
        for (int step = 0; step < smem.task.chunks; step++) {
            const auto [slot, phase] = Use<C::kStages>(step);
            wait(smem.gates_ready[slot], phase);
            wait(smem.arrived[slot], phase);
            make_chunk(step);
        }
    }
};

}  // namespace tfla_tk::mlstm
