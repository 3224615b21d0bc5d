// The scale of the forward's state in fp16 at K = 256 where gates are not stabilised: registers hold
// C / 2^log2. 2^log2 is one to two times the largest weight in C, so that nothing is lost where all weights
// are small, as with a nearly closed sigmoid gate. With the exponential gate the stabiliser makes the largest
// weight 1.
#pragma once

#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::mlstm {

// Replaces DeferredDecay.
struct FollowedWeights {
    static constexpr bool kFollowsWeights = true;

    float log2 = 0.f;
    float largest_weight;  // in C, log2

    // given: whether there is an initial state, whose weight counts as 1.
    __device__ inline explicit FollowedWeights(bool given) : largest_weight(given ? 0.f : -1e30f) {}

    // Adds a chunk: its decay and the largest weight that it adds, log2. Returns the factor on the state.
    __device__ inline float add(float decay, float added) {
        log2 += decay;
        largest_weight = fmaxf(largest_weight + decay, added);
        // 1 more, since log2 is rounded up to an integer
        if (log2 >= largest_weight && log2 <= largest_weight + 1.f) return 1.f;
        const float next = ceilf(largest_weight);
        const float due = fminf(log2 - next, 15.f);  // larger only for a state of zeros
        log2 = next;
        return exp2f(due);
    }
};

}  // namespace tfla_tk::mlstm
