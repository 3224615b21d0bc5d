// Pipeline pieces: ring positions, barrier waits, named barriers.
#pragma once

#include "kittens.cuh"

namespace tfla_tk {

// The `index`-th use of a ring of `kSlots` slots: its slot and the phase bit of the slot's barriers.
// NOTES: computed, not carried: a carried position costs registers that the accumulators need.
template <int kSlots> struct Use {
    int slot;
    uint32_t phase;

    __device__ inline explicit Use(int index)
        : slot(static_cast<unsigned>(index) % kSlots), phase((static_cast<unsigned>(index) / kSlots) & 1) {}
};

// This thread's lane, reread at every call.
// NOTES: kittens::laneid() is kept in a register for the whole kernel, which roles near their limit cannot
// afford.
__device__ inline int fresh_laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Whether this lane is the one that acts for its warp, all of whose lanes call this. NOTES: it takes no
// register, which the lane's number does.
__device__ inline bool elected() {
    int so;
    asm volatile(
        "{\n"
        ".reg .pred so;\n"
        "elect.sync _|so, 0xffffffff;\n"
        "selp.s32 %0, 1, 0, so;\n"
        "}\n"
        : "=r"(so)::"memory");
    return so != 0;
}

// This thread's number in the CTA, reread at every call.
__device__ inline int fresh_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Returns x, opaque to the compiler, so that derived values are recomputed instead of kept in registers.
__device__ inline int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Store with release semantics at device scope.
__device__ inline void release_to_device(int* place, int number) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(place), "r"(number) : "memory");
}

// Load with acquire semantics at device scope; the counterpart of release_to_device.
__device__ inline int acquire_from_device(const int* place) {
    int number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(number) : "l"(place) : "memory");
    return number;
}

// The same without acquire semantics; it sees the number of another CTA sooner or later. NOTES: an acquire
// empties the L1 cache. So a loop that waits should call this, and acquire once at its end.
__device__ inline int peek_from_device(const int* place) {
    int number;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(number) : "l"(place) : "memory");
    return number;
}

// Waits until come_true(), which looks at what another CTA writes to device memory. That CTA has to run
// already: tickets see to it where a CTA waits for one of its own launch. What does not come true in 2^28
// looks, at least half a minute, never will. Then this traps, and the host gets cudaErrorLaunchFailure,
// "unspecified launch failure". NOTES: no message, since what prints is a call, for which ptxas
// serialises all wgmmas of a kernel (C7510). Looks, not time, since a debugger, a sanitizer or another
// process on the GPU slows these down, too.
template <class ComeTrue> __device__ inline void wait_for_cta(int nanoseconds, ComeTrue come_true) {
    constexpr int kMostLooks = 1 << 28;
    for (int looks = 0; !come_true(); looks++) {
        if (looks == kMostLooks) __trap();
        __nanosleep(nanoseconds);
    }
}

// Sets bits of a number of other CTAs, without any order against other accesses.
__device__ inline void or_to_device(int* place, int bits) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;\n" ::"l"(place), "r"(bits) : "memory");
}

// A word of shared memory, reread at every call. NOTES: ptxas keeps values derived from special registers
// live; with this only one 4-byte address stays live instead.
__device__ inline uint32_t load_anew(uint32_t address) {
    uint32_t x;
    asm volatile("ld.volatile.shared.u32 %0, [%1];\n" : "=r"(x) : "r"(address));
    return x;
}

// Waits for the completion of phase `phase` of the barrier at a shared address. NOTES: kittens::wait carries
// no "memory" clobber.
__device__ inline void wait_at(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni DONE;\n"
        "bra.uni WAIT;\n"
        "DONE:\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}
__device__ inline void wait(kittens::semaphore& barrier, uint32_t phase) {
    wait_at(static_cast<uint32_t>(__cvta_generic_to_shared(&barrier)), phase);
}

// Whether phase `phase` is complete, without waiting.
__device__ inline bool completed(kittens::semaphore& barrier, uint32_t phase) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(address), "r"(phase)
        : "memory");
    return done != 0;
}

// wait(), skipped where an earlier poll has found the phase `done`. NOTES: polling ahead hides the barrier's
// latency behind the work in between.
__device__ inline void wait_unless(bool done, kittens::semaphore& barrier, uint32_t phase) {
    if (!done) wait(barrier, phase);
}

// A producer's wait for a free slot: the phase before the consumers', which counts as complete on the first
// lap.
__device__ inline void wait_free(kittens::semaphore& barrier, uint32_t phase) { wait(barrier, phase ^ 1); }

