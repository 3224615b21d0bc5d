// Consumer warpgroups of the intra-chunk mLSTM kernel: 64 query rows each, from the first KV tile to the
// diagonal.
#pragma once

#include "mlstm_intra_config.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::intra {

// The first of this thread's two rows of its warpgroup's 64; the other is 8 below.
// NOTES: read anew at every call: a kept row takes a register from the accumulators.
__device__ inline int thread_row() {
    const int thread = fresh_thread();
    return thread % 128 / 32 * 16 + thread % 32 / 4;
}

// S becomes P = S 2^{column - row}; adds to the row sums. On the diagonal tile causal.
template <bool kDiagonal, class Scores>
__device__ inline void gate_scores(Scores& s, float2& sums, const float2* columns, float2 reference) {
    const int row = kDiagonal ? thread_row() : 0, lane = fresh_laneid();
#pragma unroll
    for (int j = 0; j < Scores::width; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = 16 * j + 8 * half + 2 * (lane % 4);
            const float4 a = *reinterpret_cast<const float4*>(&columns[column]);
            float2 &upper = s.tiles[0][j].data[2 * half], &lower = s.tiles[0][j].data[2 * half + 1];
            upper.x = gated(upper.x, a.x, a.y, reference.x, !kDiagonal || column <= row);
            upper.y = gated(upper.y, a.z, a.w, reference.x, !kDiagonal || column + 1 <= row);
            lower.x = gated(lower.x, a.x, a.y, reference.y, !kDiagonal || column <= row + 8);
            lower.y = gated(lower.y, a.z, a.w, reference.y, !kDiagonal || column + 1 <= row + 8);
            sums.x += upper.x + upper.y;
            sums.y += lower.x + lower.y;
        }
    }
}

// P in bf16. Returns the OR of its words.
template <class P, class Scores> __device__ inline uint32_t pack(P& p, const Scores& s) {
    uint32_t words = 0;
#pragma unroll
    for (int j = 0; j < P::width; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            p.tiles[0][j].data[k] = from_float2<typename P::dtype>(s.tiles[0][j].data[k]);
            words |= reinterpret_cast<const uint32_t&>(p.tiles[0][j].data[k]);
        }
    return words;
}

