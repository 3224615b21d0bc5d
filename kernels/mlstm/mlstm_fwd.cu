// Fused chunk-recurrent mLSTM forward (exponential and sigmoid input gate).
//
// One CTA owns a (batch, head, slice of V) and walks the sequence in chunks of 64 tokens; the state C stays
// in the registers of the state warpgroups in fp32 and never touches global memory between chunks. Per chunk:
//   producer   TMA of K, Q, V tiles into rings; a second warp scans the gates ahead (gates.cuh)
//   state      publishes C, rounded, for Q C; then C = decay C + (key_scale . K)^T V and n likewise
//   output     S = Q K^T; O = Q C; P = gate(S); O = inter . O + P V; h = O / max(|q n|, floor); TMA store
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md.
#include "config.cuh"
#include "tfla_tk/tiles.cuh"

#ifndef TFLA_DIM_QK
#error "TFLA_DIM_QK, TFLA_SLICE_V and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::mlstm {

using namespace kittens;

struct Globals {
    TensorMap q, k, v, h;
    Gate i, f;
    const float *c_initial, *n_initial, *m_initial;
    float *c_last, *n_last, *m_last;
    int heads, seq, dim_qk, dim_v, slices;
    float scale, eps;
    double log2_scale;
    bool sigmoid_gate;

    __device__ inline int chunks() const { return (seq + kChunk - 1) / kChunk; }
};

// The (batch, head, V slice) of this CTA; slices of one head are neighbours and share Q and K through L2.
struct Task {
    int batch, head, column;  // column: first of V
    int64_t index;            // batch * heads + head

    // NOTES: the volatile read keeps each role's copy its own; one shared copy is spilled across the roles.
    template <class C> __device__ static inline Task of_block(const Globals& g) {
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        const int pair = block / g.slices;
        return {pair / g.heads, pair % g.heads, block % g.slices * C::kSliceV, pair};
    }
};

// -------------------------------------------------------------------------------- producer

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

// -------------------------------------------------------------------------------- state

