// Tiles, roles of the warps and shared memory of the forward.
#pragma once

#include "channel_gate/middle.cuh"
#include "channel_gate/walk.cuh"
#include "common/cluster.cuh"
#include "common/store_rows.cuh"

namespace tfla_tk::channel_gate {

// kCtas: CTAs of a cluster that take turns at the chunks, 1 or 2. Each makes what the walkers need of every
// second chunk and sends it to the other. Turn n of a CTA is at its n-th chunk of those.
template <class Type, int kDim, int kCount, int kCtas, bool kMirrors> struct WalkConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount, kMakers = kCtas;
    static constexpr bool kShares = kMakers > 1;
    static_assert(kMakers <= 2);
    static constexpr bool kBackward = kMirrors;  // in time

    // Eight gate warps, as one team or as two that take turns: a chunk with K = 64 has work for four.
    using GateWarp = channel_gate::GateWarp<T, kDimK, kBackward>;
    using AroundMiddle = channel_gate::AroundMiddle<T, kDimK, kBackward>;
    static constexpr int kParts = GateWarp::kParts;  // times 64 channels
    static constexpr int kTeamWarps = GateWarp::kWarps, kTeams = 8 / kTeamWarps;
    static constexpr int kGateWarps = kTeams * kTeamWarps;
    static constexpr int kThreads = 32 * (kGateWarps + 4 * kWalkers);
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever; and no warp more
    // to load and store, which would leave less of them at the launch than all roles together need.
    static constexpr int kGateRegisters = kWalkers == 1 ? 136 : kDimK == 64 ? 120 : 112;
    static constexpr int kWalkerRegisters = kWalkers == 1 ? 232 : kDimK == 64 ? 136 : 144;
    static_assert(kGateWarps / 4 * kGateRegisters + kWalkers * kWalkerRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128));

    // Chunks in shared memory that this CTA makes: those that gate warps are at, the one before, which the
    // walkers are at, and of the operands the one after. Where CTAs take turns the one after takes the place
    // of the one before: the walkers are done with that in half the time of a turn.
    static constexpr int kScoreSlots = kTeams + 1, kStages = kTeams + (kShares ? 1 : 2);
    static constexpr int kReceived = kShares ? kTeams : 0;  // chunks of the other CTA, in slots behind those
    // Of V, then O. Where CTAs take turns, and where there is no memory for more, walkers load and store for
    // themselves (columns.cuh) and have a place for V and one for O.
    static constexpr bool kOwnColumns = kShares || (kBackward && kDimK == 128 && kWalkers == 2);
    static constexpr int kColumnSlots = kOwnColumns ? 2 : kStages;
    static constexpr bool kTakesSlices = kDimK == 128;  // of K, a launch each (part.cuh)

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Scores = PanelTile<T, kChunk, kChunk, kBackward ? kLowRows : 0>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker

    // The step of the walk that a turn is at.
    __device__ static inline int step_of(int turn) {
        return kShares ? kMakers * turn + cta_in_cluster() : turn;
    }
    __device__ static inline bool makes(int step) { return !kShares || step % kMakers == cta_in_cluster(); }

    // Where a step's chunk is, and the phase of its barriers.
    struct Place {
        int slot;
        uint32_t phase;
    };
    template <int kSlots> __device__ static inline Place place_of(int step) {
        if (makes(step)) {
            const Use<kSlots> use(step / kMakers);
            return {use.slot, use.phase};
        }
        const Use<kReceived + !kShares> use(step / kMakers);
        return {kSlots + use.slot, use.phase};
    }
    __device__ static inline Place operands_of(int step) { return place_of<kStages>(step); }
    __device__ static inline Place scores_of(int step) { return place_of<kScoreSlots>(step); }
    __device__ static inline int values_of(int step) { return kOwnColumns ? 0 : Use<kStages>(step).slot; }
    __device__ static inline int out_of(int step) { return kOwnColumns ? 1 : Use<kStages>(step).slot; }
};

template <class T, int kDim, int kCount, int kCtas>
struct ForwardConfig : WalkConfig<T, kDim, kCount, kCtas, false> {};
// The mirror walk of the backward.
template <class T, int kDim, int kCount, int kCtas>
struct MirrorConfig : WalkConfig<T, kDim, kCount, kCtas, true> {};

// By levels e^{b_L}; else the factors before and behind the middle.
template <class C> struct alignas(16) Factors {
    float decay[2][C::kDimK];
    int mild;  // whether the chunk is around its middle
};

struct ForwardGlobals {
    TensorMap q, k, v;  // boxes of a chunk
    LogGates gates;
    ResultMaps o;
    Cut cut;
    int heads, seq, dim_k, dim_v;
    int ctas;                // per sequence and head
    float scale, out_scale;  // of operands and scores; of O; their product is s
    const float* initial;
    float* last;
    int other_dim_k;
    const float* borders;
    void* part;      // PartOfWarp
    int part_slots;  // per head: of chunks
    bool adds, leaves;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
    // Whether this launch begins with the part of the one before; whether it leaves one and writes no O.
    template <class C> __device__ inline bool adds_part() const { return C::kTakesSlices && adds; }
    template <class C> __device__ inline bool leaves_part() const { return C::kTakesSlices && leaves; }
};

template <class C> struct ForwardMemory {
    struct {
        typename C::Tile q, k;
    } operands[C::kStages + C::kReceived];
    // of the gate warps' blocks: log gates, then operands of levels
    alignas(1024) unsigned char work[C::kScoreSlots][C::kTeamWarps * kBlockBytes];
    typename C::Columns values[C::kColumnSlots][C::kWalkers];  // V and O
    typename C::Scores p[C::kScoreSlots + C::kReceived];
    Factors<C> factors[C::kScoreSlots + C::kReceived];
    float ones[C::kDimK];
    uint32_t lanes[32];        // their numbers
    int turns[C::kGateWarps];  // that a gate warp is at

    semaphore arrived[C::kStages];                                        // q and k of a chunk
    semaphore gates_arrived[C::kScoreSlots];                              // log gates
    semaphore values_arrived[C::kOwnColumns ? C::kWalkers : C::kStages];  // V: of a walker; of a chunk
    semaphore work_free[C::kScoreSlots];                                  // by the gate warps of a chunk
    // What the walkers need: by the gate warps, or received from the other CTA.
    semaphore operands_ready[C::kScoreSlots + C::kReceived];
    semaphore done[C::kStages + C::kReceived];  // by the walkers: O is there, all else of the chunk is free
    semaphore done_there[C::kStages];           // the same by those of the other CTA
    semaphore tail_landed[C::kTeams][2];        // of each team's warps that load q and k, and V
    semaphore tail_of_values[C::kWalkers];      // of walkers that load V
    Task task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 2);
            init_warp_barrier(done_there[i], 4 * C::kWalkers);
        }
        for (auto& of_slot : done) init_warp_barrier(of_slot, 4 * C::kWalkers);
        for (auto& of_slot : values_arrived) init_semaphore(of_slot, C::kOwnColumns ? 1 : C::kWalkers);
        for (int i = 0; i < C::kScoreSlots; i++) {
            init_semaphore(gates_arrived[i], 1);
            init_warp_barrier(work_free[i], C::kTeamWarps);
            init_warp_barrier(operands_ready[i], C::kTeamWarps);
        }
        for (int i = 0; i < C::kReceived; i++) init_semaphore(operands_ready[C::kScoreSlots + i], 1);
        for (auto& of_team : tail_landed)
            for (auto& landed : of_team) init_semaphore(landed, 1);
        for (auto& landed : tail_of_values) init_semaphore(landed, 1);
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
