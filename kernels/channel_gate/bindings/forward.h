// What the launcher of GLA's forward offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "channel_gate/bindings/read_arguments.h"

namespace tfla_tk {

inline Launcher functions_of_forward() {
    return {{prepares<&gla_forward, &read_walk>("forward"), {.name = "part_bytes", .tell = &part_bytes}}, {}};
}

}  // namespace tfla_tk
