// The maker in a walk: a warpgroup that makes A and P of each chunk in the walk's shared memory, before the
// walkers come to it. So A is not loaded, and k and q are loaded once. Per chunk:
//   1. Wait for q, k and the gates.
//   2. K K^T; from it -L, to shared memory.
//   3. Q K^T; from it P, to the stage.
//   4. A (triangular_solve.cuh), in the place of the lower rows of -L.
//   5. Arrive on the walkers' barrier. In training start the store of A.
// NOTES: the maker takes longer than the walkers, so its instructions bound the speed. They are few because
// decays are exponentials on the diagonal alone: between two blocks of 16 tokens a decay is a product.
#pragma once

#include "delta_rule/chunk_matrices/chunk.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// What the maker needs of a chunk's gates beside the walk's. A decay from a token to one of a later block of
// 16 is a product of three: to the end of the token's block, to the start of the later block, from there to
// its token. The start of a block is the last token before it.
struct MakerGates {
    alignas(16) float beta[kChunk];
    float from_start[kChunk];  // e^{b_i - b_start}, of i's block
    TokenFactors to_end;       // e^{b_end - b_j}, of j's block

    // b, beta: of the lane's two tokens. By one warp.
    __device__ inline void write(int lane, const TwoPairs& b, float2 of_beta) {
        const auto [x, y] = b;
        // the first block has no token before it: its lanes ask lane -1, which is another one, and drop that
        const FloatPair end = of_lane(y, lane | 7), last = of_lane(y, (lane & ~7) - 1);
        const FloatPair start = lane < 8 ? FloatPair{} : last;
        write_pair(beta, 2 * lane, of_beta);
        write_pair(from_start, 2 * lane, {exp2f(rounded_sum(x, -start)), exp2f(rounded_sum(y, -start))});
        to_end.write(lane, {exp2f(rounded_sum(end, -x)), exp2f(rounded_sum(end, -y))});
    }
};

// The maker's shared memory beside the stages.
template <int kStages> struct MakerInWalkMemory {
    alignas(256) UpperRows upper;  // of -L; the lower rows lie in the place of A
    MakerGates gates[kStages];
};

// -L of a stage.
template <class Memory> __device__ inline TriangularMatrix erasures_of(Memory& smem, int slot) {
    return {shared_address(&smem.maker.upper), shared_address(&smem.stages[slot].a)};
}

// A warp's 16 rows of a product of two tiles of tokens, in blocks of 16 columns.
using Products = rt_fl<16, kChunk>;
using Block = rt_fl<16, 16>;

__device__ inline Block& block_of(Products& products, int j) {
    return reinterpret_cast<Block&>(products.tiles[0][j]);
}
// The block on the diagonal. NOTES: selected, since registers have no index.
__device__ inline Block diagonal_block(Products& products, int warp) {
    Block found;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        auto of = [&](int j) { return products.tiles[0][j].data[k]; };
        const float2 first = warp == 0 ? of(0) : of(1), second = warp == 2 ? of(2) : of(3);
        found.tiles[0][0].data[k] = warp < 2 ? first : second;
    }
    return found;
}

// Decays to a warp's 16 rows from the blocks before theirs.
struct BlockDecays {
    float2 rows;        // of rows r and r + 8, from the start of their block
    float to_start[3];  // from the end of an earlier block to the start of theirs

    __device__ inline BlockDecays(const MakerGates& gates, const Log2Decay& b, int warp, int lane)
        : rows{gates.from_start[16 * warp + lane / 4], gates.from_start[16 * warp + lane / 4 + 8]} {
        const float2 start = b.of[max(16 * warp - 1, 0)];
#pragma unroll
        for (int j = 0; j < 3; j++) {
            const float2 end = b.of[16 * j + 15];
            to_start[j] = exp2f((start.x - end.x) + (start.y - end.y));
        }
    }
    // Multiplies block j, before that of the rows, by these and by `factor`. NOTES: rows past the last token
    // are zero and stay so, unless a key is NaN or infinite, when the state is, too.
    __device__ inline void apply(Block& block, int j, const MakerGates& gates, float factor, int lane) const {
        const auto columns = gates.to_end.columns(j, lane);
        const float upper = factor * to_start[j] * rows.x, lower = factor * to_start[j] * rows.y;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2& x = block.tiles[0][0].data[k];
            const float of_row = k % 2 ? lower : upper;
            const float2 of_column = columns.of[k / 2];
            x = {x.x * of_row * of_column.x, x.y * of_row * of_column.y};
        }
    }
};

