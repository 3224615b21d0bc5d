// What KDA's walks over the chunks share, the forward's and its mirror backward in time: tiles, warpgroup
// roles, shared memory. Where both have an operand for the same purpose it has one name here:
//              values    results    entering                    leaving
//   forward    V         O          the first state             the last one
//   mirror     dO        R'         gradient of the last one    of the first one
#pragma once

#include "common/register_steps.cuh"
#include "common/store_rows.cuh"
#include "common/tile_loader.cuh"
#include "kda/state_fragments.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::kda {

using namespace kittens;

// kMirrors: it goes from the last chunk to the first.
template <class Type, int kDim, int kCount, bool kMirrors> struct WalkConfig {
    using T = Type;
    static constexpr bool kBackward = kMirrors;
    static constexpr int kDimK = kDim, kWalkers = kCount, kThreads = 128 * (1 + kWalkers);
    static constexpr int kProducerRegisters = 40, kWalkerRegisters = 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters <=
                  65536 / kThreads / 8 * 8 * (1 + kWalkers));
    // Chunks in shared memory. NOTES: where not all of three fit, A and P have two: the tiles are needed
    // first, and results stay in the place of values until they are stored.
    static constexpr int kStages = 3, kMatrixStages = kDimK == 128 && kWalkers == 2 ? 2 : 3;
    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

// The (sequence, head, columns of V) of a CTA.
struct Task {
    int batch, head, column;  // column: the first one
    int first_row, tokens;    // tokens < 0: nothing to do
    int chunks, first_slot;   // first_slot: of its chunks
    int64_t state;            // sequence * heads + head

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        return {g.packed() ? 0 : s.sequence,
                head,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                g.packed() ? s.first_row / kChunk + s.sequence : 0,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }

    // The chunk of a step of the walk.
    template <class C> __device__ inline int chunk_of(int step) const {
        return C::kBackward ? chunks - 1 - step : step;
    }
};

struct WalkGlobals {
    TensorMap tiles;  // boxes of 64 tokens of [batch * heads, slots * kTiles * 64, K]
    TensorMap a, p, values;
    ResultMaps results;
    const void* factors;  // [batch * heads, slots]
    Cut cut;
    const float* entering;  // null: zero
    float* leaving;         // null: not wanted
    uint4* states;          // StateFragments: of every chunk the state that enters it; null: not wanted
    int heads, seq;
    int slots, groups;  // as of StateFragments
    int dim_k, dim_v;
    int ctas;  // per sequence and head

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

template <class C> struct WalkMemory {
    typename C::Tile tiles[C::kStages][kTiles];
    struct {
        typename C::Square a, p;
    } matrices[C::kMatrixStages];
    typename C::Columns values[C::kStages][C::kWalkers];  // then results, until these are stored
    WalkFactors<C::kDimK> factors[C::kStages];
    float ones[C::kDimK];           // by which S is scaled behind the last chunk
    semaphore arrived[C::kStages];  // all of a chunk
    semaphore free[C::kStages];     // a chunk may be loaded again, but for values, which results follow
    semaphore out_ready[C::kWalkers][C::kStages];
    semaphore tail_landed[C::kWalkers];
    Task task;

    __device__ inline void init_barriers() {
        constexpr int kOfTiles = 1, kOfMatrices = 1;
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], kOfTiles + kOfMatrices + C::kWalkers);
            init_warp_barrier(free[i], 4 * C::kWalkers);
            for (auto& of_walker : out_ready) init_warp_barrier(of_walker[i], 4);
        }
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::kda
