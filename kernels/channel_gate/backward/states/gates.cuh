// The gate warps of the walks over the states. Four or eight per strip take turns at the blocks: each works
// on one block, of 16 tokens and the strip's 64 channels, while the walkers go on. A lane has two channels
// of all tokens. Per block:
//   1. Wait for its columns. a = e^g of every token.
//   2. Writers, scaled: k times the product of a behind the token (left), s q times that up to and with it
//      (right). They are in two parts, high + low: the high ones in place, the low ones in the place of the
//      gates. Hand them to the walker, with the product over the block.
//   3. Products of the values of readers and writers, dO_i.V_j, by mma.sync, into memory of this warp. They
//      are the same for all K: in a launch that leaves sums, the head's first CTA alone makes them.
//   4. Wait for what the readers see of the state; where walkers split V these are two parts, to be added up,
//      and a later block's values are loaded into the place of this one's. Of a slice of V, add what earlier
//      launches have left; a launch before the last one leaves the sums, and goes on with the hand-over of 7.
//      The readers are processed in groups of four, in the direction of the walk. What a group sees of the
//      state and of the writers of earlier groups is summed up at the group's begin, and the sum fades from
//      reader to reader. The group's own writers join at the reader of their token and fade, too; their
//      products with the rows of step 3 are added up in fp32. No factor exceeds 1 and none is a quotient.
//   5. The result in the place of the readers, and of the left walk q dq.
//   6. Right walk: sums of q dq - k dk from each token on. They are added up in the block first; the sum of
//      all blocks behind, which the warp of the step before hands on, joins last. Reader and writer of one
//      token meet no gate, so q dq and k dk are without their product. Where a gate is closed, no gradient
//      flows through it: the sum begins anew with 0.
//   7. Store, and hand over the block's place. Of the first strip's warps each also loads the block that
//      comes into that place.
#pragma once

#include "channel_gate/backward/states/loader.cuh"
#include "channel_gate/backward/states/slices.cuh"

namespace tfla_tk::channel_gate {

// What a gate that counts as closed lets through. Sums in fp32 do not resolve the flow of gradient through
// it.
constexpr float kClosed = 0x1p-30f;

template <class C> struct GateWarpOfBlock : WritersOfBlock<typename C::T, C::kIsLeft> {
    using Writers = WritersOfBlock<typename C::T, C::kIsLeft>;
    using typename Writers::T2;
    using Writers::a, Writers::column_of, Writers::floats_of, Writers::gates, Writers::lane, Writers::token,
        Writers::writer;
    static constexpr uint32_t kValuePanel = C::Values::panel_bytes;

    // addresses in shared memory
    uint32_t readers, inflow;  // of the block
    uint32_t of_readers, of_writers;
    uint32_t out, second_out;  // second_out: the second part, where walkers split V
    uint32_t products;
    uint32_t closed;  // right: two bits per token, of this lane's channels

    // Reader r sees writer w: r >= w (left), r <= w (right).

    // Step 2.
    __device__ __forceinline__ void scale_writers(float scale) {
        const float2 product = Writers::scale_writers(scale);
        if constexpr (!C::kIsLeft) find_closed(product);
    }

    // Step 3: products[r][w], times `scale`. NOTES: a loop, to fit the instruction cache.
    __device__ __forceinline__ void multiply_values(float scale) const {
        uint32_t a_rows = of_readers + lane % 16 * kRowBytes + ((lane / 16) ^ lane % 8) * 16;
        uint32_t b_rows =
            of_writers + (lane / 16 * 8 + lane % 8) * kRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
        float c[2][4] = {};
#pragma unroll 1
        for (int panel = 0; panel < C::kDimV / kPanelColumns; panel++) {
            each<0, 4>([&](int i) {
                const Fragment<T2> x(a_rows ^ i * 32), y(b_rows ^ i * 32);
                each<0, 2>([&](int n) { multiply_16(c[n], x, y, n, true); });
            });
            a_rows += kValuePanel, b_rows += kValuePanel;
        }
        const uint32_t place = products + lane / 4 * (kBlock * 4) + lane % 4 * 8;
        each<0, 4>([&](int i) {
            const float2 x{c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]};
            store_floats(place + i % 2 * (8 * kBlock * 4) + i / 2 * 32, x * scale);
        });
        __syncwarp();
    }

