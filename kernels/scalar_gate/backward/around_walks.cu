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

template <class Pair, int kLanes> void launch_rows(const MlstmBwdRowsParams& p, void* stream) {
    const auto tiles = parts_of(p.seq, kRowsThreads / kLanes * 4);
    const dim3 grid(tiles * p.batch * p.heads, parts_of(p.dim_v, p.part_columns));
    launch<mlstm_bwd_rows_kernel<Pair, kLanes>>(p, grid, kRowsThreads, p.device, stream, "mlstm_bwd_rows");
}

// With the smallest group of lanes that holds a row of a share of V.
template <class Pair> void run_rows(const MlstmBwdRowsParams& p, void* stream) {
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
    const int tiles = offsets ? sequences + p.seq / kTokens : p.batch * parts_of(p.seq, kTokens);
    return {{offsets, offsets_are_64bit, sequences, tiles, kTileWarps},
            p.batch,
            p.heads,
            p.seq,
            chunk_slots(p.seq, sequences, offsets != nullptr)};
}

std::int64_t ctas_of(const TileGlobals& g) { return std::int64_t{g.cut.segments} * g.heads; }

template <class P> void run_scan(const MlstmBwdScanParams& p, void* stream) {
    const ScanGlobals g{tile_globals(p), p.i,       p.f,
                        p.norms,         p.chunk_m, p.gates,
                        p.tickets,       p.scale,   high_and_low(std::log2(static_cast<double>(p.scale)))};
    launch<mlstm_bwd_scan_kernel<P>>(g, ctas_of(g), kTileThreads, p.device, stream, "mlstm_bwd_scan");
}

template <class P> void run_gates(const MlstmBwdGatesParams& p, void* stream) {
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
        launch<mlstm_bwd_flows_kernel>(g, std::int64_t{2} * kStateParts * p.offsets.sequences * p.heads,
                                       kTileThreads, p.device, stream, "mlstm_bwd_flows");
    launch<mlstm_bwd_gates_kernel<P>>(g, ctas_of(g), kTileThreads, p.device, stream, "mlstm_bwd_gates");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

std::int64_t mlstm_bwd_gates_workspace_bytes(int heads, int sequences) {
    return static_cast<std::int64_t>(sequences) * heads * 2 * mlstm::kStateParts * sizeof(double);
}

std::int64_t chunk_gates_bytes() { return sizeof(ChunkGates); }

void mlstm_bwd_scan(const MlstmBwdScanParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_scan");
    with_gate(params.gate_kind, [&]<class P>(P) { mlstm::run_scan<P>(params, stream); });
}

void mlstm_bwd_rows(const MlstmBwdRowsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_rows");
    params.half ? mlstm::run_rows<__half2>(params, stream) : mlstm::run_rows<__nv_bfloat162>(params, stream);
}

void mlstm_bwd_factors(const MlstmBwdFactorsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_factors");
    const dim3 grid(parts_of(params.count, mlstm::kRowsThreads), parts_of(params.slices, params.part_slices));
    launch<mlstm::mlstm_bwd_factors_kernel>(params, grid, mlstm::kRowsThreads, params.device, stream,
                                            "mlstm_bwd_factors");
}

void mlstm_bwd_combine(const MlstmBwdCombineParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_combine");
    const int elements = params.dim_qk * (params.dim_v + params.norm_parts);
    const dim3 grid = grid_of(static_cast<std::int64_t>(carrying_ctas(params.cut)) * params.heads,
                              parts_of(elements, 4 * kCombineThreads), "mlstm_bwd_combine");
    launch<mlstm::mlstm_bwd_combine_kernel>(params, grid, kCombineThreads, params.device, stream,
                                            "mlstm_bwd_combine");
}

void mlstm_bwd_gates(const MlstmBwdGatesParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_bwd_gates");
    with_gate(params.gate_kind, [&]<class P>(P) { mlstm::run_gates<P>(params, stream); });
}

}  // namespace tfla_tk
