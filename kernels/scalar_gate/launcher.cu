// Host half of the chunkwise kernels with one decay per token and head: mLSTM and scalar decay.
#include "scalar_gate/backward/around_walks.cu"
#include "scalar_gate/backward/gradients/gradients.cu"
#include "scalar_gate/backward/walk/walk.cu"
#include "scalar_gate/forward/forward.cu"
