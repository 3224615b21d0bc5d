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

namespace tfla_tk::channel_gate {

enum class StateWalk { left, right };

constexpr int kSliceOfV = 256;  // columns of V of a launch, where there are several launches
constexpr int kBlocksOfAnchor = kAnchorChunks * kChunk / kBlock;

// A strip is 64 columns of K. Two walkers have a strip each, or with more than 128 columns of V half of these
// each, of one strip: each then gives its part of all sums over V.
template <class Type, int kTileOfV, int kCount, StateWalk kWhich> struct StatesConfig {
    using T = Type;
    static constexpr int kDimV = kTileOfV, kWalkers = kCount;
    static constexpr bool kIsLeft = kWhich == StateWalk::left;
    static constexpr bool kSplitsV = kDimV > 128;
    static constexpr int kStrips = kSplitsV ? 1 : kWalkers;
    static constexpr int kWalkersOfStrip = kWalkers / kStrips, kWalkerV = kDimV / kWalkersOfStrip;
    static_assert(kWalkersOfStrip == 1 + kSplitsV);
    // Gate warps per strip, which take turns: each is at every kTurns-th block.
    static constexpr int kTurns = kStrips == 1 ? 8 : 4;
    static constexpr int kGateWarps = kTurns * kStrips;
    static constexpr bool kTakesSlices = kDimV == kSliceOfV;  // of V, see slices.cuh
    // Whether what readers see of the state takes the place of the gates, and the second part of it that of
    // the writers.
    static constexpr bool kOutInPlace = kSplitsV;
    static constexpr int kThreads = 32 * (kGateWarps + 4 * kWalkers);
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever. A lone walker's
    // CTA has enough for all. A warp more, to load, would leave too few of them: it takes as many from each
    // quarter of the multiprocessor as there are for five warps.
    static constexpr int kGateRegisters = 120, kWalkerRegisters = 136;  // where there are two walkers
    static_assert(kWalkers == 1 || kGateRegisters + kWalkerRegisters <= 2 * (65536 / kThreads));

    using Values = PanelTile<T, kBlock, kDimV>;
    using Columns = PanelTile<T, kBlock, kWalkerColumns>;  // of K, of one strip

    // Of a walker, by its number.
    static constexpr __device__ int strip_of(int walker) { return kSplitsV ? 0 : walker; }
    static constexpr __device__ int part_of(int walker) { return kSplitsV ? walker : 0; }
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

    // Called by whole warps.
    template <class C> __device__ static inline StatesTask of_block(const StatesGlobals& g, int block) {
        Task task = Task::of_block<C>(g, block);
        task.column = block % g.ctas * C::kStrips * kWalkerColumns;
        return {task, (task.tokens + kBlock - 1) / kBlock};
    }
    template <class C> __device__ inline int block_of(int step) const {
        return C::kIsLeft ? step : blocks - 1 - step;
    }
    // Whether this CTA makes the products of values: for its results, or to leave them (slices.cuh).
    template <class C> __device__ inline bool makes_products(const StatesGlobals& g) const {
        return g.template makes_results<C>() || column == 0;
    }
    __device__ inline int row_of(int block) const { return first_row + block * kBlock; }
    __device__ inline int tokens_from(int block) const { return tokens - block * kBlock; }
    // Whether there is an anchor before a block.
    __device__ inline bool is_anchor(int block) const {
        return block > 0 && block < blocks && block % kBlocksOfAnchor == 0;
    }
};

// The values of a block.
template <class C> struct StatesValues {
    typename C::Values of_readers, of_writers;
};

// Room behind the writers, so that a part of `out` has place there.
template <bool kIsThere> struct RoomForOut {
    alignas(1024) unsigned char bytes[2048];
};
template <> struct RoomForOut<false> {};

// A strip of a block.
template <class C, bool kIsLeft> struct StatesColumns {
    typename C::Columns readers;  // then the result, until it is stored
    typename C::Columns writers;  // then the high parts of what is written to the state
    [[no_unique_address]] RoomForOut<C::kSplitsV> room;
    // Log gates, of fp32 or of 16 bits; then the low parts of what is written to the state; where walkers
    // split V, then a part of `out`; then q dq (left) or dg (right).
    alignas(1024) float gates[kBlock][kBlockChannels];
    static_assert(sizeof(gates) >= sizeof(writers));
};
template <class C> struct StatesColumns<C, false> : StatesColumns<C, true> {
    float inflow[kBlock][kBlockChannels];  // then sums of q dq - k dk in the block
};

constexpr int kOutRow = 68;  // floats; NOTES: a walker's stores meet no bank twice
static_assert(kOutRow * sizeof(float) % 16 == 0);

// Where a token's row begins in `out`, and what the bytes in the row are XORed with. NOTES: in place of the
// gates there is no room between rows. There the XOR keeps a walker's stores from meeting a bank twice.
template <class C> __device__ constexpr uint32_t out_row(int token) {
    return token * (C::kOutInPlace ? kFloatRow : kOutRow * 4);
}
template <class C> __device__ constexpr uint32_t out_swizzle(int token) {
    return C::kOutInPlace ? token / 2 % 4 * 32 : 0;
}
// Where this lane's two channels of token first + i are in `out`. first: a multiple of four; 0 <= i < 4.
template <class C> __device__ __forceinline__ uint32_t own_out(uint32_t out, int first, int i, int lane) {
    const uint32_t of_first = out + out_row<C>(first) + ((8 * lane) ^ out_swizzle<C>(first));
    return (of_first ^ out_swizzle<C>(i)) + out_row<C>(i);
}

// What walkers and gate warps hand to each other, and what a gate warp keeps: one entry per gate warp or
// walker.
template <class C> struct alignas(16) StatesExchange {
    // what readers see of the state, before their gates
    float out[C::kGateWarps][C::kOutInPlace ? 1 : kBlock][kOutRow];
    float products[C::kGateWarps][kBlock][kBlock];  // of the values of readers and writers
    float carry[C::kGateWarps][kBlockChannels];     // the sum of q dq - k dk from this block on
    float flow[C::kWalkers][kBlockChannels];        // the same behind a block, at an anchor
    float border[C::kWalkers][kBlockChannels];      // likewise, over the border behind the segment
};

template <class C> struct StatesMemory {
    using Values = StatesValues<C>;
    using Columns = StatesColumns<C, C::kIsLeft>;
    // kMost: stages; kRest: bytes of barriers and task, with a margin
    static constexpr int kMost = C::kTurns + 4, kRest = 2048;
    static constexpr int kForBlocks = MAX_SHARED_MEMORY - sizeof(StatesExchange<C>) - kRest;
    static constexpr int kOfColumns = C::kStrips * (sizeof(Columns) + kBlockChannels * sizeof(float));
    // Blocks. Where two walkers split V, values leave as soon as these have read them, columns when results
    // are stored, so that values have a ring of their own.
    static constexpr int kOwnValues = C::kSplitsV ? 4 + C::kIsLeft : 0;
    static constexpr int kStages = std::min<int>(
        (kForBlocks - kOwnValues * sizeof(Values)) / (kOfColumns + (kOwnValues ? 0 : sizeof(Values))), kMost);
    static constexpr int kValueStages = kOwnValues ? kOwnValues : kStages;
    static_assert(kStages >= C::kTurns && (!kOwnValues || kStages >= 2 * kValueStages));
    // tiles of 128 bytes a row, where TMA expects them and ldmatrix may XOR addresses
    static_assert(alignof(Columns) == 1024 && sizeof(Columns) % 1024 == 0);
    static_assert(sizeof(typename C::Values) % 1024 == 0);

    Columns columns[kStages][C::kStrips];
    alignas(1024) Values values[kValueStages];
    StatesExchange<C> exchange;
    alignas(16) float decay[kStages][C::kStrips][kBlockChannels];  // e^{b_L}

    // NOTES: values_arrived, too, has a barrier per stage of the columns, even where values have a ring of
    // their own. Gate warps run ahead by more than a lap of that ring, so with a barrier per stage of it they
    // would take a phase for that of two laps before. And they lag behind the walkers by less than a lap of
    // it, whose loads are less than two laps ahead: hence the assertion.
    semaphore columns_arrived[kStages], values_arrived[kStages];
    semaphore written[kStages][C::kStrips];  // by the gate warp: writers and decay are ready
    semaphore read[kStages];                 // by two walkers of a strip: writers are in registers
    semaphore free[kStages];                 // where there is one ring
    semaphore out_ready[C::kGateWarps], carry_ready[C::kGateWarps];
    semaphore columns_tail, values_tail;  // where the last block's tiles land
    StatesTask task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < kStages; i++) {
            init_warp_barrier(columns_arrived[i], 1), init_warp_barrier(values_arrived[i], 1);
            for (auto& of_strip : written[i]) init_warp_barrier(of_strip, 1);
            init_warp_barrier(read[i], 4 * C::kWalkers);
            init_warp_barrier(free[i], 5 * C::kWalkers);  // a gate warp and four of the walker each
        }
        for (int i = 0; i < C::kGateWarps; i++) {
            init_warp_barrier(out_ready[i], 4 * C::kWalkersOfStrip);
            init_warp_barrier(carry_ready[i], 1);
        }
        init_semaphore(columns_tail, 1), init_semaphore(values_tail, 1);
        publish_barriers();
    }
};

// A gate warp's number, of those of all strips: the one of `strip` that is at the walk's `step`.
template <class C> __device__ inline int gate_warp_of(int strip, int step) {
    return strip * C::kTurns + static_cast<unsigned>(step) % C::kTurns;
}

}  // namespace tfla_tk::channel_gate
