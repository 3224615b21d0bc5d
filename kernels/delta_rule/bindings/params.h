// Arguments of the host functions, as Python passes them. This header compiles without CUDA.
#pragma once

#include "common/operand.h"
#include "scalar_gate/bindings/params.h"
#include "sequence/cut.h"

namespace tfla_tk {

// Chunks of a segment of the walks over the states, with K of more than 128: always as many, so that the
// results of a sequence do not depend on what else is in the call. Segments of a split are multiples. A
// multiple of kDeltaAnchorChunks (params_states.h).
//
// With K of more than 128 the walks of the forward and of its mirror leave on their way the states at the
// borders between these segments, fp32 [border slots, heads, K, V]. Border n of sequence s has slot s (S - 1)
// + n where every sequence has S segments, and in a packed sequence that starts at token t slot t / tokens of
// a segment + n.
constexpr int kSegmentChunks = 16;

// The split of few long sequences, which leave multiprocessors idle, with K up to 128: the walks of the
// forward and of the backward are cut. Over a segment the state is mapped
//   S -> M S + own      dS -> M^T dS + own of the mirror
// with M [K, K], and own what a walk from zero leaves. Walks that leave nothing but states give M and own of
// the segments, delta_carry from these the states that enter the segments, with which their walks begin.
//
// States that enter a segment are fp32 [carried slots, heads, K, V]. That of segment n > 0 of sequence s has
// slot s (S - 1) + n - 1 where every sequence has S segments, and in a packed sequence that starts at token t
// slot t / tokens of a segment + n - 1. M of a segment is kept at the slot of the segment behind it.

// A head that forgets soon needs no M: the walk of a segment begins some chunks before it, its lead, with a
// state of zero, and leaves nothing of the lead but the state behind it. The lead is so long that all that is
// left out has less than 2^kForgotten of its norm in any chunk of the segment (ChunkBounds), or it begins
// where the sequence does. That of a walk back is behind its segment. If one segment of a head in a sequence
// would need a longer lead than `longest`, none of these has a lead, and the head is carried by M.
constexpr float kForgotten = -100.f;
constexpr int kCarried = -1;

// log2 of what a chunk lets through of the norm of a state, at most: all of the chunk; any stretch of it.
struct ChunkBounds {
    float whole, stretch;
};

// What all kernels of the delta rule share.
struct DeltaShape {
    Cut cut;  // every sequence is one segment, but for the walks over the states, of a split, and delta_decay
    int batch, heads, seq, dim_k, dim_v;
    int group;  // heads of v that share one head of q and k, which have heads / group heads
    bool half;  // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(cut, batch, heads, seq, dim_k, dim_v, group, half, device);
    }
};

// Of every chunk and head of v two 64 x 64 matrices that depend on q, k and the gates alone,
//   A = -(I + L diag(beta))^{-1} L    P_ij = s e^{b_i - b_j} q_i.k_j for j <= i
// with L_ij = e^{b_i - b_j} k_i.k_j for j < i and b the cumulative sum of the log decay in the chunk. A is
// zero on its diagonal, too. So (I + L diag(beta))^{-1} = I + A diag(beta) serves the forward, and
// (I + diag(beta) L)^{-1} = I + diag(beta) A the backward. Both are of q's type, [batch * heads, slots, 64,
// 64], with one slot per chunk (chunk_slots in sequence/cut.h); zero past the last token.
struct DeltaMatricesParams {
    DeltaShape shape;  // dim_v is not read
    Operand q, k;
    Gate g, beta;         // log decay; g.data is null where nothing decays
    void *a, *p;          // p: null where the walks make it (scorer.cuh)
    float scale;          // s
    ChunkBounds* bounds;  // [batch * heads, slots, 4]: of every chunk, sums of four parts; null: not wanted

    template <class Visit> void fields(Visit& visit) { visit(shape, q, k, g, beta, a, p, scale, bounds); }
};

// The leads of a split's segments, from the bounds.
struct DeltaLeadsParams {
    DeltaShape shape;  // of the split; dim_k and dim_v are not read
    const ChunkBounds* bounds;
    // multiples of kSegmentChunks, [2, segments, heads]: before each segment but a sequence's first one, then
    // behind each but its last one; kCarried: the head is carried over this sequence
    int* leads;
    int longest;
    bool both;  // the second half is wanted

