// Host half of the backward's walks (kernel.cuh), and of what makes the states at the start of their segments
// where sequences are cut (segment_sums.cuh). Equations: docs/mlstm-backward.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/backward/walk/kernel.cuh"
#include "scalar_gate/backward/walk/segment_sums.cuh"

namespace tfla_tk::mlstm {

// What the launches of a walk take of its config.
struct WalkKernels {
    Gradient gradient;
    bool keys_are_of_qk, sums_rows;
    int threads, state_warps;
    std::int64_t anchor_bytes;
    // null where they do not serve
    void (*walk)(const PassGlobals&, std::int64_t ctas, int device, void*, int cluster);
    void (*segments)(const SegmentsGlobals&, std::int64_t ctas, int device, void*);
};

template <class C> const WalkKernels& kernels_of() {
    static const WalkKernels found = [] {
        WalkKernels x{C::kGradient, C::kKeysAreOfQK, C::kSumsRows,
                      C::kThreads,  C::kStateWarps,  C::kAnchorBytes};
        if constexpr (pass_serves(C::kDimKeys, C::kSlice, C::kGradient))
            x.walk = [](const PassGlobals& g, std::int64_t ctas, int device, void* stream, int cluster) {
                launch<mlstm_pass_kernel<C>, sizeof(PassMemory<C>)>(g, ctas, C::kThreads, device, stream,
                                                                    "mlstm_pass", cluster);
            };
        if constexpr (segments_serve(C::kDimKeys, C::kSlice, C::kGradient))
            x.segments = [](const SegmentsGlobals& g, std::int64_t ctas, int device, void* stream) {
                launch<mlstm_pass_segments_kernel<C>, sizeof(SegmentsMemory<C>)>(
                    g, ctas, C::kThreads, device, stream, "mlstm_pass_segments");
            };
        return x;
    }();
    return found;
}

template <class T, int kDimKeys, int kSlice> const WalkKernels& kernels_of_tile(const PassWalk& p) {
    if (p.gradient == Gradient::dv) return kernels_of<PassConfig<T, kDimKeys, kSlice, Gradient::dv, false>>();
    auto with_normalizer = [&]<bool kNormalizer>() -> const WalkKernels& {
        return p.gradient == Gradient::dq
                   ? kernels_of<PassConfig<T, kDimKeys, kSlice, Gradient::dq, kNormalizer>>()
                   : kernels_of<PassConfig<T, kDimKeys, kSlice, Gradient::dk, kNormalizer>>();
    };
    if constexpr (segments_serve(kDimKeys, kSlice, Gradient::dk)) {
        if (p.e == nullptr) return with_normalizer.template operator()<false>();
        if constexpr (kMayNormalize) return with_normalizer.template operator()<true>();
        throw std::runtime_error("mlstm_pass: a scalar decay has no normaliser");
    }
    throw std::runtime_error("mlstm_pass: slices of 256 columns are dv's alone");
}

// The kernels of a call, by its tile, its operands' type, and whether it has a normaliser.
const WalkKernels& kernels_for(const PassWalk& p) {
    const WalkKernels* found = nullptr;
    with_tile<64, 128, 256>(p.tile_keys, "mlstm_pass", [&]<int kDimKeys>() {
        auto with_slice = [&]<int kSlice>() {
            found = &(p.half ? kernels_of_tile<half, kDimKeys, kSlice>(p)
                             : kernels_of_tile<bf16, kDimKeys, kSlice>(p));
        };
        if constexpr (kDimKeys == 256)
            with_tile<64, 128>(p.slice, "mlstm_pass", with_slice);
        else
            with_tile<64, 128, 256>(p.slice, "mlstm_pass", with_slice);
    });
    return *found;
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
int keys_heads(const PassWalk& p, const WalkKernels& x) {
    return x.keys_are_of_qk ? p.heads / p.group : p.heads;
}
int values_heads(const PassWalk& p, const WalkKernels& x) {
    return x.keys_are_of_qk ? p.heads : p.heads / p.group;
}

WalkGlobals walk_globals(const PassWalk& p, const WalkKernels& x) {
    auto map = [&](const Operand& x, int heads, int dim) {
        return TensorMap(x, p.batch, heads, p.seq, dim, kChunk, p.half);
    };
    return {map(p.keys, keys_heads(p, x), p.dim_keys),
            map(p.values, values_heads(p, x), p.dim_values),
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

void launch_walk(const MlstmPassParams& p, void* stream) {
    const PassWalk& walk = p.walk;
    const WalkKernels& x = kernels_for(walk);
    if (x.walk == nullptr) throw std::runtime_error("mlstm_pass: no such walk");
    if (!x.sums_rows && shares(walk) > 1)  // dv does not add up shares
        throw std::runtime_error("mlstm_pass: dv takes one share of the keys");
    auto map = [&](const Operand& x, int heads, int dim, int box_rows) {
        return TensorMap(x, walk.batch, heads, walk.seq, dim, box_rows, walk.half);
    };
    const DeviceGuard guard(walk.device, "mlstm_pass");
    const WalkGlobals common = walk_globals(walk, x);
    if (common.shares > 1 && common.slices > kMostSlices)
        throw std::runtime_error("mlstm_pass: more slices than take turns");
    const PassGlobals g{common,
                        p.gates,
                        map(p.queries, keys_heads(walk, x), walk.dim_keys, kChunk),
                        map(p.factor, values_heads(walk, x), walk.dim_values, kChunk),
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
                        common.shares * common.slices * x.state_warps,
                        anchor_slots(common.slots)};
    x.walk(g, ctas_of(common), walk.device, stream, ScoreTurns::cluster(common.slices));
}

void launch_segments(const MlstmSegmentsParams& p, void* stream) {
    const PassWalk& walk = p.walk;
    const WalkKernels& x = kernels_for(walk);
    if (x.segments == nullptr) throw std::runtime_error("mlstm_pass_segments: no such sums");
    const DeviceGuard guard(walk.device, "mlstm_pass_segments");
    const SegmentsGlobals g{walk_globals(walk, x), p.i, p.f, p.log2_w, p.chunk_m, p.scale, p.sigmoid_gate};
    x.segments(g, ctas_of(g), walk.device, stream);
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

std::int64_t pass_anchor_bytes(const PassSizes& x, int slots) {
    const PassWalk walk = mlstm::walk_of(x);
    return static_cast<std::int64_t>(x.batch) * x.heads * anchor_slots(slots) * mlstm::shares(walk) *
           mlstm::slices(walk) * mlstm::kernels_for(walk).anchor_bytes;
}

int pass_flow_parts(const PassSizes& x) {
    const PassWalk walk = mlstm::walk_of(x);
    return mlstm::shares(walk) * mlstm::slices(walk) * mlstm::kernels_for(walk).state_warps;
}

void mlstm_pass(const MlstmPassParams& params, void* stream) { mlstm::launch_walk(params, stream); }

void mlstm_pass_segments(const MlstmSegmentsParams& params, void* stream) {
    mlstm::launch_segments(params, stream);
}

}  // namespace tfla_tk
