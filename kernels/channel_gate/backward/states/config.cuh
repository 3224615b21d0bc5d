// Tiles, roles of the warps and shared memory of the walks over the states.
//
// Both walks are one program. `Readers` are what reads the state that the walk carries, `writers` what writes
// to it, each with its rows of values:
//             readers, with   writers, with   state
//     left    q        dO     k        V      S
//     right   k        V      q        dO     dS
// Results take the place of readers: dq of the left walk, dk of the right one.
#pragma once

#include <algorithm>

#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/walk.cuh"
#include "channel_gate/writers.cuh"

// Variants, to compare them: whether the right walk has `out` in the place of the gates; the most stages.
#ifndef TFLA_OUT_IN_PLACE
#define TFLA_OUT_IN_PLACE 0
#endif
#ifndef TFLA_MOST_STAGES
#define TFLA_MOST_STAGES 99
#endif

namespace tfla_tk::channel_gate {

enum class StateWalk { left, right };

constexpr int kSliceOfV = 256;  // of one of several launches
constexpr int kBlocksOfAnchor = kAnchorChunks * kChunk / kBlock;

template <class Type, int kTileOfV, int kCount, StateWalk kWhich> struct StatesConfig {
    using T = Type;
    static constexpr int kDimV = kTileOfV, kWalkers = kCount;
    static constexpr bool kIsLeft = kWhich == StateWalk::left;
    // Gate warps per walker, which take turns: each is at every kTurns-th block.
    static constexpr int kTurns = kWalkers == 1 && kDimV <= 128 ? 8 : 4;
    static constexpr int kGateWarps = kTurns * kWalkers;
    static constexpr bool kTakesSlices = kDimV == kSliceOfV;  // of V, see slices.cuh
    // Whether what readers see of the state takes the place of the gates. There the left walk has q dq.
    static constexpr bool kOutInPlace = TFLA_OUT_IN_PLACE && !kIsLeft && !kTakesSlices;
    static constexpr int kThreads = 32 * (kGateWarps + 4 * kWalkers);
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever. A lone walker's
    // CTA has enough for all. A warp more, to load, would leave too few of them: it takes as many from each
    // quarter of the multiprocessor as there are for five warps.
    static constexpr int kGateRegisters = 120, kWalkerRegisters = 136;  // where there are two walkers
    static_assert(kWalkers == 1 || kGateRegisters + kWalkerRegisters <= 2 * (65536 / kThreads));

    using Values = PanelTile<T, kBlock, kDimV>;
    using Columns = PanelTile<T, kBlock, kWalkerColumns>;  // of K, of one walker
};

// A result as it is stored: boxes of a block and of one row.
struct BlockMaps {
    TensorMap box, row;
};

// Fields as in bindings/params_backward.h. All maps have boxes of a block.
struct StatesGlobals {
    TensorMap readers, writers, of_readers, of_writers, gates;
    DType g_dtype;
    BlockMaps result;
    BlockMaps inflow, dg;  // unless dg is needed: of no tensor
    Cut cut;
    int heads, seq, dim_k, dim_v;
    int ctas;          // per sequence and head
    int anchor_slots;  // per head
    int block_slots;   // likewise, of `sums`
    const float* entering;
    const float* d_last;
    const float *borders, *d_borders;
    float* flows;
    uint4* anchors;
    float scale;
    bool needs_dg;
    int row_of_state;        // columns of all slices of V
    void* sums;              // SumsOfBlock
    bool is_first, is_last;  // of the launches for slices of V

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
    template <class C> __device__ inline bool adds() const { return C::kTakesSlices && !is_first; }
    template <class C> __device__ inline bool makes_results() const { return !C::kTakesSlices || is_last; }
    __device__ inline int parts() const { return (dim_k + 15) / 16; }  // of anchors
    __device__ inline bool float_gates() const { return g_dtype == DType::float32; }
    // Of a block's gates of 64 channels.
    __device__ inline uint32_t gate_row_bytes() const { return kBlockChannels * (float_gates() ? 4 : 2); }
};

// A CTA's task; its column is of K.
struct StatesTask : Task {
    int blocks;
    int first_slot;  // of the segment's chunks

