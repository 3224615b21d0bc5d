// Tiles, warpgroup roles and shared memory of the forward's walk.
#pragma once

#include "delta_rule/chunk_matrices/makers.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

template <class Type, int kDim, int kCount, Schedule kOrder> struct ForwardConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount;
    static constexpr Schedule kSchedule = kOrder;
    static constexpr int kMakers = makers_beside(kWalkers, kDimK);
    static constexpr int kThreads = 128 * (1 + kWalkers + kMakers);
    // Chunks in shared memory: of tiles and gates, which makers read ahead of the walker; and of the rest.
    static constexpr int kStages = kMakers > 0 ? 4 : 3, kReadyStages = 3;
    static constexpr int kMatrixStages = kMakers > 1 ? 2 : 3;  // of A and P
    using Registers = WalkRegisters<kWalkers, kMakers>;

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

struct ForwardGlobals : WalkGlobals {
    TensorMap v;                // boxes of a chunk
    TensorMap o, o_box, o_row;  // boxes of a chunk, of 16 rows and of one
    TensorMap writes, writes_box, writes_row;
    bool keep_writes;
    const float* initial;
    float* last;
};

// Factors of a chunk's tokens.
struct ForwardGates {
    TokenFactors minus_read;  // -e^b
    TokenFactors out;         // s e^b
    TokenFactors update;      // beta e^{b_L - b}
    float decay;              // e^{b_L}
};

template <class C> struct ForwardStage {
    typename C::Tile keys, queries;
};

template <class C> struct ForwardMemory {
    ForwardStage<C> stages[C::kStages];
    ChunkMatrices<typename C::Square> matrices[C::kMatrixStages];
    typename C::Columns values[C::kReadyStages][C::kWalkers];  // then O, until it is stored
    ForwardGates gates[C::kStages];
    MatrixGates matrix_gates[C::kMakers > 0 ? C::kStages : 0];
    typename C::Columns writes[C::kWalkers];  // U', until it is stored
    semaphore arrived[C::kStages];            // tiles and gates, for makers
    semaphore ready[C::kReadyStages];         // all of a chunk, for walkers
    semaphore free[C::kStages];               // of tiles and gates
    MatricesFreed freed;
    semaphore out_ready[C::kWalkers][C::kReadyStages];
    semaphore writes_ready[C::kWalkers], writes_free[C::kWalkers];
    semaphore tail_landed[1 + C::kWalkers];  // of each loading warp
    TriangularMatrix triangular[C::kMakers];
    Task task;

    __device__ inline void init_barriers() {
        constexpr int kTiles = 2 + kArrivalsPerWarp;  // keys, queries and gates
        constexpr int kMatrices = C::kMakers > 0 ? kArrivalsPerWarp : 1 + kTiles;
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], kTiles);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        for (auto& barrier : ready) init_semaphore(barrier, kMatrices + C::kWalkers);
        for (int walker = 0; walker < C::kWalkers; walker++) {
            for (auto& ready : out_ready[walker]) init_warp_barrier(ready, 4);
            init_warp_barrier(writes_ready[walker], 4);
            init_warp_barrier(writes_free[walker], 1);
        }
        freed.init(C::kWalkers);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
