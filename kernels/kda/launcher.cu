// Host half of KDA's kernels.
#include "kda/gradients/gradients.cu"
