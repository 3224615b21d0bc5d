// Makers: CTAs of a walk's launch that make A and P while the walk runs, on multiprocessors that it leaves
// idle.
//
// All warpgroups of a CTA are makers. They take the chunks in the order in which the walks need them: the
// first one of every sequence and head, then the second one, and so on. A flag per chunk and head of v tells
// the walks that its matrices are in device memory. The flags are zero at the launch.
//
// Makers are the first CTAs of the grid and wait for nobody. Where a CTA of the walk runs, all makers have
// begun: so it waits for CTAs that come to their end, whatever else the GPU has to do.
#pragma once

#include "delta_rule/chunk_matrices/chunk.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// Of a CTA. NOTES: five, as many as a multiprocessor holds CTAs of delta_matrices, lack registers; and where
// a CTA of K = 64 has more than three warpgroups, ptxas spills the walker's registers, setmaxnreg or not.
template <int kDimK> constexpr int kMakersOfCta = kDimK == 64 ? 3 : 4;

struct MakersGlobals : MatricesGlobals {
    int* made;  // [batch * heads, slots]
    int ctas;

    // Sequences and heads.
    __device__ inline int pairs() const { return cut.sequences * heads; }
    // At least the chunks of the longest sequence.
    __device__ inline int most_chunks() const { return packed() ? slots - cut.sequences : slots; }
};

// The arguments of a walk's kernel with makers.
template <class Walk> struct WithMakers {
    Walk walk;
    MakersGlobals makers;
};

template <class C> struct MakersMemory {
    MatricesMemory<typename C::T, C::kDimK> of[C::kMakers];
};

// The number-th one in the order of the walks, where there is one.
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
    if (g.packed()) return {0, head, start + first, left, start / kChunk + sequence + step};
    return {sequence, head, first, left, step};
}

// The first chunk with tokens of those of `number` and every stride-th one behind it; without tokens where
// there is none. Leaves the number behind it.
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
    release_to_device(made, 1);
}

// The makers of the cta-th CTA.
template <class C>
__device__ inline void run_makers(const MakersGlobals& g, unsigned char* shared_memory, int cta) {
    const int maker = __shfl_sync(0xffffffff, fresh_thread() / 128, 0), warp = warpgroup::warpid();
    auto& own = reinterpret_cast<MakersMemory<C>*>(shared_memory)->of[maker];
    auto meet = [&] { named_sync<128>(NamedBarrier::matrices, maker); };
    const bool is_first = fresh_thread() % 128 == 0;
    const int stride = C::kMakers * g.ctas;
    int number = maker * g.ctas + cta;
    ChunkOfHead chunk = next_chunk(g, number, stride);
    if (is_first) {
        init_semaphore(own.arrived, 1);
        publish_barriers();
        if (chunk.tokens > 0) load_inputs(g, own, chunk);
    }
#pragma unroll 1
    for (uint32_t phase = 0; chunk.tokens > 0; phase ^= 1) {
        load_chunk_gates(g, own, chunk, warp);
        meet();
        make_matrices<typename C::T, C::kDimK>(own, chunk.tokens, g.scale, phase, warp, meet);
        chunk = next_chunk(g, number, stride);
        if (is_first) {
            int* const made = g.made + own.head * g.slots + own.slot;
            store_matrices(g, own);
            wait_stores_read();
            if (chunk.tokens > 0) load_inputs(g, own, chunk);
            publish_matrices(made);
        }
        __syncwarp();
    }
}

}  // namespace tfla_tk::delta_rule
