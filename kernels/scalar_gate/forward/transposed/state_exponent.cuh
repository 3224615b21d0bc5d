// The units of the mLSTM forward's state in fp16 at K = 256.
//
// bf16 has the range to owe the state's decay for some chunks (OwedDecay): what the registers hold may grow
// by 2^32 over C. fp16 overflows at 2^16. So the state runs ahead of its decay instead: when a
// multiplication falls due it is multiplied with what the next chunks will decay by too, 2^-kAhead, and is
// the smaller for it until they have. That costs digits below 2^-14. Samples of keys and values tell whether
// they matter; where they do, the state pays in every chunk.
//
// Nor is C in its true scale with the sigmoid gate: units follow the largest weight in it, by powers of two.
// So nothing is lost where all weights are small, as those of a gate that is nearly closed. The exponential
// gate's largest weight is 1, by the stabiliser.
#pragma once

#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// Four numbers of the keys and of the values of every second token of a chunk, by lanes.
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
        key = load(g.keys, task.key_head, 4 * ((5 * lane + chunk) % 32));  // of more than 128 columns
        value = load(g.values, task.head, lane * g.dim_v / 128 * 4);
    }

    __device__ static inline float mean_square(uint2 x) {
        const float2 a = to_float2(reinterpret_cast<const __half2&>(x.x));
        const float2 b = to_float2(reinterpret_cast<const __half2&>(x.y));
        return .25f * (a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
    }
};

constexpr float kAhead = 10.f, kAheadOfSlow = 4.f;  // log2; NOTES: little where OwedDecay owes little

// In the place of OwedDecay, with the exponential gate. C is 2^log2 times what the registers hold, and that
// is not negative.
struct AheadOfDecay {
    static constexpr bool kFollowsWeights = false, kRunsAhead = true;

    float log2 = 0.f;
    bool may_run_ahead = false;  // as RunAhead finds

    __device__ inline explicit AheadOfDecay(bool) {}

    __device__ inline float ahead() const { return log2; }

    // Adds a chunk's decay, log2. Returns what the state is to be multiplied with. settle: log2 is to be 0.
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

// The same with the sigmoid gate, in units of the largest weight.
struct FollowedWeights {
    static constexpr bool kFollowsWeights = true, kRunsAhead = true;

    float log2 = 0.f;
    float largest_weight;        // in C, log2
    bool may_run_ahead = false;  // as RunAhead finds

    // given: a state to begin with, which counts as one of weight 1.
    __device__ inline explicit FollowedWeights(bool given) : largest_weight(given ? 0.f : -1e30f) {}

    // By how much more than its largest weight asks for.
    __device__ inline float ahead() const { return log2 - largest_weight; }

    // Adds a chunk: its decay and the largest weight that it adds with, log2. Returns what the state is to be
    // multiplied with.
    __device__ inline float add(float decay, float added) {
        log2 += decay;
        largest_weight = fmaxf(largest_weight + decay, added);
        // one more, since units are whole powers of two
        const bool stays = ahead() >= 0.f && ahead() <= (may_run_ahead ? kAhead + 1.f : 1.f);
        const float next =
            ceilf(largest_weight) + (may_run_ahead ? (decay > -1.f ? kAheadOfSlow : kAhead) : 0.f);
        const float due = stays ? 0.f : fminf(log2 - next, 15.f);  // more only of a state of zeros
        log2 = stays ? log2 : next;
        return exp2f(due);
    }
};

// Whether the state may run ahead, as samples of keys and values tell in every kEvery-th chunk.
// NOTES: seldom, since its instructions drive others out of the cache.
//
// What rounding takes from scaled values that are small is a matter of the keys, whatever their weights: so
// the state, as large at least as what the chunk adds to it, is compared with keys.
struct RunAhead {
    static constexpr int kEvery = 16;
    float ratio = 0.f;  // of squares of C, in units of its largest weight, to keys, as the last looks found

    // ahead: of the units, as the gates are written.
    __device__ inline bool look(const SampledToken& x, const GateStage& gates, float ahead) {
        constexpr float kLeastKey = .25f;  // the state itself has to keep its digits
        constexpr float kLeastRatio = .25f;
        const float key = SampledToken::mean_square(x.key);
        const float weight = gates.key_scale[SampledToken::of_lane()] * exp2f(ahead);
        const float state = warp_max(weight * weight * key) * warp_max(SampledToken::mean_square(x.value));
        const float now = state / fmaxf(warp_max(key), kLeastKey);
        ratio = fmaxf(now, .25f * ratio);  // a chunk may add less than there is
        return ratio >= kLeastRatio;
    }
};

}  // namespace tfla_tk::mlstm
