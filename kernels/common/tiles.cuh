// Register-tile operations that ThunderKittens lacks: pins, transposed and scaled A operands, partial-K
// accumulation, conversion into shared panels, state tiles in global memory.
//
// Element map of a row-layout 16 x 16 register subtile (one warp): data[k] holds row lane/4 + 8 (k % 2),
// columns 2 (lane % 4) + 8 (k / 2) + {0, 1}.
#pragma once

#include "common/tma.cuh"
#include "common/warp.cuh"
#include "kittens.cuh"

namespace tfla_tk {

// Forces every register of a tile to hold its value at this point of the program (no instruction).
// NOTES: keeps initialisers out of open wgmma stages (C7515), and keeps the A registers of a wgmma in flight
// from being reused before its wait.
template <kittens::ducks::rt::all Tile> __device__ inline void pin(Tile& tile) {
#pragma unroll
    for (int i = 0; i < Tile::height; i++)
#pragma unroll
        for (int j = 0; j < Tile::width; j++)
#pragma unroll
            for (int k = 0; k < Tile::packed_per_tile; k++) {
                auto& data = tile.tiles[i][j].data[k];
                if constexpr (std::is_same_v<typename Tile::T, float>)
                    asm volatile("" : "+f"(data.x), "+f"(data.y)::"memory");
                else
                    asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(data))::"memory");
            }
}

// The same for an accumulator of pairs.
template <int kPairs> __device__ inline void pin(float2 (&pairs)[kPairs]) {
#pragma unroll
    for (auto& pair : pairs) asm volatile("" : "+f"(pair.x), "+f"(pair.y)::"memory");
}

// The same for a pointer.
template <class X> __device__ inline void pin(X*& pointer) { asm volatile("" : "+l"(pointer)::"memory"); }

// Marks a tile's values as dead (no instruction), before a GEMM that overwrites them.
// NOTES: a wgmma's accumulators are read-write operands, so the old values would otherwise stay live up to
// it.
template <kittens::ducks::rt::all Tile> __device__ inline void forget(Tile& tile) {
#pragma unroll
    for (int j = 0; j < Tile::width; j++)
#pragma unroll
        for (int k = 0; k < Tile::packed_per_tile; k++) {
            auto& data = tile.tiles[0][j].data[k];
            asm volatile("" : "=f"(data.x), "=f"(data.y));
        }
}

