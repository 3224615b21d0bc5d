// CTAs on a CPU: every thread is a fibre. Loads and stores of the TMA engine end at random times.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_functions.h>
#include <algorithm>
#include <array>
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
#undef __forceinline__
#define __forceinline__ inline
#undef __align__
#define __align__(n)

inline uint3 threadIdx, blockIdx;
[[noreturn]] inline void fail(const char* what) { std::fprintf(stderr, "emulator: %s (block %u thread %u)\n", what, blockIdx.x, threadIdx.x); std::abort(); }
#define CHECKED(x) do { if (!(x)) fail(#x); } while (0)

namespace emulator {
constexpr int kMostThreads = 512, kArena = 232448 + 1024, kBase = 1024;
struct Meeting { int count = 0, generation = 0; };
struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(512 << 10);
    bool done = false;
    const int* watched = nullptr; int seen = 0;
    std::vector<std::function<void()>> stores;
};
inline std::vector<Fibre> fibres(kMostThreads);
inline int current, threads;
inline std::int64_t idle;
inline ucontext_t scheduler;
inline Meeting of_warp[kMostThreads / 32], of_block;
inline std::function<void()> body;
inline std::mt19937 random_bits(1);
inline std::vector<std::function<void()>> transfers;
alignas(1024) inline unsigned char memory[kArena];
inline unsigned char* arena() { return memory; }
inline int shared_bytes;

inline uint32_t to_shared(const void* p) {
    const auto at = static_cast<const unsigned char*>(p) - memory;
    CHECKED(at >= 0 && at <= shared_bytes);
    return static_cast<uint32_t>(at) + kBase;
}
inline unsigned char* from_shared(uint32_t a, int bytes) {
    CHECKED(a >= kBase && static_cast<int>(a - kBase) + bytes <= shared_bytes);
    CHECKED(a % std::min(bytes, 16) == 0);
    return memory + (a - kBase);
}
inline void yield() { swapcontext(&fibres[current].context, &scheduler); }
inline void meet(Meeting& x, int all, const std::function<void()>& by_last = {}) {
    const int generation = x.generation;
    if (++x.count == all) { if (by_last) by_last(); x.count = 0, x.generation++; return; }
    fibres[current].watched = &x.generation, fibres[current].seen = generation;
    while (x.generation == generation) yield();
    fibres[current].watched = nullptr;
}
inline Meeting& warp_meeting() { return of_warp[current / 32]; }
inline void run_fibre() { body(); for (auto& s : fibres[current].stores) s(); fibres[current].stores.clear(); fibres[current].done = true; swapcontext(&fibres[current].context, &scheduler); }
inline void run_cta() {
    std::memset(memory, 0xff, sizeof(memory));
    transfers.clear();
    of_block = {}; for (auto& m : of_warp) m = {};
    for (int n = 0; n < threads; n++) {
        Fibre& f = fibres[n];
        f.done = false, f.watched = nullptr, f.stores.clear();
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
        makecontext(&f.context, run_fibre, 0);
    }
    idle = 0;
    for (int left = threads; left > 0;) {
        left = 0;
        const unsigned resting = random_bits();
        for (int n = 0; n < threads; n++) {
            Fibre& f = fibres[n];
            if (f.done) continue;
            left++;
            if (resting >> n / 32 & 1 && resting % 3) continue;
            if (f.watched && *f.watched == f.seen) continue;
            current = n, threadIdx = {static_cast<unsigned>(n), 0, 0};
            swapcontext(&scheduler, &f.context);
            left -= f.done;
        }
        if (!transfers.empty() && random_bits() % 4 == 0) {
            const int n = random_bits() % transfers.size();
            transfers[n](); transfers.erase(transfers.begin() + n);
        }
        if (++idle > 3'000'000) fail("threads wait for ever");
    }
    CHECKED(transfers.empty());
}
template <class Body> void run(Body of_thread, dim3 grid, int count, int bytes) {
    body = of_thread, threads = count, shared_bytes = bytes;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) blockIdx = {x, y, 0}, run_cta();
}

