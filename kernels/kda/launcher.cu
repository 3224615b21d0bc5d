// Host half of KDA's kernels.
#include "kda/forward/forward.cu"