template <class T2> __device__ inline float2 to_float2(T2 x) {
    if constexpr (std::is_same_v<T2, kittens::bf16_2>) {  // its halves are the upper halves of two floats
        const auto bits = reinterpret_cast<const uint32_t&>(x);
        return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000)};
    }
    return kittens::base_types::convertor<float2, T2>::convert(x);
}
// Dot product of eight numbers in 16 bytes each.
template <class T2> __device__ inline float dot(const uint4& x, const uint4& y) {
    const T2 *a = reinterpret_cast<const T2*>(&x), *b = reinterpret_cast<const T2*>(&y);
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 u = to_float2(a[n]), v = to_float2(b[n]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

template <class T2> __device__ inline T2 from_float2(float2 x) {
    return kittens::base_types::convertor<T2, float2>::convert(x);
}

// Two numbers, each as the sum of a high and a low part of T2's element type.
template <class T2> struct HighAndLow {
    T2 high, low;

    __device__ inline explicit HighAndLow(float2 x) : high(from_float2<T2>(x)) {
        const float2 rounded = to_float2(high);
        low = from_float2<T2>({x.x - rounded.x, x.y - rounded.y});
    }
};

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The value of the first lane of every four.
__device__ inline float of_first_lane(float x) { return __shfl_sync(0xffffffff, x, 0, 4); }

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Byte offset of (row, 16-byte unit) in a 64-column panel under the 128-byte swizzle.
__device__ inline uint32_t panel_offset(uint32_t row, uint32_t unit) {
    return row * (kPanelColumns * 2) + ((unit ^ (row % 8)) * 16);
}

// The row, of 16, whose address a lane passes to a transposed ldmatrix or stmatrix.
template <class Lane> __device__ inline Lane transposed_row(Lane lane) { return lane % 8 + lane / 16 * 8; }

// This lane's address for them, relative to the panel, for columns [16 warp, 16 warp + 16).
__device__ inline uint32_t transposed_lane_offset(int warp) {
    const uint32_t lane = kittens::laneid();
    return panel_offset(transposed_row(lane), 2 * warp + (lane / 8) % 2);
}

// A = X^T for 16 A::width rows of a panel of X and this warp's 16 columns. `address` is the panel plus
// transposed_lane_offset.
template <class A> __device__ inline void load_transposed(A& a, uint32_t address) {
#pragma unroll
    for (int j = 0; j < A::width; j++) {
        auto& x = a.tiles[0][j].data;
        kittens::move<typename A::dtype>::ldsm4t(x[0], x[1], x[2], x[3],
                                                 address + 16 * j * kPanelColumns * 2);
    }
}

// The first or second half of an fp32 tile's columns, in place.
template <int kHalf, int kColumns> __device__ inline auto& half_of(kittens::rt_fl<16, kColumns>& tile) {
    using Half = kittens::rt_fl<16, kColumns / 2>;
    return reinterpret_cast<Half&>(tile.tiles[0][kHalf * Half::width]);
}

// Column c of a tile times scale[c].
template <class Tile> __device__ inline void scale_columns(Tile& tile, const float* scale) {
    using T2 = typename Tile::dtype;
    scale += 2 * (fresh_laneid() % 4);
#pragma unroll
    for (int j = 0; j < Tile::width; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 s = *reinterpret_cast<const float2*>(&scale[16 * j + 8 * half]);
#pragma unroll
            for (int k = 2 * half; k < 2 * half + 2; k++) {
                T2& data = tile.tiles[0][j].data[k];
                const float2 x = to_float2(data);
                data = from_float2<T2>({x.x * s.x, x.y * s.y});
            }
        }
}

// sums += this lane's part of the dot products of rows lane / 4 and + 8 of a 16 x 16 operand with `weights`.
template <class A> __device__ inline void add_row_dots(float2& sums, const A& a, const float* weights) {
    weights += 2 * (fresh_laneid() % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 w = *reinterpret_cast<const float2*>(&weights[8 * half]);
        const float2 upper = to_float2(a.tiles[0][0].data[2 * half]);
        const float2 lower = to_float2(a.tiles[0][0].data[2 * half + 1]);
        sums = {sums.x + w.x * upper.x + w.y * upper.y, sums.y + w.x * lower.x + w.y * lower.y};
    }
}

// Rounds 16 columns of an fp32 tile to an A fragment of a wgmma.
template <class A, class Tile>
__device__ inline void convert_fragment(A& a, const Tile& tile, int column_tile) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        a.tiles[0][0].data[k] = from_float2<typename A::dtype>(tile.tiles[0][column_tile].data[k]);
}

// A = (K_slice . key_scale)^T for 16 A::width tokens from `first_token` and 16 rows of K^T. `address` is the
// panel plus transposed_lane_offset. Adds this lane's part of the row sums, before rounding, to `sums`.
template <class A>
__device__ inline void load_scaled_transposed(A& a, float2& sums, uint32_t address, const float* key_scale,
                                              int first_token) {
    using T2 = typename A::dtype;
#pragma unroll
    for (int j = 0; j < A::width; j++) {
        auto& x = a.tiles[0][j].data;
        const int token = first_token + 16 * j;
        kittens::move<T2>::ldsm4t(x[0], x[1], x[2], x[3], address + token * kPanelColumns * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 s =
                *reinterpret_cast<const float2*>(&key_scale[token + 8 * half + 2 * (kittens::laneid() % 4)]);
            const float2 upper = to_float2(x[2 * half]), lower = to_float2(x[2 * half + 1]);
            const float2 u{upper.x * s.x, upper.y * s.y}, l{lower.x * s.x, lower.y * s.y};
            sums.x += u.x + u.y;
            sums.y += l.x + l.y;
            x[2 * half] = from_float2<T2>(u);
            x[2 * half + 1] = from_float2<T2>(l);
        }
    }
}

// D_n += A B_n[first_row : first_row + 16 A::width] for the column tiles D_n of D and B = [rows, kTiles
// D::cols] in shared memory; one committed wgmma group.
template <class D, int kTiles, class A, class B>
__device__ inline void mma_partial_AB(D (&d)[kTiles], A& a, B& b, int first_row) {
    using wgmma = kittens::detail::wgmma::base<float, typename A::T, D::cols, 0, 1>;
    // everything written before the fence: accumulators and A
    pin(a);
#pragma unroll
    for (int n = 0; n < kTiles; n++) pin(d[n]);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
        auto& columns = b.template subtile<D::cols>(n);
        kittens::st_descriptor<std::remove_reference_t<decltype(columns)>, 1> rows(columns);
#pragma unroll
        for (int k = 0; k < A::width; k++)
            wgmma::rt_st(d[n], a.tiles[0][k], rows.chunk_descriptor(first_row / 16 + k), 1);
    }
    kittens::warpgroup::mma_commit_group();
}

