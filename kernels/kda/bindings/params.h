// Arguments of the kernels of KDA (Kimi Delta Attention). This header compiles without CUDA.
//
// The delta rule with a log decay per channel of K. With b the sum of these over the tokens of a chunk up to
// and with a token, b_L its last value, s the scale, per head of v
//   L_ij = sum_c k_ic k_jc e^{b_ic - b_jc}  (j < i)      P_ij = s sum_c q_ic k_jc e^{b_ic - b_jc}  (j <= i)
//   A = -(I + L diag(beta))^{-1} L
//   Q_F = s q e^b      K_F = k e^b      K_G = k e^{b_L - b}
// and over the chunks
//   X = K_F S    W = V - X    U' = W + A (beta W)    Y = beta U'    O = Q_F S + P Y
//   S <- e^{b_L} S + K_G^T Y
// The mirror walks back over the chunks. With dO, and dS' the gradient of the state that leaves a chunk,
//   R = P^T dO + K_G dS'    R' = R + A^T (beta R)    G = beta R', which is dV
//   dS = e^{b_L} dS' + Q_F^T dO - K_F^T G
#pragma once

#include <array>

#include "common/operand.h"
#include "sequence/cut.h"
#include "sequence/log_decay.h"

namespace tfla_tk {

struct KdaShape {
    Cut cut;  // every sequence is one segment
    int batch, heads, seq, dim_k, dim_v;
    int group;  // heads of v that share one head of q and k, which have heads / group heads
    bool half;  // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(cut, batch, heads, seq, dim_k, dim_v, group, half, device);
    }
};

// What the walk reads of q, k, g and beta, of every chunk and head of v: [batch * heads, slots, ..] with one
// slot per chunk (chunk_slots in sequence/cut.h). All is zero past the last token.
struct KdaTiles {
    void* tiles;    // [3, 64, tile of K] of q's type: Q_F, K_F, K_G
    void* factors;  // Factors in kda/tiles.cuh, fp32: e^{b_L}, beta, 1 / norms
    void *a, *p;    // [64, 64] of q's type

    template <class Visit> void fields(Visit& visit) { visit(tiles, factors, a, p); }
};

struct KdaMatricesParams {
    KdaShape shape;  // dim_v is not read
    Operand q, k;
    Operand g;
    DType g_type;
    Gate beta;
    // Of a head of v, and of its channels, which are rows here. a_log.data is null: zero. dt_bias.data is
    // null: zero.
    Gate a_log, dt_bias;
    LogDecay gate;
    float lower_bound, scale;
    bool l2norm;                     // q and k are x r with r = (sum x^2 + 1e-6)^{-1/2}
    bool beta_sigmoid, beta_double;  // beta is made by a sigmoid, and doubled
    KdaTiles left;                   // written

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, g, g_type, beta, a_log, dt_bias, gate, lower_bound, scale, l2norm, beta_sigmoid,
              beta_double, left);
    }
};

// Of a walk over the chunks. Both have the same operands:
//              values    results          entering                    leaving
//   forward    v         o                the first state             the last one
//   mirror     do        R', at first     gradient of the last one    of the first one
struct KdaWalkParams {
    KdaShape shape;
    Operand values, results;  // [B, T, heads, V]
    KdaTiles tiles;
    const float* entering;  // [N, heads, K, V]; null: zero
    float* leaving;         // the same; null: not wanted
    void* states;           // of every chunk that which enters it (kda/state_fragments.cuh); null: not wanted
    int walkers;            // warpgroups of a CTA that own 64 columns of V each: 1 or 2

    template <class Visit> void fields(Visit& visit) {
        visit(shape, values, results, tiles, entering, leaving, states, walkers);
    }
};

// The parallel half of the backward. With dS' the gradient of the state that leaves a chunk, the mirror walk
// has left
//   R' = R + A^T (beta R)  where  R = P^T dO + K_G dS'
// and with G = beta R' the gradients are, L and P strictly and weakly lower triangular
//   dV = G    dbeta = sum_v U' R'    dP = dO Y^T    dL = -G Y^T
//   dQ_F = dO S^T    dK_F = -G S^T    dK_G = Y dS'^T
// Of dq and the two parts of dk, by readers and by writers, follows per channel that of g:
//   sum over later tokens of the chunk, and the token itself, of q dq + k dk_read - k dk_written, + <S', dS'>
struct KdaGradientsParams {
    KdaMatricesParams of;                  // the forward's; shape.dim_v is read
    Operand v, d_out, solved;              // solved: R', over which dV is written
    const void *states, *state_gradients;  // StateFragments in kda/state_fragments.cuh
    Operand dq, dk;                        // one for each head of v
    Operand dg;                            // of g's type
    float* dbeta;                          // [batch, seq, heads]
    // Parts of d dt_bias [batch * heads, slots, dim_k] and of dA_log [batch * heads, slots]; null: not
    // wanted.
    float *of_bias, *of_rate;

    template <class Visit> void fields(Visit& visit) {
        visit(of, v, states, state_gradients, d_out, solved, dq, dk, dg, dbeta, of_bias, of_rate);
    }
};

std::array<std::int64_t, 3> kda_tiles_bytes(const KdaShape& shape);  // of tiles, of factors, of A or P
std::int64_t kda_states_bytes(const KdaShape& shape);                // of the states of all chunks

// All throw std::runtime_error on a refused launch.
void kda_matrices(const KdaMatricesParams& params, void* stream);
void kda_forward(const KdaWalkParams& params, void* stream);
void kda_mirror(const KdaWalkParams& params, void* stream);
void kda_gradients(const KdaGradientsParams& params, void* stream);

}  // namespace tfla_tk
