// The chain walker of a pair of the mirror (pair.cuh): what leads from the gradient of a chunk's last state
// to that of its first one. dU and dY share accumulators; the state is dS^T. Per step:
//   1. Round dS^T to A operands, issue X^T = dS^T K^T. Under it scale dS^T by its decay, and take P^T dO and
//      dO, scaled, from the side walker.
//   2. Wait for X. Issue half of dS^T += dO^T Q.
//   3. dU^T = e^{b_L - b} X^T + (P^T dO)^T; round beta dU^T. Issue dY^T = dU^T + (beta dU^T) A.
//   4. Issue the other half of dS^T += dO^T Q.
//   5. Round -e^b beta dY^T to A operands and issue dS^T += dY^T K.
//   6. Under it hand dY over, wait for the next chunk's tiles and gates, and load the factors of step 3.
//   7. Wait for dS.
// A is zero above its diagonal, so dY of the second half of the tokens depends on nothing of the first half.
// Hence steps 3 and 5 begin with the second half, as the forward's chain walker does with the first one
// (forward/chain_walker.cuh, where notes on ptxas are, too).
#pragma once

#include "delta_rule/backward/pair.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_mirror_chain(const MirrorGlobals& g, MirrorPairMemory<C>& smem) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16, kHalf = kTokenSteps / 2;
    constexpr bool kSequential = C::kSchedule == Schedule::sequential;
    rt_fl<16, C::kDimK> state;    // dS^T
    rt_fl<16, kChunk> x;          // X^T
    rt_fl<16, kChunk> through;    // (P^T dO)^T
    rt_fl<16, kChunk / 2> w[2];   // dU^T, then dY^T, of each half of the tokens
    Fragment read[kStateSteps];   // dS^T, rounded; then beta dU^T, then -e^b beta dY^T
    Fragment outs[kTokenSteps];   // dO^T, scaled
    Fragment lasts[kTokenSteps];  // -e^b beta dY^T
    TokenFactors::Columns factors[kTokenSteps], betas[kTokenSteps];
    static_assert(kStateSteps >= kTokenSteps);
    auto rounded = [&](int j) -> Fragment& { return read[j]; };
    auto gradient_of = [&](int j) -> auto& { return w[j / kHalf].tiles[0][j % kHalf]; };

    const WalkTask& task = smem.task;
    const int chunks = task.chunks, lane = fresh_laneid();
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    const uint32_t through_words = smem.through.own(), scaled_words = smem.scaled.own(),
                   dy_words = smem.dy.own();

    auto stage_of = [&](int step) -> ChainStage<C>& { return smem.stages[Use<C::kStages>(step).slot]; };
    auto gates_of = [&](int step) -> const MirrorGates& { return smem.gates[Use<C::kStages>(step).slot]; };

    // Until no more than the last kSteps of all issued ones run.
    auto wait_but = [&]<int kSteps>() { warpgroup::mma_async_wait<kSequential ? 0 : kSteps>(); };
    auto wait_if_sequential = [&] {
        if constexpr (kSequential) warpgroup::mma_async_wait<0>();
    };

    // Behind the last step nothing is made of what lies there: the phase before is over.
    auto wait_arrived = [&](int step) {
        const Use<C::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase ^ (step == chunks));
    };
    auto take_step = [&](int step) {
        wait_arrived(step);
        const MirrorGates& gates = gates_of(step);
        each<0, kTokenSteps>([&](int j) {
            factors[j] = gates.update.columns(j, lane);
            betas[j] = gates.beta.columns(j, lane);
        });
    };
    auto take_from_side = [&] {
        each<0, 2 * kTokenSteps>([&](int i) {
            auto& pairs = reinterpret_cast<float2(&)[2]>(through.tiles[0][i / 2].data[i % 2 * 2]);
            load_shared_floats(pairs, through_words + i * decltype(smem.through)::kStride);
        });
        each<0, kTokenSteps>([&](int j) {
            load_shared(outs[j].tiles[0][0].data, scaled_words + j * decltype(smem.scaled)::kStride);
        });
        pin(through), pin_all(outs);
        arrive_warp(smem.through_free);
    };

    // The chunk that step `step` begins with lies before a border.
    auto is_before_border = [&](int step) { return is_border(chunks - step); };
    // Whether step 1 leaves dS^T as it is: behind the last step, and where leave_state has yet to store it.
    auto scales_late = [&](int step) {
        return static_cast<int>(step == chunks) |
               static_cast<int>(g.borders != nullptr) & static_cast<int>(is_before_border(step));
    };
    auto load_decay = [&](int step) {
        return __uint_as_float(load_anew(shared_address(&gates_of(step).decay)));
    };

    // Step 1, up to the wait for X. follows: there is a step before; else dS^T is rounded and scaled already.
    auto begin_step = [&]<bool follows>(int step) {
        constexpr int kFirst = 2;  // steps whose GEMMs run under the rounding of the others
        const auto rows = Operand128B::rows(&stage_of(step).keys);
        auto fragment = [&](int k) -> Fragment& { return read[k]; };
        auto keys = [&](int k) { return rows.row_step(C::Tile::panel_bytes, k); };
        auto round = [&](int k) {
            if constexpr (follows) convert_fragment(read[k], state, k);
        };
        forget(x), pin(x);
        each<0, kFirst>(round);
        multiply_steps<false, 0, kFirst>(x, fragment, keys, true);
        // NOTES: its branch keeps the other steps behind these
        wait(smem.through_ready, (step & 1) ^ (step == chunks));
        each<kFirst, kStateSteps>(round);
        multiply_steps<false, kFirst, kStateSteps>(x, fragment, keys);
        wait_if_sequential();
        const float decay = follows ? load_decay(step) : 1.f;
        take_from_side();
        if constexpr (follows) {
            warp::mul(state, state, scales_late(step) ? 1.f : decay);
            arrive_warp(smem.free[Use<C::kStages>(step - 1).slot]);
        }
        pin(state);
        wait_arrived(step);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(read), pin(state);
    };
    // dS behind a border between segments, and the rest of step 1.
    auto leave_state = [&](int step) {
        store_state_transposed(border_state(g, task, task.first_chunk + chunks - step), state, 0, column(),
                               g.dim_k, g.dim_v, g.dim_v);
        warp::mul(state, state, load_decay(step));
        pin(state);
    };
    // dS += Q^T dO of a half of the tokens, behind a fence.
    auto add_outs = [&]<int half>(const typename C::Tile& tile) {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        issue_steps<true, half * kHalf, (half + 1) * kHalf>(
            state, [&](int j) -> Fragment& { return outs[j]; },
            [&](int j) { return columns.column_step(j); });
        wait_if_sequential();
    };
    // dU and beta dU of a half of the tokens.
    auto make_half = [&]<int half>() {
        each<half * kHalf, (half + 1) * kHalf>([&](int j) {
            each<0, 4>([&](int k) {
                const float2 from = x.tiles[0][j].data[k], more = through.tiles[0][j].data[k];
                const float2 factor = factors[j].of[k / 2], beta = betas[j].of[k / 2];
                const float2 z{fmaf(from.x, factor.x, more.x), fmaf(from.y, factor.y, more.y)};
                gradient_of(j).data[k] = z;
                rounded(j).tiles[0][0].data[k] = from_float2<T2>({beta.x * z.x, beta.y * z.y});
            });
        });
    };
    // dY of a half of the tokens += (beta dU) A of the tokens from its start on, the second half first,
    // behind a fence.
    auto add_half = [&]<int half>(const typename C::Square& square) {
        const auto columns = Operand128B::columns(&square, C::Square::panel_bytes);
        auto from_middle = [](int i) { return (i + kHalf) % kTokenSteps; };
        issue_steps<true, 0, (2 - half) * kHalf>(
            w[half], [&](int i) -> Fragment& { return rounded(from_middle(i)); },
            [&](int i) { return columns.column_step(from_middle(i), half * kChunk / 2 * sizeof(T)); });
        wait_if_sequential();
    };
    // dS += K^T dY of a half of the tokens.
    using AllFactors = TokenFactors::Columns[kTokenSteps];
    auto update_half = [&]<int half>(const typename C::Tile& tile, const AllFactors& updates) {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        each<half * kHalf, (half + 1) * kHalf>([&](int j) {
            each<0, 4>([&](int k) {
                const float2 z = gradient_of(j).data[k], e = updates[j].of[k / 2];
                lasts[j].tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
        });
        multiply_steps<true, half * kHalf, (half + 1) * kHalf>(
            state, [&](int j) -> Fragment& { return lasts[j]; },
            [&](int j) { return columns.column_step(j); });
        wait_if_sequential();
    };
    // Steps 2 to 7.
    auto end_step = [&](int step) {
        const ChainStage<C>& stage = stage_of(step);
        pin_all(outs);  // 2
        wgmma_fence();
        add_outs.template operator()<0>(stage.queries);
        make_half.template operator()<1>();  // 3
        make_half.template operator()<0>();
        pin(w[0]), pin(w[1]), each<0, kTokenSteps>([&](int j) { pin(rounded(j)); });
        wgmma_fence();
        add_half.template operator()<1>(stage.a);
        add_half.template operator()<0>(stage.a);
        add_outs.template operator()<1>(stage.queries);  // 4
        AllFactors updates;
        each<0, kTokenSteps>([&](int j) { updates[j] = gates_of(step).minus_read.columns(j, lane); });
        wait_but.template operator()<3 * kHalf>();
        pin(w[1]);
        update_half.template operator()<1>(stage.keys, updates);  // 5
        wait_but.template operator()<2 * kHalf>();
        pin(w[0]), each<0, kTokenSteps>([&](int j) { pin(rounded(j)); });
        update_half.template operator()<0>(stage.keys, updates);
        if constexpr (!C::kStatesAlone) {  // 6
            wait_free(smem.dy_free, step & 1);
            each<0, 2 * kTokenSteps>([&](int i) {
                const auto& pairs = reinterpret_cast<const float2(&)[2]>(gradient_of(i / 2).data[i % 2 * 2]);
                store_shared_floats(dy_words + i * decltype(smem.dy)::kStride, pairs);
            });
            arrive_warp(smem.dy_ready);
        }
        take_step(step + 1);
        warpgroup::mma_async_wait<0>();  // 7
        pin(state), pin_all(outs);
        pin_all(lasts);
    };

    if (task.entering)
        load_state_transposed(state, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    else
        warp::zero(state);
    if (chunks > 0) {
        take_step(0);
        // NOTES: all of it before the first GEMM (C7517)
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
        warp::mul(state, state, load_decay(0));
        pin(state);
        begin_step.template operator()<false>(0);
#pragma unroll 1
        for (int step = 0; step < chunks; step++) {
            if (g.borders && step > 0 && is_before_border(step)) leave_state(step);
            end_step(step);
            begin_step.template operator()<true>(step + 1);
        }
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
