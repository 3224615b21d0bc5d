// Tiles, warpgroup roles and shared memory of the backward's mirror walk.
#pragma once

#include "delta_rule/chunk_matrices/makers.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

template <class Type, int kDim, int kCount, Schedule kOrder> struct MirrorConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount;
    static constexpr Schedule kSchedule = kOrder;
    static constexpr int kMakers = makers_beside(kWalkers, kDimK);
    static constexpr int kThreads = 128 * (1 + kWalkers + kMakers);
    // Chunks in shared memory: of tiles and gates, which makers read ahead of the walker; and of the rest.
    static constexpr int kStages = kMakers > 0 ? 4 : kDimK == 64 ? 3 : 2;
    static constexpr int kReadyStages = kDimK == 64 ? 3 : 2, kMatrixStages = kReadyStages;
    using Registers = WalkRegisters<kWalkers, kMakers>;

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

struct MirrorGlobals : WalkGlobals {
    TensorMap dout, writes;        // boxes of a chunk
    TensorMap dv, dv_box, dv_row;  // boxes of a chunk, of 16 rows and of one
    TensorMap u, u_box, u_row;
    bool keep_u;
    float* dbeta;
    int64_t dbeta_part;  // elements from one part's to the next one's
    const float* d_last;
    float* d_initial;
};

// Factors of a chunk's tokens.
struct MirrorGates {
    TokenFactors update;  // e^{b_L - b}
    TokenFactors out;     // s e^b
    TokenFactors beta;
    TokenFactors minus_read;  // -e^b beta
    float decay;              // e^{b_L}
};

template <class C> struct MirrorStage {
    typename C::Tile keys, queries;
};
template <class C> struct MirrorReadyStage {
    typename C::Columns douts[C::kWalkers];   // dO, then dV, until it is stored
    typename C::Columns writes[C::kWalkers];  // U', then U where it is wanted, until it is stored
};

template <class C> struct MirrorMemory {
    MirrorStage<C> stages[C::kStages];
    ChunkMatrices<typename C::Square> matrices[C::kMatrixStages];
    MirrorReadyStage<C> ready_stages[C::kReadyStages];
    MirrorGates gates[C::kStages];
    MatrixGates matrix_gates[C::kMakers > 0 ? C::kStages : 0];
    semaphore arrived[C::kStages];     // tiles and gates, for makers
    semaphore ready[C::kReadyStages];  // all of a chunk, for walkers
    semaphore free[C::kStages];        // of tiles and gates
    MatricesFreed freed;
    semaphore out_ready[C::kWalkers][C::kReadyStages];
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
        for (auto& barrier : ready) init_semaphore(barrier, kMatrices + 2 * C::kWalkers);
        for (auto& of_walker : out_ready)
            for (auto& ready : of_walker) init_warp_barrier(ready, 4);
        freed.init(C::kWalkers);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
