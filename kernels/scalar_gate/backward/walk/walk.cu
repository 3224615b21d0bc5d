// One walk of the backward: dq, dk or dv (bindings/params_walk.h).
//
// One CTA owns a (segment of a sequence, head, slice of the values, share of the keys) and walks it in chunks
// of 64 tokens, for dq forward and for dk and dv backward in time; the transposed state stays in registers in
// fp32. Per chunk:
//   producer   loads tiles into rings; one warp applies the deferred decay to the gates (gates.cuh), one
//   loads the factor
//              and stores the gradient, one adds up row sums (output.cuh)
//   scores     S = Q K^T; (S + e) . gate into shared memory. The CTAs of two neighbouring slices each make
//   every second
//              chunk's for both. For dv, on request, row sums of values . factor
//   state      O = state Q^T, scaled; O += values^T scores^T; state = decay state + (values . key_scale)^T K;
//   row sums of
//              O . factor; O replaces the factor
// Where sequences are cut, segment_sums.cuh has made the state at the start of each segment. Equations:
// docs/mlstm-backward.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/backward/walk/config.cuh"
#include "scalar_gate/backward/walk/output.cuh"
#include "scalar_gate/backward/walk/producer.cuh"
#include "scalar_gate/backward/walk/scores.cuh"
#include "scalar_gate/backward/walk/segment_sums.cuh"
#include "scalar_gate/backward/walk/state.cuh"

#ifndef TFLA_DIM_KEYS
#error "TFLA_DIM_KEYS and TFLA_SLICE choose the instance"
#endif

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTiling.ctas_per_sm) void mlstm_pass_kernel(
    const __grid_constant__ PassGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<PassMemory<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

    if (warpgroup_id == 2)
        smem.lane_offsets[threadIdx.x % 128] = transposed_lane_offset(threadIdx.x % 128 / 32);
    begin_task<C>(g, smem, block_of_pass<C>(g, smem),
                  [&] { g.queries.prefetch(), g.keys.prefetch(), g.values.prefetch(), g.out.prefetch(); });
    if (cluster_ctas() > 1) cluster_sync();  // barriers are initialised before the other CTA uses them
    if (smem.task.tokens < 0) return;

    constexpr auto kRegisters = C::kTiling.registers;
    constexpr int kThreads = C::kThreads, kCtas = C::kTiling.ctas_per_sm;
    if (warpgroup_id == 0) {
        set_registers<kRegisters.producer, kThreads, kCtas>();
        const int warp = warpgroup::warpid();
        if (warp == 0)
            load_pass_tiles(g, smem);
        else if (warp == 1)
            feed_gates(g, smem);
        else if (warp == 2)
            load_factor_and_store_outputs(g, smem);
        else if constexpr (C::kSumsRows)
            store_row_sums(g, smem);
    } else if (warpgroup_id == 1) {
        set_registers<kRegisters.scores, kThreads, kCtas>();
        make_pass_scores(g, smem);
    } else {
        set_registers<kRegisters.state, kThreads, kCtas>();
        walk_state(g, smem, warpgroup_id - 2);
    }
    if (cluster_ctas() > 1) cluster_sync();  // the other CTA may still write to this one's shared memory
}

// Number of tiles of the keys' columns, and of the values'.
inline int shares(int dim_keys) { return (dim_keys + TFLA_DIM_KEYS - 1) / TFLA_DIM_KEYS; }
inline int slices(int dim_values) { return (dim_values + TFLA_SLICE - 1) / TFLA_SLICE; }

// Number of heads of queries and keys, and of values and the factor.
template <class C> int keys_heads(const PassWalk& p) { return C::kKeysAreOfQK ? p.heads / p.group : p.heads; }
template <class C> int values_heads(const PassWalk& p) {
    return C::kKeysAreOfQK ? p.heads : p.heads / p.group;
}

template <class C> WalkGlobals walk_globals(const PassWalk& p) {
    auto map = [&](const Operand& x, int heads, int dim) {
        return TensorMap(x, p.batch, heads, p.seq, dim, kChunk, p.half);
    };
    return {map(p.keys, keys_heads<C>(p), p.dim_keys),
            map(p.values, values_heads<C>(p), p.dim_values),
            p.e,
            p.e_stride,
            p.boundaries,
            p.cut,
            p.batch,
            p.heads,
            p.seq,
            chunk_slots(p.seq, p.cut.sequences, p.cut.offsets != nullptr),
            p.dim_keys,
            p.dim_values,
            C::kGradient == Gradient::dv ? p.dim_values : p.dim_keys,
            shares(p.dim_keys),
            slices(p.dim_values),
            p.group};
}

dim3 grid(const WalkGlobals& g, const char* name) {
    return grid_of(static_cast<std::int64_t>(g.cut.segments) * g.heads * g.slices * g.shares, 1, name);
}

