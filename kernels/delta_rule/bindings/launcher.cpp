// What Python calls of the delta rule's launcher.
#include "delta_rule/bindings/backward.h"
#include "delta_rule/bindings/forward.h"
#include "delta_rule/bindings/states.h"
#include "scalar_gate/bindings/backward.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined({functions_of_delta_forward(), functions_of_delta_backward(),
                                             functions_of_delta_states(), functions_of_backward()});
    return &launcher;
}
