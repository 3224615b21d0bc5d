// Makers: CTAs of a walk's launch that make A, and P for walks that do not make it, while the walk runs, on
// multiprocessors that it leaves idle.
//
// All warpgroups of a CTA but the last one are makers. Each maker is served by a warp of the last warpgroup:
// it loads the inputs, scans the gates, stores the results and tells the walks. Near the walks it loads a
// chunk ahead.
//
// Makers take the chunks in the order in which the walks need them: the first chunk of each walk, then the
// second one, and so on. A flag per chunk and head of v tells the walks that its matrices are in device
// memory. The flags are zero at the launch.
//
// Makers stay close to the walks, so that these find in L2 what makers read and write: a maker waits until
// the walk has loaded the chunk that is `ahead` chunks before its next one. It has stored and published
// its own results then.
//
// A CTA draws a ticket when it begins: of makers while there is one left, else of walks. So when a walk
// begins, all makers have begun, in whatever order the GPU starts the CTAs of a grid. Makers wait for a walk,
// which may not have begun, only for a limited time. So the walk waits only for CTAs that are sure to end,
// whatever else the GPU has to do.
#pragma once

#include "delta_rule/chunk_matrices/chunk.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// Warpgroups of a CTA: the makers and the one that serves them.
constexpr int kWarpgroupsOfMakers = 4;

// Chunks that makers may be ahead of a walk: at least so many, since less than 8 are too few for the time
// that a chunk takes them; and as many chunks of all walks together as the L2 holds.
constexpr int kLeastAhead = 9, kChunksInL2 = 576;

struct MakersGlobals : MatricesGlobals {
    int* made;     // [batch * heads, slots]
    int* tickets;  // [2]: the next one of makers, of walks
    int ctas;      // of makers
    int ahead;     // chunks that makers may be ahead of a walk

    // Pairs of a sequence and a head.
    __host__ __device__ inline int pairs() const { return cut.sequences * heads; }
    // At least the chunks of the longest sequence.
    __device__ inline int most_chunks() const { return packed() ? slots - cut.sequences : slots; }
};

// The arguments of a walk's kernel with makers.
template <class Walk> struct WithMakers {
    Walk walk;
    MakersGlobals makers;
};

template <class Of> struct InputsAndResults {
    using Tiles = Of;
    typename Tiles::Inputs in;
    typename Tiles::Results out;
};

template <class T, int kDimK, bool kWithScores>
struct MakerMemory : InputsAndResults<MatricesTiles<T, kDimK, kWithScores>> {
    Log2Decay log2_decay;
    alignas(16) float beta[2][kChunk];  // of the chunk and the one behind it, in turns
    GateCopies::Words decays, betas;    // of the chunk behind
    int tokens;                         // of the chunk; 0: there is no further chunk
    semaphore arrived;                  // the inputs, and the gates with the tokens
    semaphore multiplied;               // the inputs are read
    semaphore gated;                    // the log decay and the tokens are read
    semaphore ready;                    // the results
    semaphore stored;                   // they may be overwritten

    __device__ inline void init_barriers() {
        init_semaphore(arrived, 1 + kArrivalsPerWarp);
        init_warp_barrier(multiplied, 4);
        init_warp_barrier(gated, 4);
        init_warp_barrier(ready, 4);
        init_warp_barrier(stored, 1);
        publish_barriers();
    }
};

template <class C> struct MakersMemory {
    static constexpr int kMakers = C::kMakerWarpgroups - 1;  // one warpgroup serves them
    MakerMemory<typename C::T, C::kDimK, !C::kHasScorer> of[kMakers];
};

// The number-th chunk in the order of the walks; without tokens where the sequence has fewer chunks.
__device__ inline ChunkOfHead chunk_in_order(const MakersGlobals& g, int number) {
    const int step = number / g.pairs(), pair = number % g.pairs();
    const int sequence = pair / g.heads, head = pair % g.heads;
    int start = 0, tokens = g.seq;
    if (g.packed()) {
        const PackedSequence found(g.cut, g.seq, sequence);
        start = found.start, tokens = found.tokens;
    }
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const int first = step * kChunk, left = step < chunks ? min(tokens - first, kChunk) : 0;
    if (g.packed()) return {0, head, start + first, left, start / kChunk + sequence + step, step};
    return {sequence, head, first, left, step, step};
}

// The first chunk with tokens among `number` and every stride-th one behind it; without tokens where there is
// none. Moves `number` behind it.
__device__ inline ChunkOfHead next_chunk(const MakersGlobals& g, int& number, int stride) {
    const int end = g.pairs() * g.most_chunks();
    ChunkOfHead found{};
    while (number < end && found.tokens <= 0) {
        found = chunk_in_order(g, number);
        number += stride;
    }
    return found;
}

// Waits until the matrices are in device memory, and tells the walks; by the thread that stores them.
__device__ inline void publish_matrices(int* made) {
    wait_stores_done();
    fence_async_global();
    release_to_device(made, kMade);
}

// Whether the walks are so close that a chunk may be made. Called by whole warps.
__device__ inline bool walk_is_near(const MakersGlobals& g, const ChunkOfHead& chunk) {
    if (chunk.tokens <= 0 || chunk.step < g.ahead) return true;
    const int* const flag = g.made + (chunk.batch * g.heads + chunk.head) * g.slots + chunk.slot - g.ahead;
    return __any_sync(0xffffffff, peek_from_device(flag) & kLoaded);
}

// Waits for it. Returns whether it has come true: a warp that has waited in vain should not wait again.
__device__ inline bool wait_near(const MakersGlobals& g, const ChunkOfHead& chunk) {
    constexpr int kTries = 500, kNanoseconds = 200;
    for (int i = 0; i < kTries; i++) {
        if (walk_is_near(g, chunk)) return true;
        __nanosleep(kNanoseconds);
    }
    return false;
}