// ---- values of a warp
template <class X> X exchange(X x, int from) {
    static X values[kMostThreads / 32][32]; static X results[kMostThreads / 32][32]; static int sources[kMostThreads / 32][32];
    const int w = current / 32, l = current % 32;
    values[w][l] = x, sources[w][l] = from;
    meet(warp_meeting(), 32, [w] { for (int i = 0; i < 32; i++) results[w][i] = values[w][sources[w][i] & 31]; });
    return results[w][l];
}

// ---- asm
struct Operand { char kind; bool is_out; void* place; std::uint64_t value; 
    template <class X> X get() const { X x; if (place) std::memcpy(&x, place, sizeof x); else std::memcpy(&x, &value, sizeof x); return x; }
    template <class X> void set(X x) const { std::memcpy(place, &x, sizeof x); } };
template <class X> Operand output(const char* c, X& x) { return {c[1], true, &x, 0}; }
template <class X> Operand input(const char* c, X x) {
    Operand o{c[0], false, nullptr, 0};
    if constexpr (std::is_integral_v<X> || std::is_enum_v<X>) o.value = static_cast<std::uint64_t>(x); else std::memcpy(&o.value, &x, sizeof x);
    return o;
}
using Operands = std::initializer_list<Operand>;
// forget(): what it leaves is NaN
inline void run_empty(const char*, Operands ops) { for (auto& o : ops) (void)o; }
inline float tf32(float x) { uint32_t b; std::memcpy(&b, &x, 4); b &= ~0x1fffu; std::memcpy(&x, &b, 4); return x; }

struct alignas(8) Semaphore { uint16_t count, pending; int32_t tx : 31; uint32_t phase : 1; };
static_assert(sizeof(Semaphore) == 8);
inline void settle(Semaphore& s) { if (s.pending == 0 && s.tx == 0) s.phase ^= 1, s.pending = s.count; }
inline void wait_parity(Semaphore& s, uint32_t parity) { while (s.phase == parity) yield(); }
inline void complete(Semaphore& s, int bytes) { s.tx -= bytes; settle(s); }

// A tensor map, as encoded.
struct Map { char* data; int bytes; std::int64_t sizes[4], strides[3]; int rows, columns; bool swizzled; };
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
inline void box(const CUtensorMap* of, uint32_t at, const int (&c)[4], bool load) {
    Map m; std::memcpy(&m, of, sizeof m);
    for (int r = 0; r < m.rows; r++)
        for (int i = 0; i < m.columns; i++) {
            uint32_t offset = (r * m.columns + i) * m.bytes;
            uint32_t a = at + offset; if (m.swizzled) a ^= ((a - kBase) >> 7 & 7) << 4;
            unsigned char* s = from_shared(a, m.bytes);
            const std::int64_t x = c[0] + i, y = c[1] + r;
            const bool inside = x >= 0 && x < m.sizes[0] && y >= 0 && y < m.sizes[1] && c[2] >= 0 && c[2] < m.sizes[2] && c[3] >= 0 && c[3] < m.sizes[3];
            char* g = m.data + x * m.bytes + y * m.strides[0] + c[2] * m.strides[1] + c[3] * m.strides[2];
            if (load) { if (inside) std::memcpy(s, g, m.bytes); else std::memset(s, 0, m.bytes); }
            else if (inside) std::memcpy(g, s, m.bytes);
        }
}

