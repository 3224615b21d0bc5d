// In the place of kernels/common/kernel.cuh: the host half has the device half's code, too.
#pragma once

#define TFLA_DEVICE_CODE