// Writes a fragment of 16 x 16 at row `first_row` and the fragment-th 16 columns of a [kRows, *] panel tile
// at `base`, by one warp.
template <class T, int kRows, class T2>
__device__ inline void store_fragment(uint32_t base, int first_row, int fragment, T2 (&x)[4]) {
    constexpr uint32_t kPanelBytes = kRows * kPanelColumns * sizeof(T);
    const uint32_t lane = kittens::laneid();
    const uint32_t address = base + panel_offset(first_row + lane % 16, lane / 16);
    kittens::move<T2>::stsm4((address ^ ((fragment % 4) * 32)) + (fragment / 4) * kPanelBytes, x[0], x[1],
                             x[2], x[3]);
}

// Writes this warp's 16 rows of a tile, converted to T, at row `first_row` and the first-th 16 columns of a
// [kRows, *] panel tile at `base`.
template <class T, int kRows, class Tile>
__device__ inline void store_panels(uint32_t base, int first_row, const Tile& tile, int first = 0) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
#pragma unroll
    for (int j = 0; j < Tile::width; j++) {
        T2 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = from_float2<T2>(tile.tiles[0][j].data[k]);
        store_fragment<T, kRows>(base, first_row, first + j, x);
    }
}

// Zeros units of 16 bytes, by one warp, one lane of which arrives for all afterwards.
// NOTES: the lane reread, one unit at a time: what else is kept for it stays live in loops that load tiles,
// whose warps have few registers.
__device__ inline void zero_units(uint4* units, int count) {
    constexpr int kLanes = kArrivalsPerWarp == 1 ? 32 : 1;  // racecheck's build: by the arriving lane alone
    const int lane = fresh_laneid();
    if (lane >= kLanes) return;
#pragma unroll 1
    for (int unit = lane; unit < count; unit += kLanes) units[unit] = {0, 0, 0, 0};
}

// Zeros the rows of a tile from `first_row` on, by one warp.
template <class Tile> __device__ inline void zero_rows(Tile& tile, int first_row) {
    constexpr int kUnits =
        kPanelColumns * sizeof(typename Tile::dtype) / 16;  // of 16 bytes per row of a panel
    const int count = (Tile::rows - first_row) * kUnits;
    for (int panel = 0; panel < Tile::cols / kPanelColumns; panel++) {
        auto* rows = reinterpret_cast<uint4*>(&tile.data[(panel * Tile::rows + first_row) * kPanelColumns]);
        zero_units(rows, count);
    }
}

// Writes the transpose of a tile, of change(its pairs) converted to T, into a panel: this warp's 16 rows
// become its columns. `address` is the panel plus transposed_lane_offset.
template <class T, class Tile, class Change>
__device__ inline void store_transposed(uint32_t address, const Tile& tile, Change change) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
#pragma unroll
    for (int j = 0; j < Tile::width; j++) {
        T2 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = from_float2<T2>(change(tile.tiles[0][j].data[k]));
        kittens::move<T2>::stsm4t(address + 16 * j * kPanelColumns * 2, x[0], x[1], x[2], x[3]);
    }
}
template <class T, class Tile> __device__ inline void store_transposed(uint32_t address, const Tile& tile) {
    store_transposed<T>(address, tile, [](float2 x) { return x; });
}

// The same of 16 columns each that are of type T already.
template <class Fragment, int kCount>
__device__ inline void store_transposed(uint32_t address, const Fragment (&fragments)[kCount]) {
    using T2 = typename Fragment::dtype;
#pragma unroll
    for (int j = 0; j < kCount; j++) {
        T2 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = fragments[j].tiles[0][0].data[k];
        kittens::move<T2>::stsm4t(address + 16 * j * kPanelColumns * 2, x[0], x[1], x[2], x[3]);
    }
}

