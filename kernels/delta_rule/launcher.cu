// Host half of the delta rule's kernels, and of those that make the gradients of its gates.
#include "delta_rule/backward/backward.cu"
#include "delta_rule/backward/gradients/gradients.cu"
#include "delta_rule/backward/states/states.cu"
#include "delta_rule/forward/forward.cu"
#include "scalar_gate/backward/around_walks.cu"
