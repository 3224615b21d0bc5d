// What the launcher of the mirror walk of GLA's backward offers. Addresses are prepared ones
// (prepared_launches.h).
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/read_arguments.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher{
        {prepares<&gla_mirror, &read_walk>("mirror"), {.name = "part_bytes", .tell = &part_bytes}},
        constants_and({})};
    return &launcher;
}
