// The side walker of a pair of the mirror (pair.cuh). Per step, of the chunk ahead of the chain walker's:
//   1. Load dO^T and issue (P^T dO)^T = dO^T P. Under it scale dO^T by s e^b and round it.
//   2. Wait for it and hand both over.
// and of the chunk whose dY is there:
//   3. dV = beta dY; sums of dY . writes over the warp's 16 columns of V, over `written`, are dbeta's.
// A walk that leaves states alone has no step 3.
#pragma once

#include "delta_rule/backward/pair.cuh"
#include "delta_rule/backward/token_sums.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_mirror_side(const MirrorGlobals& g, MirrorPairMemory<C>& smem) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    using Memory = MirrorPairMemory<C>;
    constexpr int kTokenSteps = kChunk / 16, kHalf = kTokenSteps / 2;
    rt_fl<16, kChunk / 2> through[2];  // (P^T dO)^T of each half of the tokens
    rt_fl<16, kChunk> dy;              // dY^T, then dV^T
    Fragment tokens[kTokenSteps];      // dO^T; the writes
    Fragment scaled[kTokenSteps];      // dO^T, scaled

    const WalkTask& task = smem.task;
    const int chunks = task.chunks, lane = fresh_laneid();
    auto column = [&] { return task.column + fresh_thread() % 128 / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    const uint32_t through_words = smem.through.own(), scaled_words = smem.scaled.own(),
                   dy_words = smem.dy.own();
    auto load_tokens = [&](const typename C::Columns& tile) {
        const uint32_t address = shared_address(&tile) + lane_offset;
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(tokens[j], address + 16 * j * kPanelColumns * sizeof(T)); });
    };

    auto go_ahead = [&](int step) {
        const auto [slot, phase] = Use<Memory::kSideStages>(step);
        const Use<C::kStages> gates_use(step);
        const SideStage<C>& stage = smem.side_stages[slot];
        const TokenFactors& out = smem.gates[gates_use.slot].out;
        wait(smem.side_arrived[slot], phase);
        load_tokens(stage.dout);  // 1
        // P is zero above its diagonal: a token of the second half gets nothing from the first half
        auto multiply_half = [&]<int half>() {
            const auto columns = Operand128B::columns(&stage.p, C::Square::panel_bytes);
            forget(through[half]), pin(through[half]);
            multiply_steps<true, half * kHalf, kTokenSteps>(
                through[half], [&](int j) -> Fragment& { return tokens[j]; },
                [&](int j) { return columns.column_step(j, half * kChunk / 2 * sizeof(T)); }, true);
        };
        multiply_half.template operator()<0>();
        multiply_half.template operator()<1>();
        wait(smem.gated[gates_use.slot], gates_use.phase);
        each<0, kTokenSteps>([&](int j) {
            const auto factors = out.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 x = to_float2(tokens[j].tiles[0][0].data[k]), e = factors.of[k / 2];
                scaled[j].tiles[0][0].data[k] = from_float2<T2>({e.x * x.x, e.y * x.y});
            });
        });
        warpgroup::mma_async_wait<0>();  // 2
        pin(through[0]), pin(through[1]), pin_all(tokens);
        arrive_warp(smem.side_free[slot]);
        wait_free(smem.through_free, step & 1);
        each<0, 2 * kTokenSteps>([&](int i) {
            const auto& tile = through[i / 2 / kHalf].tiles[0][i / 2 % kHalf];
            const auto& pairs = reinterpret_cast<const float2(&)[2]>(tile.data[i % 2 * 2]);
            store_shared_floats(through_words + i * decltype(smem.through)::kStride, pairs);
        });
        each<0, kTokenSteps>([&](int j) {
            store_shared(scaled_words + j * decltype(smem.scaled)::kStride, scaled[j].tiles[0][0].data);
        });
        arrive_warp(smem.through_ready);
        if constexpr (C::kStatesAlone) arrive_warp(smem.side_done[gates_use.slot]);
    };
    auto follow = [&](int step) {  // 3
        const int chunk = chunks - 1 - step, slot = Use<C::kStages>(step).slot;
        const auto [writes_slot, writes_phase] = Use<Memory::kSideStages>(step);
        const TokenFactors& beta = smem.gates[slot].beta;
        wait(smem.writes_arrived[writes_slot], writes_phase);
        load_tokens(smem.writes[writes_slot]);
        wait(smem.dy_ready, step & 1);
        each<0, 2 * kTokenSteps>([&](int i) {
            auto& pairs = reinterpret_cast<float2(&)[2]>(dy.tiles[0][i / 2].data[i % 2 * 2]);
            load_shared_floats(pairs, dy_words + i * decltype(smem.dy)::kStride);
        });
        pin(dy);
        arrive_warp(smem.dy_free);
        float* const sums = g.dbeta + column() / 16 * g.dbeta_part +
                            (static_cast<int64_t>(task.batch) * g.heads + task.head) * g.seq +
                            task.first_row + chunk * kChunk;
        if (column() < g.dim_v)
            store_token_sums(
                sums, task.tokens - chunk * kChunk, lane,
                [&](int j, int k) {
                    const float2 u = to_float2(tokens[j].tiles[0][0].data[k]), z = dy.tiles[0][j].data[k];
                    return float2{u.x * z.x, u.y * z.y};
                },
                [&](int token) { return 1.f / written_part(beta.of(token)); });
        each<0, kTokenSteps>([&](int j) {
            const auto factors = beta.columns(j, lane);
            each<0, 4>([&](int k) { scale_in_place(dy.tiles[0][j].data[k], factors.of[k / 2]); });
        });
        wait_free(smem.dv_free, step & 1);
        store_transposed<T>(shared_address(&smem.dv) + lane_offset, dy);
        fence_async_proxy();
        arrive_warp(smem.side_done[slot]);
    };

    forget(dy);
#pragma unroll 1
    for (int step = 0; step <= chunks; step++) {
        if (step < chunks) go_ahead(step);
        if constexpr (!C::kStatesAlone)
            if (step > 0) follow(step - 1);
    }
}

}  // namespace tfla_tk::delta_rule
