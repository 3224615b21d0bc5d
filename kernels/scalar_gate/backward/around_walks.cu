// Host half of the small kernels around the walks of the backward: per-chunk gates and per-row terms before
// them, the states at the boundaries of cut sequences, and the gradients of the gates after them. They have
// no matrix product and serve all head dims.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/backward/carry.cuh"
#include "scalar_gate/backward/gate_gradients.cuh"
#include "scalar_gate/backward/row_terms.cuh"
#include "scalar_gate/backward/scan.cuh"

namespace tfla_tk::mlstm {

template <class Pair, int kLanes> void launch_rows(const MlstmBwdRowsParams& p, cudaStream_t stream) {
    constexpr int kTokens = kRowsThreads / kLanes * 4;
    const int64_t tiles = (p.seq + kTokens - 1) / kTokens;
    const dim3 grid(tiles * p.batch * p.heads, (p.dim_v + p.part_columns - 1) / p.part_columns);
    launch<mlstm_bwd_rows_kernel<Pair, kLanes>>(p, grid, kRowsThreads, p.device, stream, "mlstm_bwd_rows");
}

// With the smallest group of lanes that holds a row of a share of V.
template <class Pair> void run_rows(const MlstmBwdRowsParams& p, cudaStream_t stream) {
    const int columns = std::min(p.dim_v, p.part_columns);
    if (columns <= 64)
        launch_rows<Pair, 8>(p, stream);
    else if (columns <= 128)
        launch_rows<Pair, 16>(p, stream);
    else
        launch_rows<Pair, 32>(p, stream);
}

template <class Params> TileGlobals tile_globals(const Params& p) {
    constexpr int kTokens = kTileWarps * kChunk;
    const auto [offsets, offsets_are_64bit, sequences] = p.offsets;
    const int tiles = offsets ? sequences + p.seq / kTokens : p.batch * ((p.seq + kTokens - 1) / kTokens);
    return {{offsets, offsets_are_64bit, sequences, tiles, kTileWarps},
            p.batch,
            p.heads,
            p.seq,
            chunk_slots(p.seq, sequences, offsets != nullptr)};
}

dim3 grid(const TileGlobals& g, const char* name) {
    return grid_of(static_cast<std::int64_t>(g.cut.segments) * g.heads, 1, name);
}

template <class P> void run_scan(const MlstmBwdScanParams& p, cudaStream_t stream) {
    const ScanGlobals g{tile_globals(p), p.i,       p.f,
                        p.norms,         p.chunk_m, p.gates,
                        p.tickets,       p.scale,   high_and_low(std::log2(static_cast<double>(p.scale)))};
    launch<mlstm_bwd_scan_kernel<P>>(g, grid(g, "mlstm_bwd_scan"), kTileThreads, p.device, stream,
                                     "mlstm_bwd_scan");
}

template <class P> void run_gates(const MlstmBwdGatesParams& p, cudaStream_t stream) {
    if (p.anchors.chunks != kAnchorChunks && 2 * p.anchors.chunks != kAnchorChunks)
        throw std::runtime_error("mlstm_bwd_gates: anchors that many chunks apart are not served");
    const TileGlobals tiles = tile_globals(p);
    const GatesGlobals g{tiles,
                         p.q_dq,
                         p.k_dk,
                         p.anchors,
                         p.i,
                         p.f,
                         p.di,
                         p.df,
                         p.chunk_m,
                         p.initial,
                         p.last,
                         static_cast<double*>(p.workspace),
                         anchor_slots(tiles.slots, p.anchors.chunks),
                         static_cast<int64_t>(p.dim_qk) * p.dim_v,
                         p.dim_qk};
    if (p.initial.c || p.initial.n || p.last.c || p.last.n)
        launch<mlstm_bwd_flows_kernel>(
            g, grid_of(std::int64_t{2} * kStateParts * p.offsets.sequences * p.heads, 1, "mlstm_bwd_flows"),
            kTileThreads, p.device, stream, "mlstm_bwd_flows");
    launch<mlstm_bwd_gates_kernel<P>>(g, grid(g, "mlstm_bwd_gates"), kTileThreads, p.device, stream,
                                      "mlstm_bwd_gates");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

std::int64_t mlstm_bwd_gates_workspace_bytes(int heads, int sequences) {
    return static_cast<std::int64_t>(sequences) * heads * 2 * mlstm::kStateParts * sizeof(double);
}

std::int64_t chunk_gates_bytes() { return sizeof(ChunkGates); }

void mlstm_bwd_scan(const MlstmBwdScanParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_scan");
    const auto s = static_cast<cudaStream_t>(stream);
    with_gate(params.sigmoid_gate, [&]<class P>(P) { mlstm::run_scan<P>(params, s); });
}

void mlstm_bwd_rows(const MlstmBwdRowsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_rows");
    const auto s = static_cast<cudaStream_t>(stream);
    params.half ? mlstm::run_rows<__half2>(params, s) : mlstm::run_rows<__nv_bfloat162>(params, s);
}

void mlstm_bwd_factors(const MlstmBwdFactorsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_factors");
    const auto blocks = (params.count + mlstm::kRowsThreads - 1) / mlstm::kRowsThreads;
    const int parts = (params.slices + params.part_slices - 1) / params.part_slices;
    launch<mlstm::mlstm_bwd_factors_kernel>(params, dim3(blocks, parts), mlstm::kRowsThreads, params.device,
                                            static_cast<cudaStream_t>(stream), "mlstm_bwd_factors");
}

void mlstm_bwd_combine(const MlstmBwdCombineParams& params, void* stream) {
    constexpr int kPerBlock = 4 * kCombineThreads;
    const DeviceGuard guard(params.device, "mlstm_bwd_combine");
    const int elements = params.dim_qk * (params.dim_v + params.norm_parts);
    const dim3 grid = grid_of(static_cast<std::int64_t>(carrying_ctas(params.cut)) * params.heads,
                              (elements + kPerBlock - 1) / kPerBlock, "mlstm_bwd_combine");
    launch<mlstm::mlstm_bwd_combine_kernel>(params, grid, kCombineThreads, params.device,
                                            static_cast<cudaStream_t>(stream), "mlstm_bwd_combine");
}

void mlstm_bwd_gates(const MlstmBwdGatesParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_gates");
    const auto s = static_cast<cudaStream_t>(stream);
    with_gate(params.sigmoid_gate, [&]<class P>(P) { mlstm::run_gates<P>(params, s); });
}

}  // namespace tfla_tk