    // What the reader of token first + i sees of the state. first: a multiple of four.
    __device__ __forceinline__ float2 seen(int first, int i) const {
        const float2 x = load_floats(own_out<C>(out, first, i, lane));
        if constexpr (!C::kSplitsV) return x;
        const float2 y = load_floats(own_out<C>(second_out, first, i, lane));
        return {x.x + y.x, x.y + y.y};
    }

    // Steps 4 and 5, and 6 in the block; returns the sum over it. wants_sums: q dq is wanted, or given.
    // NOTES: a loop over groups of four readers, to fit the instruction cache. So the indices of registers
    // must be the same in every group: go_on moves their contents from group to group.
    __device__ __forceinline__ float2 make_results(float scale, bool wants_sums) {
        Group x;
        x.through = {C::kIsLeft ? scale : 1.f, C::kIsLeft ? scale : 1.f};
        each<0, kGroup>([&](int e) { x.fade[e] = fade_before(e); });
        each<0, kGroups - 1>([&](int i) {
            each<0, kGroup>([&](int e) { x.others[i][e] = fade_before(kGroup * (i + 1) + e); });
        });
        each<0, kBlock>([&](int n) { x.waiting[n] = writer[token(n)]; });
        float2 sum{0.f, 0.f};
#pragma unroll 1
        for (int group = 0; group < kGroups; group++) {
            make_group(x, group, sum, wants_sums);
            if (group < kGroups - 1) go_on(x, group);
        }
        return sum;
    }

    // Step 6: the same sum over all tokens behind the block, for the first token in it and those before it.
    __device__ __forceinline__ float2 through_block(float2 carry) const {
        if (any_closed())
            each<0, kBlock>([&](int n) { close(carry, token(n), load_floats(floats_of(inflow, token(n)))); });
        return carry;
    }

    // Step 6: the gradients of the gates, in their place. carry: the sum over all tokens behind the block.
    __device__ __forceinline__ void store_sums(float2 carry, DType dtype) const {
        if (dtype == DType::float32 && !any_closed())
            store_sums<true>(carry, dtype);
        else
            store_sums<false>(carry, dtype);
    }

  private:
    // product: of the block's gates. NOTES: that of few blocks is so small, so the rest is skipped.
    __device__ __forceinline__ void find_closed(float2 product) {
        closed = 0;
        if (__any_sync(0xffffffff, product.x < kClosed || product.y < kClosed))
            each<0, kBlock>([&](int t) {
                closed |= (a[t].x < kClosed ? 1u : 0u) << 2 * t | (a[t].y < kClosed ? 2u : 0u) << 2 * t;
            });
    }
    __device__ __forceinline__ bool any_closed() const { return __any_sync(0xffffffff, closed != 0); }

    // At a closed gate of token t: what makes 0 of `sum`, of the block from t on.
    __device__ __forceinline__ void close(float2& carry, int t, float2 sum) const {
        carry = {closed >> 2 * t & 1 ? -sum.x : carry.x, closed >> 2 * t & 2 ? -sum.y : carry.y};
    }

    // kIsPlain: gates of fp32, none of them closed. NOTES: a loop, to fit the instruction cache.
    template <bool kIsPlain> __device__ __forceinline__ void store_sums(float2 carry, DType dtype) const {
#pragma unroll 1
        for (int group = 0; group < kGroups; group++) {
            const int first = first_token(group);
            float2 x[kGroup];
            each<0, kGroup>([&](int e) { x[e] = load_floats(floats_of(inflow, first) + kFloatRow * of(e)); });
            each<0, kGroup>([&](int e) {
                const int t = first + of(e);
                if constexpr (!kIsPlain) close(carry, t, x[e]);
                const float2 y{x[e].x + carry.x, x[e].y + carry.y};
                const uint32_t short_place = gates + 4 * lane + t * kRowBytes;
                if (kIsPlain || dtype == DType::float32)
                    store_floats(floats_of(gates, first) + kFloatRow * of(e), y);
                else if (dtype == DType::float16)
                    store_rounded<half_2>(short_place, y);
                else
                    store_rounded<bf16_2>(short_place, y);
            });
        }
    }

