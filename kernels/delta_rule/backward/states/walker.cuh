// What the walkers of both walks over the states do alike.
//
// A walker is a warpgroup that owns 64 columns of K. It holds the state, or its gradient, of these (64 x V)
// in fp32 and computes results transposed (key_steps.cuh). The scores alone are shared: each walker
// makes one of the two tiles.
#pragma once

#include "delta_rule/backward/key_steps.cuh"
#include "delta_rule/backward/states/config.cuh"
#include "delta_rule/scores.cuh"

namespace tfla_tk::delta_rule {

// Rounds the products X U^T to a tile, gated and times `factor` and the rest of beta: zero right of the
// diagonal, and on it for strict ones. kDecays: else all gates are 1. NOTES: by selection, not by products:
// what is left out may be NaN or infinite.
template <class T, bool kDecays, class Square>
__device__ inline void round_scores(Square& tile, rt_fl<16, kChunk>& scores, const StatesGates& gates,
                                    float factor, bool strict) {
    const int warp = warpgroup::warpid(), lane = fresh_laneid();
    const int first_row = 16 * warp + lane / 4, first_column = 2 * (lane % 4);
    const float2 of_rows[2] = {gates.log2_decay.of[first_row], gates.log2_decay.of[first_row + 8]};
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = first_column + 16 * j + 8 * half;
            float4 before{};
            if constexpr (kDecays) before = *reinterpret_cast<const float4*>(&gates.log2_decay.of[column]);
            const float2 rest = *reinterpret_cast<const float2*>(&gates.rest[column]);
            const float2 by{factor * rest.x, factor * rest.y};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int last = first_row + 8 * k - strict;  // column that the row sees
                const float2 b = of_rows[k];
                float2& x = scores.tiles[0][j].data[2 * half + k];
                auto gated = [&](float x, float by, float high, float low, int column) {
                    const float gate = kDecays ? exp2f((b.x - high) + (b.y - low)) : 1.f;
                    return column <= last ? by * gate * x : 0.f;
                };
                x = {gated(x.x, by.x, before.x, before.y, column),
                     gated(x.y, by.y, before.z, before.w, column + 1)};
            }
        }
    store_panels<T, kChunk>(shared_address(&tile), 16 * warp, scores);
}

// Waits until all walkers are done with the step before, and so with its scores. NOTES: this costs
// nothing: the walker that is ahead would wait for the other one's scores in any case.
template <class C> __device__ inline void wait_scores_read(StatesMemory<C>& smem, int step) {
    if (step == 0) return;
    const Use<StatesMemory<C>::kStages> before(step - 1);
    wait(smem.free[before.slot], before.phase);
}

template <class C> struct StatesWalker : KeySteps<C> {
    using T = typename C::T;
    using typename KeySteps<C>::Tokens;

    // Issues the products of the scores that a walker makes.
    __device__ static inline void issue_reads_or_erasures(Tokens& scores, const StatesStage<C>& stage,
                                                          bool reads) {
        issue_scores<T, C::kDimV>(scores, reads ? stage.dout : stage.dv, stage.writes);
    }
    __device__ static inline void round_reads_or_erasures(ChunkScores<C>& to, Tokens& scores,
                                                          const StatesGates& gates, const StatesGlobals& g,
                                                          bool reads) {
        pin(scores);
        auto& tile = reads ? to.reads : to.erasures;
        const float factor = reads ? g.scale : -1.f;
        g.g.data ? round_scores<T, true>(tile, scores, gates, factor, !reads)
                 : round_scores<T, false>(tile, scores, gates, factor, !reads);
    }
};

}  // namespace tfla_tk::delta_rule
