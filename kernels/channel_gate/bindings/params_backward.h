// Arguments of the kernels of the backward. This header compiles without CUDA.
#pragma once

#include "channel_gate/bindings/params.h"
#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// The forward's walk from the last chunk to the first. Its parameters are the forward's, where v is dO, o is
// dV, `initial` the gradient of the last state and `last` that of the first one. With dS the gradient of the
// state that leaves a chunk:
//   dV = (k e^{b_L - b}) dS + P^T dO      dS <- e^{b_L} dS + s (q e^b)^T dO
void gla_mirror(const GlaForwardParams& params, void* stream);

// The two walks over the states, in blocks of 16 tokens. With b the cumulative sum of g in a block, S the
// state that enters it and dS the gradient of the one that leaves it:
//   left, forward in time:    dq_i = s e^{b_i} (S dO_i) + s sum_{j <= i} (dO_i.V_j) k_j e^{b_i - b_j}
//                             S <- e^{b_L} S + (k e^{b_L - b})^T V
//   right, backward in time:  dk_j = e^{b_L - b_j} (dS V_j) + s sum_{i >= j} (dO_i.V_j) q_i e^{b_i - b_j}
//                             dS <- e^{b_L} dS + s (q e^b)^T dO
// and the gradient of the log decay, per channel: the sum of q dq - k dk from a token on, plus the flow of
// gradient <S, dS> over the sequence's end. That sum begins anew at the anchors (scalar_gate's params.h).
struct GlaStatesParams {
    ChannelShape shape;
    Operand q, k, v, dout;
    Operand g;  // as in GlaForwardParams
    DType g_dtype;
    Operand result;          // dq of the left walk, dk of the right one
    Operand inflow;          // q dq in fp32, like g: the left walk writes it, the right one reads it
    Operand dg;              // of g_dtype, by the right walk; may be the inflow
    const float* entering;   // the first state, or the gradient of the last; [N, heads, K, V], null: zero
    const float* d_last;     // left: the gradient of the last state, null: zero
    const float* borders;    // S at the borders between segments, of gla_segments, where sequences are cut
    const float* d_borders;  // right: dS there
    float* flows;            // [N, heads, K]: the left walk writes those over the sequence's end, unless
                             // d_last is null; the right one begins with them, null: zero
    void* anchors;           // of gla_anchor_bytes: what the left walk leaves of S
    float scale;             // s, any finite number
    int tile_v;              // columns of V of the kernel: 64, 128 or 256, at least V
    int walkers;             // of a CTA, for 64 columns of K each: 1 or 2; ignored with a tile of 256, where
                             // two split V
    bool needs_dg;           // else inflow, dg, d_last, flows and anchors are not looked at
    // Results are of sums over V, so that launches one after the other, of a tile of 256 columns, may
    // take a slice of V each: v, dout, the states and anchors are of a slice then. The last one makes the
    // results; of flows, those after the first add theirs.
    bool is_slice;                         // there are others
    int other_dim_v;                       // columns of the others, between two rows of the states
    void* sums;                            // of gla_sums_bytes: what the walk hands from slice to slice
    bool is_first = true, is_last = true;  // slice

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, v, dout, g, g_dtype, result);
        visit.given(needs_dg);
        if (needs_dg) visit(inflow, dg, d_last, flows, anchors);
        visit(entering, scale, tile_v, walkers, borders, d_borders);
        visit.given(is_slice);
        if (is_slice) visit(other_dim_v, sums, is_first, is_last);
    }
};

std::int64_t gla_anchor_bytes(const ChannelShape& shape, int tile_v);  // of a slice of V
std::int64_t gla_sums_bytes(const ChannelShape& shape);

// All throw std::runtime_error on a refused launch.
void gla_left(const GlaStatesParams& params, void* stream);
void gla_right(const GlaStatesParams& params, void* stream);

}  // namespace tfla_tk
