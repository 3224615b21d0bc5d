// What a turn leaves for the next one, where CTAs take turns to add up dq, left or dk. Parts from slices of V
// are added up in fp32, of which a turn leaves 24 bits: the upper 16 in the result's own place, the eight
// below them in `low`. The last turn rounds to the operands' type. So a result is rounded once, whatever the
// number of slices. Without low bytes each turn rounds. That takes fewer bytes: where V is one slice and
// heads of v share a head of q and k.
#pragma once

#include "delta_rule/backward/states/walker.cuh"

namespace tfla_tk::delta_rule {

// The place of the low bytes of a walker's result in a chunk. result: 0 for dq or dk, 1 for left.
template <class C>
__device__ inline LowBytes* low_place(const StatesGlobals& g, const StatesTask& task, int chunk, int walker,
                                      int result) {
    const int64_t head = static_cast<int64_t>(task.batch) * (g.heads / g.shared) + task.result_head;
    const int64_t column = head * low_columns(g.dim_k) + task.column / kWalkerColumns + walker;
    return g.low + result * g.low_of_result + column * g.slots + task.first_slot + chunk;
}

// Of one walker. result: as for low_place.
template <class C> struct Turns {
    using W = StatesWalker<C>;
    using Fragment = typename W::Fragment;
    using Tokens = typename W::Tokens;
    using Columns = typename C::Columns;

    const StatesGlobals& g;
    const StatesMemory<C>& smem;
    int walker;

    // Adds what the turn before has left.
    __device__ inline void add(Tokens& to, typename W::Factors& unpacked, const Columns& upper,
                               int result) const {
        if (g.low) return add(to, upper, smem.earlier.low[walker][result]);
        W::add(to, unpacked, upper);
    }
    // In the place of a tile's columns that none but this warp has read.
    __device__ inline void store(Columns& upper, const Tokens& from, int chunk, int result) const {
        if (g.low && smem.task.turn + 1 < g.turns())
            return store(upper, *low_place<C>(g, smem.task, chunk, walker, result), from);
        W::store(upper, from);
    }

  private:
    // A number whose upper half is one of `pair` and whose third byte, counted from the top, is one of `low`.
    // The last byte is the third once more: on average that is the half of a unit that store() cuts off.
    template <int kThird, int kHalf> __device__ static inline float joined(uint32_t pair, uint32_t low) {
        return __uint_as_float(__byte_perm(low, pair, 0x5400 + kHalf * 0x2200 + kThird * 0x11));
    }
    __device__ static inline void add(Tokens& to, const Columns& upper, const LowBytes& low) {
        const int thread = fresh_thread() % 128;
        each<0, kChunk / 16>([&](int j) {
            Fragment halves;
            W::load(halves, upper, j);
            const uint2 bytes = low.of_tokens[j][thread];
            auto pair = [&](int k) { return reinterpret_cast<const uint32_t&>(halves.tiles[0][0].data[k]); };
            auto add_to = [](float2& x, float2 y) { x = {x.x + y.x, x.y + y.y}; };
            auto& x = to.tiles[0][j].data;
            add_to(x[0], {joined<0, 0>(pair(0), bytes.x), joined<1, 1>(pair(0), bytes.x)});
            add_to(x[1], {joined<2, 0>(pair(1), bytes.x), joined<3, 1>(pair(1), bytes.x)});
            add_to(x[2], {joined<0, 0>(pair(2), bytes.y), joined<1, 1>(pair(2), bytes.y)});
            add_to(x[3], {joined<2, 0>(pair(3), bytes.y), joined<3, 1>(pair(3), bytes.y)});
        });
    }
    // The upper halves of two numbers, and the third bytes of four.
    __device__ static inline uint32_t upper_of(float2 x) {
        return __byte_perm(__float_as_uint(x.x), __float_as_uint(x.y), 0x7632);
    }
    __device__ static inline uint32_t third_of(float2 x, float2 y) {
        auto of_two = [](float2 z) {
            return __byte_perm(__float_as_uint(z.x), __float_as_uint(z.y), 0x5151);
        };
        return __byte_perm(of_two(x), of_two(y), 0x5410);
    }
    __device__ static inline void store(Columns& upper, LowBytes& low, const Tokens& from) {
        const int thread = fresh_thread() % 128;
        each<0, kChunk / 16>([&](int j) {
            auto& x = from.tiles[0][j].data;
            Fragment halves[1];
            each<0, 4>(
                [&](int k) { reinterpret_cast<uint32_t&>(halves[0].tiles[0][0].data[k]) = upper_of(x[k]); });
            store_transposed(W::address(upper) + 16 * j * kPanelColumns * sizeof(typename C::T), halves);
            low.of_tokens[j][thread] = {third_of(x[0], x[1]), third_of(x[2], x[3])};
        });
    }
};

}  // namespace tfla_tk::delta_rule
