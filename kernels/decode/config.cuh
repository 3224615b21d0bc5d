// Which part of a state a thread has, by layout and K.
#pragma once

#include "decode/params.h"

namespace tfla_tk::decode {

enum class Layout { v_first, k_first };
enum class Decay { scalar, channel };  // a number per head, or one per key channel
enum class Write { plain, delta };

template <Layout kLayout, int K, int kTokens, int kChains = 1> struct Part;

// A warp owns rows of the state, each of K numbers. kLanes lanes hold a row, kWords words of four each; a
// thread has a part of kRows rows of a pass.
template <int K, int kTokens> struct Part<Layout::v_first, K, kTokens, 1> {
    static_assert(K == 64 || K == 96 || K == 128 || K == 256);
    static constexpr int kLanes = K == 64 ? 16 : K == 96 ? 8 : 32;
    static constexpr int kWords = K / (4 * kLanes);
    static constexpr int kRows = K == 96 ? 2 : K == 256 ? 4 : 8;
    static constexpr int kSide = 32 / kLanes;         // rows side by side in a warp
    static constexpr int kWarpSlice = kRows * kSide;  // columns of V, which are rows of the state

    // Warps need nothing of each other, so that with one token each is a CTA.
    static constexpr int kThreads = kTokens == 1 ? 32 : 128;
    static constexpr int kSlice = kWarpSlice * (kThreads / 32);  // columns of V of a pass

    // Of a key in shared memory.
    __host__ __device__ static constexpr int place(int key) { return key; }
};

// A CTA owns a slice of columns with all K rows: a thread has kRows rows and four columns of a pass, kLanes
// lanes are side by side. It adds up kChains_ chains of eight rows each, as that many threads would: so the
// order of the sums does not depend on it.
template <int K, int kTokens, int kChains_> struct Part<Layout::k_first, K, kTokens, kChains_> {
    static constexpr int kLanes = 8;  // 128 bytes of a row of an fp32 state
    static constexpr int kChains = kChains_;
    static constexpr int kRows = 8 * kChains;
    static constexpr int kStep = K / kRows;  // between two rows of a thread
    static constexpr int kThreads = K * kLanes / kRows, kSlice = 4 * kLanes;

    // The keys of a thread are neighbours.
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
    static constexpr bool kFloats = sizeof(State) == 4, kDelta = kWrite == Write::delta;
    static constexpr bool kByChannel = kDecay == Decay::channel;
    // Two chains have more bytes in flight. They need whole warps, and gain nothing with a scalar decay and a
    // plain write.
    static constexpr bool kTwoChains =
        kLayout == Layout::k_first && kTokens == 1 && K % 64 == 0 && (kByChannel || kDelta);
    using Part = decode::Part<kLayout, K, kTokens, kTwoChains ? 2 : 1>;
    static constexpr int kThreads = Part::kThreads, kSlice = Part::kSlice;

    // With several tokens a CTA takes several slices, one after the other, and the next one comes into shared
    // memory during the tokens of this one. NOTES: with a decay per channel that is 10 % slower.
    static constexpr bool kStaged = kTokens > 1 && !kByChannel;
    static constexpr int kMostPasses = kTokens == 1 ? 1 : kStaged ? 3 : 4;

    // Warps per multiprocessor, as many as do not spill: 24 have 80 registers per thread, 20 have 96, 16 have
    // 128, 12 have 168.
    static constexpr bool kMany = kFloats && (!kDelta || (!kByChannel && K < 256));
    static constexpr int warps_of_one() {
        if (kTwoChains) return kDelta && !kFloats ? 12 : 16;
        if (kMany || (kLayout == Layout::k_first && K == 96)) return 24;
        return K == 96 ? 16 : 20;
    }
    static constexpr int kWarps = kTokens == 1 ? warps_of_one() : kStaged && kMany ? 20 : 16;
    static constexpr int kCtas = kWarps * 32 / kThreads;
};

}  // namespace tfla_tk::decode
