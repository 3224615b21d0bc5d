// What the launchers with the kernels around the walks of the backward offer of these.
#pragma once

#include "common/launcher.h"
#include "scalar_gate/bindings/params_backward.h"

namespace tfla_tk {

inline Launcher functions_of_backward() {
    return {
        {prepares<&mlstm_bwd_scan>("mlstm_bwd_scan"), prepares<&mlstm_bwd_rows>("mlstm_bwd_rows"),
         prepares<&mlstm_bwd_factors>("mlstm_bwd_factors"), prepares<&mlstm_bwd_combine>("mlstm_bwd_combine"),
         prepares<&mlstm_bwd_gates>("mlstm_bwd_gates"), tells<&chunk_gates_bytes>("chunk_gates_bytes"),
         tells<&mlstm_bwd_gates_workspace_bytes>("mlstm_bwd_gates_workspace_bytes")},
        {{"ANCHOR_CHUNKS", kAnchorChunks},
         {"GATE_KINDS.exponential", static_cast<int>(GateKind::exponential)},
         {"GATE_KINDS.sigmoid", static_cast<int>(GateKind::sigmoid)},
         {"GATE_KINDS.decay", static_cast<int>(GateKind::decay)}}};
}

}  // namespace tfla_tk
