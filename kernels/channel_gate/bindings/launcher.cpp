// What Python calls of GLA's launcher.
#include "channel_gate/bindings/backward.h"
#include "channel_gate/bindings/forward.h"
#include "channel_gate/bindings/segments.h"
#include "channel_gate/bindings/states.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined(
        {functions_of_forward(), functions_of_backward(), functions_of_states(), functions_of_segments()});
    return &launcher;
}
