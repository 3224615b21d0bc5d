// What the walkers of both walks over the states do alike.
//
// A walker is a warpgroup that owns 64 columns of K. It holds the state, or its gradient, of these (64 x V)
// in fp32 and computes results transposed (key_steps.cuh). The scores alone are shared: each walker
// makes one of the two tiles.
#pragma once

#include "delta_rule/backward/key_steps.cuh"
#include "delta_rule/backward/states/scores.cuh"

namespace tfla_tk::delta_rule {

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