// One maker, until it is handed a chunk without tokens.
template <class C, class Memory>
__device__ inline void make_chunks(const MakersGlobals& g, Memory& own, int maker) {
    auto meet = [&] { named_sync<128>(NamedBarrier::matrices, maker); };
#pragma unroll 1
    for (uint32_t phase = 0;; phase ^= 1) {
        wait(own.arrived, phase);
        const int tokens = own.tokens;
        if (tokens <= 0) break;
        const int warp = fresh_thread() / 32 % 4;  // NOTES: anew, to save registers
        make_matrices<typename C::T, C::kDimK>(
            own, own.beta[phase], tokens, g.scale, warp, meet,
            [&](const auto&) { arrive_warp(own.multiplied); },
            [&] {
                arrive_warp(own.gated);
                wait_free(own.stored, phase);
            });
        arrive_warp(own.ready);
    }
}

// The warp that serves a maker: it takes every stride-th chunk from `number` on.
template <class Memory>
__device__ inline void serve_maker(const MakersGlobals& g, Memory& own, int number, int stride) {
    const bool is_first = fresh_laneid() == 0;
    ChunkOfHead chunk = next_chunk(g, number, stride), next = chunk;  // the maker's, the one behind it
    auto gates_of = [&](const GateWords& gate) {
        return GateCopies(gate, next.batch, next.head, next.first_row);
    };
    auto start_gates = [&] {
        gates_of(g.g).start(own.decays, 0, g.g.data ? next.tokens : 0);
        gates_of(g.beta).start(own.betas, 0, next.tokens);
        commit_copies();
    };
    auto start_inputs = [&] {
        if (is_first) {
            tma::expect_bytes(own.arrived, next.tokens > 0 ? sizeof(own.in) : 0);
            if (next.tokens > 0) load_inputs(g, own, next);
        }
        __syncwarp();
    };
    auto scanned = [&] {
        wait_copies();
        return cumulative_log2_decay(gates_of(g.g).of(own.decays));
    };
    auto hand_over = [&](const TwoPairs& log2_decay, uint32_t turn) {
        own.log2_decay.write(fresh_laneid(), log2_decay);
        write_pair(own.beta[turn], 2 * fresh_laneid(), gates_of(g.beta).of(own.betas));
        if (is_first) own.tokens = next.tokens;
        arrive_warp(own.arrived);
    };
    int* made = nullptr;  // the flag of the chunk that is stored last; null: none is yet
    auto publish = [&] {
        if (is_first && made) publish_matrices(made);
        __syncwarp();
    };
    auto go_on = [&](uint32_t phase) {
        const TwoPairs log2_decay = scanned();
        wait(own.gated, phase);
        hand_over(log2_decay, phase ^ 1);
        chunk = next, next = next_chunk(g, number, stride);
        start_gates();
    };
    bool waits = true;
    start_gates();
    start_inputs();
    hand_over(scanned(), 0);
    next = next_chunk(g, number, stride);
    start_gates();
#pragma unroll 1
    for (uint32_t phase = 0; chunk.tokens > 0; phase ^= 1) {
        const bool near = !waits || walk_is_near(g, next);
        const int slot = chunk.slot, head = chunk.batch * g.heads + chunk.head;
        wait(own.multiplied, phase);
        if (near) start_inputs();
        publish();
        if (near) go_on(phase);
        made = g.made + head * g.slots + slot;
        wait(own.ready, phase);
        if (is_first) {
            store_matrices(g, own, slot, head);
            wait_stores_read();
        }
        arrive_warp(own.stored);
        if (!near) {
            publish();
            made = nullptr;
            waits = wait_near(g, next);
            start_inputs();
            go_on(phase);
        }
    }
    publish();
    wait_copies();
}

// The part that a CTA takes: a maker's, below g.ctas, or g.ctas and the number of a walk. The last CTAs of
// the grid let the others be makers where these begin soon: drawn by all, the walks are up to a quarter
// slower. By all threads of a CTA. place: in shared memory, whose later contents it may be a part of.
__device__ inline int draw_part(const MakersGlobals& g, int& place) {
    constexpr int kTries = 100, kNanoseconds = 100;
    if (threadIdx.x == 0) {
        auto all_makers_began = [&] { return peek_from_device(&g.tickets[0]) >= g.ctas; };
        if (blockIdx.x >= g.ctas)
            for (int i = 0; i < kTries && !all_makers_began(); i++) __nanosleep(kNanoseconds);
        place = all_makers_began() ? g.ctas : atomicAdd(&g.tickets[0], 1);
        if (place >= g.ctas) place = g.ctas + atomicAdd(&g.tickets[1], 1);
    }
    __syncthreads();
    const int drawn = __shfl_sync(0xffffffff, place, 0);
    __syncthreads();
    return drawn;
}

// The cta-th CTA of makers.
template <class C>
__device__ inline void run_makers(const MakersGlobals& g, unsigned char* shared_memory, int cta) {
    using Memory = MakersMemory<C>;
    auto& smem = *reinterpret_cast<Memory*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, fresh_thread() / 128, 0), warp = warpgroup::warpid();
    const bool serves = warpgroup_id == Memory::kMakers && warp < Memory::kMakers;
    if (serves && fresh_laneid() == 0) {
        smem.of[warp].init_barriers();
        g.a.prefetch();
    }
    __syncthreads();
    if (serves)
        serve_maker(g, smem.of[warp], warp * g.ctas + cta, Memory::kMakers * g.ctas);
    else if (warpgroup_id < Memory::kMakers)
        make_chunks<C>(g, smem.of[warpgroup_id], warpgroup_id);
}

}  // namespace tfla_tk::delta_rule
