// What CuPy's kernels need of CUDA, on the host, before their source.

#pragma once

#include "host_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

// CUDA's headers define them once more.
#undef __shared__
#define __shared__ static
#undef __forceinline__
#define __forceinline__ inline
// By which CuPy chooses CUDA's half precision.
#define __CUDACC_VER_MAJOR__ (HOST_CUDA / 1000)

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
using std::signbit;

// What compiler.py puts in place of a device's clock, in nanoseconds.
inline unsigned long long host_time() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

inline void __nanosleep(unsigned int nanoseconds) { usleep(nanoseconds / 1000); }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }

// One block, and one thread of it, runs at a time.
template <typename T>
inline T atomicCAS(T* address, T expected, T value) {
    const T before = *address;
    if (before == expected) *address = value;
    return before;
}
template <typename T>
inline T atomicAdd(T* address, T value) {
    const T before = *address;
    *address = before + value;
    return before;
}

// As -ftz=true has it, and for doubles, too: subnormals are read and written as 0.
inline host::Launch flushing(host::Launch launch) {
#ifdef __SSE__
    return [launch](unsigned int blocks, unsigned int threads) {
        const unsigned int before = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(before | 0x8040);
        const char* failure = launch(blocks, threads);
        __builtin_ia32_ldmxcsr(before);
        return failure;
    };
#endif
    return launch;
}

// By which driver.cpp launches a kernel.
#define PREPARED_KERNEL(kernel, meets, flushes)                                    \
    extern "C" host::Launch* prepare_##kernel(void* const* arguments) {            \
        const host::Launch launch = host::prepared(kernel, arguments, meets);      \
        return new host::Launch(flushes ? flushing(launch) : launch);              \
    }
