// A walker of the walks over the states: a warpgroup that owns a strip, or a strip and half of V. It holds
// the state of these (64 columns of K, up to 128 of V) in fp32 and computes what readers see of it
// transposed. All that is rounded on the way from the state or to it is in two parts, high + low, and so are
// its GEMMs: dg is a difference of sums that cancel but for rounding. Per block of 16 tokens:
//   1. out^T = state values^T with the values of the readers, over the first half of V. NOTES: operands of
//      both halves at once would not leave registers. At an anchor the left walk leaves the state there, the
//      right one finds the flow of gradient.
//   2. The state's second half to operands. Wait for the gate warp's writers and scale the state by the
//      block's decay, a factor per row. NOTES: before the second half's first GEMM: ptxas does not follow a
//      GEMM's accumulators over the loop's edge while another GEMM is in flight (C7517).
//   3. Issue out^T += state values^T over the second half, and state += writers^T values.
//   4. Wait for both. Hand out to the gate warp, which then may write where the low parts of writers are, and
//      hand over the block's place. Where walkers split V, each puts its part of out where the writers' high
//      or low parts are, so it waits until the GEMMs of both walkers have read these: under the other one's
//      work of step 1 of the next block.
#pragma once

#include "channel_gate/backward/states/anchors.cuh"

namespace tfla_tk::channel_gate {

// A state's rows lane / 4 and + 8 times `decay`, in place.
template <class State> __device__ inline void decay_rows(State& state, float2 decay) {
    each<0, 4 * State::width>([&](int i) {
        float2& x = state.tiles[0][i / 4].data[i % 4];
        const float by = i % 2 ? decay.y : decay.x;
        scale_in_place(x, {by, by});
    });
}

// 16 columns of a state as two A operands, whose sum they are.
template <class A, class State>
__device__ inline void split_fragment(A& high, A& low, const State& state, int column_tile) {
    each<0, 4>([&](int k) {
        const HighAndLow<typename A::dtype> parts(state.tiles[0][column_tile].data[k]);
        high.tiles[0][0].data[k] = parts.high, low.tiles[0][0].data[k] = parts.low;
    });
}

// The transpose of a warp's 16 rows of out^T, which are columns from `first_column` on.
template <class C>
__device__ inline void store_out(uint32_t rows, const rt_fl<16, kBlock>& out, int first_column, int lane) {
    const int first_token = lane % 4 * 2;  // and the next one, and eight behind
    const uint32_t address = rows + out_row<C>(first_token) + lane / 4 * 4;
    auto store = [&](int token, uint32_t column, float x) {
        asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address + out_row<C>(token) + column), "f"(x)
                     : "memory");
    };
    each<0, 2>([&](int n) {
        const uint32_t column = (4 * first_column + 32 * n) ^ out_swizzle<C>(first_token);
        each<0, 2>([&](int half) {
            const float2 x = out.tiles[0][0].data[2 * half + n];
            store(8 * half, column, x.x), store(8 * half + 1, column, x.y);
        });
    });
}

