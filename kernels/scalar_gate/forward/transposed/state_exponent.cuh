// The scale of the forward's state in fp16 at K = 256. Registers hold C / 2^log2.
//
// In bf16 the decay of the state is deferred (DeferredDecay), so registers may hold up to 2^32 C; fp16
// overflows at 2^16. So here the state runs ahead of its decay: when it is multiplied, it is multiplied by
// 2^-kAhead more, and then not again until later chunks have decayed by that. Meanwhile numbers below 2^-14
// lose digits. Samples of keys and values tell whether that matters (RunAhead); where it does, the state is
// multiplied in every chunk.
//
// Without stabiliser 2^log2 also follows the largest weight in C, as a power of two, so that nothing is lost
// where all weights are small, as with a nearly closed sigmoid gate. With the exponential gate the stabiliser
// makes the largest weight 1.
#pragma once

#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// A lane's sample: four elements of k and of v of every second token of a chunk.
struct SampledToken {
    uint2 key{}, value{};

    // The lane's token of a chunk.
    __device__ static inline int of_lane() { return 2 * fresh_laneid(); }

    __device__ inline SampledToken(const Globals& g, const Task& task, int chunk) {
        const int lane = fresh_laneid(), row = chunk * kChunk + of_lane();
        if (row >= task.tokens) return;
        auto load = [&](const Operand& x, int head, int column) {
            const auto* rows = static_cast<const __half*>(x.data) + task.batch * x.batch_stride +
                               head * x.head_stride + (task.first_row + row) * x.row_stride;
            return __ldg(reinterpret_cast<const uint2*>(rows + column));
        };
        key = load(g.keys, task.key_head, 4 * ((5 * lane + chunk) % 32));  // K > 128 here
        value = load(g.values, task.head, lane * g.dim_v / 128 * 4);
    }

    __device__ static inline float mean_square(uint2 x) {
        const float2 a = to_float2(reinterpret_cast<const __half2&>(x.x));
        const float2 b = to_float2(reinterpret_cast<const __half2&>(x.y));
        return .25f * (a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
    }
};

constexpr float kAhead = 10.f, kAheadOfSlow = 4.f;  // log2; NOTES: less for slow decays, as in DeferredDecay

// Replaces DeferredDecay with the exponential gate. C is 2^log2 times what the registers hold, and log2 >= 0.
struct PrescaledDecay {
    static constexpr bool kFollowsWeights = false, kRunsAhead = true;

    float log2 = 0.f;
    bool may_run_ahead = false;  // result of RunAhead

    __device__ inline explicit PrescaledDecay(bool) {}

    __device__ inline float ahead() const { return log2; }

    // Adds a chunk's decay, log2. Returns the factor on the state. settle: log2 must become 0.
    __device__ inline float add(float decay, bool settle) {
        log2 += decay;
        const float most = may_run_ahead && !settle ? kAhead : 0.f;
        if (log2 >= 0.f && log2 <= most) return 1.f;
        const float next = decay > -1.f ? fminf(most, kAheadOfSlow) : most;
        const float due = exp2f(log2 - next);
        log2 = next;
        return due;
    }
};

// Replaces DeferredDecay for gates that are not stabilised: 2^log2 also follows the largest weight in C.
struct FollowedWeights {
    static constexpr bool kFollowsWeights = true, kRunsAhead = true;

    float log2 = 0.f;
    float largest_weight;        // in C, log2
    bool may_run_ahead = false;  // result of RunAhead

    // given: whether there is an initial state, whose weight counts as 1.
    __device__ inline explicit FollowedWeights(bool given) : largest_weight(given ? 0.f : -1e30f) {}

    // log2 headroom above the largest weight in C.
    __device__ inline float ahead() const { return log2 - largest_weight; }

    // Adds a chunk: its decay and the largest weight that it adds, log2. Returns the factor on the state.
    __device__ inline float add(float decay, float added) {
        log2 += decay;
        largest_weight = fmaxf(largest_weight + decay, added);
        // 1 more, since log2 is rounded up to an integer
        const bool stays = ahead() >= 0.f && ahead() <= (may_run_ahead ? kAhead + 1.f : 1.f);
        const float next =
            ceilf(largest_weight) + (may_run_ahead ? (decay > -1.f ? kAheadOfSlow : kAhead) : 0.f);
        const float due = stays ? 0.f : fminf(log2 - next, 15.f);  // larger only for a state of zeros
        log2 = stays ? log2 : next;
        return exp2f(due);
    }
};

// Decides from samples of keys and values, in every kEvery-th chunk, whether the state may run ahead.
// NOTES: not more often, since its instructions evict others from the instruction cache.
//
// The rounding error of small scaled values is multiplied by keys, whatever the weights. So the state, of
// which the chunk's own contribution is a lower bound, is compared with the keys.
struct RunAhead {
    static constexpr int kEvery = 16;
    // squares of C, relative to its largest weight, over squares of keys: a fading maximum over the looks
    float ratio = 0.f;

    // ahead: the policy's, when the gates were written.
    __device__ inline bool look(const SampledToken& x, const GateStage& gates, float ahead) {
        constexpr float kLeastKey = .25f;  // lower bound, so that the state itself keeps its digits
        constexpr float kLeastRatio = .25f;
        const float key = SampledToken::mean_square(x.key);
        const float weight = gates.key_scale[SampledToken::of_lane()] * exp2f(ahead);
        const float state = warp_max(weight * weight * key) * warp_max(SampledToken::mean_square(x.value));
        const float now = state / fmaxf(warp_max(key), kLeastKey);
        ratio = fmaxf(now, .25f * ratio);  // a chunk may add less than the state already has
        return ratio >= kLeastRatio;
    }
};

}  // namespace tfla_tk::mlstm
