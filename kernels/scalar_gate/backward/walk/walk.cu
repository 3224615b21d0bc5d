// Host half of the backward's walks (kernel.cuh), and of what makes the states at the start of their segments
// where sequences are cut (segment_sums.cuh). Equations: docs/mlstm-backward.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/backward/walk/kernel.cuh"
#include "scalar_gate/backward/walk/segment_sums.cuh"

namespace tfla_tk::mlstm {

// Calls run<C>() with the config of a walk, by its tile, its operands' type, and whether n takes part.
template <class Run> void with_config(const PassWalk& p, bool normalizer, Run run) {
    with_type_and_tiles(p.half, p.tile_keys, p.slice, "mlstm_pass", [&]<class T, int kDimKeys, int kSlice>() {
        if (p.gradient == Gradient::dv)
            return run.template operator()<PassConfig<T, kDimKeys, kSlice, Gradient::dv, false>>();
        auto with_normalizer = [&]<bool kNormalizer>() {
            p.gradient == Gradient::dq
                ? run.template operator()<PassConfig<T, kDimKeys, kSlice, Gradient::dq, kNormalizer>>()
                : run.template operator()<PassConfig<T, kDimKeys, kSlice, Gradient::dk, kNormalizer>>();
        };
        if constexpr (segments_serve(kDimKeys, kSlice, Gradient::dk)) {
            return normalizer ? with_normalizer.template operator()<true>()
                              : with_normalizer.template operator()<false>();
        }
        throw std::runtime_error("mlstm_pass: slices of 256 columns are dv's alone");
    });
}

// Number of tiles of the keys' columns, and of the values'.
int shares(const PassWalk& p) { return parts_of(p.dim_keys, p.tile_keys); }
int slices(const PassWalk& p) { return parts_of(p.dim_values, p.slice); }

// The walk for dq of these sizes.
PassWalk walk_of(const PassSizes& x) {
    PassWalk p{Gradient::dq};
    p.dim_keys = x.dim_keys, p.dim_values = x.dim_values, p.tile_keys = x.tile_keys, p.slice = x.slice;
    return p;
}

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
            p.gradient == Gradient::dv ? p.dim_values : p.dim_keys,
            shares(p),
            slices(p),
            p.group};
}

std::int64_t ctas_of(const WalkGlobals& g) {
    return std::int64_t{g.cut.segments} * g.heads * g.slices * g.shares;
}

template <class C> void launch_walk(const MlstmPassParams& p, void* stream) {
    const PassWalk& walk = p.walk;
    if (!C::kSumsRows && shares(walk) > 1)  // dv does not add up shares
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
                        common.shares * common.slices * C::kStateWarps,
                        anchor_slots(common.slots)};
    launch<mlstm_pass_kernel<C>, sizeof(PassMemory<C>)>(g, ctas_of(common), C::kThreads, walk.device, stream,
                                                        "mlstm_pass", ScoreTurns::cluster(common.slices));
}

template <class C> void launch_segments(const MlstmSegmentsParams& p, void* stream) {
    const int device = p.walk.device;
    const DeviceGuard guard(device, "mlstm_pass_segments");
    const SegmentsGlobals g{walk_globals<C>(p.walk), p.i, p.f, p.log2_w, p.chunk_m, p.scale, p.gate_kind};
    launch<mlstm_pass_segments_kernel<C>, sizeof(SegmentsMemory<C>)>(g, ctas_of(g), C::kThreads, device,
                                                                     stream, "mlstm_pass_segments");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

std::int64_t pass_anchor_bytes(const PassSizes& x, int slots) {
    const PassWalk walk = mlstm::walk_of(x);
    std::int64_t bytes = 0;
    mlstm::with_config(walk, false, [&]<class C>() { bytes = C::kAnchorBytes; });
    return static_cast<std::int64_t>(x.batch) * x.heads * anchor_slots(slots) * mlstm::shares(walk) *
           mlstm::slices(walk) * bytes;
}

int pass_flow_parts(const PassSizes& x) {
    const PassWalk walk = mlstm::walk_of(x);
    int warps = 0;
    mlstm::with_config(walk, false, [&]<class C>() { warps = C::kStateWarps; });
    return mlstm::shares(walk) * mlstm::slices(walk) * warps;
}

void mlstm_pass(const MlstmPassParams& p, void* stream) {
    mlstm::with_config(p.walk, p.walk.e != nullptr, [&]<class C>() {
        if constexpr (mlstm::pass_serves(C::kDimKeys, C::kSlice, C::kGradient))
            mlstm::launch_walk<C>(p, stream);
        else
            throw std::runtime_error("mlstm_pass: no such walk");
    });
}

void mlstm_pass_segments(const MlstmSegmentsParams& p, void* stream) {
    // sums of n are always made; they are stored where there is a place for them
    mlstm::with_config(p.walk, true, [&]<class C>() {
        if constexpr (C::kNormalizer && mlstm::segments_serve(C::kDimKeys, C::kSlice, C::kGradient))
            mlstm::launch_segments<C>(p, stream);
        else
            throw std::runtime_error("mlstm_pass_segments: no such sums");
    });
}

}  // namespace tfla_tk
