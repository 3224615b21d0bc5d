// Host half of GLA's kernels.
#include "channel_gate/backward/states/states.cu"
#include "channel_gate/forward/forward.cu"
#include "channel_gate/segments/segments.cu"
