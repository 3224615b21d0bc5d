// The small kernels around the passes of the mLSTM backward: what the passes need per row, and the gradients
// of the gates from what they leave. No matrix product, so one instance serves all head dims.
#include <cmath>

#include "mlstm_bwd_gates.cuh"
#include "mlstm_bwd_rows.cuh"
#include "tfla_tk/launch.cuh"

namespace tfla_tk::mlstm {

constexpr int kEnoughTiles = 528;  // four for each of 132 multiprocessors

template <class Pair, int kLanes, int kVectors>
void launch_rows(const MlstmBwdRowsParams& p, cudaStream_t stream) {
    constexpr int kTokens = kRowsThreads / kLanes * (4 / kVectors);
    const int64_t tiles = (p.seq + kTokens - 1) / kTokens;
    launch<mlstm_bwd_rows_kernel<Pair, kLanes, kVectors>>(p, tiles * p.batch * p.heads, kRowsThreads,
                                                          p.device, stream, "mlstm_bwd_rows");
}

// By the smallest group of lanes that holds a row.
template <class Pair> void run_rows(const MlstmBwdRowsParams& p, cudaStream_t stream) {
    if (p.dim_v <= 64)
        launch_rows<Pair, 8, 1>(p, stream);
    else if (p.dim_v <= 128)
        launch_rows<Pair, 16, 1>(p, stream);
    else if (p.dim_v <= 256)
        launch_rows<Pair, 32, 1>(p, stream);
    else
        launch_rows<Pair, 32, 2>(p, stream);
}

// Chunks of a tile: one per warp, more where there are CTAs enough, since each looks at all chunks of its
// head.
inline int tile_chunks(const MlstmBwdGatesParams& p) {
    const int64_t all = static_cast<int64_t>(p.batch) * p.heads * chunk_slots(p.seq, p.sequences, false);
    int chunks = kGatesWarps;
    while (chunks < kMostChunks && all > kEnoughTiles * chunks) chunks *= 2;
    return chunks;
}

template <bool kSigmoid> void run_gates(const MlstmBwdGatesParams& p, cudaStream_t stream) {
    const int slots = chunk_slots(p.seq, p.sequences, p.offsets != nullptr);
    const int tokens = kChunk * tile_chunks(p);  // of a tile
    const int segments = p.offsets ? p.sequences + p.seq / tokens : p.batch * ((p.seq + tokens - 1) / tokens);
    auto* chunks = static_cast<ChunkFlow*>(p.workspace);
    const GatesGlobals g{p.q_dq,
                         p.k_dk,
                         p.i,
                         p.f,
                         p.di,
                         p.df,
                         p.chunk_m,
                         p.initial,
                         p.last,
                         chunks,
                         reinterpret_cast<double*>(chunks + static_cast<int64_t>(p.batch) * p.heads * slots),
                         {p.offsets, p.wide_offsets, p.sequences, segments, tokens / kChunk},
                         p.batch,
                         p.heads,
                         p.seq,
                         slots,
                         static_cast<int64_t>(p.dim_qk) * p.dim_v,
                         p.dim_qk};
    const bool states = p.initial.c || p.initial.n || p.last.c || p.last.n;
    const int tiles = segments * p.heads;
    const int state_blocks = states ? 2 * kStateParts * p.sequences * p.heads : 0;
    launch<mlstm_bwd_flows_kernel<kSigmoid>>(g, tiles + state_blocks, kGatesThreads, p.device, stream,
                                             "mlstm_bwd_flows");
    launch<mlstm_bwd_gates_kernel<kSigmoid>>(g, tiles, kGatesThreads, p.device, stream, "mlstm_bwd_gates");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

std::int64_t mlstm_bwd_gates_workspace_bytes(int batch, int heads, int seq, int sequences, bool packed) {
    const std::int64_t slots = chunk_slots(seq, sequences, packed);
    return heads * (batch * slots * static_cast<std::int64_t>(sizeof(mlstm::ChunkFlow)) +
                    sequences * static_cast<std::int64_t>(2 * mlstm::kStateParts * sizeof(double)));
}

void mlstm_bwd_rows(const MlstmBwdRowsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_rows");
    const auto s = static_cast<cudaStream_t>(stream);
    params.half ? mlstm::run_rows<__half2>(params, s) : mlstm::run_rows<__nv_bfloat162>(params, s);
}

void mlstm_bwd_gates(const MlstmBwdGatesParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_gates");
    const auto s = static_cast<cudaStream_t>(stream);
    params.sigmoid_gate ? mlstm::run_gates<true>(params, s) : mlstm::run_gates<false>(params, s);
}

}  // namespace tfla_tk
