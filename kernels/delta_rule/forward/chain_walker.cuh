// The chain walker of a pair (pair.cuh): what leads from the state of a chunk to that of the next one.
// W and U' share accumulators; S^T is the state. Per chunk:
//   1. Round S^T to A operands, issue X^T = S^T K^T and hand the operands over. Under it scale S^T by its
//      decay and load V.
//   2. Wait for X. W^T = V^T - e^b X^T; round beta W^T.
//   3. Issue U'^T = W^T + (beta W^T) A^T.
//   4. Issue S^T += (beta e^{b_L - b} U'^T) K.
//   5. Under it hand U' over, wait for the next chunk's tiles and gates, and load the factors of step 2.
//   6. Wait for S.
// A is zero above its diagonal, so U' of the first half of the tokens depends on nothing of the second half.
// Hence steps 2 to 4 take the halves in turn: the tensor cores work on the first one while W and U' of the
// second one are made. NOTES: halves have accumulators of their own: GEMMs of 64 and of 32 columns on the
// same registers are serialised (C7511). The loop's edge is after step 1's wait, where no GEMM is in flight
// (C7514, C7517).
#pragma once

#include "delta_rule/forward/pair.cuh"

namespace tfla_tk::delta_rule {

template <class C> __device__ inline void walk_chain(const ForwardGlobals& g, PairMemory<C>& smem) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16, kHalf = kTokenSteps / 2;
    constexpr bool kSequential = C::kSchedule == Schedule::sequential;
    rt_fl<16, C::kDimK> state;      // S^T
    rt_fl<16, kChunk> x;            // X^T
    rt_fl<16, kChunk / 2> w[2];     // W^T, then U'^T, of each half of the tokens
    Fragment read[kStateSteps];     // S^T, rounded
    Fragment tokens[kTokenSteps];   // V^T, then beta W^T
    float2 values[kTokenSteps][4];  // V^T in fp32
    TokenFactors::Columns minus_read[kTokenSteps], betas[kTokenSteps];
    // U'^T, scaled: in place of S^T, which nobody reads any more then
    static_assert(kStateSteps >= kTokenSteps);
    auto update_of = [&](int j) -> auto& { return w[j / kHalf].tiles[0][j % kHalf]; };
    auto scaled = [&](int j) -> Fragment& { return read[j]; };

    const WalkTask& task = smem.task;
    const int chunks = task.chunks, lane = fresh_laneid();
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    const uint32_t state_words = smem.state.own(), update_words = smem.update.own();

    auto stage_of = [&](int chunk) -> PairStage<C>& { return smem.stages[Use<C::kStages>(chunk).slot]; };
    auto gates_of = [&](int chunk) -> const ForwardGates& { return smem.gates_of(chunk); };

    // Until no more than the last kSteps of all issued ones run.
    auto wait_but = [&]<int kSteps>() { warpgroup::mma_async_wait<kSequential ? 0 : kSteps>(); };
    auto wait_if_sequential = [&] {
        if constexpr (kSequential) warpgroup::mma_async_wait<0>();
    };

