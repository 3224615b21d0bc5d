// A walker of the walk that makes dq, dk and dv, backward in time. It owns 64 columns of V and holds dS^T of
// them in registers. It makes dv, and of the scores P_ij = s W_ij / w_i q_i.k_j, j <= i, its share of the
// columns. With `sent` and `received` of walk/gates.cuh, per chunk:
//   1. Issue the scores. Round dS^T to A operands and hand it to the keys' warpgroup; issue X^T = dS^T K^T.
//   2. Issue dS^T <- decay dS^T + (received dh)^T Q. Under it gate P and scale X^T by `sent`. Where sums for
//      the gates are wanted, leave v . X, what tokens send through dS, and where S enters the chunk decay
//      <S, dS>, what passes it.
//   3. Meet: P is there. Issue dv^T = X^T + dh^T P.
//   4. dv takes the place of v.
#pragma once

#include "scalar_gate/backward/gradients/config.cuh"

namespace tfla_tk::mlstm {

template <class C> struct GradientsWalker {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    static constexpr int kTokenSteps = kChunk / 16;
    static constexpr int kScores = kChunk / C::kWalkers;  // columns

    const GradientsGlobals& g;
    GradientsMemory<C>& smem;
    const int walker;
    rt_fl<16, C::kDimK> gradient;  // dS^T
    rt_fl<16, kChunk> x;           // X^T, then dv^T
    rt_fl<16, kScores> scores;
    Fragment fragments[kTokenSteps], tokens[kTokenSteps];

    __device__ inline GradientsWalker(const GradientsGlobals& g, GradientsMemory<C>& smem, int walker)
        : g(g), smem(smem), walker(walker) {}

    // The first of this warp's 16 rows of scores, and of the state's tiles, which are columns of V. NOTES:
    // recomputed, to save registers
    __device__ inline int own_row() const { return kPanelColumns * walker + own_token(); }
    __device__ inline void meet() const { named_sync<128 * C::kWalkers>(NamedBarrier::walkers_meet); }

    // Leaves this warp's part of the chunk's flow, from X^T, scaled, and from the rounded dS^T. NOTES: all
    // of the same rounded operands as dk and dq are, so that what cancels in the gates' gradients does.
    __device__ inline void leave_flow(int step) {
        const GradientsTask& task = smem.task;
        const int chunk = task.chunks - 1 - anew(step), slot = Use<C::kStages>(step).slot;
        float flow = 0.f;
        const uint32_t values = own_columns(smem.values[slot].data[walker]);
        each<0, kTokenSteps>([&](int j) {
            Fragment of_tokens;
            load_transposed(of_tokens, values + 16 * j * kPanelColumns * sizeof(T));
            each<0, 4>([&](int k) {
                const float2 v = to_float2(of_tokens.tiles[0][0].data[k]), y = x.tiles[0][j].data[k];
                flow += v.x * y.x, flow += v.y * y.y;
            });
            if (j % 2) asm volatile("" : "+f"(flow)::"memory");
        });
        if (GradientsTask::enters_with_state(chunk)) {
            wait(smem.state_arrived, task.states_before(chunk) & 1);
            flow += smem.state_scale * exp2f(smem.gates[slot].decay) *
                    sum_products<T, 16>(smem.state, smem.gradient, own_row());
            arrive_warp(smem.state_free);
        }
        flow = warp_sum(flow);
        if (fresh_laneid() == 0)
            g.flows[(task.first_slot + chunk) * kFlowParts + 4 * walker + own_token() / 16] = flow;
    }
    __device__ inline void walk_chunk(int step) {
        const int slot = Use<C::kStages>(step).slot;
        const ChunkGates& gates = smem.gates[slot];
        // 1
        issue_scores<T, C::kDimK>(scores, smem.queries[slot], smem.keys[slot], kScores * walker);
        read_gradient(x, fragments, gradient, smem.keys[slot], smem.gradient, own_row(), smem.gradient_ready);
        pin(scores);
        load_columns(tokens, smem.douts[slot].data[walker]);
        for_token_pairs([&](int j, int k, int token) {
            T2& pair = tokens[j].tiles[0][0].data[k];
            const float2 dh = to_float2(pair), received = pair_of(gates.received, token);
            pair = from_float2<T2>({received.x * dh.x, received.y * dh.y});
        });
        pin_all(tokens);
        // 2
        warp::mul(gradient, gradient, exp2f(gates.decay));
        add_columns(gradient, tokens, smem.queries[slot]);
        store_gated<T, false>(smem.p[step % 2], scores, kScores * walker,
                              [&](int row, int column, float2 score) {
                                  const float2 gate = gates_between(gates, row, column);
                                  return float2{gate.x * score.x, gate.y * score.y};
                              });
        for_token_pairs([&](int j, int k, int token) {
            scale_in_place(x.tiles[0][j].data[k], pair_of(gates.sent, token));
        });
        if constexpr (C::kSums) leave_flow(step);
        warpgroup::mma_async_wait<0>();
        pin(gradient), pin_all(tokens), pin(x);
        arrive_warp(smem.qk_read[slot]);
        load_columns(fragments, smem.douts[slot].data[walker]);
        // 3
        meet();
        add_columns(x, fragments, smem.p[anew(step) % 2]);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(fragments);
        // 4. NOTES: the keys' warpgroup has then read dS^T, too, which the next chunk's replaces
        wait(smem.values_read[slot], Use<C::kStages>(anew(step)).phase);
        store_transposed<T>(own_columns(smem.values[slot].data[walker]), x);
        fence_async_proxy();
        arrive_warp(smem.dv_ready[slot]);
        arrive_warp(smem.free[slot]);
    }

    __device__ inline void walk() {
        const GradientsTask& task = smem.task;
        begin_state(gradient, task.entering_c, [&](auto& tile) {
            load_state_transposed(tile, task.entering_c, 0, own_row(), g.dim_k, g.dim_v, g.dim_v);
        });
#pragma unroll 1
        for (int step = 0; step < task.chunks; step++) {
            const auto [slot, phase] = Use<C::kStages>(step);
            wait(smem.gates_ready[slot], phase);
            wait(smem.arrived[slot], phase);
            walk_chunk(step);
        }
        if (task.leaving_c)
            store_state_transposed(task.leaving_c, gradient, 0, own_row(), g.dim_k, g.dim_v, g.dim_v);
    }
};

}  // namespace tfla_tk::mlstm
