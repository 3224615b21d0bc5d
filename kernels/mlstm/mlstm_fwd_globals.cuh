// Arguments of the mLSTM forward kernel, and the part of them that a CTA works on.
#pragma once

#include "config.cuh"

namespace tfla_tk::mlstm {

using namespace kittens;

struct Globals {
    TensorMap q, k, v, h;
    Gate i, f;
    const float *c_initial, *n_initial, *m_initial;
    float *c_last, *n_last, *m_last;
    int heads, seq, dim_qk, dim_v, slices;
    float scale, eps;
    double log2_scale;
    bool sigmoid_gate;

    __device__ inline int chunks() const { return (seq + kChunk - 1) / kChunk; }
};

// The (batch, head, V slice) of this CTA; slices of one head are neighbours and share Q and K through L2.
struct Task {
    int batch, head, column;  // column: first of V
    int64_t index;            // batch * heads + head

    // NOTES: the volatile read keeps each role's copy its own; one shared copy is spilled across the roles.
    template <class C> __device__ static inline Task of_block(const Globals& g) {
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        const int pair = block / g.slices;
        return {pair / g.heads, pair % g.heads, block % g.slices * C::kSliceV, pair};
    }
};

}  // namespace tfla_tk::mlstm
