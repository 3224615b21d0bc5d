// What a walker of the forward and one of the mirror share. A walker is a warpgroup that owns 64 columns of
// V. It holds the transposed state (64 x K), of the mirror the state's gradient, in fp32 and computes
// everything transposed: so the A operand of each GEMM is in its own registers and B in shared memory, and
// walkers never wait for each other.
#pragma once

#include "kda/walk.cuh"

namespace tfla_tk::kda {

// NOTES: what a thread holds are no members, but in structs of each walk: a struct with arrays stays in
// memory until the loops over them are unrolled, and the compiler would know nothing of its other members.
template <class C> struct WalkerSteps {
    using Config = C;
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    using State = rt_fl<16, C::kDimK>;
    using Tokens = rt_fl<16, kChunk>;  // of a chunk
    static constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    using StateFragment = Fragment[kStateSteps];   // the state, rounded
    using TokenFragments = Fragment[kTokenSteps];  // 64 columns of V of a chunk
    using Betas = TokenFactors::Columns[kTokenSteps];

    const WalkGlobals& g;
    WalkMemory<C>& smem;
    const int walker;
    const Task& task = smem.task;
    const int chunks = smem.task.chunks;
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());

    // --- GEMMs

    // d (+)= state B^T. before(k): before the k-th step.
    template <bool kAdds = false, class Before>
    __device__ inline void read_state(Tokens& d, StateFragment& state, const typename C::Tile& tile,
                                      Before before) const {
        const auto rows = Operand128B::rows(&tile);
        if constexpr (!kAdds) forget(d);
        each<0, kStateSteps>([&](int k) {
            before(k);
            multiply_step<false>(d, state[k], rows.row_step(C::Tile::panel_bytes, k), kAdds || k > 0,
                                 k == 0 && !kAdds);
        });
    }
    // d (+)= tokens B, with kRows tokens B^T
    template <bool kRows, bool kAdds = true>
    __device__ inline void multiply_tokens(Tokens& d, TokenFragments& tokens,
                                           const typename C::Square& square) const {
        const auto of =
            kRows ? Operand128B::rows(&square) : Operand128B::columns(&square, C::Square::panel_bytes);
        if constexpr (!kAdds) forget(d);
        each<0, kTokenSteps>([&](int j) {
            multiply_step<!kRows>(d, tokens[j], kRows ? of.at(j * 32) : of.column_step(j), kAdds || j > 0,
                                  j == 0);
        });
    }
    // state += tokens B. before(j): before the j-th step.
    template <class Before>
    __device__ inline void add_to_state(State& state, TokenFragments& tokens, const typename C::Tile& tile,
                                        Before before) const {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        each<0, kTokenSteps>([&](int j) {
            before(j);
            multiply_step<true>(state, tokens[j], columns.column_step(j), true, j == 0);
        });
    }

    // --- waits. GEMMs complete in the order in which they are issued; a step of k = 16 counts as one, of
    // which a wait counts seven at most.

    template <int kLater> __device__ static inline void wait_but() {
        warpgroup::mma_async_wait<std::min(kLater, 7)>();
    }

    // --- arithmetic

    // to = sign beta x of the j-th 16 tokens, rounded.
    template <int kSign>
    __device__ static inline void round_times_beta(Fragment& to, const Tokens& x, const Betas& betas, int j) {
        each<0, 4>([&](int k) {
            const float2 y = x.tiles[0][j].data[k], beta = betas[j].of[k / 2];
            to.tiles[0][0].data[k] = from_float2<T2>({kSign * beta.x * y.x, kSign * beta.y * y.y});
        });
    }
    // A factor per column. NOTES: volatile: it anchors what it is multiplied with, which ptxas would move
    // into the chain.
    __device__ inline void scale_state(State& state, const float* decay) const {
        const uint32_t from = shared_address(decay) + 8 * (fresh_laneid() % 4);
        each<0, 2 * kStateSteps>([&](int i) {
            float2 e;
            asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(e.x), "=f"(e.y)
                         : "r"(from + 32 * i));
            auto& pairs = state.tiles[0][i / 2].data;
            scale_in_place(pairs[i % 2 * 2], e), scale_in_place(pairs[i % 2 * 2 + 1], e);
        });
    }
    // NOTES: all of it before the first GEMM: the state's registers are a GEMM's to ptxas from there on
    // (C7517)
    __device__ inline void round_first_state(State& state, StateFragment& rounded) const {
        each<0, kStateSteps>([&](int k) { convert_fragment(rounded[k], state, k), pin(rounded[k]); });
        scale_state(state, smem.factors[0].decay);
        pin(state);
    }

    // --- loads and stores

    __device__ static inline int slot_of(int step) { return Use<C::kStages>(step).slot; }
    __device__ inline auto& matrices_of(int step) const {
        return smem.matrices[Use<C::kMatrixStages>(step).slot];
    }
    __device__ inline uint32_t values_of(int step) const {
        return shared_address(&smem.values[slot_of(step)][walker]) + lane_offset;
    }
    __device__ inline void load_values(TokenFragments& tokens, int step) const {
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(tokens[j], values_of(step) + 16 * j * kPanelColumns * sizeof(T)); });
    }
    // NOTES: once for both uses, ahead of the chain: beside GEMMs a load takes some 200 cycles.
    __device__ inline void load_betas(Betas& to, int step) const {
        const TokenFactors& betas = smem.factors[slot_of(step)].beta;
        each<0, kTokenSteps>([&](int j) { to[j] = betas.columns(j, fresh_laneid()); });
    }
    // Each warp puts results in the place of its own 16 columns of V, which none but it has read.
    __device__ inline void put_results(const Tokens& results, int step) const {
        store_transposed<T>(values_of(step), results);
    }
    __device__ inline void hand_over_results(int step) const {
        fence_async_proxy();
        arrive_warp(smem.out_ready[walker][slot_of(step)]);
    }
    // The state that enters a chunk, where it is wanted.
    __device__ inline void leave_state(const StateFragment& rounded, int step) const {
        const int group = task.column / kWalkerColumns + walker;
        if (g.states == nullptr || group >= g.groups) return;
        const StateFragments<C::kDimK> to{g.states, g.slots, g.groups};
        const int head = task.batch * g.heads + task.head, slot = task.first_slot + task.chunk_of<C>(step);
        uint4* const at = to.at(head, slot, group, warpgroup::warpid(), 0, fresh_laneid());
        each<0, kStateSteps>(
            [&](int k) { at[k * to.kLanes] = reinterpret_cast<const uint4&>(rounded[k].tiles[0][0].data); });
    }

    // The warp's first column of V. NOTES: recomputed, to save registers.
    __device__ inline int column() const { return task.column + (fresh_thread() - 128) / 32 * 16; }
    __device__ inline int64_t place_of_state() const {
        return task.state * static_cast<int64_t>(g.dim_k) * g.dim_v;
    }
    __device__ inline void load_entering_state(State& state) const {
        const float* const from = g.entering ? g.entering + place_of_state() : nullptr;
        if (from == nullptr)
            warp::zero(state);
        else
            load_state_transposed(state, from, 0, column(), g.dim_k, g.dim_v, g.dim_v);
        pin(state);
    }
    __device__ inline void store_leaving_state(State& state) const {
        if (g.leaving == nullptr) return;
        float* const to = g.leaving + place_of_state();
        store_state_transposed(to, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    }
};

}  // namespace tfla_tk::kda
