// Arguments of the host functions, as Python passes them. This header compiles without CUDA.
#pragma once

#include "common/operand.h"
#include "sequence/cut.h"

namespace tfla_tk {

// What all kernels with a gate per channel share.
struct ChannelShape {
    Cut cut;
    int batch, heads, seq, dim_k, dim_v;
    bool half;  // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(cut, batch, heads, seq, dim_k, dim_v, half, device);
    }
};

// Gated linear attention, forward. With log gates g in R^K per token, natural logarithms:
//   S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T      o_t = s q_t^T S_t
// by chunks, b the cumulative sum of g in the chunk, b_L that over all of it:
//   O = s (q e^b) S + P V      P = s tril(sum_c q_ic k_jc e^{b_ic - b_jc})
//   S <- e^{b_L} S + (k e^{b_L - b})^T V
// K <= tile_k, K and V multiples of 16. Exact for gates <= 0, -inf among them; for
// positive ones as long as e^(sum of g over a chunk) and its products with q and k stay finite in fp32, and
// these in the operands' type.
struct GlaForwardParams {
    ChannelShape shape;
    Operand q, k, v, o;
    Operand g;  // [B, heads, S, K], of dtype g_dtype, aligned as the others: rows at multiples of 16 bytes
    DType g_dtype;
    const float* initial;  // [N, heads, K, V] or null: zero
    float* last;           // the same, or null: not wanted
    float scale;           // s, any finite number
    int tile_k;            // channels of the kernel: 64 or 128, at least K
    int walkers;           // warpgroups of a CTA that own 64 columns of V each: 1 or 2
    const float* borders;  // of gla_segments, where sequences are cut
    // O is a sum over K, so that launches one after the other, of a tile of 128 channels, may take some
    // each. The last one writes O.
    bool is_slice;    // there are others
    int other_dim_k;  // channels of the others: rows of the states between those of two heads
    void* part;       // of gla_part_bytes: what a launch leaves of O for the next one
    bool is_first = true, is_last = true;  // of these

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, v, o, g, g_dtype, initial, last, scale, tile_k, walkers, borders);
        visit.given(is_slice);
        if (is_slice) visit(other_dim_k, part, is_first, is_last);
    }
};

// The states at the borders between segments, from which the walks of all segments begin at once:
//   S of a border = diag(e^{sum of g over the segment}) (S of the border before) + what the segment adds
// Backward in time it is dS of a border from that of the border behind, where q is in the place of k, dO in
// that of V, and gates count up to and with a token, not behind it. The gates of a segment must not grow
// beyond e^88 where a state is to come through it.
struct GlaSegmentsParams {
    ChannelShape shape;
    Operand keys, values;  // k and V, or q and dO
    Operand g;             // as in GlaForwardParams
    DType g_dtype;
    const float* entering;  // the first state, or the gradient of the last; [N, heads, K, V], null: zero
    float* borders;         // [slots, heads, K, V]; slots: segments less sequences (sequence/segments.cuh)
    float* decays;          // [slots, heads, K]: of the segment that a border's sum is of
    float scale;            // s
    bool backward;          // in time

    template <class Visit> void fields(Visit& visit) {
        visit(shape, keys, values, g, g_dtype, entering, borders, decays, scale, backward);
    }
};

std::int64_t gla_part_bytes(const ChannelShape& shape, int walkers);

// All throw std::runtime_error on a refused launch.
void gla_segments(const GlaSegmentsParams& params, void* stream);
void gla_forward(const GlaForwardParams& params, void* stream);

}  // namespace tfla_tk
