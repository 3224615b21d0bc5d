// A CTA on a CPU: every thread is a fibre that runs until it waits for its warp or its CTA. Warps rest at random, so that
// others run ahead to the next barrier. It finds wrong arithmetic, wrong indices, shuffles that diverge, and accesses
// past the end of a state under AddressSanitizer; not races within a warp.
#pragma once

#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __shared__
#define __shared__ static

inline uint3 threadIdx, blockIdx;

namespace emulator {

constexpr int kMostThreads = 512;

struct Meeting {
    int count = 0, generation = 0;
};
struct Fibre {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it waits: to go on there takes no system call
    bool begun = false;
    std::vector<char> stack = std::vector<char>(256 << 10);
    bool done = false;
    int exchanges = 0;
};
inline std::vector<Fibre> fibres(kMostThreads);
inline int current, threads;
inline std::int64_t waits;
inline jmp_buf place_of_scheduler;
inline Meeting of_warp[kMostThreads / 32], of_block;
inline double exchanged[2][kMostThreads];
inline std::function<void()> body;
inline std::mt19937 random_bits(1);

inline void wait_for_others() {
    if (++waits > 500'000'000) {
        std::fprintf(stderr, "threads wait for ever\n");
        std::abort();
    }
    if (_setjmp(fibres[current].place) == 0) _longjmp(place_of_scheduler, 1);
}
inline void meet(Meeting& x, int all) {
    const int generation = x.generation;
    if (++x.count == all) {
        x.count = 0, x.generation++;
        return;
    }
    while (x.generation == generation) wait_for_others();
}
inline void run_fibre() {
    body();
    fibres[current].done = true;
    _longjmp(place_of_scheduler, 1);
}
inline void go_on() {
    Fibre& fibre = fibres[current];
    if (_setjmp(place_of_scheduler) != 0) return;
    if (fibre.begun) _longjmp(fibre.place, 1);
    fibre.begun = true;
    setcontext(&fibre.context);
}
inline void run_cta() {
    waits = 0;
    for (int n = 0; n < threads; n++) {
        Fibre& fibre = fibres[n];
        fibre.begun = fibre.done = false, fibre.exchanges = 0;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        makecontext(&fibre.context, run_fibre, 0);
    }
    for (int left = threads; left > 0;) {
        left = 0;
        const unsigned resting = random_bits();  // a bit per warp
        for (current = 0; current < threads; current++) {
            if (fibres[current].done) continue;
            left++;
            if (resting >> current / 32 & 1) continue;
            threadIdx = {static_cast<unsigned>(current), 0, 0};
            go_on();
            left -= fibres[current].done;
        }
    }
}
// Every CTA of a launch, one after the other, the last ones first.
template <class Body> void run(Body of_thread, dim3 grid, int count) {
    body = of_thread, threads = count;
    for (unsigned z = grid.z; z-- > 0;)
        for (unsigned y = grid.y; y-- > 0;)
            for (unsigned x = grid.x; x-- > 0;) {
                blockIdx = {x, y, z};
                run_cta();
            }
}

template <class X> X exchange(X x, int from) {
    const int thread = current, set = fibres[thread].exchanges++ % 2;
    exchanged[set][thread] = x;
    meet(of_warp[thread / 32], 32);
    return static_cast<X>(exchanged[set][thread / 32 * 32 + from % 32]);
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::of_block, emulator::threads); }
inline void __syncwarp() { emulator::meet(emulator::of_warp[emulator::current / 32], 32); }
template <class X> X __shfl_xor_sync(unsigned, X x, int step) {
    return emulator::exchange(x, emulator::current % 32 ^ step);
}
template <class X> X __shfl_up_sync(unsigned, X x, int step) {
    const int lane = emulator::current % 32;
    return emulator::exchange(x, lane < step ? lane : lane - step);
}
template <class X> X __shfl_sync(unsigned, X x, int lane) { return emulator::exchange(x, lane); }
inline unsigned __reduce_max_sync(unsigned, int) { std::abort(); }  // of what decoding does not use

template <class T> T __ldcg(const T* x) { return *x; }
template <class T> void __stcg(T* x, T value) { *x = value; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_ru(float a, float b) {
    const float sum = a + b;
    return sum < static_cast<double>(a) + b ? std::nextafter(sum, INFINITY) : sum;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(unsigned x) {
    float y;
    return std::memcpy(&y, &x, 4), y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    return std::memcpy(&y, &x, 4), y;
}
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
