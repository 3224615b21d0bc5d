// Plain argument structs shared by the kernels' host functions and the pybind11 bindings.
// No CUDA, ThunderKittens or Torch header here: bindings.cpp compiles in seconds.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "common/operand.h"
#include "sequence/cut.h"

namespace tfla_tk {

// The state of every (sequence, head): [N, H, K, V], [N, H, K], [N, H], contiguous; null where there is none.
struct State {
    float *c, *n, *m;
};

// What enters the segments of a walk of the backward, but the first of each sequence: states, or gradients of
// them, at the boundaries between segments. One slot per head and boundary: (segments - sequences) * heads.
struct Boundaries {
    float *c, *n;        // [slots, K, V] and [slots, K]
    double* log2_decay;  // [slots]: of the segment that the walk leaves over the boundary
};

// The passes of the backward give the flow of gradient over the boundary before every chunk of a sequence
// whose number is a multiple of this and not 0: the anchors.
constexpr int kAnchorChunks = 8;

// Slots per head of what there is once per anchor, of so many chunk_slots: the anchor before the chunk of
// slot s has s / kAnchorChunks. It has it alone: neighbouring anchors' chunks are at least kAnchorChunks
// slots apart, also across packed sequences, each of which begins without an anchor.
inline int anchor_slots(int slots) { return slots / kAnchorChunks + 1; }

// One chunk's gates as the passes of the backward take them (mlstm_pass_gates.cuh).
struct ChunkGates;

// A sum over one chunk, and the squares of its parts; where it is kNotSummed, as some of its parts tell them.
struct FlowSum {
    float value, squares;
};
constexpr float kNotSummed = std::numeric_limits<float>::infinity();

// What all kernels of a forward read.
struct MlstmFwdWalk {
    Operand k, v;  // bf16 or fp16, as q and h
    Gate i, f;
    State initial;    // n and m may be null by themselves where the operator has none
    void* workspace;  // mlstm_fwd_workspace_bytes of it; null where no sequence is cut
    Cut cut;
    int batch, heads, seq, dim_qk, dim_v;
    int group;  // heads that share one of q and k, which have heads / group
    bool half;  // operands are fp16, not bf16
    bool sigmoid_gate;
    bool normalize;
    int device;
};

struct MlstmFwdParams {
    MlstmFwdWalk walk;
    Operand q, h;
    State last;
    float *row_n, *row_m;  // [B, H, S]: s q_t.n_t and m_t of every token; null: not wanted
    // [B, H, chunk_slots, 2]: m at every chunk's start, log2 units, as high and low part; null: not wanted
    float* chunk_m;
    float scale;  // of q k^T
    float eps;    // added to the normaliser after the max
};

// Bytes that a call whose sequences are cut needs between its kernels, for (segments - sequences) * heads
// slots.
std::int64_t mlstm_fwd_workspace_bytes(std::int64_t slots, int dim_qk, int dim_v);

// Bytes from its start to the states at the cuts: c [slots, K, V] and n [slots, K].
std::array<std::int64_t, 2> mlstm_fwd_workspace_offsets(std::int64_t slots, int dim_qk, int dim_v);

// CTAs of the fused kernel that a multiprocessor holds at a time.
int mlstm_fwd_ctas_per_multiprocessor();

// Defined once per instance (head-dim tile and schedule). Both throw std::runtime_error on a refused launch.
// Where sequences are cut, mlstm_fwd_states comes first and leaves in the workspace what arrives at the
// segments.
void mlstm_fwd_states(const MlstmFwdWalk& params, void* stream);
void mlstm_fwd(const MlstmFwdParams& params, void* stream);

}  // namespace tfla_tk
