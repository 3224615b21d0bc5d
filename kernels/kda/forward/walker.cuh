// A walker of the forward: a warpgroup that owns 64 columns of V. It holds the transposed state (64 x K) in
// fp32 and computes everything transposed: so the A operand of each GEMM is in its own registers and B in
// shared memory, and walkers never wait for each other. Per chunk:
//   1. Round S^T to A operands and issue X^T = S^T K_F^T.
//   2. Wait for P Y of the chunk before. Load V, and put O where V of that chunk was.
//   3. Issue O^T = S^T Q_F^T. Free the chunk before.
//   4. Wait for X. W^T = V^T - X^T in its place; round beta W^T.
//   5. Issue U'^T = W^T + (beta W^T) A^T. Under it scale S^T by e^{b_L}, and hand over O of the chunk before.
//   6. Wait for U' and Q_F S.
//   7. Round Y^T. Issue S^T += Y^T K_G, then O^T += Y^T P^T.
//   8. Wait for the next chunk, then for S; P Y stays in flight.
// The chain from chunk to chunk is X, W, U', S. NOTES: the loop's edge is after step 6, where no GEMM is in
// flight: ptxas does not follow them over it (C7514).
#pragma once

#include "kda/forward/config.cuh"

namespace tfla_tk::kda {

// What a thread of a walker holds. NOTES: not members of Walker: a struct with arrays stays in memory until
// the loops over them are unrolled, and the compiler would know nothing of its other members.
template <class C> struct WalkerRegisters {
    using Fragment = rt<typename C::T, 16, 16>;
    static constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;

    rt_fl<16, C::kDimK> state;                 // S^T
    rt_fl<16, kChunk> x, out;                  // X^T, then W^T, then U'^T; O^T
    Fragment read[kStateSteps];                // S^T, rounded
    Fragment tokens[kTokenSteps];              // V^T, then beta W^T, then Y^T
    TokenFactors::Columns betas[kTokenSteps];  // of the chunk
};

template <class C> struct Walker {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Registers = WalkerRegisters<C>;
    static constexpr int kStateSteps = Registers::kStateSteps, kTokenSteps = Registers::kTokenSteps;

    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    const int walker;
    Registers& r;
    const Task& task = smem.task;
    const int chunks = smem.task.chunks;
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());