    // Behind the last chunk nothing is made of what lies in the stage: the phase before is over.
    auto wait_arrived = [&](int chunk) {
        const Use<C::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase ^ (chunk == chunks));
    };
    auto load_values = [&](int chunk) {
        const uint32_t tile = shared_address(&stage_of(chunk).values) + lane_offset;
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(tokens[j], tile + 16 * j * kPanelColumns * sizeof(T)); });
    };
    // What W of a chunk needs.
    auto take_chunk = [&](int chunk) {
        wait_arrived(chunk);
        const ForwardGates& gates = gates_of(chunk);
        each<0, kTokenSteps>([&](int j) {
            minus_read[j] = gates.minus_read.columns(j, lane);
            betas[j] = gates.beta.columns(j, lane);
        });
    };

    // Whether step 1 leaves S^T as it is: behind the last chunk, and where leave_state has yet to store it.
    // NOTES: without a branch, since a GEMM is in flight
    auto scales_late = [&](int chunk) {
        return static_cast<int>(chunk == chunks) |
               static_cast<int>(g.borders != nullptr) & static_cast<int>(is_border(chunk));
    };
    auto load_decay = [&](int chunk) {
        return __uint_as_float(load_anew(shared_address(&gates_of(chunk).decay)));
    };

    // Step 1, with what W needs under it, up to the wait for X. follows: there is a chunk before; else S^T is
    // rounded and scaled already.
    auto begin_chunk = [&]<bool follows>(int chunk) {
        // steps whose GEMMs run under the rounding of the others, and V
        constexpr int kFirst = kStateSteps > 4 ? 3 : 2;
        const auto rows = Operand128B::rows(&stage_of(chunk).keys);
        auto fragment = [&](int k) -> Fragment& { return read[k]; };
        auto keys = [&](int k) { return rows.row_step(C::Tile::panel_bytes, k); };
        auto round = [&](int k) {
            if constexpr (follows) convert_fragment(read[k], state, k);
        };
        auto hand_over = [&](int k) {
            store_shared(state_words + k * decltype(smem.state)::kStride, read[k].tiles[0][0].data);
        };
        forget(x), pin(x);
        each<0, kFirst>(round);
        multiply_steps<false, 0, kFirst>(x, fragment, keys, true);
        wait_free(smem.state_free, chunk & 1);  // NOTES: its branch keeps the other steps behind these
        each<0, kFirst>(hand_over);
        load_values(chunk);
        each<kFirst, kStateSteps>(round);
        multiply_steps<false, kFirst, kStateSteps>(x, fragment, keys);
        each<kFirst, kStateSteps>(hand_over);
        wait_if_sequential();
        // NOTES: ptxas scales S^T as soon as the factor is there. So this is behind all GEMMs, which would
        // else be issued late.
        const float decay = follows ? load_decay(chunk) : 1.f;
        if constexpr (follows) warp::mul(state, state, scales_late(chunk) ? 1.f : decay);
        each<0, kTokenSteps>([&](int j) {
            each<0, 4>([&](int k) { values[j][k] = to_float2(tokens[j].tiles[0][0].data[k]); });
            pin(values[j]);
        });
        arrive_warp(smem.state_ready);
        if constexpr (follows) arrive_warp(smem.free[Use<C::kStages>(chunk - 1).slot]);
        pin(state);
        // NOTES: over long ago; its branch keeps ptxas from moving the work above behind the wait for X
        wait_arrived(chunk);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(read), pin(state);
    };
    // S that enters a chunk at a border between segments, and the rest of step 1.
    auto leave_state = [&](int chunk) {
        store_state_transposed(border_state(g, task, task.first_chunk + chunk), state, 0, column(), g.dim_k,
                               g.dim_v, g.dim_v);
        warp::mul(state, state, load_decay(chunk));
        pin(state);
    };
    // W and beta W of a half of the tokens.
    auto make_half = [&]<int half>() {
        each<half * kHalf, (half + 1) * kHalf>([&](int j) {
            each<0, 4>([&](int k) {
                const float2 read = x.tiles[0][j].data[k], value = values[j][k];
                const float2 factor = minus_read[j].of[k / 2], beta = betas[j].of[k / 2];
                const float2 z{fmaf(read.x, factor.x, value.x), fmaf(read.y, factor.y, value.y)};
                update_of(j).data[k] = z;
                tokens[j].tiles[0][0].data[k] = from_float2<T2>({beta.x * z.x, beta.y * z.y});
            });
        });
    };
    // U' of a half of the tokens += A (beta W) of the tokens up to its end.
    auto add_half = [&]<int half>(const typename C::Square& square) {
        const auto rows = Operand128B::rows(&square);
        pin(w[half]);
        multiply_steps<false, 0, (half + 1) * kHalf>(
            w[half], [&](int j) -> Fragment& { return tokens[j]; },
            [&](int j) { return rows.at(half * C::Square::panel_bytes / 2 + j * 32); });
        wait_if_sequential();
    };
    // S += K^T U' of a half of the tokens.
    using AllFactors = TokenFactors::Columns[kTokenSteps];
    auto update_half = [&]<int half>(const typename C::Tile& tile, const AllFactors& updates) {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        each<half * kHalf, (half + 1) * kHalf>([&](int j) {
            each<0, 4>([&](int k) {
                const float2 z = update_of(j).data[k], e = updates[j].of[k / 2];
                scaled(j).tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
        });
        multiply_steps<true, half * kHalf, (half + 1) * kHalf>(state, scaled,
                                                               [&](int j) { return columns.column_step(j); });
        wait_if_sequential();
    };
    // Steps 2 to 6.
    auto end_chunk = [&](int chunk) {
        const PairStage<C>& stage = stage_of(chunk);
        make_half.template operator()<0>();        // 2
        add_half.template operator()<0>(stage.a);  // 3
        make_half.template operator()<1>();
        add_half.template operator()<1>(stage.a);
        AllFactors updates;
        each<0, kTokenSteps>([&](int j) { updates[j] = gates_of(chunk).update.columns(j, lane); });
        wait_but.template operator()<kTokenSteps>();
        pin(w[0]);
        update_half.template operator()<0>(stage.keys, updates);  // 4
        wait_but.template operator()<kHalf>();
        pin(w[1]), pin_all(tokens);
        update_half.template operator()<1>(stage.keys, updates);
        wait_free(smem.update_free, chunk & 1);  // 5
        each<0, 2 * kTokenSteps>([&](int i) {
            const auto& pairs = reinterpret_cast<const float2(&)[2]>(update_of(i / 2).data[i % 2 * 2]);
            store_shared_floats(update_words + i * decltype(smem.update)::kStride, pairs);
        });
        arrive_warp(smem.update_ready);
        take_chunk(chunk + 1);
        warpgroup::mma_async_wait<0>();  // 6
        pin(state);
        each<0, kTokenSteps>([&](int j) { pin(scaled(j)); });
    };

    if (task.entering)
        load_state_transposed(state, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    else
        warp::zero(state);
    if (chunks > 0) {
        take_chunk(0);
        // NOTES: all of it before the first GEMM: the state's registers are a GEMM's to ptxas from there on
        // (C7517)
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
        warp::mul(state, state, load_decay(0));
        pin(state);
        begin_chunk.template operator()<false>(0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (g.borders && chunk > 0 && is_border(chunk)) leave_state(chunk);
            end_chunk(chunk);
            begin_chunk.template operator()<true>(chunk + 1);
        }
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
