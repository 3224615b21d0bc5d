// Host side of the chunk matrices: their own launch, and that of a walk with makers.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/chunk_matrices/kernel.cuh"
#include "delta_rule/chunk_matrices/makers.cuh"
#include "delta_rule/launch_walk.cuh"

namespace tfla_tk::delta_rule {

// p: DeltaMatricesParams, or the parameters of a walk, which have the same fields but for the bounds.
template <class Params> MatricesGlobals matrices_globals(const Params& p, ChunkBounds* bounds = nullptr) {
    const DeltaShape& s = p.shape;
    const OperandMaps maps(s);
    Cut chunks = s.cut;  // every chunk is a segment
    const int slots = slots_of(s);
    chunks.segment_chunks = 1, chunks.segments = s.cut.offsets ? slots : s.cut.sequences * slots;
    return {maps.of_keys(p.q),
            maps.of_keys(p.k),
            maps.of_matrices(p.a),
            maps.of_matrices(p.p ? p.p : p.a),
            GateWords(p.g),
            GateWords(p.beta),
            chunks,
            s.heads,
            s.group,
            s.seq,
            slots,
            p.scale,
            bounds};
}

template <class T, int kDimK, bool kWithScores>
void launch_matrices(const DeltaMatricesParams& p, cudaStream_t stream) {
    const DeviceGuard guard(p.shape.device, "delta_matrices");
    const MatricesGlobals g = matrices_globals(p, p.bounds);
    const std::int64_t ctas = static_cast<std::int64_t>(g.cut.segments) * g.heads;
    launch<delta_matrices_kernel<T, kDimK, kWithScores>, sizeof(MatricesMemory<T, kDimK, kWithScores>)>(
        g, grid_of(ctas, 1, "delta_matrices"), 128, p.shape.device, stream, "delta_matrices");
}

template <class T, int kDimK> void run_matrices(const DeltaMatricesParams& p, cudaStream_t stream) {
    // whether there are walks of this K that make P, and such that do not
    constexpr bool kSomeMake = kMakesScores<kDimK, 2, 0>, kSomeDoNot = !kMakesScores<kDimK, 1, 0>;
    if (p.p ? !kSomeDoNot : !kSomeMake)
        throw std::runtime_error("delta_matrices: P is wanted or left out where no walk has it so");
    if constexpr (kSomeDoNot)
        if (p.p) return launch_matrices<T, kDimK, true>(p, stream);
    if constexpr (kSomeMake) launch_matrices<T, kDimK, false>(p, stream);
}

// Launches a walk with p.makers CTAs of makers. The results are right for any number of CTAs; the launch is
// fast where all run at once.
template <auto kKernel, class C, class Memory, class Walk, class Params>
void launch_with_makers(const Walk& walk, const Params& p, cudaStream_t stream, const char* name) {
    const MatricesGlobals matrices = matrices_globals(p);
    const std::size_t flags = static_cast<std::size_t>(p.shape.batch) * p.shape.heads * matrices.slots;
    MakersGlobals makers{matrices, p.made, p.made + flags, p.makers};
    makers.ahead = std::max(kLeastAhead, kChunksInL2 / makers.pairs());
    check_launch(cudaMemsetAsync(p.made, 0, (flags + 2) * sizeof(*p.made), stream), name);
    dim3 grid = walk_grid(walk, name);
    grid.x += p.makers;
    constexpr int kBytes = std::max(sizeof(Memory), sizeof(MakersMemory<C>));
    launch<kKernel, kBytes>(WithMakers<Walk>{walk, makers}, grid, C::kThreads, p.shape.device, stream, name);
}

}  // namespace tfla_tk::delta_rule
