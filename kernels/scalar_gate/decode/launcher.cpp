// What Python calls of the launcher of mLSTM's kernels for one token and for a few tokens.
#include "scalar_gate/bindings/sequence.h"
#include "scalar_gate/bindings/step.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined({functions_of_step(), functions_of_sequence()});
    return &launcher;
}
