// What the kernels take of ThunderKittens, on the CPU.
#pragma once
#include "emulator.h"
#include <concepts>
#include <type_traits>
namespace kittens {
using bf16 = __nv_bfloat16; using half = __half; using bf16_2 = __nv_bfloat162; using half_2 = __half2;
constexpr int MAX_SHARED_MEMORY = 232448;
namespace base_types {
template <class T> struct packing; 
template <> struct packing<bf16> { using packed_type = bf16_2; };
template <> struct packing<half> { using packed_type = half_2; };
template <> struct packing<float> { using packed_type = float2; };
template <class To, class From> struct convertor;
template <class X> struct convertor<X, X> { static X convert(X x) { return x; } };
template <> struct convertor<float2, bf16_2> { static float2 convert(bf16_2 x) { return __bfloat1622float2(x); } };
template <> struct convertor<float2, half_2> { static float2 convert(half_2 x) { return __half22float2(x); } };
template <> struct convertor<bf16_2, float2> { static bf16_2 convert(float2 x) { return __float22bfloat162_rn(x); } };
template <> struct convertor<half_2, float2> { static half_2 convert(float2 x) { return __float22half2_rn(x); } };
}
template <class T2> struct Subtile { T2 data[4]; };
template <class X, int R, int C> struct rt {
    using T = X; using dtype = typename base_types::packing<X>::packed_type;
    static constexpr int rows = R, cols = C, height = R / 16, width = C / 16, packed_per_tile = 4;
    static constexpr bool is_rt = true;
    Subtile<dtype> tiles[R / 16][C / 16];
};
template <int R, int C> using rt_fl = rt<float, R, C>;
namespace ducks::rt { template <class T> concept all = requires { requires T::is_rt; }; }
template <class A, int> struct st_descriptor;
inline int laneid() { return emulator::current % 32; }
using semaphore = emulator::Semaphore;
inline void init_semaphore(semaphore& s, int count, int = 0) { s.count = s.pending = count, s.tx = 0, s.phase = 0; }
inline void arrive(semaphore& s, uint32_t count = 1) { CHECKED(s.pending >= count); s.pending -= count; emulator::settle(s); }
inline void wait(semaphore& s, int phase) { emulator::wait_parity(s, phase); }
namespace tma { inline void expect_bytes(semaphore& s, uint32_t bytes) { s.tx += bytes; CHECKED(s.pending >= 1); s.pending--; emulator::settle(s); } }
template <class T2> struct move {
    struct Lane { T2* x[4]; uint32_t address; };
    static inline Lane lanes[emulator::kMostThreads / 32][32];
    static void all(T2& a, T2& b, T2& c, T2& d, uint32_t address, bool load, bool transposed) {
        const int w = emulator::current / 32; lanes[w][emulator::current % 32] = {{&a, &b, &c, &d}, address};
        emulator::meet(emulator::warp_meeting(), 32, [=] {
            for (int m = 0; m < 4; m++)
                for (int row = 0; row < 8; row++) {
                    unsigned char* from = emulator::from_shared(lanes[w][8 * m + row].address, 16);
                    for (int column = 0; column < 8; column++) {
                        const int lane = transposed ? column * 4 + row / 2 : row * 4 + column / 2, which = transposed ? row % 2 : column % 2;
                        auto* reg = reinterpret_cast<unsigned char*>(lanes[w][lane].x[m]) + 2 * which;
                        load ? std::memcpy(reg, from + 2 * column, 2) : std::memcpy(from + 2 * column, reg, 2);
                    }
                }
        });
    }
    static void ldsm4(T2& a, T2& b, T2& c, T2& d, uint32_t at) { all(a, b, c, d, at, true, false); }
    static void ldsm4t(T2& a, T2& b, T2& c, T2& d, uint32_t at) { all(a, b, c, d, at, true, true); }
    static void stsm4(uint32_t at, T2& a, T2& b, T2& c, T2& d) { all(a, b, c, d, at, false, false); }
    static void stsm4t(uint32_t at, T2& a, T2& b, T2& c, T2& d) { all(a, b, c, d, at, false, true); }
};
namespace warp {
template <class X> void zero(X& x) { for (auto& row : x.tiles) for (auto& t : row) for (auto& p : t.data) p = {}; }
template <class X> void mul(X& x, const X& y, float by) { for (int j = 0; j < X::width; j++) for (int k = 0; k < 4; k++) x.tiles[0][j].data[k] = {y.tiles[0][j].data[k].x * by, y.tiles[0][j].data[k].y * by}; }
}
namespace warp {
struct HmmaLane { float2 *d0, *d1; float2 c0, c1; float a[4][2], b[2][2]; };
inline HmmaLane hmma_lanes[emulator::kMostThreads / 32][32];
template <class T2> void hmma16816(float2& d0, float2& d1, T2 a0, T2 a1, T2 a2, T2 a3, T2 b0, T2 b1, float2 c0, float2 c1) {
    const int w = emulator::current / 32; auto& own = hmma_lanes[w][emulator::current % 32];
    own.d0 = &d0, own.d1 = &d1, own.c0 = c0, own.c1 = c1;
    const T2 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    for (int i = 0; i < 4; i++) { float2 x = base_types::convertor<float2, T2>::convert(a[i]); own.a[i][0] = x.x, own.a[i][1] = x.y; }
    for (int i = 0; i < 2; i++) { float2 x = base_types::convertor<float2, T2>::convert(b[i]); own.b[i][0] = x.x, own.b[i][1] = x.y; }
    emulator::meet(emulator::warp_meeting(), 32, [w] {
        float A[16][16], B[16][8];
        for (int l = 0; l < 32; l++) { auto& x = hmma_lanes[w][l]; const int g = l / 4, c = l % 4;
            for (int i = 0; i < 4; i++) for (int e = 0; e < 2; e++) A[g + i % 2 * 8][2 * c + e + i / 2 * 8] = x.a[i][e];
            for (int i = 0; i < 2; i++) for (int e = 0; e < 2; e++) B[2 * c + e + 8 * i][g] = x.b[i][e]; }
        for (int l = 0; l < 32; l++) { auto& x = hmma_lanes[w][l]; const int g = l / 4, c = l % 4; float r[2][2];
            for (int h = 0; h < 2; h++) for (int e = 0; e < 2; e++) { double s = h ? (e ? x.c1.y : x.c1.x) : (e ? x.c0.y : x.c0.x); for (int k = 0; k < 16; k++) s += double(A[g + 8 * h][k]) * B[k][2 * c + e]; r[h][e] = s; }
            *x.d0 = {r[0][0], r[0][1]}, *x.d1 = {r[1][0], r[1][1]}; }
    });
}
}
namespace warpgroup {
template <int N> void mma_async_wait() {}
inline void mma_commit_group() {}
inline int warpid() { return emulator::current / 32 % 4; }
template <int N> void increase_registers() {}
template <int N> void decrease_registers() {}
}
namespace detail::wgmma {
inline unsigned char* element(uint64_t desc, int transposed, int n, int k) {
    const uint32_t start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4, eight = (desc >> 32 & 0x3fff) << 4;
    CHECKED(eight == 1024);
    uint32_t a = transposed ? start + n / 64 * leading + k / 8 * eight + k % 8 * 128 + n % 64 * 2 : start + n / 8 * eight + n % 8 * 128 + k * 2;
    a ^= ((a - emulator::kBase) >> 7 & 7) << 4;
    return emulator::from_shared(a, 2);
}
template <class, class T, int N, int kA, int kB> struct base {
    struct Lane { void* d; const void* a; };
    static inline Lane lanes[emulator::kMostThreads / 32][32];
    template <class D, class A> static void rt_st(D& d, const A& a, uint64_t b, bool accumulate) {
        using T2 = typename base_types::packing<T>::packed_type;
        const int w = emulator::current / 32; lanes[w][emulator::current % 32] = {&d, &a};
        emulator::meet(emulator::warp_meeting(), 32, [=] {
            static float B[16][256];
            for (int k = 0; k < 16; k++) for (int n = 0; n < N; n++) { T x; std::memcpy(&x, element(b, kB, n, k), 2); B[k][n] = static_cast<float>(x); }
            float X[16][16];
            for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) { const float2 x = base_types::convertor<float2, T2>::convert(static_cast<const Subtile<T2>*>(lanes[w][l].a)->data[i]); const int r = l / 4 + i % 2 * 8, c = i / 2 * 8 + l % 4 * 2; X[r][c] = x.x, X[r][c + 1] = x.y; }
            for (int l = 0; l < 32; l++) { auto& t = *static_cast<D*>(lanes[w][l].d);
                for (int j = 0; j < N / 16; j++) for (int i = 0; i < 4; i++) { const int r = l / 4 + i % 2 * 8, c = 16 * j + i / 2 * 8 + l % 4 * 2; float2& y = t.tiles[0][j].data[i];
                    float s = accumulate ? y.x : 0.f, u = accumulate ? y.y : 0.f;
                    for (int k = 0; k < 16; k++) s += X[r][k] * B[k][c], u += X[r][k] * B[k][c + 1];
                    y = {s, u}; } }
        });
    }
    template <class D> static void st_st(D&, uint64_t, uint64_t, bool) { fail("st_st"); }
};
}
}  // namespace kittens
extern "C" inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t, void* data, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    emulator::Map m{static_cast<char*>(data), type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2};
    for (int i = 0; i < 4; i++) m.sizes[i] = sizes[i];
    for (int i = 0; i < 3; i++) { m.strides[i] = strides[i]; CHECKED(strides[i] % 16 == 0); }
    CHECKED(reinterpret_cast<std::uint64_t>(data) % 16 == 0);
    m.columns = box[0], m.rows = box[1], m.swizzled = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
    std::memset(map, 0, sizeof *map); std::memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
extern "C" inline CUresult cuGetErrorString(CUresult, const char**) { return CUDA_SUCCESS; }
