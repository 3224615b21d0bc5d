// Arguments of the walks for the gradients of q and k, K of more than 128. This header compiles without CUDA.
#pragma once

#include "delta_rule/bindings/params.h"

namespace tfla_tk {

// Chunks from one anchor (scalar_gate/bindings/params.h) of these walks to the next.
constexpr int kDeltaAnchorChunks = 4;

// The two walks over the states, once U' and dV are known. With U = beta U', R and E the scores of a chunk,
//   R_ij = s e^{b_i - b_j} dO_i.U_j for j <= i      E_ij = -e^{b_i - b_j} dV_i.U_j for j < i,
// both rounded, S the state that enters a chunk and dS the gradient of the state that leaves it:
//   left, forward in time:    dq = s e^b (dO S^T) + R K      left = -e^b (dV S^T) + E K
//                             S <- e^{b_L} S + (e^{b_L - b} K)^T U
//   right, backward in time:  right = e^{b_L - b} (U dS^T) + R^T Q + E^T K      dk = left + right
//                             dS <- e^{b_L} dS + (s e^b Q)^T dO - (e^b K)^T dV
// All of these are sums over V, and over the heads of v that share a head of q and k. A CTA has a head of v
// and a slice of V, as wide as an instance's tile; where several CTAs share a result, they add up their parts
// in a fixed order. The gradient of the log decay comes from sums per token, q.dq + k.left and k.right, from
// their parts through S and dS, and from the flow of gradient <S, dS> at the anchors.
struct DeltaStatesParams {
    DeltaShape shape;                // segments of kSegmentChunks
    Operand q, k, writes, dout, dv;  // writes: of the forward, times `rest` U
    // of [B, S, heads / shared, K]; the left walk writes dq and left, the right one reads left and writes dk
    Operand dq, left, dk;
    Gate g, beta;           // log decay; g.data is null where nothing decays
    const float* entering;  // the first state, or the gradient of the last; [N, heads, K, V], null: zero
    // the last state, or the gradient of the first, of which the sums are: those of the forward and the
    // mirror are rounded otherwise; null: not wanted
    float* leaving;
    // S, or dS, at the borders between segments, with which the segments between them begin; null where
    // every sequence is one segment
    const float* borders;
    // [parts, batch, heads, seq] and, per chunk, [parts, batch, heads, slots], a part for a slice of V and
    // 16 columns of K; null: no sums are wanted
    float* whole;
    FlowSum* inter;
    void* anchors;  // of delta_anchor_bytes: what the left walk leaves of S
    // [2, batch, heads, anchor_slots, parts], by the right walk: <S, dS> with S rounded; with dS in fp32 for
    // the chunks behind an anchor, with dS rounded for those before it
    float* flows;
    int* written;  // workspace of delta_written_bytes, where several CTAs share a result
    // workspace of delta_low_bytes, where slices of V take turns (states/turns.cuh); null: each turn rounds
    void* low;
    float scale;  // s
    int shared;   // neighbouring heads of v that share a head of dq, left and dk; it divides the group

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, writes, dout, dv, dq, left, dk, g, beta, entering, leaving, borders);
        visit(whole, inter, anchors, flows, written, low, scale, shared);
    }
};

std::int64_t delta_anchor_bytes(const DeltaShape& shape);
std::int64_t delta_written_bytes(const DeltaShape& shape, int shared);  // 0 where no CTAs share a result
std::int64_t delta_low_bytes(const DeltaShape& shape, int shared);      // 0 where V is one slice

// Both throw std::runtime_error on a refused launch.
void delta_left(const DeltaStatesParams& params, void* stream);
void delta_right(const DeltaStatesParams& params, void* stream);

}  // namespace tfla_tk
