// Tiles, schedules, arguments and shared-memory plan of the intra-chunk mLSTM kernel.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "kittens.cuh"
#include "params_intra.h"

namespace tfla_tk::intra {

using namespace kittens;

// How a consumer warpgroup orders the GEMMs and the gate of tile j.
//   sequential:  S_j, wait, gate j, P_j V_j, wait
//   overlapped:  S_{j+1} in flight while tile j is gated, then P_j V_j
//   pingpong:    overlapped, and the two warpgroups take turns: one issues GEMMs while the other gates
//   three_stage: S_{j+1} and P_{j-1} V_{j-1} in flight while tile j is gated
enum class Schedule : int { sequential = 0, overlapped = 1, pingpong = 2, three_stage = 3 };

constexpr int kTile = 64;                     // tokens of a KV tile, and query rows of a consumer warpgroup
constexpr int kConsumers = 2;                 // warpgroups
constexpr int kPadding = kConsumers * kTile;  // the scanned gates end at a multiple of the query tile

struct Globals {
    TensorMap q, k, v, h;
    Gate i, f;
    float* workspace;  // per head: columns (two floats per token), row references, floors
    int heads, seq, query_tiles;
    float eps;
    double log2_scale;
    uint32_t zero;  // 0, which the compiler does not know

    __device__ inline int padded() const { return query_tiles * kPadding; }
    __device__ inline float* gates(int64_t head_index) const { return workspace + head_index * 4 * padded(); }
    // a_j + log2(scale) as high and low part
    __device__ inline float2* columns(int64_t head_index) const {
        return reinterpret_cast<float2*>(gates(head_index));
    }
    // M_t rounded up to fp32: the stabiliser that the row really uses
    __device__ inline float* references(int64_t head_index) const { return gates(head_index) + 2 * padded(); }
    // e^{-m_t}: lower bound of |q n|
    __device__ inline float* floors(int64_t head_index) const { return gates(head_index) + 3 * padded(); }
};

template <class T_, int kDimQK_, int kSliceV_, Schedule kSchedule_> struct Config {
    using T = T_;
    static constexpr int kDimQK = kDimQK_;    // K, padded to the tile
    static constexpr int kSliceV = kSliceV_;  // columns of V that one CTA owns
    static constexpr Schedule kSchedule = kSchedule_;

    // Warpgroup 0 loads, the others each own 64 query rows. Accumulators of a consumer at V = 256: O 128
    // registers, two S of 32, two P of 16.
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kConsumerWarps = 4 * kConsumers;
    static constexpr int kRegistersProducer = 24, kRegistersConsumer = 240;

    // smem: at 256/128 a fourth stage of K does not fit
    static constexpr int kStagesK = kDimQK == 256 ? 3 : 4, kStagesV = 4;
    __device__ static inline auto key(int tile) { return Use<kStagesK>(tile); }
    __device__ static inline auto value(int tile) { return Use<kStagesV>(tile); }

    // h leaves through the space of Q, as many columns at a time as it holds.
    static constexpr int kPassV = kSliceV < kDimQK ? kSliceV : kDimQK;
    static constexpr int kPasses = kSliceV / kPassV;

    using QTile = st<T, kTile, kDimQK>;
    using KTile = st<T, kTile, kDimQK>;
    using VTile = st<T, kTile, kSliceV>;
};

// All shared memory of a CTA.
template <class C> struct SharedMemoryPlan {
    typename C::QTile q[kConsumers];
    typename C::KTile k[C::kStagesK];
    typename C::VTile v[C::kStagesV];
    alignas(16) float2 columns[C::kStagesV][kTile];  // the gates of a tile, freed with its V

    semaphore q_arrived;
    semaphore k_arrived[C::kStagesK], k_free[C::kStagesK];
    semaphore v_arrived[C::kStagesV], gates_arrived[C::kStagesV], v_free[C::kStagesV];

    __device__ inline void init_barriers() {
        init_semaphore(q_arrived, 1);
        for (int i = 0; i < C::kStagesK; i++) {
            init_semaphore(k_arrived[i], 1);
            init_warp_barrier(k_free[i], C::kConsumerWarps);
        }
        for (int i = 0; i < C::kStagesV; i++) {
            init_semaphore(v_arrived[i], 1);
            init_semaphore(gates_arrived[i], 1);
            init_warp_barrier(v_free[i], C::kConsumerWarps);
        }
        publish_barriers();
    }
};

// The (batch, head, query tile, V slice) of this CTA, of a grid (V slices, query tiles, batch * heads):
// neighbours share K and V through L2, and long rows of tiles come first. NOTES: straight from the block's
// index, so that it is uniform for the compiler and ring positions need no registers.
struct Task {
    int batch, head, query_tile, column;
    int64_t head_index;  // batch * heads + head

    template <class C> __device__ static inline Task of_block(const Globals& g) {
        const int pair = blockIdx.z;
        return {pair / g.heads, pair % g.heads, g.query_tiles - 1 - static_cast<int>(blockIdx.y),
                static_cast<int>(blockIdx.x) * C::kSliceV, pair};
    }

    // KV tiles up to the diagonal of the last warpgroup.
    __device__ inline int tiles() const { return kConsumers * (query_tile + 1); }
};

// Starts the copy of a multiple of 16 bytes; they count on `arrived`.
__device__ inline void load_bytes(void* dst, const void* src, uint32_t bytes, semaphore& arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared_address(dst)),
        "l"(src), "r"(bytes), "r"(shared_address(&arrived))
        : "memory");
}

}  // namespace tfla_tk::intra
