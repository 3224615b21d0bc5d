// The gradients of q, k and the log decay, once the mirror walk has left dV (backward/backward.cu).
//
// Two kernels:
//   delta_left   forward in time: dq and the left part of dk; all of dk where the mirror has made the right
//                part, and then it is the only walk (left.cuh)
//   delta_right  backward in time: dk (right.cuh)
// One CTA of either owns a (segment, head, slice of V, 64 or 128 columns of K):
//     producer   loads writes, dO, dV, q, k and the results of the turn before (the right walk first the left
//                part of dk) and the right part of dk that the mirror has made; scans the gates; stores the
//                results. The CTAs of a pair exchange theirs (pair.cuh)
//     walkers    one or two, the state or its gradient in registers (walker.cuh)
// Equations: bindings/params_states.h and docs/delta-rule-backward.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/backward/states/config.cuh"
#include "delta_rule/backward/states/left.cuh"
#include "delta_rule/backward/states/producer.cuh"
#include "delta_rule/backward/states/right.cuh"
#include "delta_rule/launch_walk.cuh"

#ifndef TFLA_DIM_V
#error "TFLA_DIM_V chooses the instance"
#endif

namespace tfla_tk::delta_rule {

// The number of a CTA, for its first warp. The two CTAs of a pair are neighbours in the grid and run side by
// side. Other CTAs that share results wait for each other, so they draw tickets
// in the order in which they begin: each then only waits for one that runs. Of as many shared results as the
// GPU serves at once, all first turns come first, then all second ones. So the CTAs of a turn end at the same
// time, those of the same turn of other results follow them, and each turn is late once per launch, not once
// per CTA.
template <class C> __device__ inline int block_of_states(const StatesGlobals& g) {
    if constexpr (C::kPaired) {
        const int result = blockIdx.x / 2 / g.ctas, cta = blockIdx.x / 2 % g.ctas;
        return (result * 2 + cta_in_cluster()) * g.ctas + cta;
    }
    if (g.written == nullptr || threadIdx.x >= 32) return blockIdx.x;
    int ticket = 0;
    if (threadIdx.x == 0) ticket = atomicAdd(g.written, 1);
    ticket = __shfl_sync(0xffffffff, ticket, 0);
    // of ctas CTAs of a turn each
    const int turns = g.turns(), results = gridDim.x / (turns * g.ctas);
    const int first = ticket / (g.at_once * turns * g.ctas) * g.at_once;
    const int rest = ticket - first * turns * g.ctas, of_turn = min(g.at_once, results - first) * g.ctas;
    const int turn = rest / of_turn, cta = rest % of_turn;
    return ((first + cta / g.ctas) * turns + turn) * g.ctas + cta % g.ctas;
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_states_kernel(const __grid_constant__ StatesGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<StatesMemory<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
    if (!begin_task<C>(g, smem, block_of_states<C>(g), [&] {
            g.q.prefetch(), g.k.prefetch(), g.writes.prefetch(), g.dout.prefetch(), g.dv.prefetch();
        }))
        return;
    if constexpr (C::kPaired) cluster_sync();  // the other CTA has initialised its barriers
    if (warpgroup_id == 0) {
        set_registers<C::kProducerRegisters, C::kThreads, 1>();
        const int warp = warpgroup::warpid();
        if (warp == 0)
            load_values(g, smem);
        else if (warp == 1)
            scan_gates(g, smem);
        else if (warp == 2)
            load_columns_and_store_results(g, smem);
        else
            load_earlier(g, smem);
    } else {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        if constexpr (C::kIsLeft)
            walk_left(g, smem);
        else
            walk_right(g, smem);
    }
    if constexpr (C::kPaired) cluster_sync();  // the other CTA may still arrive on this one's barriers
}

inline ResultMaps result_maps(const Operand& x, const DeltaStatesParams& p) {
    const DeltaShape& s = p.shape;
    return ResultMaps::of(
        [&](int rows) { return TensorMap(x, s.batch, s.heads / p.shared, s.seq, s.dim_k, rows, s.half); });
}

// Of V, one for a CTA.
inline int slices_of(const DeltaShape& s) { return (s.dim_v + TFLA_DIM_V - 1) / TFLA_DIM_V; }

// Of one result, of all walkers.
inline std::int64_t low_of_result(const DeltaShape& s, int shared) {
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * (s.heads / shared);
    return heads * low_columns(s.dim_k) * slots_of(s);
}

// Shared results that the GPU serves at once, with CTAs for all turns.
inline int served_at_once(int ctas, int device, const char* name) {
    return std::max(multiprocessors_of(device, name) / ctas, 1);
}

template <class C> StatesGlobals states_globals(const DeltaStatesParams& p) {
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const DeltaShape& s = p.shape;
    const OperandMaps maps(s);
    const int slots = slots_of(s);
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * s.heads;
    const int slices = slices_of(s);
    const bool right_made = p.right.data != nullptr;
    const int anchors = anchor_slots(slots, kDeltaAnchorChunks);
    return {
        maps.of_keys(p.q),
        maps.of_keys(p.k),
        maps.of_values(p.writes, kChunk),
        maps.of_values(p.dout, kChunk),
        maps.of_values(p.dv, kChunk),
        TensorMap(p.left, s.batch, s.heads / p.shared, s.seq, s.dim_k, kChunk, s.half),
        // NOTES: maps of what a walk does not use are of something else
        right_made ? TensorMap(p.right, s.batch, s.heads * slices, s.seq, s.dim_k, kChunk, s.half)
                   : maps.of_keys(p.k),
        result_maps(C::kIsLeft ? p.dq : p.dk, p),
        result_maps(C::kIsLeft ? p.left : p.dk, p),
        GateWords(p.g),
        GateWords(p.beta),
        s.cut,
        p.borders,
        s.heads,
        s.group,
        s.seq,
        s.dim_k,
        s.dim_v,
        (s.dim_k + kColumns - 1) / kColumns,
        slices,
        p.shared,
        slots,
        anchors,
        heads * s.seq,
        heads * slots,
        heads * anchors * slices * ((s.dim_k + 15) / 16),
        p.entering,
        p.leaving,
        p.whole,
        p.inter,
        static_cast<uint4*>(p.anchors),
        p.flows,
        slices * p.shared > 1 && !C::kPaired ? p.written : nullptr,
        C::kKeepsLow ? static_cast<LowBytes*>(p.low) : nullptr,
        low_of_result(s, p.shared),
        p.scale,
        right_made,
    };
}

template <class C> void launch_states(const DeltaStatesParams& p, cudaStream_t stream) {
    constexpr auto kName = C::kIsLeft ? "delta_left" : "delta_right";
    if (p.borders && p.shape.cut.segment_chunks != kSegmentChunks)
        throw std::runtime_error(std::string(kName) + ": segments of another length than the borders'");
    if (p.right.data && (!C::kIsLeft || C::kDimV != 128))
        throw std::runtime_error(std::string(kName) + ": the right parts of dk are not wanted");
    if (p.right.data && p.low && C::kKeepsLow)
        throw std::runtime_error(std::string(kName) + ": no room for both right parts and low bytes");
    const DeviceGuard guard(p.shape.device, kName);
    StatesGlobals g = states_globals<C>(p);
    const std::int64_t ctas = static_cast<std::int64_t>(g.cut.segments) * g.heads * g.slices * g.ctas;
    const dim3 grid = grid_of(ctas, 1, kName);
    if (g.written) {
        g.at_once = served_at_once(g.turns() * g.ctas, p.shape.device, kName);
        check_launch(cudaMemsetAsync(g.written, 0, (1 + ctas) * sizeof(int), stream), kName);
    }
    launch<delta_states_kernel<C>, sizeof(StatesMemory<C>)>(g, grid, C::kThreads, p.shape.device, stream,
                                                            kName, C::kPaired ? 2 : 1);
}

template <StateWalk kWalk, class T, bool kPaired = false>
void run_states(const DeltaStatesParams& p, cudaStream_t stream) {
    p.walkers == 1 ? launch_states<StatesConfig<T, TFLA_DIM_V, 1, kWalk, kPaired>>(p, stream)
                   : launch_states<StatesConfig<T, TFLA_DIM_V, 2, kWalk, kPaired>>(p, stream);
}

template <StateWalk kWalk> void run_states(const DeltaStatesParams& p, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    if constexpr (kWalk == StateWalk::left)
        if (p.shared * slices_of(p.shape) == 2)
            return p.shape.half ? run_states<kWalk, kittens::half, true>(p, s)
                                : run_states<kWalk, kittens::bf16, true>(p, s);
    p.shape.half ? run_states<kWalk, kittens::half>(p, s) : run_states<kWalk, kittens::bf16>(p, s);
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

std::int64_t delta_anchor_bytes(const DeltaShape& s) {
    const std::int64_t anchors = anchor_slots(delta_rule::slots_of(s), kDeltaAnchorChunks);
    const std::int64_t parts = (s.dim_k + 15) / 16 * delta_rule::slices_of(s);
    const std::int64_t bytes_of_part = 2 * 16 * TFLA_DIM_V;
    return anchors * s.batch * s.heads * parts * bytes_of_part;
}

std::int64_t delta_written_bytes(const DeltaShape& s, int shared) {
    const std::int64_t slices = delta_rule::slices_of(s);
    const std::int64_t most_ctas = (s.dim_k + delta_rule::kWalkerColumns - 1) / delta_rule::kWalkerColumns;
    return slices * shared == 1 ? 0 : sizeof(int) * (1 + slices * most_ctas * s.cut.segments * s.heads);
}

std::int64_t delta_low_bytes(const DeltaShape& s, int shared) {
    const int slices = delta_rule::slices_of(s), turns = slices * shared;
    if (slices == 1) return 0;
    // two turns of the left walk are a pair, which needs none
    return (turns > 2 ? 2 : 1) * delta_rule::low_of_result(s, shared) * sizeof(delta_rule::LowBytes);
}

void delta_left(const DeltaStatesParams& params, void* stream) {
    delta_rule::run_states<delta_rule::StateWalk::left>(params, stream);
}

void delta_right(const DeltaStatesParams& params, void* stream) {
    delta_rule::run_states<delta_rule::StateWalk::right>(params, stream);
}

}  // namespace tfla_tk
