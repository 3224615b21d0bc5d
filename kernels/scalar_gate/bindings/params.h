// Arguments of the host functions, as Python passes them. This header compiles without CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "common/operand.h"
#include "sequence/cut.h"

namespace tfla_tk {

// The two gates of a call; their policies: gate/policy.cuh.
enum class GateKind : int { exponential = 0, sigmoid = 1, decay = 2 };

// Whether weights are relative to a running maximum of the gates, m.
constexpr bool is_stabilised(GateKind kind) { return kind == GateKind::exponential; }

// The state of every (sequence, head): [N, H, K, V], [N, H, K], [N, H], contiguous; null where there is none.
struct State {
    float *c, *n, *m;

    template <class Visit> void fields(Visit& visit) { visit(c, n, m); }
};

// States, or gradients of states, at the boundaries between segments, where a walk of the backward enters the
// next segment. One slot per head and boundary: (segments - sequences) * heads.
struct Boundaries {
    float *c, *n;        // [slots, K, V] and [slots, K]
    double* log2_decay;  // [slots]: decay of the segment that the walk leaves over the boundary

    template <class Visit> void fields(Visit& visit) { visit(c, n, log2_decay); }
};

// Anchors: the boundaries before every kAnchorChunks-th chunk of a sequence, without the first chunk. There
// the walks of the backward compute the exact flow of gradient.
constexpr int kAnchorChunks = 8;

// Slots per head of a per-anchor array, for `slots` chunk_slots and `chunks` from one anchor to the next. The
// anchor before the chunk of slot s has slot s / chunks. No two anchors share one: their chunks are at least
// so many slots apart, also across packed sequences, since each of these begins without an anchor.
inline int anchor_slots(int slots, int chunks = kAnchorChunks) { return slots / chunks + 1; }

// With K and V up to kMostNarrow a forward leaves the states of every sequence for its backward that enter
// chunks 0, kStateChunks and so on.
constexpr int kStateChunks = 2, kMostNarrow = 128;

// Slots per head of these states. The state that enters chunk c of an unpacked sequence has slot c /
// kStateChunks. In packed sequence s, which starts at token t, it has slot t / (64 kStateChunks) + s + c /
// kStateChunks.
inline int state_slots(int seq, int sequences, bool packed) {
    constexpr int kTokens = kChunk * kStateChunks;
    return (seq + kTokens - 1) / kTokens + (packed ? sequences : 0);
}

// Such states, transposed, as they lie in the forward: [B, H, state_slots, V, K] of the operands' type, and n
// [B, H, state_slots, K], which goes with the normaliser. Both are to be multiplied by 2^unit, [B, H,
// state_slots].
struct LeftStates {
    void* states;
    float *units, *norms;

    template <class Visit> void fields(Visit& visit) { visit(states, units, norms); }
};

// One chunk's gates as the walks of the backward read them (backward/walk/gates.cuh).
struct ChunkGates;

// Sum over a chunk and sum of squares. value == kNotSummed: not computed, squares extrapolated from 16
// tokens.
struct FlowSum {
    float value, squares;
};
constexpr float kNotSummed = std::numeric_limits<float>::infinity();

// Arguments of all kernels of a forward.
struct MlstmFwdWalk {
    Operand k, v;  // bf16 or fp16; q and h are of the same type
    Gate i, f;
    State initial;    // n and m are null where the operator has none
    void* workspace;  // mlstm_fwd_workspace_bytes; null where no sequence is cut
    Cut cut;
    int batch, heads, seq, dim_qk, dim_v;
    int group;             // heads of v that share one head of q and k, which have heads / group heads
    int tile_qk, slice_v;  // of the kernel: the smallest tile that holds K; columns of V of a CTA
    bool half;             // operands are fp16, not bf16
    GateKind gate_kind;
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
    LeftStates left;  // null: not wanted
    float scale;      // of q k^T
    float eps;        // added to the normaliser after the max

    template <class Visit> void fields(Visit& visit) {
        visit(q, walk.k, walk.v, h, walk.i, walk.f, walk.initial, last, row_n, row_m, chunk_m, left);
        visit(walk.cut, walk.workspace, walk.batch, walk.heads, walk.seq, walk.dim_qk, walk.dim_v,
              walk.group);
        visit(walk.tile_qk, walk.slice_v, scale, eps, walk.half, walk.gate_kind, walk.normalize, walk.device);
    }
};

// Bytes of the workspace of a call whose sequences are cut, for (segments - sequences) * heads slots.
std::int64_t mlstm_fwd_workspace_bytes(std::int64_t slots, int dim_qk, int dim_v);

// Bytes from the workspace's start to the states at the boundaries: c [slots, K, V] and n [slots, K].
std::array<std::int64_t, 2> mlstm_fwd_workspace_offsets(std::int64_t slots, int dim_qk, int dim_v);

// CTAs of the fused kernel per multiprocessor.
int mlstm_fwd_ctas_per_multiprocessor(int tile_qk, int slice_v);

// Launches one kernel, or three where sequences are cut: then first those that write the states that arrive
// at the segments to the workspace. Throws std::runtime_error on a refused launch.
void mlstm_fwd(const MlstmFwdParams& params, void* stream);

}  // namespace tfla_tk