// Zeros the rows [first_row, kRows) of a tile, by one warp.
template <class T, int kRows, int kColumns, int kMoreRows>
__device__ inline void zero_rows(PanelTile<T, kRows, kColumns, kMoreRows>& tile, int first_row) {
    constexpr int kUnits = kPanelColumns * sizeof(T) / 16;  // of 16 bytes per row of a panel
    const int count = (kRows - first_row) * kUnits;
    for (auto& panel : tile.data) {
        auto* rows = reinterpret_cast<uint4*>(panel[first_row]);
        zero_units(rows, count);
    }
}

// Writes one, two or four registers of pairs to shared memory, aligned to their size.
template <class T2, int kPairs> __device__ inline void store_shared(uint32_t address, const T2 (&x)[kPairs]) {
    static_assert(kPairs == 1 || kPairs == 2 || kPairs == 4);
    const auto* bits = reinterpret_cast<const uint32_t*>(x);
    if constexpr (kPairs == 1)
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(bits[0]) : "memory");
    else if constexpr (kPairs == 4)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(bits[0]), "r"(bits[1]),
                     "r"(bits[2]), "r"(bits[3])
                     : "memory");
    else
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(address), "r"(bits[0]), "r"(bits[1])
                     : "memory");
}

// Reads what store_shared has written of four registers. NOTES: volatile: several calls before what uses them
// stay there, where ptxas would wait for one after the other.
template <class T2> __device__ inline void load_shared(T2 (&x)[4], uint32_t address) {
    auto* bits = reinterpret_cast<uint32_t*>(x);
    asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"(address));
}

// Visits this thread's column pairs of a tile: body(pair, row, column) for an fp32 tile whose rows start at
// `row0`.
template <class Tile, class Body>
__device__ inline void for_each_pair(Tile& tile, int row0, int column0, Body body) {
    const int lane = kittens::laneid();
#pragma unroll
    for (int j = 0; j < Tile::width; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            body(tile.tiles[0][j].data[k], row0 + lane / 4 + 8 * (k % 2),
                 column0 + 16 * j + 8 * (k / 2) + 2 * (lane % 4));
}

// The state that a walk begins with: by load(tile), zero where none is given.
template <class Tile, class Load>
__device__ inline void begin_state(Tile& tile, const float* given, Load load) {
    if (given)
        load(tile);
    else
        kittens::warp::zero(tile);
    pin(tile);
}

// State tile from a [rows, columns] fp32 matrix in global memory, its rows `stride` apart; zeros outside it.
template <class Tile>
__device__ inline void load_state(Tile& tile, const float* matrix, int row0, int column0, int rows,
                                  int columns, int stride) {
    for_each_pair(tile, row0, column0, [&](float2& x, int r, int c) {
        const bool inside = r < rows && c < columns;
        x = inside ? *reinterpret_cast<const float2*>(&matrix[static_cast<int64_t>(r) * stride + c])
                   : float2{0.f, 0.f};
    });
}

template <class Tile>
__device__ inline void store_state(float* matrix, Tile& tile, int row0, int column0, int rows, int columns,
                                   int stride) {
    for_each_pair(tile, row0, column0, [&](float2& x, int r, int c) {
        if (r < rows && c < columns)
            *reinterpret_cast<float2*>(&matrix[static_cast<int64_t>(r) * stride + c]) = x;
    });
}

// The transpose of such a matrix: tile rows are matrix columns.
template <class Tile>
__device__ inline void load_state_transposed(Tile& tile, const float* matrix, int row0, int column0, int rows,
                                             int columns, int stride) {
    for_each_pair(tile, column0, row0, [&](float2& x, int c, int r) {
        auto at = [&](int r) {
            return r < rows && c < columns ? matrix[static_cast<int64_t>(r) * stride + c] : 0.f;
        };
        x = {at(r), at(r + 1)};
    });
}

template <class Tile>
__device__ inline void store_state_transposed(float* matrix, Tile& tile, int row0, int column0, int rows,
                                              int columns, int stride) {
    for_each_pair(tile, column0, row0, [&](float2& x, int c, int r) {
        if (r < rows && c < columns) matrix[static_cast<int64_t>(r) * stride + c] = x.x;
        if (r + 1 < rows && c < columns) matrix[static_cast<int64_t>(r + 1) * stride + c] = x.y;
    });
}

}  // namespace tfla_tk
