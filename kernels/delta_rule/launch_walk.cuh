// Host side of the kernels of several passes: tensor maps and grids.
#pragma once

#include <stdexcept>

#include "common/launch.cuh"
#include "common/store_rows.cuh"
#include "delta_rule/inputs/common.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

inline int slots_of(const DeltaShape& s) {
    return chunk_slots(s.seq, s.cut.sequences, s.cut.offsets != nullptr);
}

// Calls run<T, kDimK>() with the operands' type and the smallest tile that holds K.
template <class Run> void with_type_and_tile(const DeltaShape& s, const char* name, Run run) {
    const int tile = s.dim_k <= 64 ? 64 : s.dim_k <= 128 ? 128 : 256;
    with_type(s.half, [&]<class T>() {
        with_tile<64, 128, 256>(tile, name, [&]<int kDimK>() { run.template operator()<T, kDimK>(); });
    });
}

// Tensor maps of a call's operands.
struct OperandMaps {
    const DeltaShape& shape;

    explicit OperandMaps(const DeltaShape& shape) : shape(shape) {}

    TensorMap of_keys(const Operand& x) const {
        return TensorMap(x, shape.batch, shape.heads / shape.group, shape.seq, shape.dim_k, kChunk,
                         shape.half);
    }
    TensorMap of_values(const Operand& x, int box_rows) const {
        return TensorMap(x, shape.batch, shape.heads, shape.seq, shape.dim_v, box_rows, shape.half);
    }
    // with as many columns as v
    ResultMaps of_result(const Operand& x) const {
        return ResultMaps::of([&](int rows) { return of_values(x, rows); });
    }
    // [batch * heads, slots * 64, 64]
    TensorMap of_matrices(void* data) const {
        const int rows = slots_of(shape) * kChunk;
        const std::int64_t head_stride = static_cast<std::int64_t>(rows) * kChunk;
        const std::int64_t all = head_stride * shape.batch * shape.heads;
        return TensorMap(Operand{data, all, head_stride, kChunk}, 1, shape.batch * shape.heads, rows, kChunk,
                         kChunk, shape.half);
    }
};

template <class C, class Params>
WalkGlobals walk_globals(const OperandMaps& maps, const Params& p, const Operand& q, const Operand& k,
                         const Gate& g, const Gate& beta, void* a, void* scores, const float* entering,
                         float* leaving, float scale, int* made = nullptr) {
    const DeltaShape& s = p.shape;
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    float* borders = nullptr;
    if constexpr (requires { p.borders; }) borders = p.borders;
    if (!C::kHasScorer && !scores)
        throw std::runtime_error("the delta rule: a walk that does not make the scores P is given none");
    return {maps.of_keys(q),
            maps.of_keys(k),
            maps.of_matrices(a),
            maps.of_matrices(scores ? scores : a),
            GateWords(g),
            GateWords(beta),
            s.cut,
            entering,
            leaving,
            p.carried,
            p.leads,
            borders,
            s.heads,
            s.group,
            s.seq,
            s.dim_k,
            s.dim_v,
            parts_of(s.dim_v, kColumns),
            scale,
            made,
            slots_of(s)};
}

inline std::int64_t ctas_of(const WalkGlobals& g) { return std::int64_t{g.cut.segments} * g.heads * g.ctas; }

// Launches a kernel of InputsGlobals.
template <auto kKernel, int kRowsOfBlock, class Params>
void launch_inputs(const Params& p, bool rows, bool gates, void* stream, const char* name) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, name);
    const std::int64_t tokens = static_cast<std::int64_t>(s.batch) * s.seq;
    const std::int64_t of_gates = gates ? parts_of(tokens, kInputTokens) * parts_of(s.heads, kGateHeads) : 0;
    const std::int64_t of_rows = rows ? parts_of(tokens * (s.heads / s.group), kRowsOfBlock) : 0;
    launch<kKernel>(InputsGlobals<Params>{p, static_cast<int>(of_gates)}, of_gates + of_rows, kInputThreads,
                    s.device, stream, name);
}

}  // namespace tfla_tk::delta_rule
