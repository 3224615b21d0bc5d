// A walker of the walk that makes dq, dk and dv, backward in time. It owns 64 columns of V and holds dS^T of
// them in registers. It makes dV, and of each tile of scores the columns of 32 tokens:
//   P_ij = s e^{b_i - b_j} q_i.k_j           j <= i
//   R_ij = s e^{b_i - b_j} beta_j dO_i.U'_j  j <= i, the reads
//   E_ij = -e^{b_i - b_j} beta_j dV_i.U'_j   j < i, the erasures
// Per chunk:
//   1. Issue the scores P. Round dS^T to A operands and hand it to the keys' warpgroup; issue X^T = dS^T K^T.
//   2. Issue dS^T <- e^{b_L} dS^T + (s e^b dO)^T Q. Under it gate P. Meet: both halves of P are there.
//   3. dU^T = e^{b_L - b} X^T in the place of X^T; issue dU^T += dO^T P and the scores R.
//   4. Issue dY^T = dU^T + (beta dU)^T A. Under it gate R.
//   5. Issue dS^T -= (e^b beta dY)^T K. Under it the sums for dbeta, and dV = beta dY in the place of dO.
//   6. Meet: dV of both is there. Issue the scores E and gate them.
// The chain from chunk to chunk is X, dU, dY, dS.
#pragma once

#include "delta_rule/backward/gradients/config.cuh"

