// What comes from and goes to global memory, and to the other CTA of a cluster, by warps of a team beside
// their share of the gates' work. A step of the walk is a chunk (Task::chunk_of), a turn of a CTA is a step
// whose chunk it makes.
//
// Where the slices of V of a head are even in number, those of two neighbours are a cluster, whose CTAs take
// turns at the chunks. The one whose turn it is loads q, k and the log gates for itself alone, and sends what
// its gate warps have made of them to the other. It needs to know that the walkers of both are done with what
// was in a place before: those of the other CTA arrive on its barriers, too.
#pragma once

#include "channel_gate/forward/columns.cuh"

namespace tfla_tk::channel_gate {

// Until the walkers of this CTA are done with the step of a turn.
template <class C> __device__ inline void wait_done(ForwardMemory<C>& smem, int turn) {
    if (turn < 0) return;
    const Use<C::kStages> use(turn);
    wait(smem.done[use.slot], use.phase);
}

// Until those of the other CTA are done with the step of a turn of this one.
template <class C> __device__ inline void wait_done_there(ForwardMemory<C>& smem, int turn) {
    if (turn < 0) return;
    const Use<C::kStages> use(turn);
    wait(smem.done_there[use.slot], use.phase);
}

// Each function is of one warp, the same for all turns of a team. NOTES: only one chunk of a sequence may end
// early: so each begins with the first phase of tail_landed, and no loader has to be kept.
template <class C> struct Carrier {
    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    int team;

    __device__ inline TileLoader<Task> loader(int of) const {
        return {smem.task, g.packed(), smem.tail_landed[team][of]};
    }
    __device__ inline int chunk_of(int step) const { return smem.task.template chunk_of<C>(step); }

    // The log gates.
    __device__ inline void load_gates(int turn) const {
        const Task& task = smem.task;
        const int step = C::step_of(turn);
        if (step >= task.chunks) return;
        const Use<C::kScoreSlots> use(turn);
        semaphore& arrived = smem.gates_arrived[use.slot];
        wait_free(smem.work_free[use.slot], use.phase);
        if (fresh_laneid() != 0) return;
        kittens::tma::expect_bytes(arrived, C::kParts * g.gates.part_bytes());
        const int row = task.first_row + chunk_of(step) * kChunk, boxes = C::kParts * g.gates.boxes();
        unsigned char* const work = smem.work[use.slot];
        auto load_part = [&](int part, int block) {
            g.gates.map.load_panel(work + part * (kBlocks * kBlockBytes) + g.gates.place_of(block), arrived,
                                   part * kBlockChannels, row + block * kBlock, task.head, task.batch);
        };
        if (g.gates.is_float())
            each<0, C::kParts>([&](int part) { load_part(part, 0); });
        else
#pragma unroll 1
            for (int n = 0; n < boxes; n++) load_part(n / kBlocks, n % kBlocks);
    }

    // q and k, in the place of those of an earlier turn, which the walkers are done with.
    __device__ inline void load_operands(int turn) const {
        const int step = C::step_of(turn);
        if (step >= smem.task.chunks) return;
        wait_done(smem, turn - C::kStages);
        if constexpr (C::kShares) wait_done_there(smem, turn - C::kStages);
        const int slot = Use<C::kStages>(turn).slot;
        TileLoader<Task> load_tile = loader(0);
        load_tile(smem.operands[slot].q, g.q, smem.arrived[slot], 0, smem.task.head, chunk_of(step));
        load_tile(smem.operands[slot].k, g.k, smem.arrived[slot], 0, smem.task.head, chunk_of(step));
    }

    // V, where O of an earlier step has been, which this warp has stored.
    __device__ inline void load_values(int step) const {
        if (step >= smem.task.chunks) return;
        wait_stores_read();
        __syncwarp();
        TileLoader<Task> load_tile = loader(1);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            load_columns(g, smem, load_tile, smem.values_arrived[C::values_of(step)], i, step);
    }

    // O.
    __device__ inline void store(int step) const {
        if (step < 0) return;
        wait_done(smem, step);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++) store_columns(g, smem, i, step);
    }

    // What the walkers need of a turn's step to the other CTA, when all warps of the team have handed it on.
    // NOTES: all lanes wait, or ptxas keeps the address of shared memory in a register and spills.
    __device__ inline void send(int turn) const {
        const Use<C::kScoreSlots> made(turn);
        wait(smem.operands_ready[made.slot], made.phase);
        wait_done_there(smem, turn - C::kReceived);
        if (fresh_laneid() == 0) {
            const int slot = Use<C::kReceived>(turn).slot, other = 1 - cta_in_cluster();
            semaphore& arrived = smem.operands_ready[C::kScoreSlots + slot];
            const auto& operands = smem.operands[Use<C::kStages>(turn).slot];
            const auto& p = smem.p[made.slot];
            const auto& factors = smem.factors[made.slot];
            expect_in_cta(arrived, sizeof(operands) + sizeof(p) + sizeof(factors), other);
            auto send_to = [&](const auto& from, const auto& to) {
                send_to_cta(&from, &to, sizeof(from), arrived, other);
            };
            send_to(operands, smem.operands[C::kStages + slot]);
            send_to(p, smem.p[C::kScoreSlots + slot]);
            send_to(factors, smem.factors[C::kScoreSlots + slot]);
        }
        __syncwarp();
    }
};

}  // namespace tfla_tk::channel_gate
