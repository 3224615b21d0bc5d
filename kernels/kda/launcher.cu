// Host half of KDA's kernels.
#include "kda/backward/mirror.cu"
#include "kda/forward/forward.cu"
#include "kda/gradients/gradients.cu"
