// A and P of all chunks and heads of v, in parallel. A CTA of one warpgroup, of which a multiprocessor holds
// five, makes those of one chunk and head.
#pragma once

#include "delta_rule/chunk_matrices/chunk.cuh"

namespace tfla_tk::delta_rule {

template <class T, int kDimK>
__global__ __launch_bounds__(128, 5) void delta_matrices_kernel(const __grid_constant__ MatricesGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    using Memory = MatricesMemory<T, kDimK>;
    auto& smem = *reinterpret_cast<Memory*>(shared_memory);
    const int warp = threadIdx.x / 32;
    const int head = blockIdx.x % g.heads, index = blockIdx.x / g.heads;

    const Segment found = find_segment(g.cut, g.seq, index);
    if (found.tokens <= 0) return;
    const ChunkOfHead chunk{g.packed() ? 0 : found.sequence, head, found.first_row, found.tokens,
                            g.packed() ? index : found.number};
    if (threadIdx.x == 0) {
        init_semaphore(smem.arrived, 1);
        publish_barriers();
        load_inputs(g, smem, chunk);
    }
    load_chunk_gates(g, smem, chunk, warp);
    __syncthreads();
    make_matrices<T, kDimK>(smem, chunk.tokens, g.scale, 0, warp, [] { __syncthreads(); });
    if (threadIdx.x == 0) {
        store_matrices(g, smem);
        wait_stores_done();
    }
}

}  // namespace tfla_tk::delta_rule
