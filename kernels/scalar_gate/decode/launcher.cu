// Host half of mLSTM's kernels for one token and for a few tokens.
#include "scalar_gate/decode/sequence.cu"
#include "scalar_gate/decode/step.cu"
