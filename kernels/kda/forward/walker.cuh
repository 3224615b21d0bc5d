// A walker of the forward. Per chunk:
//   1. Round S^T to A operands and issue X^T = S^T K_F^T.
//   2. Wait for P Y of the chunk before. Load V, and put O where V of that chunk was.
//   3. Issue O^T = S^T Q_F^T. Free the chunk before.
//   4. Wait for X. W^T = V^T - X^T in its place; round beta W^T.
//   5. Issue U'^T = W^T + (beta W^T) A^T. Under it scale S^T by e^{b_L}, hand over O of the chunk before, and
//      leave S^T of this one, rounded, where it is wanted.
//   6. Wait for U' and Q_F S.
//   7. Round Y^T. Issue S^T += Y^T K_G, then O^T += Y^T P^T.
//   8. Wait for the next chunk, then for S; P Y stays in flight.
// The chain from chunk to chunk is X, W, U', S. NOTES: the loop's edge is after step 6, where no GEMM is in
// flight: ptxas does not follow them over it (C7514).
#pragma once

#include "kda/walker.cuh"

namespace tfla_tk::kda {

template <class Type, int kDim, int kCount> using ForwardConfig = WalkConfig<Type, kDim, kCount, false>;

// What a thread of a walker holds.
template <class C> struct ForwardRegisters {
    using Steps = WalkerSteps<C>;

    typename Steps::State state;            // S^T
    typename Steps::Tokens x, out;          // X^T, then W^T, then U'^T; O^T
    typename Steps::StateFragment read;     // S^T, rounded
    typename Steps::TokenFragments tokens;  // V^T, then beta W^T, then Y^T
    typename Steps::Betas betas;            // of the chunk
};

template <class C> struct ForwardWalker : WalkerSteps<C> {
    using Registers = ForwardRegisters<C>;
    using Steps = WalkerSteps<C>;
    using Steps::chunks, Steps::g, Steps::kStateSteps, Steps::kTokenSteps, Steps::smem;
    using typename Steps::T2;

    Registers& r;

    __device__ inline void walk() {
        this->load_entering_state(r.state);
        if (chunks > 0) {
            wait(smem.arrived[0], 0);
            this->round_first_state(r.state, r.read);
            begin_chunk<false>(0);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++) {
                end_chunk(chunk);
                begin_chunk<true>(chunk + 1);
            }
        }
        this->store_leaving_state(r.state);
    }

  private:
    // Steps 1 to 6. kFollows: there is a chunk before; else S^T is rounded and scaled already. Behind the
    // last chunk nothing of what it makes is used.
    template <bool kFollows> __device__ inline void begin_chunk(int chunk) {
        const auto& tiles = smem.tiles[Steps::slot_of(chunk)];
        this->read_state(r.x, r.read, tiles[kReads], [&](int k) {  // 1
            if constexpr (kFollows) convert_fragment(r.read[k], r.state, k);
        });
        if constexpr (kFollows) wait_for_out();  // 2
        this->load_values(r.tokens, chunk);
        if constexpr (kFollows) this->put_results(r.out, chunk - 1);
        this->read_state(r.out, r.read, tiles[kQueries], [](int) {});  // 3
        if constexpr (kFollows) arrive_warp(smem.free[Steps::slot_of(chunk - 1)]);
        this->load_betas(r.betas, chunk);
        wait_for_reads();  // 4
        subtract_reads();
        this->template multiply_tokens<true>(r.x, r.tokens, this->matrices_of(chunk).a);  // 5
        if constexpr (kFollows) {
            this->scale_state(r.state,
                              chunk == chunks ? smem.ones : smem.factors[Steps::slot_of(chunk)].decay);
            this->hand_over_results(chunk - 1);
        }
        if (chunk < chunks) this->leave_state(r.read, chunk);
        wait_for_all();  // 6
    }
    // Steps 7 and 8.
    __device__ inline void end_chunk(int chunk) {
        this->add_to_state(r.state, r.tokens, smem.tiles[Steps::slot_of(chunk)][kWriters],
                           [&](int j) { Steps::template round_times_beta<1>(r.tokens[j], r.x, r.betas, j); });
        this->template multiply_tokens<true>(r.out, r.tokens, this->matrices_of(chunk).p);
        wait_arrived(chunk + 1);
        wait_for_state();
    }

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

    __device__ inline void wait_arrived(int chunk) {
        // behind the last chunk nothing is loaded: the phase before is over
        const Use<C::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase ^ (chunk == chunks));
    }
    // P Y of the chunk before; X stays in flight.
    __device__ inline void wait_for_out() {
        Steps::template wait_but<kStateSteps>();
        pin(r.out), pin_all(r.tokens);
    }
    // X; Q_F S stays in flight.
    __device__ inline void wait_for_reads() {
        Steps::template wait_but<kStateSteps>();
        pin(r.x);
    }
    // S; P Y stays in flight.
    __device__ inline void wait_for_state() {
        Steps::template wait_but<kTokenSteps>();
        pin(r.state);
    }
    __device__ inline void wait_for_all() {
        warpgroup::mma_async_wait<0>();
        pin(r.x), pin(r.out), pin_all(r.tokens), pin_all(r.read), pin(r.state);
    }
};

}  // namespace tfla_tk::kda
