// Host half of KDA's kernels.
#include "kda/backward/mirror.cu"
#include "kda/forward/forward.cu"
#include "kda/gradients/gradients.cu"
#include "sequence/family_launcher.h"

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_kda{
        {prepares<&kda_matrices>("matrices"), prepares<&kda_forward>("forward"),
         prepares<&kda_mirror>("mirror"), prepares<&kda_gradients>("gradients"),
         tells<&kda_tiles_bytes>("tiles_bytes"), tells<&kda_states_bytes>("states_bytes")},
        {}};
    static const Launcher launcher = joined({of_kda});
    return &launcher;
}
