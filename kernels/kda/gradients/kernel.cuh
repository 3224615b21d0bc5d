// The gradients of all chunks and heads of v, in parallel (KdaGradientsParams in bindings/params.h). A CTA of
// two warpgroups makes those of one chunk:
//   1. Load everything. Log decays, summed up in blocks of 16 tokens, of 64 channels per warpgroup.
//   2. Of 64 columns of V per warpgroup: Y, G, dbeta and <S, dS'> (tiles.cuh).
//   3. Meet. Store dV. dP, dL; dQ_F, dK_F and dK_G of 64 channels per warpgroup, in registers.
// Of 64 channels and 16 tokens per warp (within.cuh):
//   4. Meet. dP, dL and scaled operands replace the tiles.
//   5. Meet. Add what other blocks of tokens contribute.
//   6. Add what pairs within the block contribute; sums of what dg is made of.
//   7. Meet. Store dq, dk, dg and dbeta, as gradients of the raw inputs (results.cuh).
#pragma once

#include "common/bulk_load.cuh"
#include "common/kernel.cuh"
#include "kda/gradients/results.cuh"
#include "kda/gradients/within.cuh"

namespace tfla_tk::kda {

template <class T, int kDimK> struct GradientsMaker {
    using Memory = GradientsMemory<T, kDimK>;

    const GradientsGlobals& g;
    Memory& smem;
    const Chunk chunk;
    const int group, warp;  // warp: of the warpgroup

    __device__ inline void run() {
        const KdaMatricesParams& p = g.params.of;
        const int head = chunk.batch * p.shape.heads + chunk.head;
        const bool has_channels = group < Memory::kParts;
        begin(head);
        sum_up(has_channels);  // 1
        wait(smem.walk_arrived, 0);
        zero_rows_of_others();
        ColumnsOfV<T, kDimK> columns{g, smem, group, warp};
        const bool has_columns = group < g.groups;
        if (has_columns) columns.take_states();
        __syncthreads();
        if (has_columns) columns.run();  // 2
        fence_async_proxy();
        __syncthreads();
        Results<T, kDimK> results(g, smem, chunk, head, group, warp);
        results.store_dv();  // 3
        rt_fl<16, kChunk> queries, reads, writers;
        const auto meet = [] { __syncthreads(); };
        ChannelsOfK<T, kDimK>{g, smem, group, warp, chunk.tokens, has_channels}.run(queries, reads, writers,
                                                                                    meet);
        GradientsOfBlock x(queries, reads, writers);
        const Within<T, kDimK> within{g, smem, group, warp, fresh_laneid()};
        if (has_channels) within.scale_operands();  // 4
        __syncthreads();
        if (has_channels) within.add_other_blocks(x);  // 5
        if (has_channels)
            within.finish(x, meet);  // 6
        else
            meet();
        __syncthreads();
        results.store(has_channels);  // 7
    }

  private:
    __device__ inline void begin(int head) {
        if (threadIdx.x == 0) {
            init_semaphore(smem.inputs_arrived, 1), init_semaphore(smem.walk_arrived, 1);
            publish_barriers();
        }
        __syncthreads();
        if (group == 0 && warp == 0 && fresh_laneid() == 0) load_inputs(head);
        if (group == 0 && warp == 1) write_gate_parameters(smem, g.params.of, chunk.head);
        if (group == 1 && warp == 0 && fresh_laneid() == 0) load_walk(head);
        __syncthreads();
    }
    // By one thread.
    __device__ inline void load_inputs(int of_factors) {
        const KdaMatricesParams& p = g.params.of;
        const int head = chunk.head / p.shape.group, row = chunk.first_row;
        const uint32_t of_gates = sizeof(smem.gates) / (p.g_type == DType::float32 ? 1 : 2);
        semaphore& arrived = smem.inputs_arrived;
        tma::expect_bytes(arrived,
                          sizeof(smem.keys) + sizeof(smem.queries) + of_gates + sizeof(smem.factors));
#pragma unroll 1
        for (int part = 0; part < Memory::kParts; part++)
#pragma unroll 1
            for (int block = 0; block < kBlocks; block++)
                g.g.load_panel(smem.gates[part][block * kBlock], arrived, part * kPart, row + block * kBlock,
                               chunk.head, chunk.batch);
        const auto* const factors = static_cast<const Factors<kDimK>*>(g.params.of.left.factors);
        load_bulk(&smem.factors, &factors[static_cast<int64_t>(of_factors) * g.slots + chunk.slot],
                  sizeof(smem.factors), arrived);
        load_panels(smem.keys, g.k, arrived, 0, row, head, chunk.batch);
        load_panels(smem.queries, g.q, arrived, 0, row, head, chunk.batch);
    }
    __device__ inline void load_walk(int head) {
        auto& walk = smem.walk;
        const int row = chunk.first_row;
        semaphore& arrived = smem.walk_arrived;
        const uint32_t of_states = StateFragments<kDimK>::bytes(1, g.groups);
        tma::expect_bytes(arrived, sizeof(walk.reads) + sizeof(walk.a) +
                                       3 * g.groups * sizeof(walk.values[0]) + 2 * of_states);
        auto load_states = [&](void* to, const void* all) {
            auto* const data = static_cast<uint4*>(const_cast<void*>(all));
            const StateFragments<kDimK> states{data, g.slots, g.groups};
            load_bulk(to, states.at(head, chunk.slot, 0, 0, 0, 0), of_states, arrived);
        };
        load_states(&walk.state, g.params.states);
        load_states(&walk.state_gradient, g.params.state_gradients);
        load_panels(walk.reads, g.tiles, arrived, 0, (chunk.slot * kTiles + kReads) * kChunk, head, 0);
        load_panels(walk.a, g.a, arrived, 0, chunk.slot * kChunk, head, 0);
#pragma unroll 1
        for (int n = 0; n < g.groups; n++) {
            const int column = n * kWalkerColumns;
            load_panels(walk.values[n], g.v, arrived, column, row, chunk.head, chunk.batch);
            load_panels(walk.d_out[n], g.d_out, arrived, column, row, chunk.head, chunk.batch);
            load_panels(walk.solved[n], g.solved, arrived, column, row, chunk.head, chunk.batch);
        }
    }
    // Step 1.
    __device__ inline void sum_up(bool has_channels) {
        wait(smem.inputs_arrived, 0);
        if (!has_channels) return;
        sum_gates({smem.gates[group], smem.total[group], smem.middle[group]}, g.params.of,
                  &smem.bias[group * kPart], smem.rate, warp, chunk.tokens - warp * kBlock, fresh_laneid());
    }
    // Rows past the last token belong to the next packed sequence.
    __device__ inline void zero_rows_of_others() {
        if (!g.packed() || chunk.tokens >= kChunk) return;
        auto& walk = smem.walk;
        const int own = chunk.tokens;
        if (warp == 0) zero_rows(group == 0 ? smem.keys : smem.queries, own);
        if (warp == 1) zero_rows(walk.values[group], own);
        if (warp == 2) zero_rows(walk.d_out[group], own);
        if (warp == 3) zero_rows(walk.solved[group], own);
    }
};

template <class T, int kDimK>
__global__ __launch_bounds__(kGradientsThreads,
                             1) void kda_gradients_kernel(const __grid_constant__ GradientsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
        const KdaShape& s = g.params.of.shape;
        const int head = blockIdx.x % s.heads, index = blockIdx.x / s.heads;
        const Segment found = find_segment(g.cut, s.seq, index);
        if (found.tokens <= 0) return;
        const bool packed = g.packed();
        GradientsMaker<T, kDimK>{
            g,
            *reinterpret_cast<GradientsMemory<T, kDimK>*>(shared_memory),
            {packed ? 0 : found.sequence, head, found.first_row, found.tokens, packed ? index : found.number},
            warp / 4,
            warp % 4}
            .run();
    }
}

}  // namespace tfla_tk::kda
