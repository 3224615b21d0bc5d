// Gates of a chunk: the cumulative log decay, and the factors of a walk per token.
#pragma once

#include <type_traits>

#include "common/sync.cuh"
#include "common/warp.cuh"
#include "sequence/gate_loads.cuh"
#include "sequence/log_gates.cuh"
#include "sequence/token_factors.cuh"

namespace tfla_tk::delta_rule {

// In the place of what a kernel has no need of.
struct Nothing {};

// log2 of the decay from the chunk's start up to and with each of the lane's tokens 2 l and 2 l + 1, by one
// warp.
__device__ inline TwoPairs cumulative_log2_decay(float2 log_decay) {
    return inclusive_sums({log2_exp(log_decay.x), log2_exp(log_decay.y)}, fresh_laneid());
}

// The same of all tokens, as high and low parts.
struct alignas(16) Log2Decay {
    float2 of[kChunk];

    // Of tokens 2 l and 2 l + 1, by lane l.
    __device__ inline void write(int lane, const TwoPairs& b) {
        const auto [x, y] = b;
        *reinterpret_cast<float4*>(&of[2 * lane]) = {x.high, x.low, y.high, y.low};
    }
};

// Of walks that make P.
template <bool kIsThere> using Log2DecayIf = std::conditional_t<kIsThere, Log2Decay, Nothing>;

// Decays of the lane's two tokens: from the chunk's start to each, from each to the chunk's end, and over the
// whole chunk.
struct Decays {
    float2 to_token, to_end;
    float whole;

    __device__ inline explicit Decays(float2 log_decay) : Decays(cumulative_log2_decay(log_decay)) {}
    __device__ inline explicit Decays(const TwoPairs& cumulative) {
        const auto [x, y] = cumulative;
        const FloatPair end = of_last_lane(y);
        to_token = {exp2f(x.high), exp2f(y.high)};
        to_end = {exp2f(rounded_sum(end, -x)), exp2f(rounded_sum(end, -y))};
        whole = exp2f(end.high);
    }
};

// beta as a product, written * rest. The forward leaves the `writes` of its chunks for the backward: written
// U', rounded. The rest follows where beta U' is used. Of a token with the decay `kept` = e^{b_L - b} to the
// chunk's end:
// - Where it hardly decays, kept is in `written`. Then the writes are the operand that the forward adds to
//   the state, and the left walk adds the same one. It has to, since in the forward each token corrects the
//   rounding errors of those before it. Where it decays faster the errors are forgotten, and kept may be too
//   small.
// - Where it hardly writes, beta is not in `written`, since dbeta needs U'.
// NOTES: all kernels compute the same kept, bit for bit, so they agree on what hardly decays.
__device__ inline bool hardly_decays(float kept) { return kept >= 1.f / 4; }
__device__ inline bool hardly_writes(float beta) { return !(fabsf(beta) >= 1.f / 64); }

__device__ inline float written_part(float beta, float kept) {
    return (hardly_writes(beta) ? 1.f : beta) * (hardly_decays(kept) ? kept : 1.f);
}
__device__ inline float rest_part(float beta, float kept) {
    return (hardly_writes(beta) ? beta : 1.f) / (hardly_decays(kept) ? kept : 1.f);
}
// rest kept: times the writes this is what a token adds to the state.
__device__ inline float update_part(float beta, float kept) {
    return (hardly_writes(beta) ? beta : 1.f) * (hardly_decays(kept) ? 1.f : kept);
}
__device__ inline float2 written_part(float2 beta, float2 kept) {
    return {written_part(beta.x, kept.x), written_part(beta.y, kept.y)};
}
__device__ inline float2 rest_part(float2 beta, float2 kept) {
    return {rest_part(beta.x, kept.x), rest_part(beta.y, kept.y)};
}
__device__ inline float2 update_part(float2 beta, float2 kept) {
    return {update_part(beta.x, kept.x), update_part(beta.y, kept.y)};
}

// This lane's factors of all tokens, in registers. NOTES: beside GEMMs a load from shared memory takes some
// 200 cycles. So a walker reads what its chain needs one step ahead; pinned, since ptxas would read it late.
struct LaneFactors {
    TokenFactors::Columns columns[kChunk / 16];

    __device__ inline LaneFactors(const TokenFactors& factors, int lane) {
#pragma unroll
        for (int j = 0; j < kChunk / 16; j++) {
            columns[j] = factors.columns(j, lane);
            pin(columns[j].of);
        }
    }
    __device__ inline const TokenFactors::Columns& of(int j) const { return columns[j]; }
};

// The same, read where they are used.
struct LateFactors {
    const TokenFactors& factors;
    int lane;

    __device__ inline LateFactors(const TokenFactors& factors, int lane) : factors(factors), lane(lane) {}
    __device__ inline TokenFactors::Columns of(int j) const { return factors.columns(j, lane); }
};

// The same by a lane that is asked for anew each time, to save a register.
struct FactorsAnew {
    const TokenFactors& factors;

    __device__ inline explicit FactorsAnew(const TokenFactors& factors) : factors(factors) {}
    __device__ inline TokenFactors::Columns of(int j) const { return factors.columns(j, fresh_laneid()); }
};

// Where a warp loads the gates of a walk's next steps: of several steps to shared memory, or of one step to
// registers.
struct GateRing {
    static constexpr int kSteps = 4;
    GateCopies::Words decays[kSteps], betas[kSteps];
};
struct GateRegisters {
    static constexpr int kSteps = 1;
    uint2 decays[kSteps], betas[kSteps];
};
// Of walks that have the gates in shared memory.
template <bool kIsThere> using GateRingIf = std::conditional_t<kIsThere, GateRing, Nothing>;

// Calls scan(ring) with that of a walk, or with registers.
template <class Ring, class Scan> __device__ inline void with_gate_ring(Ring& of_walk, Scan scan) {
    if constexpr (std::is_same_v<Ring, GateRing>) {
        scan(of_walk);
    } else {
        GateRegisters registers;
        scan(registers);
    }
}

// Loads gates Ring::kSteps steps before they are scanned.
template <class Ring> class GatesAhead {
    Ring& ring;
    GateCopies decays, betas;
    int tokens, decaying;  // of the task

  public:
    static constexpr int kSteps = Ring::kSteps;

    // Without a gate `decay` no token decays.
    template <class Task>
    __device__ inline GatesAhead(Ring& ring, const GateWords& decay, const GateWords& beta, const Task& task)
        : ring(ring),
          decays(decay, task.batch, task.head, task.first_row),
          betas(beta, task.batch, task.head, task.first_row),
          tokens(task.tokens),
          decaying(decay.data ? task.tokens : 0) {}

    // Starts the loads of a step, by a whole warp, in the order of the steps; of none for a chunk before the
    // first one or past the last one. A step's loads take the place of those kSteps steps before.
    __device__ inline void load(int step, int chunk) {
        const int slot = step % kSteps;
        decays.start(ring.decays[slot], chunk, decaying);
        betas.start(ring.betas[slot], chunk, tokens);
        commit_copies();
    }
    // The gates of the lane's two tokens in a step. The loads of this step and of the kSteps - 1 steps behind
    // it have been started.
    struct Pairs {
        float2 log_decay, beta;
    };
    __device__ inline Pairs take(int step) const {
        wait_copies<kSteps - 1>();
        const int slot = step % kSteps;
        return {decays.of(ring.decays[slot]), betas.of(ring.betas[slot])};
    }
};

}  // namespace tfla_tk::delta_rule
