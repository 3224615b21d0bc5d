// What the launcher of GLA's forward offers. Addresses are prepared ones (prepared_launches.h).
#include "channel_gate/bindings/read_arguments.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher{
        {prepares<&gla_forward, &read_walk>("forward"), {.name = "part_bytes", .tell = &part_bytes}},
        constants_and({})};
    return &launcher;
}