    template <class Visit> void fields(Visit& visit) { visit(shape, bounds, leads, longest, both); }
};

// The walk of the forward over chunks:
//   W = V - e^b (K S)    U' = W + A (beta W)    O = s e^b (Q S) + P (beta U')
//   S <- e^{b_L} S + K^T (beta e^{b_L - b} U')
struct DeltaForwardParams {
    DeltaShape shape;
    Operand q, k, v, o;
    // U', with K of more than 128 written U' (gates.cuh), rounded, like o; data is null: not wanted
    Operand writes;
    Gate g, beta;
    void *a, *p;           // p: not read by a walk that makes it; a: null where such a walk need not leave it
    const float* initial;  // [N, heads, K, V] or null: zero
    float* last;           // the same, or null: not wanted
    float* carried;        // S that enters every segment but the first; null where no sequence is cut
    const int* leads;      // before the segments of a split; not read without one
    float* borders;        // S at the borders between segments, with K of more than 128; null: not wanted
    void* states;  // S^T that enters each chunk, of v's type, [batch * heads, slots, V, K]; null: not wanted
    float scale;
    int walkers;  // warpgroups of a CTA that own 64 columns of V each: 1 or 2
    int makers;  // CTAs that make A, and P for a walk that does not, meanwhile; 0: made before or in the walk
    int* made;   // workspace of the makers, [batch * heads, slots] flags and two tickets
    // The walk makes A and P itself (chunk_matrices/in_walk.cuh), and stores A where a is not null: with two
    // walkers, 64 < K <= 128, whole sequences and no makers.
    bool makes_matrices;

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, v, o, writes, g, beta, a, p, made, initial, last, carried, leads, borders, states);
        visit(scale, walkers, makers, makes_matrices);
    }
};

// The mirror of that walk, backward in time. With dS the gradient of the state that leaves a chunk:
//   dU = P^T dO + e^{b_L - b} (K dS)    dY = dU + A^T (beta dU)    dV = beta dY    dbeta = rows of dY . U'
//   dS <- e^{b_L} dS + (s e^b Q)^T dO - (e^b K)^T dV
//
// With K up to 128 it leaves nothing but states: own of every segment but the first in `carried`, where the
// last one begins with d_last. Then writes, dv and strengths are not used.
struct DeltaMirrorParams {
    DeltaShape shape;
    Operand q, k, dout, writes;  // writes: of the forward
    Operand dv;                  // written
    Gate g, beta;
    void *a, *p;       // p: not read by a walk that makes it
    float* strengths;  // [V / 16, batch, heads, seq]: sums for dbeta
    const float* d_last;
    float* d_initial;  // [N, heads, K, V], null where there is none
    float* carried;    // dS that leaves every segment but the last; null where no sequence is cut
    const int* leads;  // behind the segments of a split; not read without one
    float* borders;    // dS at the borders between segments, with K of more than 128
    float scale;
    int walkers;  // with K of more than 128, else two

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, dout, writes, dv, g, beta, a, p, strengths, d_last, d_initial, carried, leads);
        visit(borders, scale, walkers);
    }
};