    __device__ inline void walk() {
        load_initial_state();
        if (chunks > 0) {
            wait(smem.arrived[0], 0);
            round_first_state();
            begin_chunk<false>(0);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++) {
                end_chunk(chunk);
                begin_chunk<true>(chunk + 1);
            }
        }
        store_last_state();
    }

  private:
    // Steps 1 to 6. kFollows: there is a chunk before; else S^T is rounded and scaled already. Behind the
    // last chunk nothing of what it makes is used.
    template <bool kFollows> __device__ inline void begin_chunk(int chunk) {
        const auto& tiles = smem.tiles[slot_of(chunk)];
        read_state(r.x, tiles[kReads], [&](int k) {  // 1
            if constexpr (kFollows) convert_fragment(r.read[k], r.state, k);
        });
        if constexpr (kFollows) wait_for_out();  // 2
        load_values(chunk);
        if constexpr (kFollows) put_out(chunk - 1);
        read_state(r.out, tiles[kQueries], [](int) {});  // 3
        if constexpr (kFollows) arrive_warp(smem.free[slot_of(chunk - 1)]);
        load_betas(chunk);
        wait_for_reads();  // 4
        subtract_reads();
        multiply_tokens(r.x, matrices_of(chunk).a);  // 5
        if constexpr (kFollows) {
            scale_state(chunk == chunks ? smem.ones : smem.factors[slot_of(chunk)].decay);
            hand_over_out(chunk - 1);
        }
        wait_for_all();  // 6
    }
    // Steps 7 and 8.
    __device__ inline void end_chunk(int chunk) {
        add_writes(chunk);
        multiply_tokens(r.out, matrices_of(chunk).p);
        wait_arrived(chunk + 1);
        wait_for_state();
    }

    // --- GEMMs

    // d = S^T B^T. before(k): before the k-th step.
    template <class D, class Before>
    __device__ inline void read_state(D& d, const typename C::Tile& tile, Before before) {
        const auto rows = Operand128B::rows(&tile);
        forget(d);
        each<0, kStateSteps>([&](int k) {
            before(k);
            multiply_step<false>(d, r.read[k], rows.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
    }
    // d += tokens B^T
    template <class D> __device__ inline void multiply_tokens(D& d, const typename C::Square& square) {
        const auto rows = Operand128B::rows(&square);
        each<0, kTokenSteps>(
            [&](int j) { multiply_step<false>(d, r.tokens[j], rows.at(j * 32), true, j == 0); });
    }
    // S^T += Y^T K_G, where Y = beta U'.
    __device__ inline void add_writes(int chunk) {
        const auto writers =
            Operand128B::columns(&smem.tiles[slot_of(chunk)][kWriters], C::Tile::panel_bytes);
        each<0, kTokenSteps>([&](int j) {
            each<0, 4>([&](int k) {
                const float2 u = r.x.tiles[0][j].data[k], beta = r.betas[j].of[k / 2];
                r.tokens[j].tiles[0][0].data[k] = from_float2<T2>({beta.x * u.x, beta.y * u.y});
            });
            multiply_step<true>(r.state, r.tokens[j], writers.column_step(j), true, j == 0);
        });
    }

    // --- waits. GEMMs complete in the order in which they are issued; a step of k = 16 counts as one, of
    // which a wait counts seven at most.

    __device__ inline void wait_arrived(int chunk) {
        // behind the last chunk nothing is loaded: the phase before is over
        const Use<C::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase ^ (chunk == chunks));
    }
    template <int kLater> __device__ static inline void wait_but() {
        warpgroup::mma_async_wait<std::min(kLater, 7)>();
    }
    // P Y of the chunk before; X stays in flight.
    __device__ inline void wait_for_out() {
        wait_but<kStateSteps>();
        pin(r.out), pin_all(r.tokens);
    }
    // X; Q_F S stays in flight.
    __device__ inline void wait_for_reads() {
        wait_but<kStateSteps>();
        pin(r.x);
    }
    // S; P Y stays in flight.
    __device__ inline void wait_for_state() {
        wait_but<kTokenSteps>();
        pin(r.state);
    }
    __device__ inline void wait_for_all() {
        warpgroup::mma_async_wait<0>();
        pin(r.x), pin(r.out), pin_all(r.tokens), pin_all(r.read), pin(r.state);
    }

    // --- arithmetic

    // W^T = V^T - X^T in the place of X^T, and beta W^T, rounded.
    __device__ inline void subtract_reads() {
        each<0, kTokenSteps>([&](int j) {
            each<0, 4>([&](int k) {
                T2& pair = r.tokens[j].tiles[0][0].data[k];
                const float2 beta = r.betas[j].of[k / 2];
                float2& w = r.x.tiles[0][j].data[k];
                fma_in_place(w, {-1.f, -1.f}, to_float2(pair));
                pair = from_float2<T2>({beta.x * w.x, beta.y * w.y});
            });
        });
    }
    // A factor per column. NOTES: volatile: it anchors what it is multiplied with, which ptxas would move
    // into the chain.
    __device__ inline void scale_state(const float* decay) {
        const uint32_t from = shared_address(decay) + 8 * (fresh_laneid() % 4);
        each<0, 2 * kStateSteps>([&](int i) {
            float2 e;
            asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(e.x), "=f"(e.y)
                         : "r"(from + 32 * i));
            auto& pairs = r.state.tiles[0][i / 2].data;
            scale_in_place(pairs[i % 2 * 2], e), scale_in_place(pairs[i % 2 * 2 + 1], e);
        });
    }
    // NOTES: all of it before the first GEMM: the state's registers are a GEMM's to ptxas from there on
    // (C7517)
    __device__ inline void round_first_state() {
        each<0, kStateSteps>([&](int k) { convert_fragment(r.read[k], r.state, k), pin(r.read[k]); });
        scale_state(smem.factors[0].decay);
        pin(r.state);
    }

    // --- loads and stores

    __device__ static inline int slot_of(int chunk) { return Use<C::kStages>(chunk).slot; }
    __device__ inline auto& matrices_of(int chunk) const {
        return smem.matrices[Use<C::kMatrixStages>(chunk).slot];
    }
    __device__ inline uint32_t values_of(int chunk) const {
        return shared_address(&smem.values[slot_of(chunk)][walker]) + lane_offset;
    }
    __device__ inline void load_values(int chunk) {
        each<0, kTokenSteps>([&](int j) {
            load_transposed(r.tokens[j], values_of(chunk) + 16 * j * kPanelColumns * sizeof(T));
        });
    }
    // NOTES: once for both uses, ahead of the chain: beside GEMMs a load takes some 200 cycles.
    __device__ inline void load_betas(int chunk) {
        const TokenFactors& betas = smem.factors[slot_of(chunk)].beta;
        each<0, kTokenSteps>([&](int j) { r.betas[j] = betas.columns(j, fresh_laneid()); });
    }
    // Each warp puts it in the place of its own 16 columns of V, which none but it has read.
    __device__ inline void put_out(int chunk) { store_transposed<T>(values_of(chunk), r.out); }
    __device__ inline void hand_over_out(int chunk) {
        fence_async_proxy();
        arrive_warp(smem.out_ready[walker][slot_of(chunk)]);
    }

    // The warp's first column of V. NOTES: recomputed, to save registers.
    __device__ inline int column() const { return task.column + (fresh_thread() - 128) / 32 * 16; }
    __device__ inline int64_t place_of_state() const {
        return task.state * static_cast<int64_t>(g.dim_k) * g.dim_v;
    }
    __device__ inline void load_initial_state() {
        const float* const from = g.initial ? g.initial + place_of_state() : nullptr;
        if (from == nullptr)
            warp::zero(r.state);
        else if (g.v_first)
            load_state(r.state, from, column(), 0, g.dim_v, g.dim_k, g.dim_k);
        else
            load_state_transposed(r.state, from, 0, column(), g.dim_k, g.dim_v, g.dim_v);
        pin(r.state);
    }
    __device__ inline void store_last_state() {
        if (g.last == nullptr) return;
        float* const to = g.last + place_of_state();
        if (g.v_first)
            store_state(to, r.state, column(), 0, g.dim_v, g.dim_k, g.dim_k);
        else
            store_state_transposed(to, r.state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    }
};

}  // namespace tfla_tk::kda