    static constexpr int kGroup = 4, kGroups = kBlock / kGroup;  // of readers, as the walk meets them

    // The first token of a group, and how many tokens behind it the group's e-th reader is, in walk order.
    static __device__ __forceinline__ int first_token(int group) {
        return kGroup * (C::kIsLeft ? group : kGroups - 1 - group);
    }
    static constexpr __device__ int of(int e) { return C::kIsLeft ? e : kGroup - 1 - e; }

    // The gate between the n-th reader of the walk and the reader before it, or the state where n = 0.
    __device__ __forceinline__ float2 fade_before(int n) const {
        if constexpr (C::kIsLeft) return a[n];
        return n == 0 ? float2{1.f, 1.f} : a[kBlock - n];
    }

    // The registers that make_group and go_on share.
    struct Group {
        float2 through;       // the product of gates between the state and the group, times s (left)
        float2 fade[kGroup];  // before each reader
        // At first the fades of the later groups. After each group go_on takes the first entry, moves the
        // others one entry ahead and puts the group's writers, faded up to its last reader, into the last
        // entry. So in group n the last n entries are writers.
        float2 others[kGroups - 1][kGroup];
        T2 waiting[kBlock];  // writers of this group and those behind it
        float2 writer[kGroup];
    };

    // Sums up first what the group's readers see of the state and of earlier groups, at the group's begin,
    // since all of it fades by the same gates. Then goes from reader to reader.
    __device__ __forceinline__ void make_group(Group& x, int group, float2& sum, bool wants_sums) const {
        const int first = first_token(group);
        const uint32_t own_place = column_of(readers, first);
        const uint32_t rows = products + first * (kBlock + 1) * 4;  // where row and column are of `first`
        float2 seen_before[kGroup];
        each<0, kGroup>([&](int e) { seen_before[e] = x.through * seen(first, of(e)); });
        each<1, kGroups>([&](int back) {
            if (group < back) return;
            each<0, kGroup>([&](int e) {
                float by[4];
                load_four(by, rows + of(e) * (kBlock * 4) + (C::kIsLeft ? -16 : 16) * back);
                each<0, kGroup>(
                    [&](int w) { add_product(seen_before[e], by[of(w)], x.others[kGroups - 1 - back][w]); });
            });
        });
        T2 result[kGroup];
        float2 without_own[kGroup], through;
        each<0, kGroup>([&](int e) {
            const float2 fade = x.fade[e];
            through = e == 0 ? fade : through * fade;
            each<0, kGroup>([&](int w) {
                if (w < e) x.writer[w] = x.writer[w] * fade;
            });
            x.writer[e] = to_float2(x.waiting[e]);
            float by[4];
            load_four(by, rows + of(e) * (kBlock * 4));
            float2 y = through * seen_before[e];
            each<0, kGroup>([&](int w) {
                if (w < e) add_product(y, by[of(w)], x.writer[w]);
            });
            without_own[e] = y;
            add_product(y, by[of(e)], x.writer[e]);
            result[e] = from_float2<T2>(y);
        });
        x.through = x.through * through;
        x.fade[0] = through;  // of the whole group, for go_on
        const uint32_t floats = floats_of(C::kIsLeft ? gates : inflow, first);
        float2 given[kGroup];
        T2 own[kGroup];
        each<0, kGroup>([&](int e) {
            own[e] = load_pair_of<T2>((own_place ^ of(e) * 16) + of(e) * kRowBytes);
            if (!C::kIsLeft && wants_sums) given[e] = load_floats(floats + of(e) * kFloatRow);
        });
        if constexpr (C::kIsLeft && C::kOutInPlace) __syncwarp();  // other lanes have read what they see
        each<0, kGroup>([&](int e) {
            store_pair_of((own_place ^ of(e) * 16) + of(e) * kRowBytes, result[e]);
            if (!wants_sums) return;
            float2 product = to_float2(own[e]) * without_own[e];
            if constexpr (!C::kIsLeft) {
                sum = {sum.x + (given[e].x - product.x), sum.y + (given[e].y - product.y)};
                product = sum;
            }
            store_floats(floats + of(e) * kFloatRow, product);
        });
    }