enum Op { kUnknown, kNothing, kLoadBytes, kStoreBox, kLoadBox, kFlush, kCvtTf32, kFma, kMul, kLoadShared, kStoreShared, kLane, kThread, kShfl, kLdg, kWait, kMmaTf32, kElect, kMinNaN };
inline Op find(const char* t) {
    auto has = [&](const char* x) { return std::strstr(t, x) != nullptr; };
    auto begins = [&](const char* x) { return std::strncmp(t, x, std::strlen(x)) == 0; };
    if (begins("cp.async.bulk.shared::cluster.global")) return kLoadBytes;
    if (begins("cp.async.bulk.tensor.4d.global")) return kStoreBox;
    if (begins("cp.async.bulk.tensor.4d.shared")) return kLoadBox;
    if (begins("cp.async.bulk.wait_group")) return kFlush;
    if (begins("cp.async.bulk.commit") || begins("fence") || begins("prefetch") || begins("wgmma.fence")) return kNothing;
    if (begins("cvt.rna")) return kCvtTf32;
    if (begins("fma.rn.ftz")) return kFma;
    if (begins("mul.ftz")) return kMul;
    if (begins("min.NaN")) return kMinNaN;
    if (begins("ld.shared") || begins("ld.volatile.shared")) return kLoadShared;
    if (begins("st.shared")) return kStoreShared;
    if (has("%%laneid")) return kLane;
    if (has("%%tid.x")) return kThread;
    if (begins("shfl.sync.idx")) return kShfl;
    if (has("@p ld.global.nc")) return kLdg;
    if (has("try_wait.parity")) return kWait;
    if (begins("mma.sync.aligned.m16n8k8.row.col.f32.tf32")) return kMmaTf32;
    return kUnknown;
}
struct MmaLane { const Operand* o; };
inline MmaLane mma_lanes[kMostThreads / 32][32];
inline void mma_tf32_of_warp(int w) {
    float A[16][8], B[8][8], D[16][8];
    for (int l = 0; l < 32; l++) {
        const Operand* o = mma_lanes[w][l].o; const int g = l / 4, c = l % 4;
        for (int i = 0; i < 4; i++) A[g + i % 2 * 8][c + i / 2 * 4] = tf32(o[4 + i].get<float>());
        for (int i = 0; i < 2; i++) B[c + 4 * i][g] = tf32(o[8 + i].get<float>());
        for (int i = 0; i < 4; i++) D[g + i / 2 * 8][2 * c + i % 2] = o[i].get<float>();
    }
    for (int i = 0; i < 16; i++) for (int j = 0; j < 8; j++) { double s = D[i][j]; for (int k = 0; k < 8; k++) s += static_cast<double>(A[i][k]) * B[k][j]; D[i][j] = static_cast<float>(s); }
    for (int l = 0; l < 32; l++) { const Operand* o = mma_lanes[w][l].o; const int g = l / 4, c = l % 4; for (int i = 0; i < 4; i++) o[i].set(D[g + i / 2 * 8][2 * c + i % 2]); }
}
inline void run_op(Op op, const char* text, Operands ops) {
    const Operand* o = ops.begin();
    auto i32 = [&](int n) { return o[n].get<int>(); };
    auto u32 = [&](int n) { return o[n].get<uint32_t>(); };
    auto address = [&](int n) { return o[n].get<std::uint64_t>(); };
    switch (op) {
        case kNothing: return;
        case kLoadBytes: {
            const uint32_t to = u32(0), bytes = u32(2); auto* from = reinterpret_cast<const char*>(address(1)); auto* s = reinterpret_cast<Semaphore*>(from_shared(u32(3), 8));
            CHECKED(bytes % 16 == 0 && address(1) % 16 == 0);
            transfers.push_back([=] { for (uint32_t i = 0; i < bytes; i += 16) std::memcpy(from_shared(to + i, 16), from + i, 16); complete(*s, bytes); });
            return;
        }
        case kLoadBox: {
            const uint32_t to = u32(0); auto* map = reinterpret_cast<const CUtensorMap*>(address(1)); auto* s = reinterpret_cast<Semaphore*>(from_shared(u32(2), 8));
            const int c[4] = {i32(3), i32(4), i32(5), i32(6)}; Map m; std::memcpy(&m, map, sizeof m); const int bytes = m.rows * m.columns * m.bytes;
            CHECKED((to - kBase) % 128 == 0);
            std::array<int, 4> cc{c[0], c[1], c[2], c[3]};
            transfers.push_back([=] { const int x[4] = {cc[0], cc[1], cc[2], cc[3]}; box(map, to, x, true); complete(*s, bytes); });
            return;
        }
        case kStoreBox: {
            auto* map = reinterpret_cast<const CUtensorMap*>(address(0)); const uint32_t from = u32(1);
            std::array<int, 4> cc{i32(2), i32(3), i32(4), i32(5)};
            fibres[current].stores.push_back([=] { const int x[4] = {cc[0], cc[1], cc[2], cc[3]}; box(map, from, x, false); });
            return;
        }
        case kFlush: for (auto& s : fibres[current].stores) s(); fibres[current].stores.clear(); return;
        case kCvtTf32: { uint32_t b = o[1].get<uint32_t>(); b = (b + 0x1000) & ~0x1fffu; o[0].set(b); return; }
        case kFma: o[0].set(std::fma(o[0].get<float>(), o[1].get<float>(), o[2].get<float>())); return;
        case kMinNaN: { const float x = o[1].get<float>(), y = o[2].get<float>(); o[0].set(std::isnan(x) || std::isnan(y) ? NAN : std::min(x, y)); return; }
        case kMul: o[0].set(o[0].get<float>() * o[1].get<float>()); return;
        case kLoadShared: { const int n = static_cast<int>(ops.size()) - 1; auto* from = from_shared(u32(n), 4 * n); for (int i = 0; i < n; i++) std::memcpy(o[i].place, from + 4 * i, 4); return; }
        case kStoreShared: { const int n = static_cast<int>(ops.size()) - 1; auto* to = from_shared(u32(0), 4 * n); for (int i = 0; i < n; i++) { const uint32_t x = u32(i + 1); std::memcpy(to + 4 * i, &x, 4); } return; }
        case kLane: o[0].set(current % 32); return;
        case kThread: o[0].set(current); return;
        case kShfl: { CHECKED(i32(2) % 4 == 0); const int source = (i32(2) & 28) | current % 4; o[0].set(exchange(o[1].get<float>(), source)); return; }
        case kLdg: if (i32(2) < i32(3)) { uint32_t x; std::memcpy(&x, reinterpret_cast<const void*>(address(1)), 4); o[0].set(x); } return;
        case kWait: wait_parity(*reinterpret_cast<Semaphore*>(from_shared(u32(0), 8)), u32(1)); return;
        case kMmaTf32: { const int w = current / 32; mma_lanes[w][current % 32] = {o}; meet(warp_meeting(), 32, [w] { mma_tf32_of_warp(w); }); return; }
        default: fail(text);
    }
}
#define run_asm(text, ...) run_op([] { static const emulator::Op op = emulator::find(text); return op; }(), text, __VA_ARGS__)
}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::of_block, emulator::threads); }
inline void __syncwarp() { emulator::meet(emulator::warp_meeting(), 32); }
template <class X> X __shfl_xor_sync(unsigned, X x, int step) { return emulator::exchange(x, emulator::current % 32 ^ step); }
template <class X> X __shfl_sync(unsigned, X x, int lane, int width = 32) { return emulator::exchange(x, emulator::current % 32 / width * width + lane % width); }
template <class X> X __shfl_up_sync(unsigned, X x, int step) { const int l = emulator::current % 32; return emulator::exchange(x, l < step ? l : l - step); }
template <class X> X __shfl_down_sync(unsigned, X x, int step) { const int l = emulator::current % 32; return emulator::exchange(x, l + step > 31 ? l : l + step); }
inline unsigned __ballot_sync(unsigned, bool x) { unsigned all = 0; for (int i = 0; i < 32; i++) all |= static_cast<unsigned>(emulator::exchange(static_cast<int>(x), i)) << i; return all; }
inline bool __all_sync(unsigned m, bool x) { return __ballot_sync(m, x) == 0xffffffffu; }
inline int __reduce_max_sync(unsigned, int x) { fail("reduce"); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __brev(unsigned) { fail("brev"); }
inline void __nanosleep(int) {}
inline void __trap() { fail("trap"); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) { const std::uint64_t both = static_cast<std::uint64_t>(y) << 32 | x; unsigned r = 0; for (int i = 0; i < 4; i++) r |= static_cast<unsigned>(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i; return r; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_ru(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t max(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline uint32_t __cvta_generic_to_shared(const void* p) { return emulator::to_shared(p); }
inline std::uint64_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<std::uint64_t>(p); }
