// The chunk matrices A and P, the tiles and the factors of all chunks and heads of v, in parallel
// (bindings/params.h). A CTA of four warps makes those of one; a warp has 16 tokens. 64 channels after 64:
//   1. Gates become log decays, these sums from the begin of a warp's block of 16 tokens (gates.cuh).
//   2. Scores within the block; what later blocks read of its keys (scores.cuh).
//   3. Meet. Scores with the blocks before. Leave the tiles (leave_tiles.cuh).
// Then
//   4. Meet. -L and P to shared memory, in the place of the inputs.
//   5. A by the triangular solve of the delta rule.
//   6. Store A and P.
#pragma once

#include "common/kernel.cuh"
#include "kda/matrices/leave_tiles.cuh"
#include "kda/matrices/scores.cuh"

namespace tfla_tk::kda {

template <class T, int kDimK> struct MatricesMaker {
    using T2 = typename base_types::packing<T>::packed_type;
    using Memory = MatricesMemory<T, kDimK>;

    // A warp's scores, blocks of 16 x 16. `own` is on the diagonal; below it a warp has the blocks (row,
    // column): warp 0 has (3, 0), warp 1 (1, 0), warp 2 (2, 1) and (2, 0), warp 3 (3, 2) and (3, 1).
    struct Scores {
        Pairs own, below[2];
    };

    const MatricesGlobals& g;
    Memory& smem;
    const Chunk chunk;
    const int warp;

    __device__ inline void run() {
        begin();
        Scores scores;
        scores.own.clear(), scores.below[0].clear(), scores.below[1].clear();
#pragma unroll 1
        for (int part = 0; part < kDimK / kPart; part++) {
            if (part > 0) load_next_part(part);
            wait(smem.arrived, part % 2);
            score_part(scores, part);
            leave_tiles(part);
        }
        __syncthreads();  // the results may replace the inputs
        // -L, which the solve takes
        const TriangularMatrix erasures(shared_address(&smem.out.upper), shared_address(&smem.out.lower));
        store_scores(scores, erasures);
        __syncthreads();
        solve_unit_lower<T>(smem.out.a, erasures, smem.beta, warp, [] { __syncthreads(); });
        fence_async_proxy();
        __syncthreads();
        store_results();
    }

  private:
    __device__ inline void begin() {
        const KdaMatricesParams& p = g.params;
        if (threadIdx.x == 0) {
            init_semaphore(smem.arrived, 1);
            publish_barriers();
            load_part(0);
        }
        __syncwarp();
        write_row_rstd<T, kDimK>(smem, p, chunk, warp);
        if (warp == 1) write_betas(smem.beta, g, chunk);
        if (warp == 2) write_gate_parameters(smem, p, chunk.head);
        __syncthreads();
    }

    // By one thread.
    __device__ inline void load_part(int part) {
        const int head = chunk.head / g.params.shape.group, column = part * kPart, row = chunk.first_row;
        const uint32_t of_gates = sizeof(smem.in.gates) / (g.has_float_gates() ? 1 : 2);
        tma::expect_bytes(smem.arrived, sizeof(smem.in.keys) + sizeof(smem.in.queries) + of_gates);
        g.k.load_panel(&smem.in.keys, smem.arrived, column, row, head, chunk.batch);
        g.q.load_panel(&smem.in.queries, smem.arrived, column, row, head, chunk.batch);
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            g.g.load_panel(smem.in.gates[block * kBlock], smem.arrived, column, row + block * kBlock,
                           chunk.head, chunk.batch);
    }
    __device__ inline void load_next_part(int part) {
        fence_async_proxy();  // b was written where gates are loaded now
        __syncthreads();
        if (threadIdx.x == 0) load_part(part);
    }

    // Steps 1 to 3. NOTES: the lane reread, or the loop over parts keeps all places that follow from it.
    __device__ inline void score_part(Scores& scores, int part) {
        const BlockOfRows<T, kDimK> rows(smem, warp, fresh_laneid());
        const int tokens = chunk.tokens - warp * kBlock;
        if (g.packed()) zero_rows_of_others(tokens);
        const bool mild = sum_gates({smem.in.gates, smem.total, smem.middle}, g.params,
                                    &smem.bias[part * kPart], smem.rate, warp, tokens, rows.lane);
        score_block(rows, scores.own, mild);
        if (!mild) score_levels(rows, scores.own);
        __syncthreads();
        if (warp == 0)
            score_below<1, 2>(BlockOfRows<T, kDimK>(smem, 3, rows.lane), scores.below, 0);
        else if (warp == 1)
            score_below<1, 0>(rows, scores.below, 0);
        else
            score_below<2, 0>(rows, scores.below, warp - 1);
    }
    // Rows of a block past its `tokens` belong to the next packed sequence.
    __device__ inline void zero_rows_of_others(int tokens) {
        if (tokens >= kBlock) return;
        const int own = max(tokens, 0);
        for (auto* tile : {&smem.in.keys, &smem.in.queries})
            zero_units(reinterpret_cast<uint4*>(tile->data[0][warp * kBlock + own]), (kBlock - own) * 8);
        __syncwarp();
    }

    __device__ inline void leave_tiles(int part) {
        const int64_t place =
            static_cast<int64_t>(chunk.batch * g.params.shape.heads + chunk.head) * g.slots + chunk.slot;
        Factors<kDimK>& factors = static_cast<Factors<kDimK>*>(g.params.left.factors)[place];
        TileWriter<T, kDimK> writer(smem, g.params, place, part, warp);
        if (warp == 0) writer.leave_decay(factors);
        if (warp == 1 && part == 0) {
            const int lane = fresh_laneid();
            auto pair = [&](const float* x) { return float2{x[2 * lane], x[2 * lane + 1]}; };
            factors.beta.write(lane, pair(smem.beta));
            write_pair(factors.query_rstd, 2 * lane, pair(smem.query_rstd));
            write_pair(factors.key_rstd, 2 * lane, pair(smem.key_rstd));
        }
        writer.leave_rows();
    }

    // Step 4.
    __device__ inline void store_scores(const Scores& scores, const TriangularMatrix& erasures) {
        const int row = warp == 0 ? 3 : warp, last = warp == 0 ? 0 : warp - 1;
        store_pairs(scores.own, erasures, warp, warp);
        store_pairs(scores.below[0], erasures, row, last);
        if (warp >= 2) store_pairs(scores.below[1], erasures, row, last - 1);
        T2 zeros[4];
#pragma unroll
        for (T2& x : zeros) x = from_float2<T2>(float2{});
        for (int column = warp + 1; column < kBlocks; column++)
            store_fragment<T, kChunk>(shared_address(&smem.out.p), warp * kBlock, column, zeros);
    }
    // A block of P, rounded, and of -L. By selection: what is left out may be NaN.
    __device__ inline void store_pairs(const Pairs& pairs, const TriangularMatrix& erasures, int row_block,
                                       int block) {
        const int lane = fresh_laneid();
        rt_fl<16, 16> of_keys;
        T2 p[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row_block * kBlock + lane / 4 + n % 2 * 8;
            const int j = block * kBlock + lane % 4 * 2 + n / 2 * 8;
            const int last = i < chunk.tokens ? i : -1;
            const float *q = &pairs.of_queries[n / 2][n % 2 * 2], *k = &pairs.of_keys[n / 2][n % 2 * 2];
            const float2 writers{smem.key_rstd[j], smem.key_rstd[j + 1]};
            const float reader = g.params.scale * smem.query_rstd[i], eraser = -smem.key_rstd[i];
            p[n] = from_float2<T2>(
                {j <= last ? reader * writers.x * q[0] : 0.f, j < last ? reader * writers.y * q[1] : 0.f});
            of_keys.tiles[0][0].data[n] = {j < last ? eraser * writers.x * k[0] : 0.f,
                                           j + 1 < last ? eraser * writers.y * k[1] : 0.f};
        }
        store_fragment<T, kChunk>(shared_address(&smem.out.p), row_block * kBlock, block, p);
        store_erasures(place_of_erasures(erasures, row_block, lane), of_keys, block);
    }

    // Step 6.
    __device__ inline void store_results() {
        if (threadIdx.x != 0) return;
        const int row = chunk.slot * kChunk, head = chunk.batch * g.params.shape.heads + chunk.head;
        g.a.store_panel(shared_address(&smem.out.a), 0, row, head, 0);
        g.p.store_panel(shared_address(&smem.out.p), 0, row, head, 0);
        commit_stores();
        wait_stores_done();
    }
};

template <class T, int kDimK>
__global__ __launch_bounds__(kMatricesThreads, kMatricesCtas) void kda_matrices_kernel(
    const __grid_constant__ MatricesGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
        const int head = blockIdx.x % g.params.shape.heads, index = blockIdx.x / g.params.shape.heads;
        const Segment found = find_segment(g.cut, g.params.shape.seq, index);
        if (found.tokens <= 0) return;
        const bool packed = g.packed();
        MatricesMaker<T, kDimK>{
            g,
            *reinterpret_cast<MatricesMemory<T, kDimK>*>(shared_memory),
            {packed ? 0 : found.sequence, head, found.first_row, found.tokens, packed ? index : found.number},
            warp}
            .run();
    }
}

}  // namespace tfla_tk::kda
