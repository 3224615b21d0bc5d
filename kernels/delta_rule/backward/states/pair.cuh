// Two CTAs of the left walk that share results, as a cluster: two slices of V of a head, or two heads of v
// that share a head of q and k. Each makes its part of dq and of left. The first CTA keeps dq, the second one
// left: a walker sends its part of the other result and adds what the other CTA sends to its own part. So no
// part goes through device memory, and the sum is rounded once.
#pragma once

#include "common/cluster.cuh"
#include "delta_rule/backward/states/walker.cuh"

namespace tfla_tk::delta_rule {

template <class C> struct Pair {
    using W = StatesWalker<C>;
    using Tokens = typename W::Tokens;

    EarlierResults<C>& results;
    PairBarriers<C>& barriers;
    int walker;

    __device__ inline Pair(StatesMemory<C>& smem, int walker)
        : results(smem.earlier), barriers(smem.pair_barriers), walker(walker) {}

    __device__ static inline int other() { return 1 - cta_in_cluster(); }
    // Sends a part to the other CTA, once that has read the one before.
    __device__ inline void send(const Tokens& part, int chunk) const {
        const int thread = fresh_thread() % 128;
        if (thread == 0) kittens::tma::expect_bytes(barriers.arrived[walker], sizeof(typename C::Sent));
        wait_free(barriers.read[walker], chunk % 2);
        const uint32_t to = address_in_cta(&results.sent[walker].units[0][thread], other());
        const uint32_t arrived = address_in_cta(&barriers.arrived[walker], other());
        each<0, kChunk / 16>([&](int j) {
            const float2(&x)[4] = part.tiles[0][j].data;
            each<0, 2>([&](int half) {
                const float2 a = x[2 * half], b = x[2 * half + 1];
                store_in_cta(to + (2 * j + half) * sizeof(results.sent[0].units[0]), {a.x, a.y, b.x, b.y},
                             arrived);
            });
        });
    }
    // Adds the part that the other CTA has sent.
    __device__ inline void add_sent(Tokens& part, int chunk) const {
        wait(barriers.arrived[walker], chunk % 2);
        const float4* const units = &results.sent[walker].units[0][fresh_thread() % 128];
        each<0, kChunk / 8>([&](int i) {
            const float4 y = units[i * 128];
            float2* const x = &part.tiles[0][i / 2].data[i % 2 * 2];
            x[0] = {x[0].x + y.x, x[0].y + y.y}, x[1] = {x[1].x + y.z, x[1].y + y.w};
        });
    }
    // Lets the other CTA send the next part. NOTES: called when the sum has been stored, so the loads are
    // done.
    __device__ inline void free_sent() const { arrive_warp_in_cta(barriers.read[walker], other()); }
};

}  // namespace tfla_tk::delta_rule
