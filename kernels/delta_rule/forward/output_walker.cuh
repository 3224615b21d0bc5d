// The output walker of a pair (pair.cuh). It follows the chain walker and makes what the next state does not
// wait for. Per chunk:
//   1. Wait for S^T, rounded. Issue O^T = S^T Q^T.
//   2. Wait for it and scale it by s e^b.
//   3. Wait for U'. Round beta U' and issue O^T += (beta U'^T) P^T.
//   4. Leave U', times `written`, rounded, for the backward, where it is wanted.
//   5. Wait for O and hand it over.
#pragma once

#include "delta_rule/forward/pair.cuh"

namespace tfla_tk::delta_rule {

template <class C> __device__ inline void walk_outputs(const ForwardGlobals& g, PairMemory<C>& smem) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16, kHalf = kTokenSteps / 2;
    rt_fl<16, kChunk> sum, update;  // O^T before it is scaled; U'^T
    rt_fl<16, kChunk / 2> out[2];   // O^T of each half of the tokens
    Fragment read[kStateSteps];     // S^T, rounded
    Fragment tokens[kTokenSteps];   // U'^T times beta, or times `written`

    const int chunks = smem.task.chunks, lane = fresh_laneid();
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    const uint32_t state_words = smem.state.own(), update_words = smem.update.own();
    forget(update);
    auto round_update = [&](const TokenFactors& by) {
        each<0, kTokenSteps>([&](int j) {
            const auto factors = by.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 z = update.tiles[0][j].data[k], e = factors.of[k / 2];
                tokens[j].tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
        });
    };

    // O of a half of the tokens += P (beta U') of the tokens up to its end: P is zero above its diagonal.
    auto add_half = [&]<int half>(const typename C::Square& square) {
        const auto rows = Operand128B::rows(&square);
        pin(out[half]);
        multiply_steps<false, 0, (half + 1) * kHalf>(
            out[half], [&](int j) -> Fragment& { return tokens[j]; },
            [&](int j) { return rows.at(half * C::Square::panel_bytes / 2 + j * 32); });
    };

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        const uint32_t parity = chunk & 1;
        const PairStage<C>& stage = smem.stages[slot];
        const ForwardGates& gates = smem.gates[slot];

        wait(smem.asked[slot], phase);
        wait(smem.state_ready, parity);
        each<0, kStateSteps>([&](int k) {
            load_shared(read[k].tiles[0][0].data, state_words + k * decltype(smem.state)::kStride);
        });
        pin_all(read);
        arrive_warp(smem.state_free);
        const auto queries = Operand128B::rows(&stage.queries);
        forget(sum), pin(sum);
        multiply_steps<false, 0, kStateSteps>(
            sum, [&](int k) -> Fragment& { return read[k]; },
            [&](int k) { return queries.row_step(C::Tile::panel_bytes, k); }, true);  // 1
        warpgroup::mma_async_wait<0>();                                               // 2
        pin(sum), pin_all(read);
        each<0, kTokenSteps>([&](int j) {
            const auto factors = gates.out.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 z = sum.tiles[0][j].data[k], e = factors.of[k / 2];
                out[j / kHalf].tiles[0][j % kHalf].data[k] = {e.x * z.x, e.y * z.y};
            });
        });
        wait(smem.update_ready, parity);  // 3
        each<0, 2 * kTokenSteps>([&](int i) {
            float2(&pairs)[2] = reinterpret_cast<float2(&)[2]>(update.tiles[0][i / 2].data[i % 2 * 2]);
            load_shared_floats(pairs, update_words + i * decltype(smem.update)::kStride);
        });
        pin(update);
        arrive_warp(smem.update_free);
        round_update(gates.beta);
        add_half.template operator()<0>(stage.p);
        add_half.template operator()<1>(stage.p);
        warpgroup::mma_async_wait<0>();
        pin(out[0]), pin(out[1]), pin_all(tokens);
        if (g.keep_writes) {  // 4
            round_update(gates.written);
            wait_free(smem.writes_free, parity);
            store_transposed(shared_address(&smem.writes) + lane_offset, tokens);
            fence_async_proxy();
            arrive_warp(smem.writes_ready);
        }
        wait_free(smem.out_free, parity);  // 5
        const uint32_t place = shared_address(&smem.out) + lane_offset;
        store_transposed<T>(place, out[0]);
        store_transposed<T>(place + C::Columns::panel_bytes / 2, out[1]);
        fence_async_proxy();
        arrive_warp(smem.out_ready[slot]);
    }
}

}  // namespace tfla_tk::delta_rule