    // Prepares the registers for the next group.
    __device__ __forceinline__ void go_on(Group& x, int group) const {
        const float2 through = x.fade[0], none{1.f, 1.f};
        each<0, kGroup>([&](int e) { x.fade[e] = x.others[0][e]; });
        each<0, kGroups - 2>([&](int i) {
            const float2 by = pick(group > kGroups - 3 - i, through, none);
            each<0, kGroup>([&](int e) { x.others[i][e] = x.others[i + 1][e] * by; });
        });
        each<0, kGroup>([&](int e) { x.others[kGroups - 2][e] = x.writer[e]; });
        each<0, kBlock - kGroup>([&](int n) { x.waiting[n] = x.waiting[n + kGroup]; });
    }
    static __device__ __forceinline__ void add_product(float2& to, float by, float2 x) {
        to = {to.x + by * x.x, to.y + by * x.y};
    }
};

// The flow of gradient over the end of a step's block where the walker gives it: at an anchor, or of the
// segment's last block over the border behind it. Of this lane's channels.
template <class C>
__device__ inline float2 known_flow(const StatesGlobals& g, StatesMemory<C>& smem, int strip, int step) {
    const int lane = fresh_laneid();
    const auto& flows = step > 0 ? smem.exchange.flow : smem.exchange.border;
    float2 flow = load_floats(shared_address(&flows[strip][2 * lane]));
    if constexpr (C::kSplitsV) {
        const float2 second = load_floats(shared_address(&flows[1][2 * lane]));
        flow = {flow.x + second.x, flow.y + second.y};
    }
    if (!g.template adds<C>()) return flow;
    const float2 others = SumsOfLane::of(g, smem.task, smem.task.template block_of<C>(step)).sums.flow[lane];
    return {flow.x + others.x, flow.y + others.y};
}

// The sum of q dq - k dk over all tokens behind a step's block; `sum`, that over the block, goes on to the
// warp of the next step with it.
template <class C>
__device__ inline float2 hand_on(const StatesGlobals& g, StatesMemory<C>& smem, int strip, int step,
                                 const GateWarpOfBlock<C>& x, float2 sum) {
    const StatesTask& task = smem.task;
    const int lane = fresh_laneid(), column = 2 * lane, own = gate_warp_of<C>(strip, step);
    float2 carry{0.f, 0.f};
    if (step > 0) {
        const int before = gate_warp_of<C>(strip, step - 1);
        wait(smem.carry_ready[before], Use<C::kTurns>(step - 1).phase);
        carry = load_floats(shared_address(&smem.exchange.carry[before][column]));
        if (task.is_anchor(task.template block_of<C>(step) + 1)) carry = known_flow(g, smem, strip, step);
    } else if (!task.is_last) {
        carry = known_flow(g, smem, strip, step);
    } else if (g.flows) {
        const int channel = task.column + strip * kWalkerColumns + column;
        if (channel < g.dim_k)
            carry = *reinterpret_cast<const float2*>(&g.flows[task.state * g.dim_k + channel]);
    }
    const float2 past = x.through_block(carry), from_here{past.x + sum.x, past.y + sum.y};
    store_floats(shared_address(&smem.exchange.carry[own][column]), from_here);
    arrive_warp(smem.carry_ready[own]);
    return carry;
}

