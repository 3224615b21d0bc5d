// What comes from and goes to global memory, by warps of a team beside their share of the gates' work.
//
// Where the slices of V of a head are even in number, those of two neighbours are a cluster, and each of its
// CTAs loads every second box of q, k and the log gates into the shared memory of both. Before that they tell
// each other that the place is free. A step of the walk is a chunk (Task::chunk_of).
#pragma once

#include "channel_gate/forward/config.cuh"
#include "common/cluster.cuh"
#include "common/store_rows.cuh"

namespace tfla_tk::channel_gate {

// Until the walkers are done with a step.
template <class C> __device__ inline void wait_done(ForwardMemory<C>& smem, int step) {
    if (step < 0) return;
    const Use<C::kStages> use(step);
    wait(smem.done[use.slot], use.phase);
}

// Each function is of one warp, the same for all steps of a team. NOTES: only one chunk of a sequence may end
// early: so each begins with the first phase of tail_landed, and no loader has to be kept.
template <class C> struct Carrier {
    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    int team;

    __device__ inline TileLoader<Task> loader(int of) const {
        return {smem.task, g.packed(), smem.tail_landed[team][of]};
    }
    __device__ inline int chunk_of(int step) const { return smem.task.template chunk_of<C>(step); }
    __device__ inline int row_of(int step) const { return smem.task.first_row + chunk_of(step) * kChunk; }

    // The log gates.
    __device__ inline void load_gates(int step) const {
        if (step >= smem.task.chunks) return;
        const Use<C::kScoreSlots> use(step);
        semaphore& arrived = smem.gates_arrived[use.slot];
        wait_free(smem.work_free[use.slot], use.phase);
        if (fresh_laneid() == 0) kittens::tma::expect_bytes(arrived, C::kParts * g.gates.part_bytes());
        meet_neighbour(smem.work_agreed[use.slot], use.phase);
        if (fresh_laneid() != 0) return;
        const int row = row_of(step), boxes = C::kParts * g.gates.boxes();
        unsigned char* const work = smem.work[use.slot];
        auto load_part = [&](int n, int part, int block) {
            if (is_of_neighbour(step + n)) return;
            load_box(g.gates.map, work + part * (kBlocks * kBlockBytes) + g.gates.place_of(block), arrived,
                     part * kBlockChannels, row + block * kBlock);
        };
        if (g.gates.is_float())
            each<0, C::kParts>([&](int part) { load_part(part, part, 0); });
        else
#pragma unroll 1
            for (int n = 0; n < boxes; n++) load_part(n, n / kBlocks, n % kBlocks);
    }

    // q and k, in the place of those of an earlier step, which the walkers are done with.
    __device__ inline void load_operands(int step) const {
        if (step >= smem.task.chunks) return;
        wait_done(smem, step - C::kStages);
        const Use<C::kStages> use(step);
        auto& to = smem.operands[use.slot];
        semaphore& arrived = smem.arrived[use.slot];
        const bool whole = !ends_early(step);
        if (whole && fresh_laneid() == 0)
            each<0, 2>([&](int) { kittens::tma::expect_bytes(arrived, C::Tile::loaded_bytes); });
        meet_neighbour(smem.operands_agreed[use.slot], use.phase);
        if (!whole) {
            TileLoader<Task> load_tile = loader(0);
            load_tile(to.q, g.q, arrived, 0, smem.task.head, chunk_of(step));
            load_tile(to.k, g.k, arrived, 0, smem.task.head, chunk_of(step));
        } else if (fresh_laneid() == 0) {
            const int row = row_of(step);
            each<0, 2 * C::Tile::panels>([&](int n) {
                const int panel = n / 2;
                if (is_of_neighbour(n)) return;
                load_box(n % 2 ? g.k : g.q, n % 2 ? to.k.data[panel] : to.q.data[panel], arrived,
                         panel * kPanelColumns, row);
            });
        }
    }

    // V, where O of an earlier step has been, which this warp has stored.
    __device__ inline void load_values(int step) const {
        const Task& task = smem.task;
        if (step >= task.chunks) return;
        const int slot = Use<C::kStages>(step).slot;
        semaphore& arrived = smem.values_arrived[slot];
        wait_stores_read();
        __syncwarp();
        if (ends_early(step)) {
            TileLoader<Task> load_tile = loader(1);
#pragma unroll 1
            for (int i = 0; i < C::kWalkers; i++)
                load_tile(smem.values[slot][i], g.v, arrived, task.column + i * kWalkerColumns, task.head,
                          chunk_of(step));
        } else if (fresh_laneid() == 0) {
            const int column = task.column, row = row_of(step), head = task.head, batch = task.batch;
            each<0, C::kWalkers>([&](int i) {
                kittens::tma::expect_bytes(arrived, C::Columns::loaded_bytes);
                g.v.load_panel(&smem.values[slot][i], arrived, column + i * kWalkerColumns, row, head, batch);
            });
        }
    }

    // O.
    __device__ inline void store(int step) const {
        if (step < 0) return;
        const Task& task = smem.task;
        wait_done(smem, step);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            store_chunk(task, g.packed(), g.o, g.o_box, g.o_row, &smem.values[Use<C::kStages>(step).slot][i],
                        chunk_of(step), [&](const TensorMap& map, uint32_t from, int row) {
                            const int column = task.column + i * kWalkerColumns;
                            if (g.adds)
                                map.add_panel(from, column, row, task.head, task.batch);
                            else
                                map.store_panel(from, column, row, task.head, task.batch);
                        });
    }

  private:
    __device__ inline bool ends_early(int step) const {
        return g.packed() && smem.task.tokens_of(chunk_of(step)) < kChunk;
    }
    // Whether the other CTA of a cluster loads the n-th box.
    __device__ static inline bool is_of_neighbour(int n) {
        return cluster_ctas() > 1 && (n + cta_in_cluster()) % 2;
    }

    // In a cluster: tells the other CTA that a place is free here, and waits for the same of its own.
    __device__ static inline void meet_neighbour(semaphore& agreed, uint32_t phase) {
        if (cluster_ctas() == 1) return;
        __syncwarp();
        if (fresh_laneid() == 0) arrive_in_cta(agreed, 1 - cta_in_cluster());
        wait(agreed, phase);
    }

    __device__ inline void load_box(const TensorMap& map, void* to, semaphore& arrived, int column,
                                    int row) const {
        const Task& task = smem.task;
        if (cluster_ctas() > 1)
            map.load_panel_to_both(to, arrived, column, row, task.head, task.batch);
        else
            map.load_panel(to, arrived, column, row, task.head, task.batch);
    }
};

}  // namespace tfla_tk::channel_gate