// dq, dk and dV in one walk backward in time, K up to 128. With U = beta U', S the state that enters a chunk,
// dS the gradient of the one that leaves it, dU, dY and dV as above:
//   R_ij = s e^{b_i - b_j} dO_i.U_j  (j <= i)    E_ij = -e^{b_i - b_j} dV_i.U_j  (j < i)
//   dq = s e^b (dO S^T) + R K
//   dk = e^{b_L - b} (U dS^T) + R^T Q + E^T K - e^b (dV S^T) + E K
struct DeltaGradientsParams {
    DeltaShape shape;
    Operand q, k, dout, writes;  // writes: U', rounded, of a forward that leaves states
    // Of every head of v. Where V has several slices of 128 columns, [B, S, heads, K] in fp32, which the
    // slices add up in turns: a sum of parts that are rounded to bf16 would be less accurate than FLA's
    Operand dq, dk;
    int* turns;  // workspace for that: a ticket, then [batch, heads, slots]
    Operand dv;
    Gate g, beta;
    void *a, *states;  // as the forward leaves them
    const float* d_last;
    float *d_initial, *carried;  // as the mirror has them
    const int* leads;
    float* strengths;  // [V / 16, batch, heads, seq]: sums for dbeta
    // for dg, null: not wanted. Sums per token, [3 * slices, batch, heads, seq]: q.dq; k.left - k.right; of
    // k.right what goes through dS. Per chunk e^{b_L} <S, dS>, [kKeysWarps * slices, batch, heads, slots]
    float *token_sums, *flows;
    float scale;

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, dout, writes, dq, dk, turns, dv, g, beta, a, states, d_last, d_initial, carried);
        visit(leads, strengths, token_sums, flows, scale);
    }
};

// The gradient of the log decay from these.
struct DeltaDecayParams {
    DeltaShape shape;  // segments of kDecayChunks
    int slots;         // of chunks, per head
    Gate g, dg;        // dg: written
    const float *token_sums, *flows;

    template <class Visit> void fields(Visit& visit) { visit(shape, slots, g, dg, token_sums, flows); }
};
constexpr int kDecayChunks = 8;
constexpr int kSliceColumns = 128;  // of V, of a CTA of that walk
constexpr int kKeysWarps = 4;       // of that CTA, that make dq and dk

// The walks of the forward that leave nothing but states, of every segment but the last one of heads that are
// carried:
//   own in `carried`, where the first segment begins with `initial`
//   M, and M transposed, of every segment but the first, [carried slots, heads, K, K]
struct DeltaMapsParams {
    DeltaShape shape;
    Operand k, v;
    Gate g, beta;
    void* a;
    const float* initial;
    float* carried;
    const int* leads;
    float* maps;  // null: not wanted
    float* transposed;

    template <class Visit> void fields(Visit& visit) {
        visit(shape, k, v, g, beta, a, initial, carried, leads, maps, transposed);
    }
};

// The states that enter the segments of a split from those walks, in place; in the order of time
//   S <- M S + own        backward:  dS <- M^T dS + own
struct DeltaCarryParams {
    DeltaShape shape;
    float* carried;
    const int* leads;
    const float* maps;  // M transposed; backward: M
    bool backward;

    template <class Visit> void fields(Visit& visit) { visit(shape, carried, leads, maps, backward); }
};

// The gradients of q and k where the walks leave several parts of each, which are summed in fp32.
struct DeltaCombineParams {
    Operand dq_parts, dk_parts;  // [B, heads, S, K], of q's type or fp32
    Operand dq, dk;              // [B, heads / group, S, K]
    DeltaShape shape;            // cut and dim_v are not read
    bool of_floats;              // the parts are fp32

    template <class Visit> void fields(Visit& visit) { visit(shape, dq_parts, dk_parts, dq, dk, of_floats); }
};

// dbeta of the sums that a walk leaves.
struct DeltaStrengthParams {
    DeltaShape shape;   // cut, dim_k and dim_v are not read
    const float* sums;  // [parts, batch, heads, seq]
    int parts;
    Gate dbeta;  // written

    template <class Visit> void fields(Visit& visit) { visit(shape, sums, parts, dbeta); }
};

// All throw std::runtime_error on a refused launch.
void delta_matrices(const DeltaMatricesParams& params, void* stream);
void delta_leads(const DeltaLeadsParams& params, void* stream);
void delta_forward(const DeltaForwardParams& params, void* stream);
void delta_mirror(const DeltaMirrorParams& params, void* stream);
void delta_gradients(const DeltaGradientsParams& params, void* stream);
void delta_decay(const DeltaDecayParams& params, void* stream);
void delta_maps(const DeltaMapsParams& params, void* stream);
void delta_carry(const DeltaCarryParams& params, void* stream);
void delta_combine(const DeltaCombineParams& params, void* stream);
void delta_strength(const DeltaStrengthParams& params, void* stream);

}  // namespace tfla_tk
