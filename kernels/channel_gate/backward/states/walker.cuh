// A walker of the walks over the states: a warpgroup that owns a strip, or a strip and half of V. It holds
// the state of these (64 columns of K, up to 128 of V) in fp32 and computes what readers see of it
// transposed. All that is rounded on the way from the state or to it is in two parts, high + low, and so are
// its products: dg is a difference of sums that cancel but for rounding. Per block of 16 tokens:
//   1. Wait for the values and for the gate warp's writers, and load the writers. At an anchor the left walk
//      first stores the state, the right one computes the flow of gradient.
//   2. For every 16 columns of the state, by mma.sync: each warp rounds its 16 rows, adds their products with
//      the values of the readers to out^T, scales the rows by the block's decay and adds writers^T values.
//      NOTES: so a warp meets no other one. For wgmma the warps of a walker would have to, and the state
//      would be out of reach while it is written to.
//   3. Store out for the gate warp. Tell it, which then may write where the low parts of writers are, and
//      hand over the block's place. Where walkers split V, each stores its part of out in place of the
//      writers' high or low parts, once both walkers have these in registers.
#pragma once

#include "channel_gate/backward/states/anchors.cuh"

namespace tfla_tk::channel_gate {

__device__ inline float load_float(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// A warp's 16 rows of out^T, as accumulators of mma.sync: of the first eight tokens and of the last eight.
using OutOfTile = float[2][4];

// A block's operands of 16 columns of V: the values of the readers and those of the writers.
template <class T2> struct ValuesOfTile {
    Fragment<T2> readers, writers;
};

// A block's writers, of a warp's 16 columns of K, and its decay, of this lane's rows of the state.
template <class T2> struct WritersOfWarp {
    Fragment<T2> high, low;
    float2 decay;
};

// 16 columns of the state: adds their products with the values of the readers to out^T, then lets the writers
// write to them. NOTES: in this order no product waits for the one before it.
template <class T2, class Tile>
__device__ __forceinline__ void walk_tile(OutOfTile& out, Tile& tile, const WritersOfWarp<T2>& writers,
                                          const ValuesOfTile<T2>& values, bool is_first) {
    Fragment<T2> high, low;
    each<0, 4>([&](int i) {
        const HighAndLow<T2> parts(tile.data[i]);
        high.x[i] = parts.high, low.x[i] = parts.low;
        tile.data[i] = tile.data[i] * (i % 2 ? writers.decay.y : writers.decay.x);
    });
    auto numbers = [&](int n) -> float (&)[4] { return reinterpret_cast<float (&)[4]>(tile.data[2 * n]); };
    each<0, 2>([&](int n) { multiply_16(out[n], high, values.readers, n, !is_first); });
    each<0, 2>([&](int n) { multiply_16(numbers(n), writers.high, values.writers, n, true); });
    each<0, 2>([&](int n) { multiply_16(out[n], low, values.readers, n, true); });
    each<0, 2>([&](int n) { multiply_16(numbers(n), writers.low, values.writers, n, true); });
}

// Where this lane's numbers of a warp's 16 rows of out^T are in `out`. first_column: that of the first row.
template <class C> __device__ inline uint32_t lane_in_out(uint32_t first_column) {
    const uint32_t lane = fresh_laneid(), first_token = lane % 4 * 2;  // and the next one, and eight behind
    return out_row<C>(first_token) + lane / 4 * 4 + ((4 * first_column) ^ out_swizzle<C>(first_token));
}

// Where this lane's row of 16 columns of a panel of 16 tokens is, for ldmatrix: of the tiles of tokens 0 to 7
// first, then of tokens 8 to 15, or of the tiles of columns 0 to 7 first. The n-th 16 columns: XORed with 32
// n.
__device__ inline uint32_t lane_by_tokens() {
    const uint32_t lane = fresh_laneid();
    return (lane / 16 * 8 + lane % 8) * kRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
}
__device__ inline uint32_t lane_by_columns() {
    const uint32_t lane = fresh_laneid();
    return lane % 16 * kRowBytes + (lane / 16 ^ lane % 8) * 16;
}

// Stores a warp's 16 rows of out^T, transposed. place: the address of `out` plus lane_in_out.
template <class C> __device__ inline void store_out(uint32_t place, const OutOfTile& out) {
    auto store = [](uint32_t address, float x) {
        asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address), "f"(x) : "memory");
    };
    each<0, 2>([&](int n) {
        const uint32_t rows = C::kOutInPlace ? place ^ 32 * n : place + 32 * n;
        each<0, 2>([&](int half) {
            store(rows + out_row<C>(8 * half), out[half][2 * n]);
            store(rows + out_row<C>(8 * half + 1), out[half][2 * n + 1]);
        });
    });
}

