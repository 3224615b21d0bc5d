// What Python calls of KDA's launcher.
#include "kda/bindings/gradients.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined({functions_of_kda_forward(), functions_of_kda_gradients()});
    return &launcher;
}
