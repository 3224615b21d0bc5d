// Host half of the chunkwise forward of mLSTM (exponential and sigmoid input gate) and of the scalar-decay
// family.
//
// The kernel is that of narrow/kernel.cuh up to K = 128, that of transposed/kernel.cuh at K = 256. Where
// sequences are cut, two kernels before it compute the state that arrives at every segment:
//   mlstm_states    sums what each segment adds to the state (segment_sums.cuh)
//   mlstm_combine   carries the states from segment to segment (carry.cuh)
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/forward/carry.cuh"
#include "scalar_gate/forward/narrow/kernel.cuh"
#include "scalar_gate/forward/segment_sums.cuh"
#include "scalar_gate/forward/transposed/kernel.cuh"

namespace tfla_tk::mlstm {

FwdWalkGlobals fwd_walk_globals(const MlstmFwdWalk& p) {
    const int64_t slots = static_cast<int64_t>(p.cut.segments - p.cut.sequences) * p.heads;
    auto map = [&](const Operand& x, int heads, int dim) {
        return TensorMap(x, p.batch, heads, p.seq, dim, kChunk, p.half);
    };
    return {map(p.k, p.heads / p.group, p.dim_qk),
            map(p.v, p.heads, p.dim_v),
            p.i,
            p.f,
            p.initial,
            Workspace(p.workspace, slots, p.dim_qk, p.dim_v),
            p.cut,
            p.heads,
            p.seq,
            p.dim_qk,
            p.dim_v,
            parts_of(p.dim_v, p.slice_v),
            p.group,
            chunk_slots(p.seq, p.cut.sequences, p.cut.offsets != nullptr),
            0,  // state_slots: run_mlstm_fwd sets them for the kernel that makes h
            p.gate_kind};
}

// Of the kernels that walk segments.
std::int64_t ctas_of(const FwdWalkGlobals& g) { return std::int64_t{g.cut.segments} * g.heads * g.slices; }

template <class T, int kDimQK, int kSliceV> void run_states(const MlstmFwdWalk& p, void* stream) {
    using C = StatesConfig<T, kDimQK, kSliceV>;
    const DeviceGuard guard(p.device, "mlstm_states");
    const FwdWalkGlobals g = fwd_walk_globals(p);
    launch<mlstm_states_kernel<C>, sizeof(StatesMemory<C>)>(g, ctas_of(g), C::kThreads, p.device, stream,
                                                            "mlstm_states");
    const dim3 grid = grid_of(std::int64_t{carrying_ctas(p.cut)} * p.heads,
                              parts_of(p.dim_qk * (p.dim_v + 1), 4 * kCombineThreads), "mlstm_combine");
    launch<mlstm_combine_kernel>(g, grid, kCombineThreads, p.device, stream, "mlstm_combine");
}

template <class T, int kDimQK, int kSliceV, bool kNormalize>
void run_mlstm_fwd(const MlstmFwdParams& p, void* stream) {
    const MlstmFwdWalk& walk = p.walk;
    const DeviceGuard guard(walk.device, "mlstm_fwd");
    auto map = [&](const Operand& x, int heads, int dim, int box_rows) {
        return TensorMap(x, walk.batch, heads, walk.seq, dim, box_rows, walk.half);
    };
    const int slots =
        p.left.states ? state_slots(walk.seq, walk.cut.sequences, walk.cut.offsets != nullptr) : 0;
    if (slots && std::max(walk.dim_qk, walk.dim_v) > kMostNarrow)
        throw std::runtime_error("mlstm_fwd: states are left with head dims of at most 128");
    const int64_t of_state = static_cast<int64_t>(walk.dim_qk) * walk.dim_v;
    const int states = walk.batch * walk.heads * slots;
    const auto of_h = ResultMaps::of([&](int rows) { return map(p.h, walk.heads, walk.dim_v, rows); });
    Globals g{fwd_walk_globals(walk),
              map(p.q, walk.heads / walk.group, walk.dim_qk, kChunk),
              GateWords(walk.i),
              GateWords(walk.f),
              of_h,
              p.last,
              p.row_n,
              p.row_m,
              p.chunk_m,
              slots ? TensorMap({p.left.states, states * of_state, of_state, walk.dim_qk}, 1, states,
                                walk.dim_v, walk.dim_qk, kSliceV, walk.half)
                    : of_h.box,  // any valid map: it is not read
              p.left,
              p.scale,
              p.eps,
              high_and_low(std::log2(static_cast<double>(p.scale)))};
    g.state_slots = slots;
    auto start = [&]<auto kKernel, int kSharedBytes>(int threads, int cluster = 1) {
        launch<kKernel, kSharedBytes>(g, ctas_of(g), threads, walk.device, stream, "mlstm_fwd", cluster);
    };
    if constexpr (kDimQK == 256) {  // transposed/kernel.cuh
        auto run = [&]<bool kStabilised>() {
            using C = TransposedConfig<T, kDimQK, kSliceV, kNormalize, kStabilised>;
            start.template operator()<mlstm_transposed_kernel<C>, sizeof(TransposedMemory<C>)>(
                C::kThreads, C::cluster(g.slices));
        };
        if constexpr (kNormalize)
            if (is_stabilised(g.gate_kind)) return run.template operator()<true>();
        run.template operator()<false>();
    } else {
        using C = Config<T, kDimQK, kSliceV, kNormalize>;
        static_assert(sizeof(SharedMemoryPlan<C>) * C::kTiling.ctas_per_sm <= MAX_SHARED_MEMORY);
        start.template operator()<mlstm_fwd_kernel<C>, sizeof(SharedMemoryPlan<C>)>(C::kThreads);
    }
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

int mlstm_fwd_ctas_per_multiprocessor(int tile_qk, int slice_v) {
    return tile_qk == 256 ? 1 : mlstm::tiling(tile_qk, slice_v).ctas_per_sm;
}

std::int64_t mlstm_fwd_workspace_bytes(std::int64_t slots, int dim_qk, int dim_v) {
    return mlstm::Workspace::bytes(slots, dim_qk, dim_v);
}

std::array<std::int64_t, 2> mlstm_fwd_workspace_offsets(std::int64_t slots, int dim_qk, int dim_v) {
    const mlstm::Workspace at_zero(nullptr, slots, dim_qk, dim_v);
    auto offset = [](const float* x) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x));
    };
    return {offset(at_zero.arriving.c), offset(at_zero.arriving.n)};
}

void mlstm_fwd(const MlstmFwdParams& p, void* stream) {
    const MlstmFwdWalk& walk = p.walk;
    if (walk.gate_kind == (walk.normalize ? GateKind::decay : GateKind::exponential))
        throw std::runtime_error("mlstm_fwd: the exponential gate has a normaliser, a scalar decay has none");
    with_type_and_tiles(walk.half, walk.tile_qk, walk.slice_v, "mlstm_fwd",
                        [&]<class T, int kDimQK, int kSliceV>() {
                            if (walk.cut.segments > walk.cut.sequences)
                                mlstm::run_states<T, kDimQK, kSliceV>(walk, stream);
                            if (walk.normalize)
                                mlstm::run_mlstm_fwd<T, kDimQK, kSliceV, true>(p, stream);
                            else
                                mlstm::run_mlstm_fwd<T, kDimQK, kSliceV, false>(p, stream);
                        });
}

}  // namespace tfla_tk
