// A walk that makes its matrices. A warpgroup, the maker, makes A of each chunk in the walk's shared memory
// before the walkers come to it; the walkers make P (ScoresInWalk). So neither is loaded, and k and q are
// loaded once. The maker, per chunk:
//   1. Wait for q, k and the gates.
//   2. K K^T; from it -L, to shared memory.
//   3. A (sequence/triangular_solve.cuh), in the place of the lower rows of -L.
//   4. Arrive on the walkers' barrier. In training start the store of A.
// NOTES: walkers wait for the maker, so its instructions are few: decays are exponentials on the diagonal
// alone, and between two blocks of 16 tokens a decay is a product.
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

// What such a walk has in shared memory beside the stages.
template <int kStages> struct MakerInWalkMemory {
    alignas(256) UpperRows upper;  // of -L; the lower rows lie in the place of A
    MakerGates gates[kStages];
    semaphore scores_made[kStages];  // P of a stage is whole: both walkers have stored their columns
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
    // Multiplies block j, which lies left of the rows' diagonal block, by these decays and by -1. NOTES: rows
    // past the last token are zero and stay so, unless a key is NaN or infinite, when the state is, too.
    __device__ inline void apply(Block& block, int j, const MakerGates& gates, int lane) const {
        const auto columns = gates.to_end.columns(j, lane);
        const float upper = -to_start[j] * rows.x, lower = -to_start[j] * rows.y;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2& x = block.tiles[0][0].data[k];
            const float of_row = k % 2 ? lower : upper;
            const float2 of_column = columns.of[k / 2];
            x = {x.x * of_row * of_column.x, x.y * of_row * of_column.y};
        }
    }
};

// Steps 1 and 2.
template <class C, class Memory> __device__ inline void make_erasures(Memory& smem, int chunk) {
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
        decays.apply(block_of(products, j), j, of_maker, lane);
        store_erasures(place, block_of(products, j), j);
    }
}

// What step 3 works on. NOTES: found anew for each part of it, to save registers.
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
    static_assert(sizeof(LowerRows) <= sizeof(typename C::Square));
    using Part = Solving<C, Memory>;
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        make_erasures<C>(smem, chunk);
        {  // 3
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
        arrive_warp(smem.arrived[part.slot]);  // 4
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

// P in such a walk. While a walker works on a chunk it makes its share of the columns of P of the next one.
// It reads all columns, so it waits for the other walker's (wait_made).
template <class C> struct ScoresInWalk {
    using T = typename C::T;
    static constexpr int kColumns = kChunk / C::kWalkers;
    static_assert(kColumns % 16 == 0);
    rt_fl<16, kColumns> scores;

    // Issues the products q_i.k_j of a chunk. Also called for the one behind the last, since the walk's loop
    // has no branch: it multiplies what lies in that stage, without a wait, and `leave` writes zeros that
    // nobody reads.
    template <class Memory> __device__ inline void issue(Memory& smem, int walker, int chunk) {
        const Use<C::kStages> use(chunk);
        wait(smem.for_scorer[use.slot], use.phase ^ (chunk == smem.task.chunks));
        const auto& stage = smem.stages[use.slot];
        issue_scores<T, C::kDimK>(scores, stage.queries, stage.keys, walker * kColumns);
    }
    // Makes P of them and leaves it in the stage. wait_products() waits for the products.
    template <class Globals, class Memory, class Wait>
    __device__ inline void leave(const Globals& g, Memory& smem, int walker, int chunk, Wait wait_products) {
        const int slot = Use<C::kStages>(chunk).slot, first_key = walker * kColumns,
                  warp = fresh_thread() / 32 % 4, tokens = smem.task.tokens - chunk * kChunk;
        auto& stage = smem.stages[slot];
        const ReadGates<kColumns> gates(smem.gates_of(slot).log2_decay, g.scale, first_key, warp);
        wait_products();
        pin(scores);
        gates.apply(scores, 0, tokens);
        store_panels<T, kChunk>(shared_address(&stage.p), 16 * warp, scores, first_key / 16);
        fence_async_proxy();
        arrive_warp(smem.maker.scores_made[slot]);
    }
    template <class Memory> __device__ inline void wait_made(Memory& smem, int chunk) const {
        const Use<C::kStages> use(chunk);
        wait(smem.maker.scores_made[use.slot], use.phase);
    }
};

}  // namespace tfla_tk::delta_rule