template <class C>
__device__ inline void update_state(const Globals& g, SharedMemoryPlan<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kBlocks = C::kStateBlocks;
    constexpr int kStepTokens = 16;  // of scaled K^T at a time: all that the registers hold
    constexpr int kStepsPerBlock = kChunk / kStepTokens;

    // NOTES: tiles of 64 registers, since a wgmma with N = 256 does not compile in a launch of 512 threads.
    rt_fl<16, C::kPassV> state[kBlocks][C::kPasses];
    const int warp_row = warpgroup_id * 64 + warpgroup::warpid() * 16;  // in every part
    const int norm_row = warp_row + laneid() / 4;

    auto for_each_pass = [](auto body) {
#pragma unroll
        for (int pass = 0; pass < C::kPasses; pass++) body(pass);
    };
    auto write_norm = [&](int buffer, int row, float n) {
        const T high = base_types::convertor<T, float>::convert(n);
        smem.norm[buffer][row] = n;
        smem.norm_parts[buffer][0][row] = high;
        smem.norm_parts[buffer][1][row] =
            base_types::convertor<T, float>::convert(n - base_types::convertor<float, T>::convert(high));
    };
    auto load_initial = [&] {
        const Task task = Task::of_block<C>(g);
#pragma unroll
        for (int block = 0; block < kBlocks; block++) {
            for_each_pass([&](int pass) {
                auto& tile = state[block][pass];
                if (g.c_initial)
                    load_state(tile, g.c_initial + task.index * g.dim_qk * g.dim_v,
                               warp_row + C::kPartQK * block, task.column + pass * C::kPassV, g.dim_qk,
                               g.dim_v);
                else
                    warp::zero(tile);
                pin(tile);
            });
            if (!C::kNormalize || laneid() % 4 != 0) continue;
            for (int row = norm_row + C::kPartQK * block; row <= norm_row + C::kPartQK * block + 8; row += 8)
                write_norm(0, row,
                           g.n_initial && row < g.dim_qk ? g.n_initial[task.index * g.dim_qk + row] : 0.f);
        }
    };
    auto update_norm = [&](int block, float2 sums, float decay, int chunk) {
        sums = {quad_sum(sums.x), quad_sum(sums.y)};
        const int lane = fresh_laneid();
        if (lane % 4 != 0) return;
        const int row = warp_row + C::kPartQK * block + lane / 4;
        const float* old_n = smem.norm[chunk & 1];
        write_norm((chunk + 1) & 1, row, decay * old_n[row] + sums.x);
        write_norm((chunk + 1) & 1, row + 8, decay * old_n[row + 8] + sums.y);
    };
    auto publish = [&](int pass, uint32_t phase) {
        wait_free(smem.state_free[pass], phase);
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            store_panels<T, C::kPartQK>(
                shared_address(&smem.state[block]) + pass * C::kPassV * C::kPartQK * sizeof(T), warp_row,
                state[block][pass]);
        fence_async_proxy();
        arrive_warp(smem.state_ready[pass]);
    };

    load_initial();
    if constexpr (C::kNormalize) arrive_warp(smem.norm_ready[0]);
    constexpr uint32_t kPanelBytes = kChunk * kPanelColumns * sizeof(T);
    const uint32_t lane_offset = warpgroup_id * kPanelBytes + transposed_lane_offset(warpgroup::warpid());
    for (int chunk = 0; chunk < g.chunks(); chunk++) {
        const auto value = C::value(chunk);
        const auto stage = C::gate_stage(chunk);
        for_each_pass([&](int pass) { publish(pass, chunk & 1); });

        wait(smem.gates_ready[stage.slot], stage.phase);
        const GateStage& gates = smem.gates[stage.slot];
        const float decay = gates.decay;
        rt<T, 16, kStepTokens> keys;
        float2 sums;  // of the block's scaled keys, this lane's part
#pragma unroll
        for (int step = 0; step < kBlocks * kStepsPerBlock; step++) {
            const int block = step / kStepsPerBlock, token = step % kStepsPerBlock * kStepTokens;
            const auto key = C::key(chunk, block);
            if (step > 0) {
                warpgroup::mma_async_wait<0>();
                pin(keys);
            }
            if (token == 0) {
                wait(smem.qk_arrived[key.slot], key.phase);
                for_each_pass([&](int pass) { warp::mul(state[block][pass], state[block][pass], decay); });
                sums = {0.f, 0.f};
            }
            load_scaled_transposed(keys, sums, shared_address(&smem.qk[key.slot]) + lane_offset,
                                   gates.key_scale, token);
            if (step == 0) {
                wait(smem.v_arrived[value.slot], value.phase);
                if constexpr (C::kSchedule != Schedule::overlapped)
                    named_sync<C::kTurnThreads>(NamedBarrier::gemm_turn);
            }
            const bool last_of_block = token == kChunk - kStepTokens;
            mma_partial_AB(state[block], keys, smem.v[value.slot], token);
            if (last_of_block) arrive_warp(smem.qk_free[key.slot], C::kKeyArrivalsState);
            if (C::kNormalize && last_of_block) update_norm(block, sums, decay, chunk);  // under the GEMM
        }
        if constexpr (C::kNormalize) arrive_warp(smem.norm_ready[C::norm_buffer(chunk + 1).slot]);
        arrive_warp(smem.gates_free[stage.slot]);
        warpgroup::mma_async_wait<0>();
        pin(keys);
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            for_each_pass([&](int pass) { pin(state[block][pass]); });
        arrive_warp(smem.v_free[value.slot]);
    }

    if (!g.c_last) return;
    const Task task = Task::of_block<C>(g);
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
        for_each_pass([&](int pass) {
            store_state(g.c_last + task.index * g.dim_qk * g.dim_v, state[block][pass],
                        warp_row + C::kPartQK * block, task.column + pass * C::kPassV, g.dim_qk, g.dim_v);
        });
        if (!C::kNormalize || task.column != 0 || laneid() % 4 != 0) continue;
        for (int row = norm_row + C::kPartQK * block; row <= norm_row + C::kPartQK * block + 8; row += 8)
            if (row < g.dim_qk) g.n_last[task.index * g.dim_qk + row] = smem.norm[g.chunks() & 1][row];
    }
}

