// What every kernel is written with.
//
// The sources are compiled in two halves. The device half of a kernel is a cubin of its own. The host half of
// a family, its launcher, has the launches of all its kernels; there a kernel is but a name and its
// arguments, so that compiling it takes seconds.
#pragma once

#ifdef TFLA_LAUNCHER
#define TFLA_DEVICE_CODE if constexpr (false)
#else
#define TFLA_DEVICE_CODE
#endif
