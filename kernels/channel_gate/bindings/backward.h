// What the launcher of the mirror walk of GLA's backward offers. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/read_arguments.h"

namespace tfla_tk {

inline Launcher functions_of_backward() { return {{prepares<&gla_mirror, &read_walk>("mirror")}, {}}; }

}  // namespace tfla_tk
