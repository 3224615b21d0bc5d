// Tiles, arguments and shared memory of the kernels that cut a sequence.
#pragma once

#include "channel_gate/walk.cuh"
#include "channel_gate/writers.cuh"

namespace tfla_tk::channel_gate {

template <class Type, int kTileOfV, bool kIsBackward> struct SumsConfig {
    using T = Type;
    static constexpr int kDimV = kTileOfV, kWalkers = 1;  // kWalkers: times 64 columns of K
    static constexpr bool kBackward = kIsBackward;        // in time
    static constexpr int kGateWarps = 4;
    static constexpr int kThreads = 32 * (4 + kGateWarps + 1);
    static constexpr int kStages = 10;  // blocks in shared memory

    using Values = PanelTile<T, kBlock, kDimV>;
    using Keys = PanelTile<T, kBlock, kWalkerColumns>;
};

// Fields as in GlaSegmentsParams. Boxes of a block.
struct SegmentsGlobals {
    TensorMap keys, values, gates;
    DType g_dtype;
    Cut cut;
    int heads, seq, dim_k, dim_v;
    int ctas;  // per segment and head
    const float* entering;
    float* borders;
    float* decays;
    float scale;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
    // Of a block's gates of 64 channels.
    __device__ inline uint32_t gate_row_bytes() const {
        return kBlockChannels * (g_dtype == DType::float32 ? 4 : 2);
    }
};

// A CTA's task; its column is of K.
struct SumsTask : Task {
    int value_column, blocks;

    // Called by whole warps.
    template <class C> __device__ static inline SumsTask of_block(const SegmentsGlobals& g, int block) {
        Task task = Task::of_block<C>(g, block);
        const int columns = (g.dim_k + kWalkerColumns - 1) / kWalkerColumns, part = block % g.ctas;
        task.column = part % columns * kWalkerColumns;
        if (task.ends_sequence<C::kBackward>()) task.tokens = -1;  // no segment begins with its sum
        return {task, part / columns * C::kDimV, (task.tokens + kBlock - 1) / kBlock};
    }
    template <class C> __device__ inline int block_of(int step) const {
        return C::kBackward ? blocks - 1 - step : step;
    }
};

// A block.
template <class C> struct SumsStage {
    typename C::Values values;
    typename C::Keys keys;  // then high parts of what is added
    // Or numbers of 16 bits; then the low parts.
    alignas(1024) float gates[kBlock][kBlockChannels];
    static_assert(sizeof(gates) >= sizeof(keys));
};

template <class C> struct SumsMemory {
    SumsStage<C> stages[C::kStages];
    alignas(16) float decay[C::kStages][kBlockChannels];  // e^{b_L}
    semaphore arrived[C::kStages];                        // all tiles of a block
    semaphore scaled[C::kStages];                         // by the gate warp: keys and decay are ready
    semaphore free[C::kStages];                           // by the adder
    semaphore tail_landed;
    SumsTask task;

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 1);
            init_warp_barrier(scaled[i], 1);
            init_warp_barrier(free[i], 4);
        }
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::channel_gate
