// What Python calls of the launcher of mLSTM's chunkwise kernels, or of those for a scalar decay.
#include "scalar_gate/bindings/backward.h"
#include "scalar_gate/bindings/forward.h"
#include "scalar_gate/bindings/gradients.h"
#include "scalar_gate/bindings/walk.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined(
        {functions_of_forward(), functions_of_backward(), functions_of_gradients(), functions_of_walk()});
    return &launcher;
}