// -------------------------------------------------------------------------------- output

// P = S 2^{column - row}, causal; `sums` gets the row sums over the whole chunk.
template <class P, class Scores>
__device__ inline void gate_scores(P& p, const Scores& s, float2& sums, const GateStage& gates, int row) {
    const float2 reference{gates.row[row], gates.row[row + 8]};
    float2 partial{0.f, 0.f};
#pragma unroll
    for (int j = 0; j < Scores::width; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
            const float4 a = *reinterpret_cast<const float4*>(&gates.column[column]);
            auto gated = [&](float score, float high, float low, float ref, bool visible) {
                return visible ? score * exp2f((high - ref) + low) : 0.f;
            };
            float2 upper = s.tiles[0][j].data[2 * half], lower = s.tiles[0][j].data[2 * half + 1];
            upper.x = gated(upper.x, a.x, a.y, reference.x, column <= row);
            upper.y = gated(upper.y, a.z, a.w, reference.x, column + 1 <= row);
            lower.x = gated(lower.x, a.x, a.y, reference.y, column <= row + 8);
            lower.y = gated(lower.y, a.z, a.w, reference.y, column + 1 <= row + 8);
            partial.x += upper.x + upper.y;
            partial.y += lower.x + lower.y;
            p.tiles[0][j].data[2 * half] = from_float2<typename P::dtype>(upper);
            p.tiles[0][j].data[2 * half + 1] = from_float2<typename P::dtype>(lower);
        }
    }
    sums = {quad_sum(partial.x), quad_sum(partial.y)};
}

