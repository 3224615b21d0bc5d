// Host half of the mirror of KDA's forward (backward/kernel.cuh).
#include "kda/backward/kernel.cuh"
#include "kda/launch_walk.cuh"

namespace tfla_tk {

void kda_mirror(const KdaWalkParams& params, void* stream) {
    kda::with_walk(params, "kda_mirror", [&]<class T, int kDimK, int kWalkers>() {
        using C = kda::MirrorConfig<T, kDimK, kWalkers>;
        kda::launch_walk<C, kda::kda_mirror_kernel<C>>(params, "kda_mirror", stream);
    });
}

}  // namespace tfla_tk
