// Gradients of what the walks read of a chunk: GEMMs of the chunk's tiles with the states around it.
#pragma once

#include "kda/gradients/config.cuh"

namespace tfla_tk::kda {

// A fragment of A, 16 x 16, from rows of a panel: those of the warp, the step-th 16 columns.
template <class A> __device__ inline void load_rows(A& a, const void* panel, int first_row, int step) {
    const int lane = fresh_laneid();
    auto& x = a.tiles[0][0].data;
    move<typename A::dtype>::ldsm4(
        x[0], x[1], x[2], x[3],
        shared_address(panel) + panel_offset(first_row + lane % 16, 2 * step + lane / 16));
}

// The sum over lanes that differ in their rows of a fragment.
__device__ inline float sum_of_rows(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

// Step 2: of 64 columns of V, by a warpgroup; a warp has 16 of them. Everything is transposed, as in the
// walks.
template <class T, int kDimK> struct ColumnsOfV {
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    static constexpr int kStateSteps = kDimK / 16, kTokenSteps = kChunk / 16;

    const GradientsGlobals& g;
    GradientsMemory<T, kDimK>& smem;
    const int group, warp;
    Fragment state[kStateSteps], gradient[kStateSteps];  // S^T, dS'^T

    // Their tiles replace them once all warps have taken theirs.
    __device__ inline void take_states() {
        constexpr int kLanes = StateFragments<kDimK>::kLanes;
        const int first = (group * 4 + warp) * kStateSteps * kLanes + fresh_laneid();
        auto take = [&](Fragment(&to)[kStateSteps], const auto& from) {
            each<0, kStateSteps>([&](int k) {
                reinterpret_cast<uint4&>(to[k].tiles[0][0].data) =
                    reinterpret_cast<const uint4*>(&from)[first + k * kLanes];
            });
        };
        take(state, smem.walk.state), take(gradient, smem.walk.state_gradient);
    }

    __device__ inline void run() {
        leave_states();
        rt_fl<16, kChunk> x;
        read_state(x);
        Fragment tokens[kTokenSteps];
        subtract_reads(x, tokens);
        erase(x, tokens);
        leave_writes(x);
    }

  private:
    // Both to their tiles; <S, dS'>.
    __device__ inline void leave_states() {
        const int lane = fresh_laneid(), row = group * kWalkerColumns + warp * 16;
        constexpr int kRows = kGroups * kWalkerColumns;
        each<0, kStateSteps>([&](int k) {
            auto &s = state[k].tiles[0][0].data, &ds = gradient[k].tiles[0][0].data;
            each<0, 2>([&](int half) {
                const float2 x = to_float2(s[2 * half]), dx = to_float2(ds[2 * half]);
                const float2 y = to_float2(s[2 * half + 1]), dy = to_float2(ds[2 * half + 1]);
                const float2 sum{sum_of_rows(x.x * dx.x + y.x * dy.x), sum_of_rows(x.y * dx.y + y.y * dy.y)};
                if (lane < 4) write_pair(smem.flow[group * 4 + warp], 16 * k + 8 * half + 2 * lane, sum);
            });
            store_fragment<T, kRows>(shared_address(&smem.walk.state), row, k, s);
            store_fragment<T, kRows>(shared_address(&smem.walk.state_gradient), row, k, ds);
        });
    }

    // X^T = S^T K_F^T
    __device__ inline void read_state(rt_fl<16, kChunk>& x) {
        const auto rows = Operand128B::rows(&smem.walk.reads);
        forget(x);
        each<0, kStateSteps>([&](int k) {
            multiply_step<false>(x, state[k], rows.row_step(decltype(smem.walk.reads)::panel_bytes, k), k > 0,
                                 k == 0);
        });
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(state);
    }
    // W^T = V^T - X^T in the place of X^T; beta W^T, rounded.
    __device__ inline void subtract_reads(rt_fl<16, kChunk>& x, Fragment (&tokens)[kTokenSteps]) {
        each<0, kTokenSteps>([&](int j) {
            load_transposed(tokens[j], place(smem.walk.values[group], j));
            const auto betas = smem.factors.beta.columns(j, fresh_laneid());
            each<0, 4>([&](int k) {
                T2& pair = tokens[j].tiles[0][0].data[k];
                const float2 beta = betas.of[k / 2], v = to_float2(pair);
                float2& w = x.tiles[0][j].data[k];
                w = {v.x - w.x, v.y - w.y};
                pair = from_float2<T2>({beta.x * w.x, beta.y * w.y});
            });
        });
    }
    // U'^T = W^T + (beta W^T) A^T in its place.
    __device__ inline void erase(rt_fl<16, kChunk>& x, Fragment (&tokens)[kTokenSteps]) {
        const auto rows = Operand128B::rows(&smem.walk.a);
        each<0, kTokenSteps>(
            [&](int j) { multiply_step<false>(x, tokens[j], rows.at(j * 32), true, j == 0); });
        warpgroup::mma_async_wait<0>();
        pin(x), pin_all(tokens);
    }
    // Y = beta U' where V was, G = beta R' where R' was; U' R'.
    __device__ inline void leave_writes(const rt_fl<16, kChunk>& u) {
        const int lane = fresh_laneid();
        each<0, kTokenSteps>([&](int j) {
            Fragment solved[1], writes[1];
            load_transposed(solved[0], place(smem.walk.solved[group], j));
            const auto betas = smem.factors.beta.columns(j, lane);
            float2 dots[2] = {};
            each<0, 4>([&](int k) {
                T2& pair = solved[0].tiles[0][0].data[k];
                const float2 beta = betas.of[k / 2], r = to_float2(pair), w = u.tiles[0][j].data[k];
                float2& dot = dots[k / 2];
                dot = {dot.x + w.x * r.x, dot.y + w.y * r.y};
                pair = from_float2<T2>({beta.x * r.x, beta.y * r.y});
                writes[0].tiles[0][0].data[k] = from_float2<T2>({beta.x * w.x, beta.y * w.y});
            });
            store_transposed(place(smem.walk.solved[group], j), solved);
            store_transposed(place(smem.walk.values[group], j), writes);
            each<0, 2>([&](int half) {
                const float2 sum{sum_of_rows(dots[half].x), sum_of_rows(dots[half].y)};
                if (lane < 4) write_pair(smem.strength[group * 4 + warp], 16 * j + 8 * half + 2 * lane, sum);
            });
        });
    }
    // Of 16 tokens and the warp's columns of V.
    template <class Tile> __device__ inline uint32_t place(const Tile& tile, int j) const {
        return shared_address(&tile) + transposed_lane_offset(warp) + 16 * j * kPanelColumns * sizeof(T);
    }
};

// Step 3, of 64 channels, by a warpgroup; a warp has 16 tokens.
template <class T, int kDimK> struct ChannelsOfK {
    using Fragment = rt<T, 16, 16>;
    using Memory = GradientsMemory<T, kDimK>;
    static constexpr int kSteps = kWalkerColumns / 16;  // of a group of columns of V

    const GradientsGlobals& g;
    Memory& smem;
    const int part, warp, tokens;  // tokens: of the chunk
    const bool has_channels;       // else it makes its scores alone

    // What is left in shared memory replaces the walk's tiles: meet() waits for the other warpgroup.
    template <class D, class Meet> __device__ inline void run(D& queries, D& reads, D& writers, Meet meet) {
        rt_fl<16, kChunk> scores;
        warp::zero(scores), warp::zero(queries), warp::zero(reads), warp::zero(writers);
#pragma unroll 1
        for (int group = 0; group < g.groups; group++) add_columns(group, scores, queries, reads, writers);
        meet();
        leave_scores(scores);
    }

  private:
    // Adds what 64 columns of V contribute.
    template <class D>
    __device__ inline void add_columns(int group, D& scores, D& queries, D& reads, D& writers) {
        auto& walk = smem.walk;
        Fragment d_out[kSteps], solved[kSteps], written[kSteps], of_scores[kSteps];
        const void* const scored = part == 0 ? &walk.d_out[group] : &walk.solved[group];
        each<0, kSteps>([&](int k) {
            load_rows(of_scores[k], scored, 16 * warp, k);
            load_rows(d_out[k], &walk.d_out[group], 16 * warp, k);
            load_rows(solved[k], &walk.solved[group], 16 * warp, k);
            load_rows(written[k], &walk.values[group], 16 * warp, k);
        });
        const auto rows = Operand128B::rows(&walk.values[group]);
        const int panel = has_channels ? part : 0;
        const auto state = Operand128B::columns(walk.state.data[panel], 0);
        const auto gradient = Operand128B::columns(walk.state_gradient.data[panel], 0);
        each<0, kSteps>([&](int k) {
            const int step = group * kSteps + k;
            multiply_step<false>(scores, of_scores[k], rows.at(k * 32), true, k == 0);
            multiply_step<true>(queries, d_out[k], state.column_step(step), true, k == 0);
            multiply_step<true>(reads, solved[k], state.column_step(step), true, k == 0);
            multiply_step<true>(writers, written[k], gradient.column_step(step), true, k == 0);
        });
        warpgroup::mma_async_wait<0>();
        pin(scores), pin(queries), pin(reads), pin(writers);
        pin_all(of_scores), pin_all(d_out), pin_all(solved), pin_all(written);
    }
    // dP by the first warpgroup, dL by the second one.
    __device__ inline void leave_scores(const rt_fl<16, kChunk>& scores) {
        auto& to = part == 0 ? smem.within.d_scores : smem.within.d_erasures;
        const int lane = fresh_laneid();
        const float sign = part == 0 ? 1.f : -1.f;
        each<0, 4>([&](int j) {
            each<0, 4>([&](int k) {
                const int row = 16 * warp + lane / 4 + 8 * (k % 2);
                const int column = 16 * j + 8 * (k / 2) + 2 * (lane % 4);
                const int last = row < tokens ? row : -1;
                const float2 x = scores.tiles[0][j].data[k];
                to[row][column] = column < last ? rounded_to_tf32(sign * x.x) : 0.f;
                to[row][column + 1] = column + 1 < last ? rounded_to_tf32(sign * x.y) : 0.f;
                if (part == 0 && row / 2 == column / 2)
                    smem.within.own[row] = last < 0 ? 0.f : row == column ? x.x : x.y;
            });
        });
    }
};

}  // namespace tfla_tk::kda