// A warp arrives on a barrier by one of its lanes. compute-sanitizer's racecheck follows the arriving threads
// alone and would report the other lanes' accesses, so its build lets every lane arrive.
#ifdef TFLA_EVERY_LANE_ARRIVES
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

// A barrier that completes a phase after `warps` calls of arrive_warp.
__device__ inline void init_warp_barrier(kittens::semaphore& barrier, int warps) {
    kittens::init_semaphore(barrier, warps * kArrivalsPerWarp);
}

// Waits for all lanes of the warp; whether this lane arrives for it.
__device__ inline bool arrives_for_warp() {
    __syncwarp();
    return kArrivalsPerWarp == 32 || fresh_laneid() == 0;
}

// Arrives after all lanes are done, as `count` arrivals.
__device__ inline void arrive_warp(kittens::semaphore& barrier, uint32_t count = 1) {
    if (arrives_for_warp()) kittens::arrive(barrier, count);
}

// arrive_warp if `so`, which is warp-uniform. NOTES: compiles to a predicate, not a branch.
__device__ inline void arrive_warp_if(bool so, kittens::semaphore& barrier) {
    if (arrives_for_warp() && so) kittens::arrive(barrier);
}

// arrive_warp that also expects `bytes` of asynchronous copies.
__device__ inline void arrive_warp_expecting(kittens::semaphore& barrier, uint32_t bytes) {
    __syncwarp();
    if (fresh_laneid() == 0)
        kittens::tma::expect_bytes(barrier, bytes);
    else if (kArrivalsPerWarp == 32)
        kittens::arrive(barrier);
}

// Scans the steps of a walk into a ring of stages, round robin by kWarps warps, since one warp alone may be
// slower than the GEMMs that it feeds. This is the `warp`-th of them. The walk ends with the first step that
// finds itself to be the last one; its stage says so.
//   alone(step)    the part that is independent of earlier steps; also called for steps past the last one,
//                  whose results are discarded
//   carry_on(stage, found, before, step)
//                  fills the stage from alone's result and from the stage of the step before, null for the
//                  first step; returns whether the step is the last one
//   end()          called by the warp of the last step, after that
//
// NOTES: the stage of the step before may be free again while it is read here, but only this warp writes it
// next.
template <int kWarps, class Stage, int kStages, class Alone, class CarryOn, class End>
__device__ inline void scan_in_turns(Stage (&stages)[kStages], kittens::semaphore (&ready)[kStages],
                                     kittens::semaphore (&free)[kStages], int warp, Alone alone,
                                     CarryOn carry_on, End end) {
    static_assert(kStages == kWarps + 1);
    for (int step = warp;; step += kWarps) {
        const auto found = alone(step);
        const auto [slot, phase] = Use<kStages>(step);
        wait_free(free[slot], phase);
        const Stage* before = nullptr;
        if (step > 0) {
            const auto use = Use<kStages>(step - 1);
            wait(ready[use.slot], use.phase);
            before = &stages[use.slot];
        }
        const bool ended = before && before->last;  // passed on to the warps that come after
        const bool last = ended || carry_on(stages[slot], found, before, step);
        if (fresh_laneid() == 0) stages[slot].last = last;
        arrive_warp(ready[slot]);
        if (!last) continue;
        if (!ended) end();
        return;
    }
}

// Sets a warpgroup's registers per thread, up or down from what the launch gave.
template <int kRegisters, int kThreads, int kCtas> __device__ inline void set_registers() {
    if constexpr (kRegisters > 65536 / (kThreads * kCtas))
        kittens::warpgroup::increase_registers<kRegisters>();
    else
        kittens::warpgroup::decrease_registers<kRegisters>();
}

// Makes initialised barriers visible to the TMA engine; other threads of the CTA also need a __syncthreads.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Makes generic shared-memory writes visible to wgmma and the TMA engine.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

enum class NamedBarrier : int {
    gemm_turn = 1,
    norm_published = 4,
    walkers_meet = 7,
    matrices = 8,  // and 9 to 11: one per maker of the delta rule
    columns = 12,  // and 13: one per walker of GLA. 12: of the keys in the walks that make dq, dk and dv
};

template <int kThreads> __device__ inline void named_sync(NamedBarrier barrier, int index = 0) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(static_cast<int>(barrier) + index), "n"(kThreads) : "memory");
}

template <int kThreads> __device__ inline void named_arrive(NamedBarrier barrier, int index = 0) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(static_cast<int>(barrier) + index), "n"(kThreads) : "memory");
}

}  // namespace tfla_tk
