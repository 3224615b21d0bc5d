// Tiles, warpgroup roles, register split and shared-memory plan of the fused forward up to K = 128.
#pragma once

#include "common/sync.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// Registers per thread of each role; they sum to at most 512 over the warpgroups, 65536 / 128 threads.
struct Registers {
    int producer, state, output;
};

struct Tiling {
    int qk_slots, v_stages, gate_stages;
    int ctas_per_sm;
    Registers registers;
};

// One row per (K, slice of V). The comment names the limiting resource.
constexpr Tiling tiling(int dim_qk, int v_slice) {
    if (dim_qk == 128 && v_slice == 256)
        return {4, 2, 4, 1, {40, 160, 152}};  // registers: the state takes 128
    if (dim_qk == 128 && v_slice == 64) return {8, 4, 4, 1, {48, 152, 152}};  // smem: one CTA per SM
    if (dim_qk == 128) return {4, 2, 4, 1, {48, 152, 152}};                   // smem: one CTA per SM
    if (v_slice == 256) return {4, 2, 4, 1, {48, 232, 224}};                  // smem: two CTAs do not fit
    if (v_slice == 128) return {4, 2, 4, 1, {48, 168, 168}};  // registers: two CTAs do not fit
    return {4, 2, 4, 2, {48, 80, 112}};                       // registers: 65536 / (2 CTAs * 384 threads)
}

template <class T_, int kDimQK_, int kSliceV_, bool kNormalize_> struct Config {
    using T = T_;
    static constexpr int kDimQK = kDimQK_;    // K, padded to the tile
    static constexpr int kSliceV = kSliceV_;  // columns of V and of the state that one CTA owns
    static constexpr bool kNormalize = kNormalize_;
    static_assert(kDimQK <= 128);
    static constexpr Tiling kTiling = tiling(kDimQK, kSliceV);

    // Warpgroups: 0 is the producer (warp 0 TMA, warp 1 gates, warp 2 n), then the state's with 64 rows of C
    // each, then the output's.
    static constexpr int kStateWarpgroups = kDimQK / 64;
    static constexpr int kThreads = 128 * (2 + kStateWarpgroups);
    static constexpr int kTurnThreads = 128 * (1 + kStateWarpgroups);
    static constexpr int kStateWarps = 4 * kStateWarpgroups;

    // Arrivals that free a slot of the ring of K and Q. The state's warps read only K, so for Q each arrival
    // of an output warp has the weight kQueryArrivals.
    static constexpr int kQKArrivals = 4 * (1 + kStateWarpgroups), kQueryArrivals = 1 + kStateWarpgroups;

    // The output warpgroup makes its slice of V in column halves ("passes") of at most 128 columns, so that
    // its accumulator takes 64 registers.
    static constexpr int kPassV = kSliceV == 256 ? 128 : kSliceV;
    static constexpr int kPasses = kSliceV / kPassV;

    // Ring positions of a chunk's tiles. K and Q share one ring: K, then Q of every chunk.
    using QKUse = Use<kTiling.qk_slots>;
    static_assert(kTiling.qk_slots % 2 == 0, "a slot holds only K or only Q: its readers see every phase");
    __device__ static inline QKUse key(int chunk) { return QKUse(2 * chunk); }
    __device__ static inline QKUse query(int chunk) { return QKUse(2 * chunk + 1); }
    __device__ static inline auto value(int chunk) { return Use<kTiling.v_stages>(chunk); }
    __device__ static inline auto gate_stage(int chunk) { return Use<kTiling.gate_stages>(chunk); }
    // NOTES: two stages need no free barrier, since the sums of chunk c are read before those of c + 2 are
    // written: the warp of n reads the sums of c, then publishes n for c + 1; Q [C, n] of c + 1 waits for
    // that n; the state publishes C for c + 2 after that GEMM, and writes the sums of c + 2 after that.
    static constexpr int kSumStages = 2;
    __device__ static inline auto sum_stage(int chunk) { return Use<kSumStages>(chunk); }

    using QKTile = kittens::st<T, kChunk, kDimQK>;
    using VTile = kittens::st<T, kChunk, kSliceV>;
    // C^T of a column half. Below it 16 more rows, two of which hold n as a high and a low part; the first
    // half's wgmma reads them too.
    static constexpr int kNormRows = kNormalize ? 16 : 0;
    using StateTile = kittens::st<T, kPassV + kNormRows, kDimQK>;
    using OutTile = kittens::st<T, kChunk, kPassV>;
};

// All shared memory of a CTA.
template <class C> struct SharedMemoryPlan {
    typename C::QKTile qk[C::kTiling.qk_slots];
    typename C::VTile v[C::kTiling.v_stages];
    typename C::StateTile state[C::kPasses];   // C^T and n at the chunk's start, rounded: operand of Q C
    typename C::OutTile out;                   // h, staged for TMA stores, 16 rows per warp
    float key_sums[C::kSumStages][C::kDimQK];  // sums of a chunk's scaled keys, for the warp of n
    GateStage gates[C::kTiling.gate_stages];
    Task task;

    kittens::semaphore qk_arrived[C::kTiling.qk_slots], qk_free[C::kTiling.qk_slots];
    kittens::semaphore v_arrived[C::kTiling.v_stages], v_free[C::kTiling.v_stages];
    kittens::semaphore gates_ready[C::kTiling.gate_stages], gates_free[C::kTiling.gate_stages];
    kittens::semaphore state_ready[C::kPasses], state_free[C::kPasses];
    kittens::semaphore key_sums_ready[C::kSumStages];
    kittens::semaphore tail_landed;  // a tile whose last rows are still to be zeroed

    // Every warp that reads a buffer arrives on its *_free barrier; key_sums have none, see kSumStages.
    __device__ inline void init_barriers() {
        constexpr int kReaders = 4 + C::kStateWarps;
        for (int i = 0; i < C::kTiling.qk_slots; i++) {
            kittens::init_semaphore(qk_arrived[i], 1);
            init_warp_barrier(qk_free[i], C::kQKArrivals);
        }
        for (int i = 0; i < C::kTiling.v_stages; i++) {
            kittens::init_semaphore(v_arrived[i], 1);
            init_warp_barrier(v_free[i], kReaders);
        }
        for (int i = 0; i < C::kTiling.gate_stages; i++) {
            init_warp_barrier(gates_ready[i], 1);
            init_warp_barrier(gates_free[i], kReaders + C::kNormalize);
        }
        for (int pass = 0; pass < C::kPasses; pass++) {
            const bool with_norm = C::kNormalize && pass == 0;
            init_warp_barrier(state_ready[pass], C::kStateWarps + with_norm);
            init_warp_barrier(state_free[pass], 4 + task.leaves_states());
        }
        for (auto& ready : key_sums_ready) init_warp_barrier(ready, C::kStateWarps);
        kittens::init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::mlstm
