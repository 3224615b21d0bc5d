// A walker of the forward (walk.cuh). X and U' below share an accumulator; S^T is the state. Per chunk:
//   1. Round S^T to A operands and issue X^T = S^T K^T; scale S^T by its decay meanwhile.
//   2. Wait for the GEMM of the chunk before, P U', and put its O where V was. Under X leave rounded S^T for
//      the backward, where it is wanted.
//   3. Issue O^T = S^T Q^T.
//   4. Wait for X. W^T = V^T - e^b X^T in the place of X^T; round beta W^T.
//   5. Issue U'^T = W^T + (beta W^T) A^T. Under it hand over O of the chunk before. Free its stage, unless
//      step 9 has done that.
//   6. Wait for U' and Q S.
//   7. Issue S^T += (beta e^{b_L - b} U'^T) K. Where the walk makes its matrices (chunk_matrices/in_walk.cuh)
//      issue the scores of the next chunk behind it.
//   8. Under it leave U', rounded, for the backward, where it is wanted. Round beta U'; then
//      scale O^T by s e^b and issue O^T += (beta U'^T) P^T.
//   9. Wait for S and the scores; P U' stays in flight. Make P of the next chunk of the scores, and free the
//      stage.
// The chain from chunk to chunk is X, W, U', S. NOTES: the loop's edge is after step 6, where no GEMM is in
// flight: ptxas does not follow them over it (C7514); and the loop has no second way out, for the same
// reason.
#pragma once