    // Called by whole warps.
    template <class C> __device__ static inline StatesTask of_block(const StatesGlobals& g, int block) {
        const Task task = Task::of_block<C>(g, block);
        const int sequence = static_cast<int>(task.state / g.heads);
        return {task, (task.tokens + kBlock - 1) / kBlock,
                task.first_chunk +
                    (g.packed() ? (task.first_row - task.first_chunk * kChunk) / kChunk + sequence : 0)};
    }
    template <class C> __device__ inline int block_of(int step) const {
        return C::kIsLeft ? step : blocks - 1 - step;
    }
    __device__ inline int row_of(int block) const { return first_row + block * kBlock; }
    __device__ inline int tokens_from(int block) const { return tokens - block * kBlock; }
    // Whether there is an anchor before a block.
    __device__ inline bool is_anchor(int block) const {
        return block > 0 && block < blocks && block % kBlocksOfAnchor == 0;
    }
};

// 64 columns of K of a block.
template <class C> struct StatesColumns {
    typename C::Columns readers;  // then the result, until it is stored
    typename C::Columns writers;  // then the high parts of what is written to the state
    // Or numbers of 16 bits; then the low parts of what is written to the state; then q dq, or dg.
    alignas(1024) float gates[kBlock][kBlockChannels];
    static_assert(sizeof(gates) >= sizeof(writers));
};

template <class C, bool kIsLeft> struct StatesStage {
    typename C::Values of_readers, of_writers;
    StatesColumns<C> columns[C::kWalkers];
};
template <class C> struct StatesStage<C, false> : StatesStage<C, true> {
    float inflow[C::kWalkers][kBlock][kBlockChannels];  // then sums of q dq - k dk in the block
};

constexpr int kOutRow = 68;  // floats; NOTES: a walker's stores meet no bank twice
static_assert(kOutRow * sizeof(float) % 16 == 0);

// Where a token's row of `out` begins, and what its bytes are swizzled by. NOTES: in place of the gates there
// is no room between rows, so that a walker's stores meet no bank twice by the swizzle.
template <class C> __device__ constexpr uint32_t out_row(int token) {
    return token * (C::kOutInPlace ? kFloatRow : kOutRow * 4);
}
template <class C> __device__ constexpr uint32_t out_swizzle(int token) {
    return C::kOutInPlace ? token / 2 % 4 * 32 : 0;
}

// What a walker and its gate warps tell each other, by gate warp; and a gate warp keeps.
template <class C> struct alignas(16) StatesExchange {
    // what readers see of the state, before their gates
    float out[C::kOutInPlace ? 1 : C::kGateWarps][kBlock][kOutRow];
    float products[C::kGateWarps][kBlock][kBlock];  // of the values of readers and writers
    float carry[C::kGateWarps][kBlockChannels];     // the sum of q dq - k dk from this block on
    float flow[C::kWalkers][kBlockChannels];        // the same behind a block, at an anchor
};

template <class C> struct StatesMemory {
    using Stage = StatesStage<C, C::kIsLeft>;
    static constexpr int kMost = std::min(C::kTurns + 4, TFLA_MOST_STAGES),
                         kRest = 2048;  // kRest: bytes of barriers and task, and a margin
    static constexpr int kOfStage = sizeof(Stage) + C::kWalkers * kBlockChannels * sizeof(float);
    static constexpr int kStages =
        std::min<int>((MAX_SHARED_MEMORY - sizeof(StatesExchange<C>) - kRest) / kOfStage, kMost);
    static_assert(kStages >= C::kTurns);
    // tiles of 128 bytes a row, where TMA and wgmma expect them
    static_assert(alignof(Stage) == 1024 && sizeof(StatesStage<C, true>) % 1024 == 0);
    static_assert(alignof(StatesColumns<C>) == 1024 && sizeof(typename C::Values) % 1024 == 0);

    Stage stages[kStages];  // blocks
    StatesExchange<C> exchange;
    alignas(16) float decay[kStages][C::kWalkers][kBlockChannels];  // e^{b_L}

    semaphore arrived[kStages];               // all tiles of a block
    semaphore written[kStages][C::kWalkers];  // by the gate warp: writers and decay are ready
    semaphore free[kStages];
    semaphore out_ready[C::kGateWarps], out_free[C::kGateWarps], carry_ready[C::kGateWarps];
    semaphore tail_landed;
    StatesTask task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < kStages; i++) {
            init_semaphore(arrived[i], 1);
            for (auto& of_walker : written[i]) init_warp_barrier(of_walker, 1);
            init_warp_barrier(free[i], 5 * C::kWalkers);  // a gate warp and four of the walker each
        }
        for (int i = 0; i < C::kGateWarps; i++) {
            init_warp_barrier(out_ready[i], 4);
            init_warp_barrier(out_free[i], 1);
            init_warp_barrier(carry_ready[i], 1);
        }
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

// A gate warp's number, of those of all walkers: the one of `walker` that is at the walk's `step`.
template <class C> __device__ inline int gate_warp_of(int walker, int step) {
    return walker * C::kTurns + step % C::kTurns;
}
// The one that would be at the step before the first. Its carry is free until its first step, which follows
// the first step's.
template <class C> __device__ inline int gate_warp_before_all(int walker) {
    return gate_warp_of<C>(walker, C::kTurns - 1);
}

}  // namespace tfla_tk::channel_gate