template <class C> __device__ inline void compute_output(const Globals& g, SharedMemoryPlan<C>& smem) {
    using T = typename C::T;
    constexpr bool kOverlapped = C::kSchedule != Schedule::sequential;
    const Task task = Task::of_block<C>(g);
    const int warp_row = warpgroup::warpid() * 16;
    const int row = warp_row + laneid() / 4;  // this thread owns rows `row` and `row + 8`

    rt_fl<16, kChunk> scores;
    rt<T, 16, kChunk> p;
    rt_fl<16, C::kPassV> out;

    auto issue_scores = [&](int chunk) {
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            const auto key = C::key(chunk, part), query = C::query(chunk, part);
            wait(smem.qk_arrived[key.slot], key.phase);
            wait(smem.qk_arrived[query.slot], query.phase);
            if (part == 0) {
                forget(scores);
                warpgroup::mm_ABt(scores, smem.qk[query.slot], smem.qk[key.slot]);
            } else
                warpgroup::mma_ABt(scores, smem.qk[query.slot], smem.qk[key.slot]);
        }
    };
    // NOTES: waits after the last chunk too, where there are none: else ptxas serialises (C7511).
    auto finish_scores = [&](int chunk, auto none_constant) {
        warpgroup::mma_async_wait<0>();
        pin(scores);
        if constexpr (!decltype(none_constant)::value)
            for (int part = 0; part < C::kParts; part++)
                arrive_warp(smem.qk_free[C::key(chunk, part).slot], C::kKeyArrivalsOutput);
    };
    auto issue_inter = [&](int pass, int chunk) {
        wait(smem.state_ready[pass], chunk & 1);
        forget(out);
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            auto& q = smem.qk[C::query(chunk, part).slot];
            auto& state = smem.state[part].template subtile<C::kPassV>(pass);
            if (part == 0)
                warpgroup::mm_AB(out, q, state);
            else
                warpgroup::mma_AB(out, q, state);
        }
    };
    // Waits for Q C; the last pass frees each part of Q as soon as it is read.
    auto finish_inter = [&](int pass, int chunk) {
        if constexpr (C::kParts == 2) {
            warpgroup::mma_async_wait<1>();
            if (pass == C::kPasses - 1)
                arrive_warp(smem.qk_free[C::query(chunk, 0).slot], C::kQueryArrivalsOutput);
        }
        warpgroup::mma_async_wait<0>();
        pin(out);
        if (pass == C::kPasses - 1)
            arrive_warp(smem.qk_free[C::query(chunk, C::kParts - 1).slot], C::kQueryArrivalsOutput);
        arrive_warp(smem.state_free[pass]);
    };
    auto store_out = [&](int pass, int chunk) {
        const uint32_t panels = shared_address(&smem.out);
        if (laneid() == 0) wait_stores_read();
        __syncwarp();
        store_panels<T, kChunk>(panels, warp_row, out);
        fence_async_proxy();
        __syncwarp();
        if (laneid() != 0) return;
#pragma unroll
        for (int panel = 0; panel < C::kPassV / kPanelColumns; panel++)
            g.h.store_panel(panels + (panel * kChunk + warp_row) * kPanelColumns * sizeof(T),
                            task.column + pass * C::kPassV + panel * kPanelColumns, chunk * kChunk + warp_row,
                            task.head, task.batch);
        commit_stores();
    };
    // 1 / w_t of the two rows, times the row's post factor.
    auto row_scale = [&](int chunk, const GateStage& gates, float2 intra, float2 inter) {
        float2 post{gates.post[row], gates.post[row + 8]};
        if constexpr (C::kNormalize) {
            wait(smem.qn_ready, chunk & 1);
            const float2 d{intra.x + inter.x * smem.qn[row], intra.y + inter.y * smem.qn[row + 8]};
            arrive_warp(smem.qn_free);
            post.x /= fmaxf(fabsf(d.x * post.x), gates.floor[row]) + g.eps;
            post.y /= fmaxf(fabsf(d.y * post.y), gates.floor[row + 8]) + g.eps;
        }
        return post;
    };
    auto scale_rows = [&](float2 factor) {
        for_each_pair(out, 0, 0, [&](float2& x, int r, int) {
            const float s = r >= laneid() / 4 + 8 ? factor.y : factor.x;
            x = {x.x * s, x.y * s};
        });
    };

    auto step = [&](int chunk, auto last_constant) {
        constexpr bool kLast = decltype(last_constant)::value;
        const auto stage = C::gate_stage(chunk);
        const auto value = C::value(chunk);
        const GateStage& gates = smem.gates[stage.slot];
        float2 intra, final_scale;

        wait(smem.gates_ready[stage.slot], stage.phase);
        if constexpr (kOverlapped) {
            issue_inter(0, chunk);
            if constexpr (C::kSchedule == Schedule::pingpong)
                named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
            gate_scores(p, scores, intra, gates, row);  // under Q C
        } else {
            gate_scores(p, scores, intra, gates, row);
            issue_inter(0, chunk);
        }
        finish_inter(0, chunk);
        const float2 inter{gates.inter[row], gates.inter[row + 8]};

#pragma unroll
        for (int pass = 0; pass < C::kPasses; pass++) {
            const bool last_pass = pass == C::kPasses - 1;
            if (pass > 0) {
                issue_inter(pass, chunk);
                finish_inter(pass, chunk);
            }
            scale_rows(inter);
            if (pass == 0) wait(smem.v_arrived[value.slot], value.phase);
            warpgroup::mma_AB(out, p, smem.v[value.slot].template subtile<C::kPassV>(pass));
            constexpr int kScoresInFlight = kOverlapped && !kLast ? C::kParts : 0;
            if (kScoresInFlight > 0 && last_pass) issue_scores(chunk + 1);  // under this chunk's epilogue
            if (pass == 0) final_scale = row_scale(chunk, gates, intra, inter);
            if (last_pass)
                warpgroup::mma_async_wait<kScoresInFlight>();
            else
                warpgroup::mma_async_wait<0>();
            pin(p);
            pin(out);
            scale_rows(final_scale);
            store_out(pass, chunk);
        }
        arrive_warp(smem.v_free[value.slot]);
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (!kOverlapped) {
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
            if constexpr (!kLast) issue_scores(chunk + 1);
        }
        finish_scores(chunk + 1, last_constant);
    };

    issue_scores(0);
    finish_scores(0, std::false_type{});
    for (int chunk = 0; chunk + 1 < g.chunks(); chunk++) step(chunk, std::false_type{});
    step(g.chunks() - 1, std::true_type{});
    if (laneid() == 0) wait_stores_read();
}

