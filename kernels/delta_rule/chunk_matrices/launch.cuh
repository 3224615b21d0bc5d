// Host side of the chunk matrices.
#pragma once

#include "common/launch.cuh"
#include "delta_rule/chunk_matrices/kernel.cuh"
#include "delta_rule/launch_walk.cuh"

namespace tfla_tk::delta_rule {

template <class T, int kDimK> void launch_matrices(const DeltaMatricesParams& p, cudaStream_t stream) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_matrices");
    const OperandMaps maps(s);
    Cut chunks = s.cut;  // every chunk is a segment
    const int slots = slots_of(s);
    chunks.segment_chunks = 1, chunks.segments = s.cut.offsets ? slots : s.cut.sequences * slots;
    const MatricesGlobals g{maps.of_keys(p.q),
                            maps.of_keys(p.k),
                            maps.of_matrices(p.a),
                            maps.of_matrices(p.p),
                            p.g,
                            p.beta,
                            chunks,
                            s.heads,
                            s.group,
                            s.seq,
                            slots,
                            p.scale,
                            p.beta_on_rows};
    launch<delta_matrices_kernel<T, kDimK>, sizeof(MatricesMemory<T, kDimK>)>(
        g, grid_of(static_cast<std::int64_t>(chunks.segments) * s.heads, 1, "delta_matrices"), 128, s.device,
        stream, "delta_matrices");
}

}  // namespace tfla_tk::delta_rule
