// The kernels of a source for the host, compiled as they are; GRADSCALE_KERNELS names it. HOST_ONE names its only one.

#include "host_cuda.h"

#include GRADSCALE_KERNELS

#ifdef HOST_ONE

#define HOST_NAMED(kernel) HOST_KERNEL(kernel)

HOST_NAMED(HOST_ONE)

#else

#define HOST_PAIR(source, target) HOST_KERNEL(unscale_##source##_##target) HOST_KERNEL(square_##source##_##target)
#define HOST_TYPE(type) HOST_KERNEL(clip_##type)

GRADSCALE_PAIRS(HOST_PAIR)
GRADSCALE_TYPES(HOST_TYPE)
HOST_KERNEL(add_squares)

#endif
