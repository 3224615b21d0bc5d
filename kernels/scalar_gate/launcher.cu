// Host half of the chunkwise kernels of mLSTM, or with TFLA_SCALAR_DECAY of those for a scalar decay.
#include "scalar_gate/backward/around_walks.cu"
#include "scalar_gate/backward/gradients/gradients.cu"
#include "scalar_gate/backward/walk/walk.cu"
#include "scalar_gate/forward/forward.cu"
