// In the place of kernels/common/sync.cuh.
#pragma once

#include "machine.h"

namespace tfla_tk {

inline int fresh_thread() { return threadIdx.x; }

}  // namespace tfla_tk
