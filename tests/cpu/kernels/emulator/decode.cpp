// The launcher of the decoding kernels on the CPU.
#include "machine.h"

#include "decode/launcher.cu"

void tfla_load_kernels(const char*) {}