#include "delta_rule/forward/config.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_forward(const ForwardGlobals& g, ForwardMemory<C>& smem, int walker) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    rt_fl<16, C::kDimK> state;     // S^T
    rt_fl<16, kChunk> x, out;      // X^T, then W^T, then U'^T; O^T
    Fragment read[kStateSteps];    // S^T, rounded
    Fragment tokens[kTokenSteps];  // V^T, then beta W^T, then beta U'^T
    // U'^T, scaled: in place of S^T, which nobody reads any more then
    static_assert(kStateSteps >= kTokenSteps);
    auto scaled = [&](int j) -> Fragment& { return read[j]; };

    const WalkTask& task = smem.task;
    const int chunks = task.chunks, lane = fresh_laneid();
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + kWalkerColumns * walker + fresh_thread() % 128 / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    auto stage_of = [&](int chunk) -> ForwardStage<C>& { return smem.stages[Use<C::kStages>(chunk).slot]; };
    auto values_of = [&](int chunk) { return shared_address(&stage_of(chunk).values[walker]) + lane_offset; };

    [[maybe_unused]] ScoresInWalk<C> scores;

    // Behind the last chunk begin_chunk makes nothing that is asked for out of what lies in the stage: the
    // phase before is over.
    auto wait_arrived = [&](int chunk) {
        const Use<C::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase ^ (chunk == chunks));
    };

    auto load_decay = [](const ForwardStage<C>& stage) {
        return __uint_as_float(load_anew(shared_address(&stage.gates.decay)));
    };

    // S^T that enters a chunk, rounded, for the backward: 16 bytes of a row at a
    // time, which a lane collects from its quad.
    auto keep_state = [&](int chunk) {
        each<0, 2>([&](int half) {
            const int lane = fresh_laneid(), row = column() + 8 * half + lane / 4;
            const int64_t state = (task.batch * g.heads + task.head) * g.slots + task.first_slot + chunk;
            T* const to = static_cast<T*>(g.states) + (state * g.dim_v + row) * g.dim_k + 8 * (lane % 4);
            each<0, kStateSteps / 2>([&](int j) {
                const T2(&low)[4] = read[2 * j].tiles[0][0].data,
                      (&high)[4] = read[2 * j + 1].tiles[0][0].data;
                const uint4 columns = transpose_quad(low[half], low[2 + half], high[half], high[2 + half]);
                if (row < g.dim_v && 32 * j + 8 * (lane % 4) < g.dim_k)
                    *reinterpret_cast<uint4*>(to + 32 * j) = columns;
            });
        });
    };
    auto keeps_state = [&](int chunk) { return g.states && task.owns(chunk); };
    // Steps 1 to 6. follows: there is a chunk before; else S^T is rounded and scaled already.
    auto begin_chunk = [&]<bool follows>(int chunk) {
        ForwardStage<C>& stage = stage_of(chunk);
        const auto keys = Operand128B::rows(&stage.keys);
        forget(x);
        float decay = 1.f;
        each<0, kStateSteps>([&](int k) {  // 1
            if constexpr (follows) convert_fragment(read[k], state, k);
            // NOTES: where the next steps wait for their turn on the tensor cores; ptxas does it as soon as
            // the factor is there, hence this way and not earlier
            if (follows && k == std::min(3, kStateSteps - 1)) decay = load_decay(stage);
            if (follows && k == kStateSteps - 1) warp::mul(state, state, chunk == chunks ? 1.f : decay);
            multiply_step<false>(x, read[k], keys.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
        if constexpr (follows) {  // 2
            wait_but<kStateSteps>();
            pin(out), pin_all(tokens);
        }
        load_tokens(tokens, values_of(chunk));
        // each warp puts it in the place of its own 16 columns of V, which none but it has read
        if constexpr (follows) store_transposed<T>(values_of(chunk - 1), out);
        if (keeps_state(chunk)) keep_state(chunk);
        forget(out);
        const auto queries = Operand128B::rows(&stage.queries);
        each<0, kStateSteps>([&](int k) {  // 3
            multiply_step<false>(out, read[k], queries.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
        const auto& minus_read = stage.gates.minus_read;
        const TokenFactors::Columns factors[] = {minus_read.columns(0, lane), minus_read.columns(1, lane),
                                                 minus_read.columns(2, lane), minus_read.columns(3, lane)};
        float2 first[4];  // of V^T. NOTES: ahead of the wait, as the factors: the chain needs them first
        each<0, 4>([&](int k) { first[k] = to_float2(tokens[0].tiles[0][0].data[k]); });
        pin(first);
        wait_but<kStateSteps>();
        pin(x);
        each<0, kTokenSteps>([&](int j) {  // 4
            const auto betas = stage.gates.beta.columns(j, lane);
            each<0, 4>([&](int k) {
                T2& pair = tokens[j].tiles[0][0].data[k];
                const float2 v = j == 0 ? first[k] : to_float2(pair), beta = betas.of[k / 2];
                float2& w = x.tiles[0][j].data[k];
                fma_in_place(w, factors[j].of[k / 2], v);
                pair = from_float2<T2>({beta.x * w.x, beta.y * w.y});
            });
        });
        add_rows(x, tokens, stage.a);  // 5
        if constexpr (follows) {
            const int slot = Use<C::kStages>(chunk - 1).slot;
            fence_async_proxy();
            arrive_warp(smem.out_ready[walker][slot]);
            if constexpr (!C::kMakesMatrices) arrive_warp(smem.free[slot]);
        }
        warpgroup::mma_async_wait<0>();  // 6
        pin(x), pin(out), pin_all(tokens), pin_all(read), pin(state);
    };
    auto leave_writes = [&](int chunk) {
        each<0, 4 * kTokenSteps>([&](int i) {
            tokens[i / 4].tiles[0][0].data[i % 4] = from_float2<T2>(x.tiles[0][i / 4].data[i % 4]);
        });
        wait_free(smem.writes_free[walker], chunk & 1);
        store_transposed(shared_address(&smem.writes[walker]) + lane_offset, tokens);
        fence_async_proxy();
        arrive_warp(smem.writes_ready[walker]);
    };
    // Steps 7 to 9.
    auto end_chunk = [&](int chunk) {
        ForwardStage<C>& stage = stage_of(chunk);
        const auto keys = Operand128B::columns(&stage.keys, C::Tile::panel_bytes);
        each<0, kTokenSteps>([&](int j) {  // 7
            const auto factors = stage.gates.update.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 z = x.tiles[0][j].data[k], e = factors.of[k / 2];
                scaled(j).tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
            multiply_step<true>(state, scaled(j), keys.column_step(j), true, j == 0);
        });
        if constexpr (C::kMakesMatrices) scores.issue(smem, walker, chunk + 1);
        if (g.keep_writes) leave_writes(chunk);  // 8
        round_scaled(tokens, x, LateFactors(stage.gates.beta, lane));
        scale_accumulator(out, LateFactors(stage.gates.out, lane));
        if constexpr (C::kMakesMatrices) scores.wait_made(smem, chunk);
        add_rows(out, tokens, stage.p);
        if constexpr (C::kMakesMatrices) {
            scores.leave(g, smem, walker, chunk + 1, [&] { wait_but<kTokenSteps>(); });
            // What is loaded of this chunk has been read. NOTES: P may still be read, but is not loaded: the
            // walkers write it here again two chunks from now, behind a wait for the scores that both make
            // behind this P U'.
            arrive_warp(smem.free[Use<C::kStages>(chunk).slot]);
        }
        wait_arrived(chunk + 1);
        wait_but<kTokenSteps>();  // 9
        pin(state);
        each<0, kTokenSteps>([&](int j) { pin(scaled(j)); });
    };

    if (task.entering)
        load_state_transposed(state, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    else
        warp::zero(state);
    if (chunks > 0) {
        if constexpr (C::kMakesMatrices) {
            scores.issue(smem, walker, 0);
            scores.leave(g, smem, walker, 0, [] { warpgroup::mma_async_wait<0>(); });
        }
        wait_arrived(0);
        // NOTES: all of it before the first GEMM: the state's registers are a GEMM's to ptxas from there on
        // (C7517)
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
        warp::mul(state, state, load_decay(stage_of(0)));
        pin(state);
        begin_chunk.template operator()<false>(0);
        for (int chunk = 0; chunk < chunks; chunk++) {
            end_chunk(chunk);
            begin_chunk.template operator()<true>(chunk + 1);
        }
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
