// The kernels of a source for the host, compiled as they are; GRADSCALE_KERNELS names it.

#include "host_cuda.h"

#include GRADSCALE_KERNELS

#define HOST_PAIR(source, target) HOST_KERNEL(unscale_##source##_##target) HOST_KERNEL(square_##source##_##target)
#define HOST_TYPE(type) HOST_KERNEL(clip_##type)

GRADSCALE_PAIRS(HOST_PAIR)
GRADSCALE_TYPES(HOST_TYPE)
HOST_KERNEL(add_squares)
