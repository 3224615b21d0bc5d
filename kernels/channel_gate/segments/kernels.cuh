// The kernels for the states at the borders between segments.
#pragma once

#include "channel_gate/segments/carry.cuh"
#include "channel_gate/segments/sums.cuh"
