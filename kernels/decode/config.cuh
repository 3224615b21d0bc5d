// Which part of a state a thread has, by layout and K.
#pragma once

#include "decode/params.h"

namespace tfla_tk::decode {

enum class Layout { v_first, k_first };
enum class Decay { scalar, channel };  // a number per head, or one per key channel
enum class Write { plain, delta };

constexpr int kMostPasses = 4;  // slices of V that a CTA takes, one after the other

template <Layout kLayout, int K> struct Part;

// A warp owns rows of the state, each of K numbers. kLanes lanes hold a row, kWords words of four each; a
// thread has a part of kRows rows of a pass.
template <int K> struct Part<Layout::v_first, K> {
    static_assert(K == 64 || K == 96 || K == 128 || K == 256);
    static constexpr int kLanes = K == 64 ? 16 : K == 96 ? 8 : 32;
    static constexpr int kWords = K / (4 * kLanes);
    static constexpr int kRows = K == 96 ? 2 : K == 256 ? 4 : 8;
    static constexpr int kSide = 32 / kLanes;  // rows side by side in a warp
    static constexpr int kThreads = 128;
    static constexpr int kWarpSlice = kRows * kSide;  // columns of V, which are rows of the state
    static constexpr int kSlice = kWarpSlice * (kThreads / 32);

    // Of a key in shared memory.
    __host__ __device__ static constexpr int place(int key) { return key; }
};

// A CTA owns a slice of columns with all K rows: a thread has eight rows and four columns of a pass, kLanes
// lanes are side by side.
template <int K> struct Part<Layout::k_first, K> {
    static constexpr int kLanes = K == 256 ? 4 : 8;  // 64 or 128 bytes of a row of an fp32 state
    static constexpr int kRows = 8, kSlice = 4 * kLanes;
    static constexpr int kThreads = K * kLanes / kRows;
    static constexpr int kStep = K / kRows;  // between two rows of a thread

    // The eight keys of a thread are neighbours.
    __host__ __device__ static constexpr int place(int key) { return key % kStep * kRows + key / kStep; }
};

template <Layout kLayout_, class State_, Decay kDecay_, Write kWrite_, int K_, int kTokens_> struct Config {
    static constexpr Layout kLayout = kLayout_;
    using State = State_;
    static constexpr Decay kDecay = kDecay_;
    static constexpr Write kWrite = kWrite_;
    static constexpr int K = K_;
    static constexpr int kTokens = kTokens_;  // 1: of every entry, or kDecodeTokens: of a turn
    static_assert(kTokens == 1 || kTokens == kDecodeTokens);
    using Part = decode::Part<kLayout, K>;

    // CTAs per multiprocessor: 20 warps of 96 registers per thread with one token, 16 of 128 with several, so
    // that nothing spills. 64 to 80 kB of an fp32 state are in flight.
    static constexpr int kCtas = (kTokens == 1 ? 20 : 16) * 32 / Part::kThreads;
};

}  // namespace tfla_tk::decode
