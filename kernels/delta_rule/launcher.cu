// Host half of the delta rule's kernels, and of those that make the gradients of its gates.
#include "delta_rule/backward/backward.cu"
#include "delta_rule/backward/gradients/gradients.cu"
#include "delta_rule/backward/states/states.cu"
#include "delta_rule/forward/forward.cu"
#include "scalar_gate/backward/around_walks.cu"
#include "scalar_gate/bindings/backward.h"
#include "sequence/family_launcher.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_delta_rule{
        {prepares<&delta_matrices>("matrices"), prepares<&delta_leads>("leads"),
         prepares<&delta_forward>("forward"), prepares<&delta_maps>("maps"), prepares<&delta_carry>("carry"),
         prepares<&delta_inputs>("inputs"), prepares<&delta_mirror>("mirror"),
         prepares<&delta_gradients>("gradients"), prepares<&delta_decay>("decay"),
         prepares<&delta_combine>("combine"), prepares<&delta_strength>("strength"),
         prepares<&delta_inputs_backward>("inputs_backward"), prepares<&delta_left>("left"),
         prepares<&delta_right>("right"), tells<&delta_anchor_bytes>("anchor_bytes"),
         tells<&delta_written_bytes>("written_bytes"), tells<&delta_low_bytes>("low_bytes")},
        {{"SEGMENT_CHUNKS", kSegmentChunks},
         {"INPUT_TOKENS", kInputTokens},
         {"DELTA_ANCHOR_CHUNKS", kDeltaAnchorChunks},
         {"DELTA_DECAY_CHUNKS", kDecayChunks},
         {"DELTA_SLICE_COLUMNS", kSliceColumns},
         {"DELTA_KEYS_WARPS", kKeysWarps}}};
    static const Launcher launcher = joined({of_delta_rule, functions_of_backward()});
    return &launcher;
}