// Calls run<C>() with the config of the walk for dq or dk.
template <class T, class Run> void with_config(const PassWalk& p, Run run) {
    auto of_gradient = [&]<bool kNormalizer>() {
        using Dq = PassConfig<T, TFLA_DIM_KEYS, TFLA_SLICE, Gradient::dq, kNormalizer>;
        using Dk = PassConfig<T, TFLA_DIM_KEYS, TFLA_SLICE, Gradient::dk, kNormalizer>;
        p.gradient == Gradient::dq ? run.template operator()<Dq>() : run.template operator()<Dk>();
    };
    if (p.e == nullptr)
        of_gradient.template operator()<false>();
    else if constexpr (kMayNormalize)
        of_gradient.template operator()<true>();
    else
        throw std::runtime_error("mlstm_pass: this instance has no normaliser");
}

template <class C> void launch_pass(const MlstmPassParams& p, cudaStream_t stream) {
    const PassWalk& walk = p.walk;
    if (!C::kSumsRows && shares(walk.dim_keys) > 1)  // dv does not add up shares
        throw std::runtime_error("mlstm_pass: dv takes one share of the keys");
    auto map = [&](const Operand& x, int heads, int dim, int box_rows) {
        return TensorMap(x, walk.batch, heads, walk.seq, dim, box_rows, walk.half);
    };
    const DeviceGuard guard(walk.device, "mlstm_pass");
    const WalkGlobals common = walk_globals<C>(walk);
    if (common.shares > 1 && common.slices > kMostSlices)
        throw std::runtime_error("mlstm_pass: more slices than take turns");
    const PassGlobals g{common,
                        p.gates,
                        map(p.queries, keys_heads<C>(walk), walk.dim_keys, kChunk),
                        map(p.factor, values_heads<C>(walk), walk.dim_values, kChunk),
                        map(p.out, walk.heads, walk.dim_values, kBoxRows),
                        map(p.out, walk.heads, walk.dim_values, 1),
                        p.entering_c,
                        p.entering_n,
                        p.leaving_c,
                        p.leaving_n,
                        p.whole,
                        p.inter,
                        int64_t{walk.batch} * walk.heads * walk.seq,
                        int64_t{walk.batch} * walk.heads * common.slots,
                        p.states,
                        p.flows,
                        common.shares > 1 ? p.ticket : nullptr,
                        pass_flow_parts(walk.dim_keys, walk.dim_values),
                        anchor_slots(common.slots)};
    launch<mlstm_pass_kernel<C>, sizeof(PassMemory<C>)>(g, grid(common, "mlstm_pass"), C::kThreads,
                                                        walk.device, stream, "mlstm_pass",
                                                        ScoreTurns::cluster(common.slices));
}

template <class T> void run_mlstm_pass(const MlstmPassParams& p, cudaStream_t stream) {
    const Gradient gradient = p.walk.gradient;
    if (gradient == Gradient::dv)
        return launch_pass<PassConfig<T, TFLA_DIM_KEYS, TFLA_SLICE, Gradient::dv, false>>(p, stream);
    if constexpr (pass_serves(TFLA_SLICE, Gradient::dq))
        with_config<T>(p.walk, [&]<class C>() { launch_pass<C>(p, stream); });
    else
        throw std::runtime_error("mlstm_pass: this instance makes dv alone");
}

template <class C> void launch_segments(const MlstmSegmentsParams& p, cudaStream_t stream) {
    const PassWalk& walk = p.walk;
    const DeviceGuard guard(walk.device, "mlstm_pass_segments");
    const SegmentsGlobals g{walk_globals<C>(walk), p.i, p.f, p.log2_w, p.chunk_m, p.scale, p.sigmoid_gate};
    launch<mlstm_pass_segments_kernel<C>, sizeof(SegmentsMemory<C>)>(
        g, grid(g, "mlstm_pass_segments"), C::kThreads, walk.device, stream, "mlstm_pass_segments");
}

template <class T> void run_segments(const MlstmSegmentsParams& p, cudaStream_t stream) {
    if constexpr (pass_serves(TFLA_SLICE, Gradient::dq))
        if (p.walk.gradient != Gradient::dv)
            return with_config<T>(p.walk, [&]<class C>() { launch_segments<C>(p, stream); });
    throw std::runtime_error("mlstm_pass_segments: this instance has none for this gradient");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

// For sizes of anchors, which are the same for dq and dk and for both operand types.
using AnchorConfig = mlstm::PassConfig<kittens::bf16, TFLA_DIM_KEYS, TFLA_SLICE, Gradient::dq, kMayNormalize>;

std::int64_t pass_anchor_bytes(int batch, int heads, int slots, int dim_keys, int dim_values) {
    return static_cast<std::int64_t>(batch) * heads * anchor_slots(slots) * mlstm::shares(dim_keys) *
           mlstm::slices(dim_values) * AnchorConfig::kAnchorBytes;
}

int pass_flow_parts(int dim_keys, int dim_values) {
    return mlstm::shares(dim_keys) * mlstm::slices(dim_values) * AnchorConfig::kStateWarps;
}

void mlstm_pass(const MlstmPassParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.walk.half ? mlstm::run_mlstm_pass<kittens::half>(params, s)
                     : mlstm::run_mlstm_pass<kittens::bf16>(params, s);
}

void mlstm_pass_segments(const MlstmSegmentsParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.walk.half ? mlstm::run_segments<kittens::half>(params, s)
                     : mlstm::run_segments<kittens::bf16>(params, s);
}

}  // namespace tfla_tk