// -------------------------------------------------------------------------------- kernel

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTiling.ctas_per_sm) void mlstm_fwd_kernel(
    const __grid_constant__ Globals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

    if (threadIdx.x == 0) {
        smem.init_barriers();
        g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.prefetch();
    }
    __syncthreads();

    if (warpgroup_id == 0) {
        warpgroup::decrease_registers<C::kTiling.registers.producer>();
        const int warp = warpgroup::warpid();
        if (warp == 0 && laneid() == 0) load_tiles(g, smem);
        if (C::kNormalize && warp >= 2) compute_qn(g, smem, warp - 2);
        if (warp == 1 && g.sigmoid_gate) scan_gates<C, true>(g, smem);
        if (warp == 1 && !g.sigmoid_gate) scan_gates<C, false>(g, smem);
    } else if (warpgroup_id <= C::kStateWarpgroups) {
        warpgroup::increase_registers<C::kTiling.registers.state>();
        update_state(g, smem, warpgroup_id - 1);
    } else {
        warpgroup::increase_registers<C::kTiling.registers.output>();
        compute_output(g, smem);
    }
}

template <class T, bool kNormalize> void run_mlstm_fwd(const MlstmFwdParams& p, cudaStream_t stream) {
    using C = Config<T, TFLA_DIM_QK, TFLA_SLICE_V, kNormalize, static_cast<Schedule>(TFLA_SCHEDULE)>;
    const int slices = (p.dim_v + C::kSliceV - 1) / C::kSliceV;
    const Globals g{TensorMap(p.q, p.batch, p.heads, p.seq, p.dim_qk, kChunk, p.half),
                    TensorMap(p.k, p.batch, p.heads, p.seq, p.dim_qk, kChunk, p.half),
                    TensorMap(p.v, p.batch, p.heads, p.seq, p.dim_v, kChunk, p.half),
                    TensorMap(p.h, p.batch, p.heads, p.seq, p.dim_v, 16, p.half),
                    p.i,
                    p.f,
                    p.c_initial,
                    p.n_initial,
                    p.m_initial,
                    p.c_last,
                    p.n_last,
                    p.m_last,
                    p.heads,
                    p.seq,
                    p.dim_qk,
                    p.dim_v,
                    slices,
                    p.scale,
                    p.eps,
                    std::log2(static_cast<double>(p.scale)),
                    p.sigmoid_gate};
    constexpr int kSharedBytes = sizeof(SharedMemoryPlan<C>);
    static_assert(kSharedBytes * C::kTiling.ctas_per_sm <= MAX_SHARED_MEMORY);

    auto check = [](cudaError_t error) {
        if (error != cudaSuccess)
            throw std::runtime_error(std::string("mlstm_fwd: ") + cudaGetErrorString(error));
    };
    check(cudaSetDevice(p.device));
    check(
        cudaFuncSetAttribute(mlstm_fwd_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    mlstm_fwd_kernel<C><<<p.batch * p.heads * slices, C::kThreads, kSharedBytes, stream>>>(g);
    check(cudaGetLastError());
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_fwd(const MlstmFwdParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    if (params.half)
        params.normalize ? mlstm::run_mlstm_fwd<kittens::half, true>(params, s)
                         : mlstm::run_mlstm_fwd<kittens::half, false>(params, s);
    else
        params.normalize ? mlstm::run_mlstm_fwd<kittens::bf16, true>(params, s)
                         : mlstm::run_mlstm_fwd<kittens::bf16, false>(params, s);
}

}  // namespace tfla_tk