// Stores 64 columns of a block, by one warp.
__device__ inline void store_block(const StatesGlobals& g, const StatesTask& task, const BlockMaps& to,
                                   uint32_t from, uint32_t row_bytes, int column, int block) {
    const int tokens = task.tokens_from(block), row = task.row_of(block), lane = fresh_laneid();
    if (g.packed() && tokens < kBlock) {  // the rows behind belong to the next sequence
        if (lane < tokens)
            to.row.store_panel(from + lane * row_bytes, column, row + lane, task.head, task.batch);
    } else if (lane == 0) {
        to.box.store_panel(from, column, row, task.head, task.batch);
    }
}

template <class C>
__device__ inline void run_state_gates(const StatesGlobals& g, StatesMemory<C>& smem, int gate_warp) {
    using Memory = StatesMemory<C>;
    const StatesTask& task = smem.task;
    const int strip = gate_warp / C::kTurns;
    if (gate_warp == 0) load_first_steps(g, smem);
#pragma unroll 1
    for (int step = gate_warp % C::kTurns; step < task.blocks; step += C::kTurns) {
        const auto [slot, phase] = Use<Memory::kStages>(step);
        auto& columns = smem.columns[slot][strip];
        GateWarpOfBlock<C> x;
        x.readers = shared_address(&columns.readers), x.writers = shared_address(&columns.writers);
        x.gates = shared_address(&columns.gates);
        if constexpr (!C::kIsLeft) x.inflow = shared_address(&columns.inflow);
        x.out = C::kOutInPlace ? x.gates : shared_address(&smem.exchange.out[gate_warp]);
        x.second_out = x.writers;
        x.products = shared_address(&smem.exchange.products[gate_warp]);
        x.decay = shared_address(&smem.decay[slot][strip]);
        x.lane = fresh_laneid();
        wait(smem.columns_arrived[slot], phase);  // 1
        x.load_gates(g.g_dtype);
        x.scale_writers(g.scale);  // 2
        arrive_warp(smem.written[slot][strip]);
        // NOTES: computed anew, to save registers
        auto block = [&] { return task.template block_of<C>(anew(step)); };
        auto sums = [&] { return SumsOfLane::of(g, task, block()); };
        auto has_flow = [&] {  // which the walkers give
            return !C::kIsLeft && g.needs_dg && (step == 0 ? !task.is_last : task.is_anchor(block() + 1));
        };
        if (g.template adds<C>()) sums().prefetch(has_flow());
        const Use<Memory::kStages> use(step);  // 3
        wait(smem.values_arrived[use.slot], use.phase);
        auto& values = smem.values[Use<Memory::kValueStages>(step).slot];
        x.of_readers = shared_address(&values.of_readers), x.of_writers = shared_address(&values.of_writers);
        if (task.template makes_products<C>(g)) {
            x.multiply_values(g.scale);
            if (g.template adds<C>()) sums().add_products(x.products);
        }
        wait(smem.out_ready[gate_warp], Use<C::kTurns>(step).phase);  // 4
        load_values_behind(g, smem, step);
        if (g.template adds<C>()) sums().template add_out<C>(x.out);
        if (!g.template makes_results<C>()) {
            sums().leave_out([&](int first, int i) { return x.seen(first, i); });
            if (task.template makes_products<C>(g)) sums().leave_products(x.products);
            if (has_flow()) sums().sums.flow[fresh_laneid()] = known_flow(g, smem, strip, step);
            fence_async_proxy();
            load_behind(g, smem, strip, step);
            continue;
        }
        const float2 sum = x.make_results(g.scale, g.needs_dg);
        if constexpr (!C::kIsLeft)
            if (g.needs_dg) x.store_sums(hand_on(g, smem, strip, step, x, sum), g.g_dtype);  // 6
        fence_async_proxy();                                                                 // 7
        __syncwarp();
        const int column = task.column + strip * kWalkerColumns;
        store_block(g, task, g.result, x.readers, kRowBytes, column, block());
        if (g.needs_dg) {
            if constexpr (C::kIsLeft)
                store_block(g, task, g.inflow, x.gates, kFloatRow, column, block());
            else
                store_block(g, task, g.dg, x.gates, g.gate_row_bytes(), column, block());
        }
        commit_stores();
        wait_stores_read();
        load_behind(g, smem, strip, step);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::channel_gate