namespace tfla_tk::delta_rule {

template <class C> struct GradientsWalker {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    using Half = rt_fl<16, kChunk / 2>;  // of scores
    static constexpr int kTokenSteps = kChunk / 16;

    const GradientsGlobals& g;
    GradientsMemory<C>& smem;
    const int walker;
    rt_fl<16, C::kDimK> gradient;  // dS^T
    rt_fl<16, kChunk> x;           // X^T, then dU^T, dY^T, dV^T
    Half scores;
    Fragment fragments[kTokenSteps], tokens[kTokenSteps];

    __device__ inline GradientsWalker(const GradientsGlobals& g, GradientsMemory<C>& smem, int walker)
        : g(g), smem(smem), walker(walker) {}

    // The first of this warp's 16 rows of scores, rows of the state's tiles, columns of V. NOTES: recomputed,
    // to save registers
    __device__ inline int own_row() const { return kWalkerColumns * walker + own_token(); }
    __device__ inline int column() const { return smem.task.column + own_row(); }
    __device__ inline int chunk_of(int step) const { return smem.task.chunks - 1 - anew(step); }
    __device__ inline void meet() const { named_sync<128 * C::kWalkers>(NamedBarrier::walkers_meet); }

    // scores = X Y^T of the walker's half of Y's tokens, issued.
    __device__ inline void issue_half(const typename C::Tile& x, const typename C::Tile& y) {
        issue_scores<T, C::kDimK>(scores, x, y, kChunk / 2 * walker);
    }
    // Gates them and hands them over in a tile; minus: times -1, and zero on the diagonal.
    template <bool kMinus, bool kOfWrites>
    __device__ inline void gate_half(typename C::Square& to, const GradientsGates& gates) {
        const float scale = kMinus ? -1.f : g.scale;
        store_gated<T, kMinus>(to, scores, kChunk / 2 * walker, [&](int row, int column, float2 score) {
            const float2 decay = decays_between(gates.log2_decay, row, column);
            float2 factor{scale * decay.x, scale * decay.y};
            if constexpr (kOfWrites) {
                const float2 beta = pair_of(gates.beta, column);
                factor = {factor.x * beta.x, factor.y * beta.y};
            }
            return float2{factor.x * score.x, factor.y * score.y};
        });
    }

    __device__ inline void walk_chunk(int step) {
        const int slot = Use<C::kStages>(step).slot;
        const GradientsGates& gates = smem.gates[slot];
        // 1
        issue_half(smem.queries[slot], smem.keys[slot]);
        read_gradient(x, fragments, gradient, smem.keys[slot], smem.gradient, own_row(), smem.gradient_ready);
        pin(scores);
        load_columns(tokens, smem.douts[slot].data[walker]);
        for_token_pairs([&](int j, int k, int token) {
            T2& pair = tokens[j].tiles[0][0].data[k];
            const float2 out = to_float2(pair), read = pair_of(gates.read, token);
            pair = from_float2<T2>({g.scale * read.x * out.x, g.scale * read.y * out.y});
        });
        pin_all(tokens);
        // 2
        warp::mul(gradient, gradient, gates.decay);
        add_columns(gradient, tokens, smem.queries[slot]);
        gate_half<false, false>(smem.p, gates);
        for_token_pairs([&](int j, int k, int token) {
            scale_in_place(x.tiles[0][j].data[k], pair_of(gates.kept, token));
        });
        warpgroup::mma_async_wait<0>();
        pin(gradient), pin_all(tokens), pin(x);
        arrive_warp(smem.queries_read[slot]);
        load_columns(fragments, smem.douts[slot].data[walker]);
        meet();
        // 3
        add_columns(x, fragments, smem.p);
        issue_half(smem.douts[slot], smem.writes[slot]);
        warpgroup::mma_async_wait<1>();
        pin(x), pin_all(fragments);
        // 4
        for_token_pairs([&](int j, int k, int token) {
            const float2 du = x.tiles[0][j].data[k], beta = pair_of(gates.beta, token);
            fragments[j].tiles[0][0].data[k] = from_float2<T2>({beta.x * du.x, beta.y * du.y});
        });
        wait(smem.a_arrived, step & 1);
        add_columns(x, fragments, smem.a);
        warpgroup::mma_async_wait<kTokenSteps>();
        pin(scores);
        wait_free(smem.reads_free, step & 1);
        gate_half<false, true>(smem.reads, gates);
        arrive_warp(smem.reads_ready);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(fragments);
        arrive_warp(smem.a_free);
        // 5
        for_token_pairs([&](int j, int k, int token) {
            const float2 dy = x.tiles[0][j].data[k], beta = pair_of(gates.beta, token);
            const float2 read = pair_of(gates.read, token);
            tokens[j].tiles[0][0].data[k] =
                from_float2<T2>({-read.x * beta.x * dy.x, -read.y * beta.y * dy.y});
        });
        add_columns(gradient, tokens, smem.keys[slot]);
        store_strengths(step, own_columns(smem.writes[slot].data[walker]));
        for_token_pairs([&](int j, int k, int token) {
            scale_in_place(x.tiles[0][j].data[k], pair_of(gates.beta, token));
        });
        wait(smem.dout_read[slot], Use<C::kStages>(anew(step)).phase);
        store_transposed<T>(own_columns(smem.douts[slot].data[walker]), x);
        fence_async_proxy();
        arrive_warp(smem.dv_ready[slot]);
        meet();
        // 6
        issue_half(smem.douts[slot], smem.writes[slot]);
        wait_free(smem.erasures_free, step & 1);
        warpgroup::mma_async_wait<0>();
        pin(gradient), pin_all(tokens), pin(scores);
        arrive_warp(smem.keys_read[slot]);
        gate_half<true, true>(smem.erasures, gates);
        arrive_warp(smem.erasures_ready);
        arrive_warp(smem.dv_done[slot]);
        arrive_warp(smem.free[slot]);
    }

    // Sums of dY . U' over this warp's columns of V. NOTES: U' is loaded where it is used, to save registers.
    __device__ inline void store_strengths(int step, uint32_t writes) {
        const GradientsTask& task = smem.task;
        Fragment of_tokens;
        const TwoSums sums = token_sums(fresh_laneid(), [&](int j, int k) {
            if (k == 0) load_transposed(of_tokens, writes + 16 * j * kPanelColumns * sizeof(T));
            const float2 u = to_float2(of_tokens.tiles[0][0].data[k]), dy = x.tiles[0][j].data[k];
            return float2{u.x * dy.x, u.y * dy.y};
        });
        const int chunk = chunk_of(step), first = chunk * kChunk;
        if (!task.owns(chunk) || column() >= g.dim_v) return;
        float* const to =
            g.strengths + column() / kSumColumns * g.rows + task.batch_head * g.seq + task.first_row;
        sums.store(to + first, task.tokens - first);
    }

    __device__ inline void walk() {
        const GradientsTask& task = smem.task;
        begin_state(gradient, task.entering, [&](auto& tile) {
            load_state_transposed(tile, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
        });
#pragma unroll 1
        for (int step = 0; step < task.chunks; step++) {
            const auto [slot, phase] = Use<C::kStages>(step);
            wait(smem.gates_ready[slot], phase);
            wait(smem.arrived[slot], phase);
            wait_free(smem.gradient_free, step & 1);
            walk_chunk(step);
        }
        if (task.leaving)
            store_state_transposed(task.leaving, gradient, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    }
};

}  // namespace tfla_tk::delta_rule
