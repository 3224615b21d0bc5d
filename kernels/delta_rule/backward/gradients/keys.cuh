// The warpgroup of the keys: dq and dk of a chunk, off the chain of the walkers. With U' the writes:
//   dq = s e^b (dO S^T) + R K
//   right = e^{b_L - b} beta (U' dS^T) + R^T Q + E^T K    left = -e^b (dV S^T) + E K    dk = left + right
// Per chunk, a GEMM always in flight while another's result is scaled or summed:
//   1. Issue dO S^T and U' dS^T. Under them end the turn at the chunk behind and sum <S, dS>. Scale the first
//      and issue dq += R K. Scale the second, whose sums with k are those through dS, and issue right += R^T
//      Q.
//   2. The sums q.dq. dq takes the place of q. Several slices of V add up theirs in device memory instead.
//   3. Issue dV S^T and right += E^T K. Scale the first and issue left += E K. Under it the sums k.right.
//   4. The sums k.left. dk takes the place of k, or is added up, too.
#pragma once

#include "delta_rule/backward/gradients/turns.cuh"

namespace tfla_tk::delta_rule {

template <class C> struct GradientsOfKeys {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Tile = typename C::Tile;
    using Result = rt_fl<16, C::kDimK>;

    const GradientsGlobals& g;
    GradientsMemory<C>& smem;

    __device__ static inline void meet() { named_sync<128>(NamedBarrier::columns); }
    __device__ static inline uint32_t own_rows_of(const Tile& tile) {
        const int lane = fresh_laneid();
        return shared_address(&tile) + panel_offset(own_token() + lane % 16, lane / 16);
    }
    __device__ static inline uint32_t step_of(uint32_t rows, int j) {
        return (rows ^ ((j % 4) * 32)) + j / 4 * Tile::panel_bytes;
    }

    // Rows of d times factor(token).
    template <class Factor> __device__ static inline void scale_rows(Result& d, Factor factor) {
        const int row = own_token() + fresh_laneid() / 4;
        const float upper = factor(row), lower = factor(row + 8);
        each<0, Result::width>([&](int j) {
            each<0, 4>([&](int k) {
                const float by = k % 2 ? lower : upper;
                scale_in_place(d.tiles[0][j].data[k], {by, by});
            });
        });
    }
    // Sums of a row's pairs: sums +- x . y.
    template <bool kMinus>
    __device__ static inline void add_products(float2& sums, const T2 (&x)[4], const float2* y) {
        each<0, 4>([&](int k) {
            const float2 u = to_float2(x[k]);
            float& sum = k % 2 ? sums.y : sums.x;
            sum = kMinus ? sum - u.x * y[k].x - u.y * y[k].y : sum + u.x * y[k].x + u.y * y[k].y;
        });
    }
    template <bool kMinus>
    __device__ static inline void add_row_sums(float2& sums, const Result& result, const Tile& by) {
        const uint32_t rows = own_rows_of(by);
        each<0, Result::width>([&](int j) {
            T2 x[4];
            kittens::move<T2>::ldsm4(x[0], x[1], x[2], x[3], step_of(rows, j));
            add_products<kMinus>(sums, x, result.tiles[0][j].data);
            if (j % 2) asm volatile("" : "+f"(sums.x), "+f"(sums.y)::"memory");
        });
    }
    // which: of token_sums
    __device__ inline void store_sums(int which, int step, float2 sums) const {
        const GradientsTask& task = smem.task;
        const int chunk = task.chunks - 1 - anew(step), lane = fresh_laneid(), row = own_token() + lane / 4;
        const int tokens = task.tokens - chunk * kChunk;
        sums = {quad_sum(sums.x), quad_sum(sums.y)};
        if (lane % 4 != 0 || !task.owns(chunk)) return;
        float* const to = g.token_sums + (which * g.slices + task.slice) * g.rows + task.batch_head * g.seq +
                          task.first_row + chunk * kChunk;
        if (row < tokens) to[row] = sums.x;
        if (row + 8 < tokens) to[row + 8] = sums.y;
    }

    __device__ inline void leave_sums(int which, int step, const Result& result, const Tile& by) const {
        float2 sums{0.f, 0.f};
        add_row_sums<false>(sums, result, by);
        store_sums(which, step, sums);
    }
    // e^{b_L} <S, dS>, both rounded, of this warp's rows of both, which lie alike.
    __device__ inline void leave_flow(int step, const GradientsGates& gates) const {
        constexpr int kRows = C::kDimV / kKeysWarps;
        const float sum = sum_products<T, kRows>(smem.state, smem.gradient, kRows / 16 * own_token());
        const GradientsTask& task = smem.task;
        const int chunk = task.chunks - 1 - anew(step), part = kKeysWarps * task.slice + own_token() / 16;
        const float flow = gates.decay * warp_sum(sum);
        if (fresh_laneid() == 0 && task.owns(chunk))
            g.flows[part * g.chunk_rows + task.batch_head * g.slots + task.first_slot + chunk] = flow;
    }

    // A result in the place of q or k, for the producer to store. With several slices of V: added to `sums`.
    __device__ inline void store(Tile& tile, float* sums, int step, const Result& result) const {
        if (g.slices == 1) return store_panels<T, kChunk>(shared_address(&tile), own_token(), result);
        const GradientsTask& task = smem.task;
        const int chunk = task.chunks - 1 - anew(step), lane = fresh_laneid();
        if (!task.owns(chunk)) return;
        // two lanes exchange half of what they have, so that each has four columns in a row
        const bool odd = lane % 2;
        each<0, 2>([&](int half) {
            const int row = chunk * kChunk + own_token() + lane / 4 + 8 * half;
            const int64_t token = static_cast<int64_t>(task.batch) * g.seq + task.first_row + row;
            const int column = 8 * odd + 4 * (lane % 4 / 2);
            float* const to = sums + (token * g.heads + task.head) * g.dim_k + column;
            each<0, Result::width>([&](int j) {
                const float2 low = result.tiles[0][j].data[half], high = result.tiles[0][j].data[2 + half];
                const float2 give = odd ? low : high;
                const float2 got{__shfl_xor_sync(0xffffffff, give.x, 1),
                                 __shfl_xor_sync(0xffffffff, give.y, 1)};
                if (row >= task.tokens || 16 * j + column >= g.dim_k) return;
                const float4 four =
                    odd ? float4{got.x, got.y, high.x, high.y} : float4{low.x, low.y, got.x, got.y};
                if (task.slice == 0)
                    *reinterpret_cast<float4*>(to + 16 * j) = four;
                else
                    add_four(to + 16 * j, four);
            });
        });
    }

    __device__ inline void make_chunk(int step) {
        const auto [slot, phase] = Use<C::kStages>(step);
        const GradientsGates& gates = smem.gates[slot];
        Tile &queries = smem.queries[slot], &keys = smem.keys[slot];
        Result of_state, rest;  // dq, then left; right
        // 1
        issue_through<T, C::kDimV>(of_state, smem.douts[slot], smem.state);
        wait(smem.gradient_ready, step & 1);
        issue_through<T, C::kDimV>(rest, smem.writes[slot], smem.gradient);
        if (step > 0) end_turn(g, smem.task, smem.task.chunks - anew(step));
        if constexpr (C::kMakesSums) leave_flow(step, gates);
        warpgroup::mma_async_wait<1>();
        pin(of_state);
        arrive_warp(smem.dout_read[slot]);
        scale_rows(of_state, [&](int token) { return g.scale * gates.read[token]; });
        wait(smem.reads_ready, step & 1);
        issue_add<T, 0>(of_state, smem.reads, keys);
        warpgroup::mma_async_wait<1>();
        pin(rest);
        arrive_warp(smem.gradient_free);
        scale_rows(rest, [&](int token) { return gates.kept[token] * gates.beta[token]; });
        if constexpr (C::kMakesSums) leave_sums(2, step, rest, keys);
        issue_add<T, 1>(rest, smem.reads, queries);
        // 2
        warpgroup::mma_async_wait<1>();
        pin(of_state);
        if constexpr (C::kMakesSums) leave_sums(0, step, of_state, queries);
        warpgroup::mma_async_wait<0>();
        pin(rest);
        arrive_warp(smem.reads_free);
        wait(smem.queries_read[slot], phase);
        meet();  // all warps have read q
        store(queries, g.dq_sums, step, of_state);
        // 3
        wait(smem.dv_ready[slot], phase);
        issue_through<T, C::kDimV>(of_state, smem.douts[slot], smem.state);
        wait(smem.erasures_ready, step & 1);
        issue_add<T, 1>(rest, smem.erasures, keys);
        warpgroup::mma_async_wait<1>();
        pin(of_state);
        arrive_warp(smem.state_free);
        arrive_warp(smem.dv_done[slot]);
        scale_rows(of_state, [&](int token) { return -gates.read[token]; });
        issue_add<T, 0>(of_state, smem.erasures, keys);
        warpgroup::mma_async_wait<1>();
        pin(rest);
        float2 sums{0.f, 0.f};
        if constexpr (C::kMakesSums) add_row_sums<true>(sums, rest, keys);
        warpgroup::mma_async_wait<0>();
        pin(of_state);
        arrive_warp(smem.erasures_free);
        // 4
        wait(smem.keys_read[slot], phase);
        meet();  // all warps have read k
        const uint32_t rows = own_rows_of(keys);
        each<0, Result::width>([&](int j) {
            if constexpr (C::kMakesSums) {
                T2 x[4];
                kittens::move<T2>::ldsm4(x[0], x[1], x[2], x[3], step_of(rows, j));
                add_products<false>(sums, x, of_state.tiles[0][j].data);
            }
            each<0, 4>([&](int k) {
                float2& left = of_state.tiles[0][j].data[k];
                const float2 right = rest.tiles[0][j].data[k];
                left = {left.x + right.x, left.y + right.y};
            });
        });
        if constexpr (C::kMakesSums) store_sums(1, step, sums);
        store(keys, g.dk_sums, step, of_state);
        fence_async_proxy();
        arrive_warp(smem.dq_dk_ready[slot]);
        arrive_warp(smem.free[slot]);
    }

    __device__ inline void walk() {
        for (int step = 0; step < smem.task.chunks; step++) {
            const auto [slot, phase] = Use<C::kStages>(step);
            wait(smem.gates_ready[slot], phase);
            wait(smem.arrived[slot], phase);
            wait(smem.state_arrived, step & 1);
            make_chunk(step);
        }
        if (smem.task.chunks > 0) end_turn(g, smem.task, 0);
    }
};

}  // namespace tfla_tk::delta_rule
