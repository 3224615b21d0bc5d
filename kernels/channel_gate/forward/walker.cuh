// A walker of the forward (walk.cuh). Per chunk:
//   1. Wait for what the gate warps have made, of this CTA or of the other one of a cluster, and for V.
//   2. By steps of 16 channels: scale S^T by e^r, a factor per column, round it to an A operand and issue
//      O^T = S^T (s q e^{b - r})^T.
//   3. Under it, by levels, scale S^T by e^{b_L}.
//   4. Load V^T as A operands.
//   5. Issue O^T += V^T P^T, then S^T += V^T (k e^{r - b}), by 64 channels.
//   6. Wait for O, scale it by what operands and scores lack of s, and put it where V was; wait for S, scale
//      it by e^{b_L - r}, and hand over the chunk.
// r is that of a chunk around its middle (middle.cuh). By levels (chunk.cuh) there is nothing to scale by in
// steps 2 and 6, and the operands are s q e^b and k e^{b_L - b}. The chain from chunk to chunk is S.
// The mirror walk goes backward in time: dS and dV take the places of S and O, dO that of V. The operands of
// q and k change places, so do the factors of steps 2 and 6, and P is transposed.
// Where launches take slices of K, all but the first begin O^T of step 2 with the part that the one before
// has left, which is loaded in step 6 of the chunk before. All but the last leave their part in step 6, and
// no O. Where walkers have columns of their own, a walker waits for V in step 4, then loads the V of the next
// chunk; O has a place of its own, which the walker stores in step 6 (columns.cuh). NOTES: the loop's edge
// is after step 4, where no GEMM is in flight, and S^T is read in the iteration of the GEMM that has made it:
// else ptxas waits for all GEMMs before each read (C7517).
#pragma once

#include "channel_gate/forward/columns.cuh"
#include "channel_gate/forward/part.cuh"