// Steps 1 to 3.
template <class C, class Globals, class Memory>
__device__ inline void make_products(const Globals& g, Memory& smem, int chunk) {
    using T = typename C::T;
    const auto [slot, phase] = Use<C::kStages>(chunk);
    auto& stage = smem.stages[slot];
    const Log2Decay& b = smem.gates_of(slot).log2_decay;
    const MakerGates& of_maker = smem.maker.gates[slot];
    wait(smem.for_scorer[slot], phase);  // 1
    const int tokens = smem.task.tokens - chunk * kChunk, warp = fresh_thread() / 32 % 4,
              lane = fresh_laneid();
    Products products;
    issue_scores<T, C::kDimK>(products, stage.keys, stage.keys);  // 2
    const BlockDecays decays(of_maker, b, warp, lane);
    const uint32_t place = place_of_erasures(erasures_of(smem, slot), warp, lane);
    {
        const ReadGates<16> gates(b, 1.f, 16 * warp, warp, lane);
        warpgroup::mma_async_wait<0>();
        pin(products);
        Block block = diagonal_block(products, warp);
        write_erasures(place, block, warp, gates, tokens);
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j >= warp) continue;
        decays.apply(block_of(products, j), j, of_maker, -1.f, lane);
        store_erasures(place, block_of(products, j), j);
    }
    issue_scores<T, C::kDimK>(products, stage.queries, stage.keys);  // 3
    {
        const ReadGates<16> gates(b, g.scale, 16 * warp, warp, lane);
        warpgroup::mma_async_wait<0>();
        pin(products);
        Block block = diagonal_block(products, warp);
        gates.apply(block, 0, tokens);
        store_panels<T, kChunk>(shared_address(&stage.p), 16 * warp, block, warp);
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j >= warp) continue;
        decays.apply(block_of(products, j), j, of_maker, g.scale, lane);
        store_panels<T, kChunk>(shared_address(&stage.p), 16 * warp, block_of(products, j), j);
    }
}

// What step 4 works on. NOTES: found anew for each part of it, to save registers.
template <class C, class Memory> struct Solving {
    int slot, warp, lane;
    TriangularMatrix matrix;
    const float* beta;

    __device__ inline Solving(Memory& smem, int chunk)
        : slot(Use<C::kStages>(anew(chunk)).slot),
          warp(fresh_thread() / 32 % 4),
          lane(fresh_laneid()),
          matrix(erasures_of(smem, slot)),
          beta(smem.maker.gates[slot].beta) {}
};

template <class C, class Globals, class Memory>
__device__ inline void make_matrices_in_walk(const Globals& g, Memory& smem) {
    using T = typename C::T;
    const Task& task = smem.task;
    auto meet = [] { named_sync<128>(NamedBarrier::matrices); };
    // where a query is before a key, nobody writes P
    static_assert(C::kStages <= 4 && sizeof(LowerRows) <= sizeof(typename C::Square));
    if (const int stage = warpgroup::warpid(); stage < C::kStages) zero_rows(smem.stages[stage].p, 0);
    meet();
    using Part = Solving<C, Memory>;
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        make_products<C>(g, smem, chunk);
        {  // 4
            Part part(smem, chunk);
            solve_diagonal_block(part.matrix, part.beta, 16 * part.warp, part.lane);
        }
        meet();
        {
            Part part(smem, chunk);
            merge_to_32(part.matrix, part.beta, part.warp, part.lane, meet);
        }
        meet();
        Part part(smem, chunk);
        auto& a = smem.stages[part.slot].a;
        merge_to_64<T>(a, part.matrix, part.beta, part.warp, part.lane, [&] {
            RoundedDiagonalRows<T> diagonal(part.matrix, part.warp, part.lane);
            meet();
            diagonal.store(a, part.warp);
        });
        fence_async_proxy();
        arrive_warp(smem.arrived[part.slot]);  // 5
        if (g.keep_matrices && task.column == 0) {
            meet();
            if (part.warp == 0 && part.lane == 0) {
                g.a.store_panel(shared_address(&a), 0, (task.first_slot + chunk) * kChunk,
                                task.batch * g.heads + task.head, 0);
                commit_stores();
                // Waits for the store of the chunk before this one. Its stage is written again two chunks
                // from here; the meetings of the chunk between tell the other warps.
                static_assert(C::kStages >= 3);
                wait_stores_read_but<1>();
            }
        }
    }
    wait_stores_done();
}

}  // namespace tfla_tk::delta_rule
