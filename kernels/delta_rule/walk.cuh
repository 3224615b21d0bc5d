// What the walks of the forward and the backward share: the task of a CTA, the matrices of a
// chunk.
//
// A walker is a warpgroup that owns 64 columns of V. It holds the transposed state (64 x K) in fp32 and
// computes everything transposed: so the A operand of each GEMM is in its own registers and B in shared
// memory. Walkers wait for each other where they make P, and in the walk of backward/gradients/.
#pragma once

#include <algorithm>

#include "common/register_steps.cuh"
#include "common/sync.cuh"
#include "common/tile_loader.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/gates.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

constexpr int kWalkerColumns = 64;  // of V; of K in the walks over the states

// Flags of a chunk and head: makers have made its matrices; a walk has asked for them.
constexpr int kMade = 1, kLoaded = 2;

// Arguments that both walks share; fields as in bindings/params.h.
struct WalkGlobals {
    TensorMap q, k, a, p;  // boxes of a chunk
    GateWords g, beta;
    Cut cut;
    const float* entering;  // the first state, or the gradient of the last one; null: zero
    float* leaving;         // the last state, or the gradient of the first one; null: not wanted
    float* carried;         // those between the segments of a split
    const int* leads;       // [segments, heads], of a split
    float* borders;
    int heads, group, seq, dim_k, dim_v;
    int ctas;  // per sequence and head
    float scale;
    int* made;  // [batch * heads, slots], flags of makers; null without these
    int slots;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// The (segment of a sequence, head, columns of V, or of K) of a CTA.
struct Task {
    int batch, head, key_head, column;  // column: the first one
    int first_row, tokens;              // tokens < 0: nothing to do
    int chunks, first_slot;             // first_slot: of the segment's matrices
    int number, segments;               // of this segment, and how many the sequence has
    int first_chunk;                    // of this segment, in its sequence
    int first_border, first_carried;    // slots of the sequence's first border, and of a split's first state
    int64_t state;                      // sequence * heads + head

