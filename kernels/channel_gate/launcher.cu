// Host half of GLA's kernels.
#include "channel_gate/backward/states/states.cu"
#include "channel_gate/forward/forward.cu"
#include "channel_gate/segments/segments.cu"
#include "sequence/family_launcher.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_gla{
        {prepares<&gla_forward>("forward"), prepares<&gla_mirror>("mirror"), prepares<&gla_left>("left"),
         prepares<&gla_right>("right"), prepares<&gla_segments>("segments"),
         tells<&gla_part_bytes>("part_bytes"), tells<&gla_anchor_bytes>("anchor_bytes"),
         tells<&gla_sums_bytes>("sums_bytes")},
        {{"ANCHOR_CHUNKS", kAnchorChunks}}};
    static const Launcher launcher = joined({of_gla});
    return &launcher;
}
