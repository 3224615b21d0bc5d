// Host half of the mirror walk of the backward of gated linear attention (GLA): dV, and the gradient of the
// first state. It is the forward's walk from the last chunk to the first: the gate warps make the same of a
// chunk, the walkers carry the state's gradient. Equations: bindings/params_backward.h and
// docs/gla-backward.md.
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/forward/launch_walk.cuh"

namespace tfla_tk {

void gla_mirror(const GlaForwardParams& params, void* stream) {
    using namespace channel_gate;
    run_walk<MirrorConfig>(params, stream);
}

}  // namespace tfla_tk
