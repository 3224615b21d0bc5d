// Host half of the chunkwise kernels with one decay per token and head: mLSTM and scalar decay.
#include "scalar_gate/backward/around_walks.cu"
#include "scalar_gate/backward/gradients/gradients.cu"
#include "scalar_gate/backward/walk/walk.cu"
#include "scalar_gate/bindings/backward.h"
#include "scalar_gate/forward/forward.cu"
#include "sequence/family_launcher.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_walks{
        {prepares<&mlstm_fwd>("forward"), prepares<&mlstm_gradients>("gradients"),
         prepares<&mlstm_gate_gradients>("gate_gradients"), prepares<&mlstm_pass>("walk"),
         prepares<&mlstm_pass_segments>("segments"), tells<&mlstm_fwd_workspace_bytes>("workspace_bytes"),
         tells<&mlstm_fwd_workspace_offsets>("workspace_offsets"),
         tells<&mlstm_fwd_ctas_per_multiprocessor>("ctas_per_multiprocessor"),
         tells<&pass_anchor_bytes>("anchor_bytes"), tells<&pass_flow_parts>("flow_parts")},
        {{"STATE_CHUNKS", kStateChunks},
         {"FLOW_PARTS", kFlowParts},
         {"GRADIENTS.dq", static_cast<int>(Gradient::dq)},
         {"GRADIENTS.dk", static_cast<int>(Gradient::dk)},
         {"GRADIENTS.dv", static_cast<int>(Gradient::dv)}}};
    static const Launcher launcher = joined({of_walks, functions_of_backward()});
    return &launcher;
}
