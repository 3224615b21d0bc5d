// Producer warpgroup of the mLSTM forward: TMA loads, gate scan, q n.
#pragma once

#include "mlstm_fwd_globals.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

template <class C> __device__ inline void load_tiles(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task task = Task::of_block<C>(g);
    auto load_qk = [&](const TensorMap& map, typename C::QKUse use, int part, int row) {
        wait_free(smem.qk_free[use.slot], use.phase);
        tma::expect_bytes(smem.qk_arrived[use.slot], sizeof(typename C::QKTile));
        load_tile(smem.qk[use.slot], map, smem.qk_arrived[use.slot], part * C::kPartQK, row, task.head,
                  task.batch);
    };
    for (int chunk = 0; chunk < g.chunks(); chunk++) {
        const int row = chunk * kChunk;
        for (int part = 0; part < C::kParts; part++) {
            load_qk(g.k, C::key(chunk, part), part, row);
            load_qk(g.q, C::query(chunk, part), part, row);
        }
        const auto [slot, phase] = C::value(chunk);
        wait_free(smem.v_free[slot], phase);
        tma::expect_bytes(smem.v_arrived[slot], sizeof(typename C::VTile));
        load_tile(smem.v[slot], g.v, smem.v_arrived[slot], task.column, row, task.head, task.batch);
    }
}

template <class C, bool kSigmoid>
__device__ inline void scan_gates(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task task = Task::of_block<C>(g);
    const int64_t i_offset = task.batch * g.i.batch_stride + task.head * g.i.head_stride;
    const int64_t f_offset = task.batch * g.f.batch_stride + task.head * g.f.head_stride;
    GateScan<kSigmoid> scan{!kSigmoid && g.m_initial ? g.m_initial[task.index] * kLog2eDouble : 0.};
    float2 i, f;
    auto load = [&](int chunk) {
        const int64_t t = static_cast<int64_t>(chunk) * kChunk + 2 * laneid();
        i.x = t < g.seq ? load_gate(g.i, i_offset + t * g.i.row_stride) : 0.f;
        f.x = t < g.seq ? load_gate(g.f, f_offset + t * g.f.row_stride) : 0.f;
        i.y = t + 1 < g.seq ? load_gate(g.i, i_offset + (t + 1) * g.i.row_stride) : 0.f;
        f.y = t + 1 < g.seq ? load_gate(g.f, f_offset + (t + 1) * g.f.row_stride) : 0.f;
    };
    load(0);
    for (int chunk = 0; chunk < g.chunks(); chunk++) {
        const auto [slot, phase] = C::gate_stage(chunk);
        wait_free(smem.gates_free[slot], phase);
        scan.chunk(smem.gates[slot], i, f, g.seq - chunk * kChunk, g.scale, g.log2_scale);
        arrive_warp(smem.gates_ready[slot]);
        load(chunk + 1);  // lands while the ring is full
    }
    const Task end = Task::of_block<C>(g);
    if (!kSigmoid && g.m_last && end.column == 0 && laneid() == 0) g.m_last[end.index] = scan.m * kLn2;
}

// q n of one chunk: 32 rows per warp, by warp-level MMAs with n as two columns of B.
template <class C>
__device__ inline void compute_qn(const Globals& g, SharedMemoryPlan<C>& smem, int norm_warp) {
    using T = typename C::T;
    constexpr int kRowTiles = kChunk / 16 / C::kNormWarps;
    const int first_row = norm_warp * kRowTiles * 16;
    // B fragment: k = 2 (lane % 4) + {0, 1} (+ 8), column lane / 4: 0 is the high part of n, 1 the low part.
    const int column = laneid() / 4;
    for (int chunk = 0; chunk < g.chunks(); chunk++) {
        float qn[kRowTiles][2][4] = {};  // even and odd steps of k apart: two short chains of MMAs
        const auto buffer = C::norm_buffer(chunk);
        const T* n = &smem.norm_parts[buffer.slot][column & 1][2 * (laneid() % 4)];
        wait(smem.norm_ready[buffer.slot], buffer.phase);
        for (int part = 0; part < C::kParts; part++) {
            const auto query = C::query(chunk, part);
            wait(smem.qk_arrived[query.slot], query.phase);
            const uint32_t q = shared_address(&smem.qk[query.slot]);
#pragma unroll
            for (int k = 0; k < C::kPartQK; k += 16) {
                uint32_t b[2] = {0, 0};
                if (column < 2) {
                    b[0] = *reinterpret_cast<const uint32_t*>(&n[part * C::kPartQK + k]);
                    b[1] = *reinterpret_cast<const uint32_t*>(&n[part * C::kPartQK + k + 8]);
                }
#pragma unroll
                for (int tile = 0; tile < kRowTiles; tile++)
                    mma_16x8x16<T>(qn[tile][k / 16 % 2],
                                   load_rows_16x16<T>(q, kChunk, first_row + 16 * tile, k), b);
            }
            arrive_warp(smem.qk_free[query.slot], C::kQueryArrivalsNorm);
        }
        // NOTES: in this order: qn_free says that the previous phase of state_free has all its arrivals.
        wait_free(smem.qn_free, chunk & 1);
        arrive_warp(smem.state_free[0]);
        if (laneid() % 4 == 0) {
#pragma unroll
            for (int tile = 0; tile < kRowTiles; tile++) {
                const auto& [even, odd] = qn[tile];
                float* rows = &smem.qn[first_row + 16 * tile + laneid() / 4];
                rows[0] = (even[0] + odd[0]) + (even[1] + odd[1]);
                rows[8] = (even[2] + odd[2]) + (even[3] + odd[3]);
            }
        }
        arrive_warp(smem.qn_ready);
    }
}

}  // namespace tfla_tk::mlstm
