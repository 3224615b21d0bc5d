// The kernels for the gates around the walks of the backward.
#pragma once

#include "scalar_gate/backward/gate_gradients.cuh"
#include "scalar_gate/backward/gradients/gate_gradients.cuh"
#include "scalar_gate/backward/scan.cuh"