// Shared memory as an object at its 32-bit shared address: address_of() gives the shared addresses of its
// members. Nothing may be read through it. NOTES: at every use of the symbol's address the compiler would
// read the CTA's number in its cluster again.
template <class Memory> __device__ inline const Memory& at_shared_address(const Memory& smem) {
    return *reinterpret_cast<const Memory*>(
        static_cast<uintptr_t>(static_cast<uint32_t>(anew(shared_address(&smem)))));
}
template <class Member> __device__ inline uint32_t address_of(const Member& member) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&member));
}

// arrive_warp() with the shared address of a barrier.
__device__ inline void arrive_warp_at(uint32_t barrier) {
    if (arrives_for_warp())
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// A step's slot in a ring of kSlots, and the phase of its barriers; go_on() moves to the next step.
template <int kSlots> struct RingPlace {
    int slot = kSlots - 1;  // of the step before the first one
    uint32_t phase = 1;

    __device__ inline void go_on() {
        const bool wraps = slot == kSlots - 1;
        slot = wraps ? 0 : slot + 1, phase ^= wraps;
    }
};

// warp: its number among the warps of all walkers. NOTES: what is the same in all lanes of a warp must be
// computed from numbers that the compiler knows to be uniform; else it does not keep addresses in uniform
// registers.
template <class C>
__device__ inline void walk_states(const StatesGlobals& g, StatesMemory<C>& smem, int warp) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Values = typename C::Values;
    constexpr int kTiles = C::kWalkerV / 16;  // of the state's columns
    using Memory = StatesMemory<C>;
    constexpr int kStages = Memory::kStages;
    rt_fl<16, C::kWalkerV> state;

    const StatesTask& task = smem.task;
    const int walker = warp / 4, strip = C::strip_of(walker), part = C::part_of(walker);
    const int first_column = warp % 4 * 16;  // of the strip's
    auto column = [&] { return task.column + strip * kWalkerColumns + first_column; };
    const int value_column = part * C::kWalkerV;
    const uint32_t own_panels = part * (C::kWalkerV / kPanelColumns) * Values::panel_bytes;  // bytes before
    // The next step that begins at an anchor. The right walk prefetches the anchor some steps ahead.
    // special_step: the next one that does either.
    constexpr int kAnchorAhead = 8;
    int anchor_step = C::kIsLeft ? kBlocksOfAnchor : (task.blocks - 1) % kBlocksOfAnchor + 1;
    if (!g.needs_dg) anchor_step = task.blocks;
    auto prefetch_step = [&] { return max(anchor_step - kAnchorAhead, 0); };
    int special_step = C::kIsLeft ? anchor_step : prefetch_step();

    const Memory& at = at_shared_address(smem);
    const uint32_t out_of_lane = lane_in_out<C>(first_column);
    const uint32_t by_tokens = lane_by_tokens(), by_columns = lane_by_columns();
    const uint32_t decay_of_lane =
        address_of(at.decay[0][strip][first_column + unsigned(fresh_laneid()) / 4]);
    using Place = RingPlace<kStages>;
    Place use;  // of the step's block
    int value_slot = Memory::kValueStages - 1;

    // Waits until the block's out may be stored; returns the address of `out`. NOTES: that of a gate warp is
    // free when the warp hands over writers again.
    auto place_of_out = [&](int step) {
        const auto& columns = at.columns[use.slot][strip];
        if constexpr (C::kSplitsV) {
            wait_at(address_of(at.read[use.slot]), use.phase);
            // the first walker's is in place of the gates, the second one's from the writers on
            return address_of(columns.gates) - part * (sizeof(columns.writers) + sizeof(columns.room));
        } else {
            return address_of(at.exchange.out[gate_warp_of<C>(strip, step)]);
        }
    };
    auto anchor_at = [&](int step) {
        const int block = task.template block_of<C>(step) + !C::kIsLeft;  // the anchor is before it
        return anchor_units<C>(g, task, block, column() / 16, walker);
    };

    auto serve_anchor = [&](int step) {
        const bool has_part = column() < g.dim_k;
        if (step == anchor_step) {
            if (has_part) {
                if constexpr (C::kIsLeft)
                    store_anchor<C>(anchor_at(step), state);
                else
                    store_flow<C>(anchor_at(step), state, &smem.exchange.flow[walker][first_column]);
            }
            anchor_step += kBlocksOfAnchor;
            special_step = C::kIsLeft ? anchor_step : prefetch_step();
        } else {
            if (has_part && anchor_step < task.blocks) prefetch_anchor<C>(anchor_at(anchor_step));
            special_step = anchor_step;
        }
    };

    auto walk_block = [&](int step) {
        if (step == special_step) serve_anchor(step);
        use.go_on();
        if constexpr (C::kSplitsV) value_slot = value_slot == Memory::kValueStages - 1 ? 0 : value_slot + 1;
        const auto& values = at.values[C::kSplitsV ? value_slot : use.slot];
        const auto& columns = at.columns[use.slot][strip];
        const uint32_t of_readers = address_of(values.of_readers) + own_panels + by_tokens,
                       of_writers = address_of(values.of_writers) + own_panels + by_columns;
        auto address_of_tile = [](uint32_t rows, int k) {
            constexpr int kOfPanel = kPanelColumns / 16;
            return (rows ^ k % kOfPanel * 32) + k / kOfPanel * Values::panel_bytes;
        };
        Fragment<T2> readers[2];  // values of this tile's and the next one's

        wait_at(address_of(at.values_arrived[use.slot]), use.phase);  // 1
        readers[0] = Fragment<T2>(of_readers);
        wait_at(address_of(at.written[use.slot][strip]), use.phase);
        const uint32_t decay = decay_of_lane + use.slot * sizeof(smem.decay[0]);
        const uint32_t own_column = by_tokens ^ first_column * 2;
        const WritersOfWarp<T2> writers{Fragment<T2>::transposed(address_of(columns.writers) + own_column),
                                        Fragment<T2>::transposed(address_of(columns.gates) + own_column),
                                        {load_float(decay), load_float(decay + 32)}};
        if constexpr (C::kSplitsV) arrive_warp_at(address_of(at.read[use.slot]));
        OutOfTile out;
        each<0, kTiles>([&](int k) {  // 2
            if (k + 1 < kTiles) readers[(k + 1) % 2] = Fragment<T2>(address_of_tile(of_readers, k + 1));
            walk_tile(out, state.tiles[0][k], writers,
                      {readers[k % 2], Fragment<T2>::transposed(address_of_tile(of_writers, k))}, k == 0);
        });
        store_out<C>(place_of_out(step) + out_of_lane, out);  // 3
        arrive_warp_at(address_of(at.out_ready[gate_warp_of<C>(strip, step)]));
        if constexpr (!C::kSplitsV) arrive_warp_at(address_of(at.free[use.slot]));
    };

    const int64_t state_size = static_cast<int64_t>(g.dim_k) * g.row_of_state;
    const float* const entering = task.template entering<!C::kIsLeft>(
        g.entering, C::kIsLeft ? g.borders : g.d_borders, g.heads, state_size);
    begin_state(state, entering, [&](auto& tile) {
        load_state(tile, entering, column(), value_column, g.dim_k, g.dim_v, g.row_of_state);
    });
    if (!C::kIsLeft && g.needs_dg && !task.is_last) {
        float* const flow = &smem.exchange.border[walker][first_column + fresh_laneid() / 4];
        put_last_flow<C>(g, state, g.borders + task.border * state_size, column(), value_column,
                         [&](int n, float sum) { flow[8 * n] = sum; });
    }
    const int blocks = task.blocks;
#pragma unroll 1
    for (int step = 0; step < blocks; step++) walk_block(step);
    if (C::kIsLeft && g.needs_dg && g.d_last && task.is_last)
        store_last_flow<C>(g, smem, state, walker, column(), value_column);
}

}  // namespace tfla_tk::channel_gate