// held = p, not before `zero`, which is 0, is known.
template <class P> __device__ inline void hold(P& held, const P& p, uint32_t zero) {
#pragma unroll
    for (int j = 0; j < P::width; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            reinterpret_cast<uint32_t&>(held.tiles[0][j].data[k]) =
                reinterpret_cast<const uint32_t&>(p.tiles[0][j].data[k]) | zero;
}

// Where in a warpgroup's row of tiles a step stands.
template <bool kFirst_, bool kLast_> struct Place {
    static constexpr bool kFirst = kFirst_, kLast = kLast_;
};
using First = Place<true, false>;
using Middle = Place<false, false>;
using Last = Place<false, true>;
using Only = Place<true, true>;

// NOTES: one copy of the code per consumer, so that ring positions are uniform for the compiler.
template <class C, int kConsumer>
__device__ inline void consume(const Globals& g, SharedMemoryPlan<C>& smem) {
    using T = typename C::T;
    using Scores = rt_fl<16, kTile>;
    using P = rt<T, 16, kTile>;
    constexpr bool kOverlapped = C::kSchedule != Schedule::sequential;
    constexpr bool kTakesTurns = C::kSchedule == Schedule::pingpong;
    constexpr bool kHoldsP = C::kSchedule == Schedule::three_stage;

    const Task task = Task::of_block<C>(g);
    const int first_row = (kConsumers * task.query_tile + kConsumer) * kTile;
    const float* references = g.references(task.head_index) + first_row + thread_row();
    const float2 reference{references[0], references[8]};

    Scores s0, s1;
    P p, held;  // of this tile; three_stage: of the one before
    rt_fl<16, C::kSliceV> out[1];
    float2 sums{0.f, 0.f};
    warp::zero(out[0]);
    pin(out[0]);

    // Turns: a consumer issues its GEMMs when the other has issued its own. The second one has a tile more,
    // and takes no turn there.
    const int shared_tiles = kConsumers * task.query_tile + 1;
    auto turn_of = [](int consumer) { return static_cast<NamedBarrier>(1 + consumer); };
    auto take_turn = [&](int tile) {
        if (kTakesTurns && tile + kConsumer < shared_tiles) named_sync<256>(turn_of(kConsumer));
    };
    auto pass_turn = [&](int tile) {
        if (kTakesTurns && tile < shared_tiles) named_arrive<256>(turn_of(1 - kConsumer));
    };

    auto issue_scores = [&](Scores& s, int tile) {
        const auto key = C::key(tile);
        wait(smem.k_arrived[key.slot], key.phase);
        forget(s);
        warpgroup::mm_ABt(s, smem.q[kConsumer], smem.k[key.slot]);
    };
    auto issue_values = [&](P& p, int tile) { mma_partial_AB(out, p, smem.v[C::value(tile).slot], 0); };
    auto free_key = [&](int tile) { arrive_warp(smem.k_free[C::key(tile).slot]); };
    auto free_value = [&](int tile) { arrive_warp(smem.v_free[C::value(tile).slot]); };
    auto finish_scores = [&](Scores& s, int tile) {
        warpgroup::mma_async_wait<0>();
        pin(s);
        free_key(tile);
    };

    // s: scores of this tile, next: of the next one.
    auto step = [&](Scores& s, Scores& next, int tile, auto place) {
        using At = decltype(place);
        constexpr bool kPending = kHoldsP && !At::kFirst;
        const auto value = C::value(tile);

        if constexpr (!kOverlapped) {
            issue_scores(s, tile);
            finish_scores(s, tile);
        } else if constexpr (!At::kLast)
            issue_scores(next, tile + 1);
        if constexpr (kPending) issue_values(held, tile - 1);

        pass_turn(tile);
        wait(smem.gates_arrived[value.slot], value.phase);
        gate_scores<At::kLast>(s, sums, smem.columns[value.slot], reference);
        // NOTES: ptxas puts off what no GEMM waits for, the row sums and a P that is held, and keeps all of P
        // in fp32 for it. So the next wait formally needs them.
        uint32_t needed = pack(p, s);
        if constexpr (!kHoldsP) needed = 0;
        needed |= __float_as_uint(sums.x) | __float_as_uint(sums.y);
        wait(smem.v_arrived[value.slot], value.phase | (needed & g.zero));
        take_turn(tile);
        if constexpr (!kHoldsP || At::kLast) issue_values(p, tile);

        warpgroup::mma_async_wait<0>();
        pin(out[0]);
        pin(p);
        if constexpr (kOverlapped && !At::kLast) {
            pin(next);
            free_key(tile + 1);
        }
        if constexpr (kPending) {
            pin(held);
            free_value(tile - 1);
        }
        if constexpr (kHoldsP && !At::kLast)
            hold(held, p, __float_as_uint(next.tiles[0][0].data[0].x) & g.zero);
        else if constexpr (!At::kLast)
            free_value(tile);
    };
    auto even = [&](int tile, auto place) { step(s0, s1, tile, place); };
    auto odd = [&](int tile, auto place) { step(s1, s0, tile, place); };

    const int pairs = task.query_tile;  // of whole tiles; the second consumer has one more
    wait(smem.q_arrived, 0);
    if constexpr (!kOverlapped) {
        for (int tile = 0; tile < 2 * pairs + kConsumer; tile++) even(tile, Middle{});
        even(2 * pairs + kConsumer, Last{});
    } else if constexpr (kConsumer == 0) {
        issue_scores(s0, 0);
        finish_scores(s0, 0);
        if (kHoldsP && pairs > 0) {
            even(0, First{});
            odd(1, Middle{});
        }
        for (int pair = kHoldsP; pair < pairs; pair++) {
            even(2 * pair, Middle{});
            odd(2 * pair + 1, Middle{});
        }
        if (kHoldsP && pairs == 0)
            even(0, Only{});
        else
            even(2 * pairs, Last{});
    } else {
        take_turn(-1);
        issue_scores(s1, 0);
        finish_scores(s1, 0);
        odd(0, First{});
        for (int pair = 0; pair < pairs; pair++) {
            even(2 * pair + 1, Middle{});
            odd(2 * pair + 2, Middle{});
        }
        even(2 * pairs + 1, Last{});
    }

    // Normalise; all warps are done with Q, whose space h takes.
    const int row = thread_row(), warp_row = row / 16 * 16;
    const float* floors = g.floors(task.head_index) + first_row;
    const float2 scale{1.f / row_normaliser(quad_sum(sums.x), floors[row], g.eps),
                       1.f / row_normaliser(quad_sum(sums.y), floors[row + 8], g.eps)};
    named_sync<128>(static_cast<NamedBarrier>(3 + kConsumer));
    const uint32_t panels = shared_address(&smem.q[kConsumer]);
#pragma unroll
    for (int pass = 0; pass < C::kPasses; pass++) {
        rt_fl<16, C::kPassV> part;
#pragma unroll
        for (int j = 0; j < part.width; j++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const float2 o = out[0].tiles[0][pass * part.width + j].data[x];
                const float s = x % 2 ? scale.y : scale.x;
                part.tiles[0][j].data[x] = {o.x * s, o.y * s};
            }
        if (laneid() == 0) wait_stores_read();
        __syncwarp();
        store_panels<T, kTile>(panels, warp_row, part);
        fence_async_proxy();
        __syncwarp();
        if (laneid() != 0) continue;
#pragma unroll
        for (int panel = 0; panel < C::kPassV / kPanelColumns; panel++)
            g.h.store_panel(panels + (panel * kTile + warp_row) * kPanelColumns * sizeof(T),
                            task.column + pass * C::kPassV + panel * kPanelColumns, first_row + warp_row,
                            task.head, task.batch);
        commit_stores();
    }
    if (laneid() == 0) wait_stores_read();
}

}  // namespace tfla_tk::intra