namespace tfla_tk::channel_gate {

template <class C>
__device__ inline void walk_forward(const ForwardGlobals& g, ForwardMemory<C>& smem, int walker) {
    using T = typename C::T;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16, kHalves = C::kDimK / 64;
    rt_fl<16, C::kDimK> state;             // S^T
    rt_fl<16, kChunk> out;                 // O^T
    rt<T, 16, 16> fragments[kTokenSteps];  // S^T rounded, four steps at a time; V^T
    const Task& task = smem.task;
    const int chunks = task.chunks;
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 32 * C::kGateWarps) / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    auto columns_at = [&](int slot) { return shared_address(&smem.values[slot][walker]) + lane_offset; };
    const WalkerColumns<C> columns{g, smem, walker};
    auto pin_fragments = [&] { each<0, kTokenSteps>([&](int k) { pin(fragments[k]); }); };
    auto wait_arrived = [&](int chunk) {  // 1
        const auto scores = C::scores_of(chunk);
        if constexpr (!C::kOwnColumns) {
            const auto use = C::operands_of(chunk);
            wait(smem.values_arrived[use.slot], use.phase);
        }
        wait(smem.operands_ready[scores.slot], scores.phase);
    };
    // Factors of S^T, one per column: e^{b_L}, or those before and behind the middle.
    enum Factor { whole, before, behind };
    constexpr Factor kAtFirst = C::kBackward ? behind : before, kAtLast = C::kBackward ? before : behind;
    // This lane's factors of 16 columns, the step-th ones. NOTES: volatile, or ptxas loads all factors first,
    // in registers of their own
    auto load_factors = [](float2(&e)[2], uint32_t decay, int step) {
        each<0, 2>([&](int i) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                         : "=f"(e[i].x), "=f"(e[i].y)
                         : "r"(decay + 64 * step + 32 * i));
        });
    };
    auto decay_columns = [&](int step, const float2(&e)[2]) {
        each<0, 4>([&](int k) {
            float2& z = state.tiles[0][step].data[k];
            asm volatile("mul.ftz.f32 %0, %0, %1;" : "+f"(z.x) : "f"(e[k / 2].x));
            asm volatile("mul.ftz.f32 %0, %0, %1;" : "+f"(z.y) : "f"(e[k / 2].y));
        });
    };
    // Whether the chunk's form has it.
    auto is_used = [&](const Factors<C>& factors, Factor factor) {
        return (load_anew(shared_address(&factors.mild)) != 0) == (factor != whole);
    };
    // Scales columns of S^T, those of steps from `begin` to `end`.
    auto decay_state = [&]<int begin = 0, int end = C::kDimK / 16>(int chunk, Factor factor) {
        const auto& factors = smem.factors[C::scores_of(chunk).slot];
        if (!is_used(factors, factor)) return;
        const uint32_t decay = shared_address(factors.decay[factor == behind]) + 8 * (fresh_laneid() % 4);
        each<begin, end>([&](int step) {
            float2 e[2];
            load_factors(e, decay, step), decay_columns(step, e);
        });
    };
    // O of a launch of other channels, of a step. NOTES: computed anew, to save registers
    WaitingPart<T> part;
    auto part_of = [&](int step) -> PartOfWarp<T>& {
        const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
        const int64_t place = head * g.part_slots + task.first_slot + task.template chunk_of<C>(step);
        return static_cast<PartOfWarp<T>*>(g.part)[place * (4 * C::kWalkers * g.ctas) + column() / 16];
    };
    auto load_part = [&](int step) {
        if constexpr (C::kTakesSlices) {
            if (!g.adds || step >= chunks) return;
            part.load(part_of(step), out);
            if (step + 1 < chunks) prefetch_bytes<sizeof(PartOfWarp<T>)>(&part_of(step + 1));
        }
    };
    // Steps 2 to 4. first: S^T is not of a GEMM.
    auto begin_chunk = [&]<bool first>(int chunk) {
        const auto& operands = smem.operands[C::operands_of(chunk).slot];
        const auto queries = Operand128B::rows(C::kBackward ? &operands.k : &operands.q);
        const auto& factors = smem.factors[C::scores_of(chunk).slot];  // 2
        const uint32_t decay =
            shared_address(is_used(factors, kAtFirst) ? factors.decay[kAtFirst == behind] : smem.ones) +
            8 * (fresh_laneid() % 4);
        float2 e[2][2];
        load_factors(e[0], decay, 0);
        if (g.adds_part<C>())
            part.put(out);
        else
            forget(out);
        each<0, kStateSteps>([&](int k) {
            auto& fragment = fragments[k % kTokenSteps];
            if (k >= kTokenSteps) warpgroup::mma_async_wait<first ? 0 : kTokenSteps - 1>(), pin(fragment);
            if (k + 1 < kStateSteps) load_factors(e[(k + 1) % 2], decay, k + 1);
            decay_columns(k, e[k % 2]);
            convert_fragment(fragment, state, k);
            multiply_step<false>(out, fragment, queries.row_step(C::Tile::panel_bytes, k),
                                 k > 0 || g.adds_part<C>(), k == 0);
            if constexpr (first) warpgroup::mma_async_wait<0>();
        });
        decay_state(chunk, whole);  // 3
        warpgroup::mma_async_wait<0>();
        pin(out), pin_fragments();
        if constexpr (C::kOwnColumns) columns.wait_arrived(chunk);  // 4
        const uint32_t values = columns_at(C::values_of(chunk));
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(fragments[j], values + 16 * j * kPanelColumns * sizeof(T)); });
        if constexpr (C::kOwnColumns) columns.hand_over_values(chunk);
    };
    // O^T += V^T P^T. The mirror multiplies by 16 rows of P at a time, up to their diagonal block, in two
    // parts (chunk.cuh). NOTES: these products differ in shape, so they need the fence before each of them.
    auto multiply_scores = [&](Operand128B p) {
        auto multiply = [&]<int i>() {
            if constexpr (!C::kBackward) {
                multiply_step<false>(out, fragments[i], p.at(32 * i), true, i == 0);
            } else {
                auto& tokens = reinterpret_cast<rt_fl<16, 16 * (i + 1)>&>(out);
                const uint32_t low = low_row(i, 0) * kRowBytes + low_column(i) * sizeof(T);
                multiply_step<false>(tokens, fragments[i], p.at(32 * i), true, i == 0);
                multiply_step<false>(tokens, fragments[i], p.at(low), true, false);
            }
        };
        multiply.template operator()<0>(), multiply.template operator()<1>();
        multiply.template operator()<2>(), multiply.template operator()<3>();
    };
    // Steps 5 and 6.
    auto end_chunk = [&](int chunk) {
        const int slot = C::operands_of(chunk).slot;
        const auto& operands = smem.operands[slot];
        const auto keys =
            Operand128B::columns(C::kBackward ? &operands.q : &operands.k, C::Tile::panel_bytes);
        multiply_scores(Operand128B::rows(&smem.p[C::scores_of(chunk).slot]));  // 5
        auto multiply = [&]<int half>() {
            auto& columns_of_k = reinterpret_cast<rt_fl<16, 64>&>(state.tiles[0][4 * half]);
            each<0, kTokenSteps>([&](int j) {
                multiply_step<true>(columns_of_k, fragments[j],
                                    keys.column_step(j, half * C::Tile::panel_bytes), true, j == 0);
            });
        };
        multiply.template operator()<0>();
        if constexpr (kHalves == 2) multiply.template operator()<1>();
        warpgroup::mma_async_wait<kHalves * kTokenSteps>();  // 6
        pin(out);
        if (g.leaves_part<C>()) {
            leave_part(part_of(chunk), out);
        } else {
            store_transposed<T>(columns_at(C::out_of(chunk)), out,
                                [&](float2 x) { return C::kBackward ? x : x * g.out_scale; });
            fence_async_proxy();
            if constexpr (C::kOwnColumns) columns.store(chunk);
        }
        load_part(chunk + 1);
        if constexpr (kHalves == 2) {
            warpgroup::mma_async_wait<kTokenSteps>();
            pin(half_of<0>(state));
            decay_state.template operator()<0, kStateSteps / 2>(chunk, kAtLast);
        }
        warpgroup::mma_async_wait<0>();
        pin(state), pin_fragments();
        decay_state.template operator()<kStateSteps / 2 * (kHalves - 1)>(chunk, kAtLast);
        arrive_warp(smem.done[slot]);
        if constexpr (C::kShares) {
            if (!C::makes(chunk))
                arrive_warp_in_cta(smem.done_there[Use<C::kStages>(chunk / C::kMakers).slot],
                                   1 - cta_in_cluster());
        }
    };

    if constexpr (C::kOwnColumns) columns.load(0);
    // NOTES: computed anew, to save registers
    auto state_size = [&] { return static_cast<int64_t>(anew(g.dim_k + g.other_dim_k)) * g.dim_v; };
    const float* const entering =
        task.template entering<C::kBackward>(g.initial, g.borders, g.heads, state_size());
    begin_state(state, entering, [&](auto& tile) {
        load_state_transposed(tile, entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    });
    if (chunks > 0) {
        load_part(0);
        wait_arrived(0);
        begin_chunk.template operator()<true>(0);
#pragma unroll 1
        for (int chunk = 0; chunk + 1 < chunks; chunk++) {
            end_chunk(chunk);
            wait_arrived(chunk + 1);
            begin_chunk.template operator()<false>(chunk + 1);
        }
        end_chunk(chunks - 1);
    }
    if constexpr (C::kOwnColumns) columns.finish();
    if (g.last && task.template ends_sequence<C::kBackward>())
        store_state_transposed(g.last + task.state * state_size(), state, 0, column(), g.dim_k, g.dim_v,
                               g.dim_v);
}

}  // namespace tfla_tk::channel_gate