    // Segment of its sequence.
    __device__ inline bool is_first() const { return number == 0; }
    __device__ inline bool is_last() const { return number == segments - 1; }

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        constexpr int kSegmentTokens = kSegmentChunks * kChunk;
        const int start = s.first_row - s.number * segment_tokens(g.cut);
        return {g.packed() ? 0 : s.sequence,
                head,
                head / g.group,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                s.first_row / kChunk + (g.packed() ? s.sequence : 0),
                s.number,
                s.count,
                s.number * g.cut.segment_chunks,
                g.packed() ? start / kSegmentTokens : s.sequence * ((g.seq - 1) / kSegmentTokens),
                g.packed() ? start / segment_tokens(g.cut) : s.sequence * (s.count - 1),
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

// The first column of a walker of a CTA.
__device__ inline int column_of_walker(const Task& task, int walker) {
    return task.column + walker * kWalkerColumns;
}

// The task of a walk of the forward or the mirror, and its states. C::kBackward: it is the mirror.
// C::kStatesAlone: it makes those that are carried over the segments of a split. A lead (bindings/params.h)
// is a part of the task, but not of the segment.
struct WalkTask : Task {
    const float* entering;    // the state that the walk begins with, null: zero
    float* leaving;           // the place of the state that it ends with, null: not wanted
    int first_own, last_own;  // chunks of the segment

    __device__ inline bool owns(int chunk) const { return chunk >= first_own && chunk <= last_own; }

    // Called by whole warps.
    template <class C, class Globals>
    __device__ static inline WalkTask of_block(const Globals& g, int block) {
        Task task = Task::of_block<C>(g, block);
        if (task.tokens < 0) return {task, nullptr, nullptr, 0, -1};
        const bool ends = C::kBackward ? task.is_first() : task.is_last();
        bool begins = C::kBackward ? task.is_last() : task.is_first();
        const int64_t size = static_cast<int64_t>(g.dim_k) * g.dim_v;
        // that enters a segment of the sequence
        auto carried = [&](int number) {
            return g.carried +
                   (static_cast<int64_t>(task.first_carried + number - 1) * g.heads + task.head) * size;
        };
        const float* entering = nullptr;
        float* leaving = g.leaving ? g.leaving + task.state * size : nullptr;
        int first_own = 0, last_own = task.chunks - 1;
        const int segment = block / g.ctas;  // and head
        if constexpr (C::kStatesAlone) {
            // of a carried head the walk behind this segment asks for its state, and the mirror for M
            bool asked = !ends && g.leads[segment + (C::kBackward ? -g.heads : g.heads)] == kCarried;
            if constexpr (!C::kBackward)
                asked |= !ends && g.maps && g.leads[g.cut.segments * g.heads + segment] == kCarried;
            if (!asked) task.tokens = -1;
        } else if (const int lead = begins ? 0 : g.leads[segment]; lead == kCarried) {
            entering = carried(task.number + C::kBackward);
        } else if (lead > 0) {
            if constexpr (C::kBackward) {
                const int behind = tokens_behind(g, task);
                begins = lead * kChunk >= behind;
                task.tokens += min(lead * kChunk, behind);
                task.chunks += min(lead, (behind + kChunk - 1) / kChunk);
            } else {
                begins = lead >= task.first_chunk;
                task.first_row -= lead * kChunk, task.tokens += lead * kChunk, task.chunks += lead;
                task.first_slot -= lead, task.first_chunk -= lead;
                first_own += lead, last_own += lead;
            }
        }
        if (begins && g.entering) entering = g.entering + task.state * size;
        if (!ends) leaving = C::kStatesAlone ? carried(task.number + !C::kBackward) : nullptr;
        return {task, entering, leaving, first_own, last_own};
    }

  private:
    // Of the sequence behind the task's segment.
    template <class Globals> __device__ static inline int tokens_behind(const Globals& g, const Task& task) {
        const int end = task.first_row + task.tokens;
        return (g.packed() ? sequence_start(g.cut, g.seq, task.state / g.heads + 1) : g.seq) - end;
    }
};

// Of accumulators and A operands whose columns are tokens: an accumulator times factors, in place; operands
// likewise; an accumulator times factors, rounded to operands.
template <class D, class Factors> __device__ inline void scale_accumulator(D& d, const Factors& by) {
    each<0, D::width>([&](int j) {
        const auto factors = by.of(j);
        each<0, 4>([&](int k) { scale_in_place(d.tiles[0][j].data[k], factors.of[k / 2]); });
    });
}
template <class A, int kCount, class Factors>
__device__ inline void scale_fragments(A (&a)[kCount], const Factors& by) {
    each<0, kCount>([&](int j) {
        const auto& factors = by.of(j);
        each<0, 4>([&](int k) {
            auto& pair = a[j].tiles[0][0].data[k];
            const float2 x = to_float2(pair), e = factors.of[k / 2];
            pair = from_float2<typename A::dtype>({e.x * x.x, e.y * x.y});
        });
    });
}
template <class A, int kCount, class D, class Factors>
__device__ inline void round_scaled(A (&to)[kCount], const D& d, const Factors& by) {
    each<0, kCount>([&](int j) {
        const auto& factors = by.of(j);
        each<0, 4>([&](int k) {
            const float2 x = d.tiles[0][j].data[k], e = factors.of[k / 2];
            to[j].tiles[0][0].data[k] = from_float2<typename A::dtype>({e.x * x.x, e.y * x.y});
        });
    });
}

// W^T = V^T - e^b X^T in the place of X^T, and beta W^T, rounded, in that of V^T.
template <class A, int kCount, class D, class Factors>
__device__ inline void make_writers(A (&values)[kCount], D& x, const Factors& minus_read,
                                    const Factors& beta) {
    each<0, kCount>([&](int j) {
        const auto factors = minus_read.of(j), betas = beta.of(j);
        each<0, 4>([&](int k) {
            auto& pair = values[j].tiles[0][0].data[k];
            float2& w = x.tiles[0][j].data[k];
            fma_in_place(w, factors.of[k / 2], to_float2(pair));
            pair = from_float2<typename A::dtype>({betas.of[k / 2].x * w.x, betas.of[k / 2].y * w.y});
        });
    });
}

// A walk whose loop has its edge within a chunk, where no GEMM is in flight: begin<is first>(chunk), once
// wait(chunk) has waited for it, then end(chunk).
template <class Wait, class Begin, class End>
__device__ inline void walk_in_halves(int chunks, Wait wait, Begin begin, End end) {
    if (chunks <= 0) return;
    wait(0);
    begin.template operator()<true>(0);
#pragma unroll 1
    for (int chunk = 0; chunk + 1 < chunks; chunk++) {
        end(chunk);
        wait(chunk + 1);
        begin.template operator()<false>(chunk + 1);
    }
    end(chunks - 1);
}

// Whether the walk makes its matrices: a maker in the place of the scorer makes A, the walkers make P
// (chunk_matrices/in_walk.cuh).
template <class C> constexpr bool kMakesMatrices = requires { requires C::kMakesMatrices; };

// Barriers of a stage of a walk, and what arrives on them. `inputs`: q, k and the gates.
//
//                                          for_scorer   arrived: all that walkers wait for
//   without a scorer                       -            inputs; the other tiles; A and P
//   with a scorer, which makes P           inputs       the scorer, behind the inputs and P; the others; A
//   with a maker, which makes A            inputs       the maker, behind the inputs and A; the others
//
// Walkers beside a maker make P themselves; for that they wait for `for_scorer`.
template <class C, class Memory> __device__ inline semaphore& tiles_arrived(Memory& smem, int slot) {
    return C::kHasScorer ? smem.for_scorer[slot] : smem.arrived[slot];
}
// columns: tiles that the walkers have for themselves.
template <class C, class Memory> __device__ inline void init_arrivals(Memory& smem, int slot, int columns) {
    constexpr int kOfTiles = 2 + kArrivalsPerWarp;          // keys, queries; gates
    constexpr int kOfMatrices = kMakesMatrices<C> ? 0 : 1;  // that are loaded
    init_semaphore(smem.for_scorer[slot], kOfTiles);
    init_semaphore(smem.arrived[slot],
                   kOfMatrices + columns + (C::kHasScorer ? 4 * kArrivalsPerWarp : kOfTiles));
}

// Whether a border between segments lies before a chunk of a task, which is not the first one. The segments
// of a split begin at such borders.
__device__ inline bool is_border(int chunk) { return chunk % kSegmentChunks == 0; }

// The state of a task's head at a border of its sequence, that before the sequence's chunk `chunk`.
template <class Globals> __device__ inline auto* border_state(const Globals& g, const Task& task, int chunk) {
    const int slot = task.first_border + chunk / kSegmentChunks - 1;
    return g.borders + (static_cast<int64_t>(slot) * g.heads + task.head) * g.dim_k * g.dim_v;
}

// Waits until a chunk's matrices are made, by one warp, which may load them then. Each lane looks at one
// chunk, from this one on. Returns how many of these are made without a gap: at least one.
__device__ inline int wait_made(const WalkGlobals& g, const Task& task, int chunk) {
    const int asked = chunk + fresh_laneid(), head = task.batch * g.heads + task.head;
    const int* const flag = g.made + head * g.slots + task.first_slot + asked;
    int made = 0;
    wait_for_cta(32, [&] {
        const bool is_made = asked < task.chunks && peek_from_device(flag) != 0;
        made = __clz(__brev(~__ballot_sync(0xffffffff, is_made)));
        return made > 0;
    });
    if (fresh_laneid() < made) acquire_from_device(flag);
    __syncwarp();
    fence_async_global();
    return made;
}

// Tells makers that a chunk's matrices are asked for, by one thread. NOTES: by a read-modify-write, so that
// who sees the flag then is behind the maker's release, too.
__device__ inline void mark_loaded(const WalkGlobals& g, const Task& task, int chunk) {
    const int head = task.batch * g.heads + task.head;
    or_to_device(g.made + head * g.slots + task.first_slot + chunk, kLoaded);
}

// Loads A and, where the walk does not make it, P of a chunk, by one thread.
template <class C, class Stage>
__device__ inline void load_matrices(const WalkGlobals& g, const Task& task, Stage& stage, semaphore& arrived,
                                     int chunk) {
    const int row = (task.first_slot + chunk) * kChunk, head = task.batch * g.heads + task.head;
    tma::expect_bytes(arrived, (C::kHasScorer ? 1 : 2) * C::Square::loaded_bytes);
    load_panels(stage.a, g.a, arrived, 0, row, head, 0);
    if constexpr (!C::kHasScorer) load_panels(stage.p, g.p, arrived, 0, row, head, 0);
}

}  // namespace tfla_tk::delta_rule