template <class C>
__device__ inline void walk_states(const StatesGlobals& g, StatesMemory<C>& smem, int walker) {
    using T = typename C::T;
    using Values = typename C::Values;
    constexpr int kStateSteps = C::kWalkerV / 16, kHalf = kStateSteps / 2;
    using Memory = StatesMemory<C>;
    constexpr int kStages = Memory::kStages;
    rt_fl<16, C::kWalkerV> state;
    rt_fl<16, kBlock> out;
    rt<T, 16, 16> high[kHalf], low[kHalf];  // of half of the state

    const StatesTask& task = smem.task;
    const int strip = C::strip_of(walker), part = C::part_of(walker);
    const int first_column = 16 * warpgroup::warpid();  // of the strip's
    auto column = [&] { return task.column + strip * kWalkerColumns + first_column; };
    const int value_column = part * C::kWalkerV;
    const uint32_t own_panels = part * (C::kWalkerV / kPanelColumns) * Values::panel_bytes;  // bytes before
    // The next step at whose begin there is an anchor.
    int anchor_step = C::kIsLeft ? kBlocksOfAnchor : (task.blocks - 1) % kBlocksOfAnchor + 1;
    if (!g.needs_dg || column() >= g.dim_k) anchor_step = task.blocks;

    auto hand_out = [&](int step) {  // 4
        const Use<kStages> use(step);
        auto& columns = smem.columns[use.slot][strip];
        const int gate_warp = gate_warp_of<C>(strip, step);
        uint32_t rows;
        if constexpr (C::kSplitsV) {
            wait(smem.read[use.slot], use.phase);
            rows = part == 0 ? shared_address(&columns.gates) : shared_address(&columns.writers);
        } else if constexpr (C::kOutInPlace) {
            warpgroup::sync(1 + walker);  // all warps' GEMMs have read the low parts there
            rows = shared_address(&columns.gates);
        } else {
            wait_free(smem.out_free[gate_warp], Use<C::kTurns>(step).phase);
            rows = shared_address(&smem.exchange.out[gate_warp]);
        }
        store_out<C>(rows, out, first_column, fresh_laneid());
        arrive_warp(smem.out_ready[gate_warp]);
    };

    auto wait_values = [&](int step) {
        const Use<kStages> use(step);
        wait(smem.values_arrived[use.slot], use.phase);
    };

    auto walk_block = [&](int step) {
        const int slot = Use<kStages>(step).slot;
        if (step == anchor_step) {
            anchor_step += kBlocksOfAnchor;
            const int block = task.template block_of<C>(step) + !C::kIsLeft;  // the anchor is before it
            uint4* const units = anchor_units<C>(g, task, block, column() / 16, walker);
            if constexpr (C::kIsLeft)
                store_anchor<C>(units, state);
            else
                store_flow<C>(units, state, &smem.exchange.flow[walker][first_column]);
        }
        auto& tiles = smem.values[Use<Memory::kValueStages>(step).slot];
        // NOTES: descriptors by shares, so that those of all steps are one and a constant
        const Operand128B readers{Operand128B::rows(&tiles.of_readers).low + own_panels / 16};
        auto round_half = [&](int half) {
            each<0, kHalf>([&](int k) {
                split_fragment(high[k], low[k], state, half * kHalf + k);
                pin(high[k]), pin(low[k]);
            });
        };
        auto read_half = [&](int half) {
            each<0, kHalf>([&](int k) {
                const uint64_t values = readers.row_step(Values::panel_bytes, half * kHalf + k);
                multiply_step<false>(out, high[k], values, half + k > 0, k == 0);
                wgmma_step<false>(out, low[k], 0, values);
            });
        };
        round_half(0);  // 1
        if constexpr (C::kSplitsV) {
            if (step > 0) hand_out(step - 1);
            wait_values(step);
        }
        forget(out);
        read_half(0);
        warpgroup::mma_commit_group();
        warpgroup::mma_async_wait<0>();
        pin(out), pin_all(high), pin_all(low);
        round_half(1);  // 2
        const Use<kStages> use(step);
        wait(smem.written[slot][strip], use.phase);
        const int lane = fresh_laneid();
        const float* const decay = &smem.decay[slot][strip][first_column + lane / 4];
        decay_rows(state, {decay[0], decay[8]});
        pin(state);
        read_half(1);  // 3
        auto& columns = smem.columns[slot][strip];
        const auto values = Operand128B::columns(&tiles.of_writers, Values::panel_bytes);
        const uint64_t own_values = Operand128B{values.low + own_panels / 16}.at(0);
        auto write = [&](const void* writers) {
            kittens::detail::wgmma::base<float, T, C::kWalkerV, 1, 1>::st_st(
                state, Operand128B::columns(writers, 0).at(0), own_values, 1);
        };
        write(&columns.writers), write(&columns.gates);
        warpgroup::mma_commit_group();
        warpgroup::mma_async_wait<0>();  // 4
        pin(out), pin_all(high), pin_all(low), pin(state);
        if constexpr (C::kSplitsV)
            arrive_warp(smem.read[slot]);
        else
            hand_out(step), arrive_warp(smem.free[slot]);
    };

    const int64_t state_size = static_cast<int64_t>(g.dim_k) * g.row_of_state;
    const float* const entering = task.template entering<!C::kIsLeft>(
        g.entering, C::kIsLeft ? g.borders : g.d_borders, g.heads, state_size);
    if (entering)
        load_state(state, entering, column(), value_column, g.dim_k, g.dim_v, g.row_of_state);
    else
        warp::zero(state);
    pin(state);
    if (!C::kIsLeft && g.needs_dg && !task.is_last) {
        float* const flow = &smem.exchange.border[walker][first_column + fresh_laneid() / 4];
        put_last_flow<C>(g, state, g.borders + task.border * state_size, column(), value_column,
                         [&](int n, float sum) { flow[8 * n] = sum; });
    }
    const int blocks = task.blocks;
#pragma unroll 1
    for (int step = 0; step < blocks; step++) {
        if constexpr (!C::kSplitsV) {
            wait_values(step);
        }
        walk_block(step);
    }
    if constexpr (C::kSplitsV)
        if (blocks > 0) hand_out(blocks - 1);
    if (C::kIsLeft && g.needs_dg && g.d_last && task.is_last)
        store_last_flow<C>(g, smem, state, walker, column(), value_column);
}

}  // namespace tfla_tk::channel_gate
