// Host half of the forward of gated linear attention (GLA): a decay per token, head and key channel.
// Equations: bindings/params.h, block.cuh and docs/gla.md.
#include "channel_gate/forward/launch_walk.cuh"

namespace tfla_tk {

void gla_forward(const GlaForwardParams& params, void* stream) {
    using namespace channel_gate;
    run_walk<ForwardConfig>(params, stream);
}

std::int64_t gla_part_bytes(const ChannelShape& shape, int walkers) {
    return channel_gate::part_bytes(shape, walkers);
}

}  // namespace tfla_tk
