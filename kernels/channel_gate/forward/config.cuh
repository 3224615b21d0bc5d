// Tiles, roles of the warps and shared memory of the forward.
#pragma once

#include "channel_gate/middle.cuh"
#include "channel_gate/walk.cuh"

namespace tfla_tk::channel_gate {

template <class Type, int kDim, int kCount, Schedule kOrder> struct ForwardConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount;
    static constexpr bool kSequential = kOrder == Schedule::sequential;
    static constexpr bool kBackward = false;  // in time
    static constexpr bool kTwoParts = true;   // of the operands of scores around a middle

    // Eight gate warps, as one team or as two that take turns: a chunk with K = 64 has work for four.
    static constexpr int kParts = GateWarp<T, kDimK>::kParts;  // times 64 channels
    static constexpr int kTeamWarps = GateWarp<T, kDimK>::kWarps, kTeams = 8 / kTeamWarps;
    static constexpr int kGateWarps = kTeams * kTeamWarps;
    static constexpr int kThreads = 32 * (kGateWarps + 4 * kWalkers);
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever; and no warp more
    // to load and store, which would leave less of them at the launch than all roles together need.
    static constexpr int kGateRegisters = kWalkers == 1 ? 136 : kDimK == 64 ? 120 : 112;
    static constexpr int kWalkerRegisters = kWalkers == 1 ? 232 : kDimK == 64 ? 136 : 144;
    static_assert(kGateWarps / 4 * kGateRegisters + kWalkers * kWalkerRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128));

    // Chunks in shared memory. Those that gate warps are at, the one before, which the walkers are at, and of
    // the operands the one after.
    static constexpr int kScoreSlots = kTeams + 1, kStages = kTeams + 2;

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

// The mirror walk of the backward.
template <class T, int kDim, int kCount, Schedule kOrder>
struct MirrorConfig : ForwardConfig<T, kDim, kCount, kOrder> {
    static constexpr bool kBackward = true;
};

struct ForwardGlobals {
    TensorMap q, k, v;  // boxes of a chunk
    LogGates gates;
    TensorMap o, o_box, o_row;  // boxes of a chunk, of 16 rows and of one
    Cut cut;
    int heads, seq, dim_k, dim_v;
    int ctas;  // per sequence and head
    float scale;
    const float* initial;
    float* last;
    int other_dim_k;
    bool adds;
    const float* borders;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

template <class C> struct ForwardMemory {
    struct {
        typename C::Tile q, k;
    } operands[C::kStages];
    // of the gate warps' blocks: log gates, then operands of levels
    alignas(1024) unsigned char work[C::kScoreSlots][C::kTeamWarps * kBlockBytes];
    typename C::Columns values[C::kStages][C::kWalkers];  // then O, until it is stored
    typename C::Square p[C::kScoreSlots];
    float decay[C::kScoreSlots][2][C::kDimK];  // by levels e^{b_L}; else those before and behind the middle
    float ones[C::kDimK];
    uint32_t lanes[32];        // their numbers
    int mild[C::kScoreSlots];  // whether the chunk is around its middle
    int steps[C::kGateWarps];  // that a gate warp is at

    semaphore arrived[C::kStages];             // q and k of a chunk
    semaphore gates_arrived[C::kScoreSlots];   // log gates
    semaphore values_arrived[C::kStages];      // V
    semaphore work_free[C::kScoreSlots];       // by the gate warps of a chunk
    semaphore operands_agreed[C::kStages];     // by the other CTA of a cluster: places of q and k are free
    semaphore work_agreed[C::kScoreSlots];     // there, those of log gates
    semaphore operands_ready[C::kScoreSlots];  // by them: what the walkers need
    semaphore done[C::kStages];                // by the walkers: O is there, all else of the chunk is free
    semaphore tail_landed[C::kTeams][2];       // of each team's warps that load q and k, and V
    Task task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 2);
            init_semaphore(operands_agreed[i], 1);
            init_semaphore(values_arrived[i], C::kWalkers);
            init_warp_barrier(done[i], 4 * C::kWalkers);
        }
        for (int i = 0; i < C::kScoreSlots; i++) {
            init_semaphore(gates_arrived[i], 1);
            init_semaphore(work_agreed[i], 1);
            init_warp_barrier(work_free[i], C::kTeamWarps);
            init_warp_barrier(operands_ready[i], C::kTeamWarps);
        }
        for (auto& of_team : tail_landed)
            for (auto& landed : of_team) init_semaphore(landed, 1);
        publish_barriers();
    }

    // Before the first chunk, by all threads of the CTA, which must meet afterwards. NOTES: the gate warps
    // never write P above the diagonal blocks of its first rows.
    __device__ inline void init_tiles() {
        auto* const scores = reinterpret_cast<uint4*>(p);
        for (int i = threadIdx.x; i < sizeof(p) / sizeof(uint4); i += C::kThreads) scores[i] = {0, 0, 0, 0};
        if (threadIdx.x < 32) lanes[threadIdx.x] = threadIdx.x;
        if (threadIdx.x < C::kDimK) ones[threadIdx.x] = 1.f;
        fence_async_proxy();
    }
};

}  // namespace tfla_tk::channel_gate
