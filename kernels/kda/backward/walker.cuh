// A walker of the mirror, backward in time. Per chunk:
//   1. Round dS'^T to A operands and issue R^T += dS'^T K_G^T on top of dO^T P, which step 8 has issued.
//   2. Free the chunk before in the walk. Scale dS'^T by e^{b_L} and issue dS^T += dO^T Q_F.
//   3. Wait for R; round beta R^T.
//   4. Issue R'^T = R^T + (beta R^T) A in its place. Under it hand over R' of the chunk before, and leave
//      dS'^T, rounded.
//   5. Wait for R' and Q_F^T dO.
//   6. Round -G^T = -beta R'^T and issue dS^T -= G^T K_F.
//   7. Under it put R' where dO was.
//   8. Wait for the next chunk, load its dO^T and issue R^T = dO^T P.
//   9. Wait for dS; P^T dO stays in flight.
// The chain from chunk to chunk is R, R', G, dS. The loop's edge is after step 5 (forward/walker.cuh).
#pragma once

#include "kda/walker.cuh"

namespace tfla_tk::kda {

template <class Type, int kDim, int kCount> using MirrorConfig = WalkConfig<Type, kDim, kCount, true>;

// What a thread of a walker holds.
template <class C> struct MirrorRegisters {
    using Steps = WalkerSteps<C>;

    typename Steps::State state;            // dS^T
    typename Steps::Tokens x;               // R^T, then R'^T
    typename Steps::StateFragment read;     // dS'^T, rounded
    typename Steps::TokenFragments douts;   // dO^T
    typename Steps::TokenFragments tokens;  // beta R^T, then -G^T
    typename Steps::Betas betas;            // of the chunk
};

template <class C> struct MirrorWalker : WalkerSteps<C> {
    using Registers = MirrorRegisters<C>;
    using Steps = WalkerSteps<C>;
    using Steps::chunks, Steps::kStateSteps, Steps::kTokenSteps, Steps::smem;

    Registers& r;

    __device__ inline void walk() {
        this->load_entering_state(r.state);
        if (chunks > 0) {
            wait_arrived(0);
            this->round_first_state(r.state, r.read);
            begin_reads(0);
            begin_chunk<false>(0);
#pragma unroll 1
            for (int step = 0; step + 1 < chunks; step++) {
                end_chunk<true>(step);
                begin_chunk<true>(step + 1);
            }
            end_chunk<false>(chunks - 1);
            this->hand_over_results(chunks - 1);
        }
        this->store_leaving_state(r.state);
    }

  private:
    // Steps 1 to 5. kFollows: there is a chunk before in the walk; else dS'^T is rounded and scaled already.
    template <bool kFollows> __device__ inline void begin_chunk(int step) {
        const int slot = Steps::slot_of(step);
        const auto& tiles = smem.tiles[slot];
        this->template read_state<true>(r.x, r.read, tiles[kWriters], [&](int k) {  // 1
            if constexpr (kFollows) convert_fragment(r.read[k], r.state, k);
        });
        if constexpr (kFollows) {  // 2
            arrive_warp(smem.free[Steps::slot_of(step - 1)]);
            this->scale_state(r.state, smem.factors[slot].decay);
        }
        this->load_betas(r.betas, step);
        this->add_to_state(r.state, r.douts, tiles[kQueries], [](int) {});
        wait_for_reads();  // 3
        each<0, kTokenSteps>(
            [&](int j) { Steps::template round_times_beta<1>(r.tokens[j], r.x, r.betas, j); });
        this->template multiply_tokens<false>(r.x, r.tokens, this->matrices_of(step).a);  // 4
        if constexpr (kFollows) this->hand_over_results(step - 1);
        this->leave_state(r.read, step);  // NOTES: not before that, whose fence would wait for it
        wait_for_all();                   // 5
    }
    // Steps 6 to 9. kGoesOn: there is a chunk behind in the walk.
    template <bool kGoesOn> __device__ inline void end_chunk(int step) {
        this->add_to_state(r.state, r.tokens, smem.tiles[Steps::slot_of(step)][kReads], [&](int j) {  // 6
            Steps::template round_times_beta<-1>(r.tokens[j], r.x, r.betas, j);
        });
        this->put_results(r.x, step);  // 7
        if constexpr (kGoesOn) {
            wait_arrived(step + 1);  // 8
            begin_reads(step + 1);
        }
        wait_for_state<kGoesOn>();  // 9
    }
    // R^T = dO^T P
    __device__ inline void begin_reads(int step) {
        this->load_values(r.douts, step);
        this->template multiply_tokens<false, false>(r.x, r.douts, this->matrices_of(step).p);
    }

    __device__ inline void wait_arrived(int step) {
        const Use<C::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase);
    }
    // R; Q_F^T dO stays in flight.
    __device__ inline void wait_for_reads() {
        Steps::template wait_but<kTokenSteps>();
        pin(r.x), pin_all(r.read);
    }
    // dS; with kLater P^T dO stays in flight.
    template <bool kLater> __device__ inline void wait_for_state() {
        Steps::template wait_but<kLater ? kTokenSteps : 0>();
        pin(r.state), pin_all(r.tokens);
    }
    __device__ inline void wait_for_all() {
        warpgroup::mma_async_wait<0>();
        pin(r.x), pin(r.state), pin_all(r.douts), pin_all(r.tokens);
    }
};

}  // namespace tfla_tk::kda
