// The kernel of gradscale_cupy: divides many arrays by the scale in one launch, and judges what it stores.
//
// CuPy compiles it when it is first needed, without headers; nvcc compiles it in CI; and the tests compile it as C++ for
// the host, where a loop over the blocks and threads takes the place of a launch.
//
// One launch serves one pair of types. A table has a row for each array. An array is cut into chunks of as many elements
// as the launch says, and `first_chunks` says how many chunks lie before each row, so that a block finds its array by
// bisection. A chunk of dense arrays is read and written in 16 bytes at once, but for its ends.

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GRADSCALE_ON_DEVICE 1
#define GRADSCALE_FUNCTION __device__ __forceinline__
#define GRADSCALE_UNROLL _Pragma("unroll")
#else
#define GRADSCALE_ON_DEVICE 0
#define GRADSCALE_FUNCTION inline
#define GRADSCALE_UNROLL
#include <cmath>
#include <cstring>
#endif

namespace gradscale {

typedef long long Index;
typedef unsigned long long Address;

const int kMostDimensions = 8;

// What the host writes, as plan.py has it.
struct Row {
    const void* source;
    void* target;
    Index size;
    Index dimensions;  // 0 for arrays whose memory is dense and in one order; else how many are to be walked
    Index shape[kMostDimensions];
    Index source_strides[kMostDimensions];  // in elements
    Index target_strides[kMostDimensions];
};
static_assert(sizeof(Row) == 224, "plan.py writes rows of 224 bytes");

// The types of the elements: half precision as its bits, and complex numbers as pairs of their parts.
struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

GRADSCALE_FUNCTION unsigned int bits_of(float x) {
#if GRADSCALE_ON_DEVICE
    return __float_as_uint(x);
#else
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

GRADSCALE_FUNCTION float float_of(unsigned int bits) {
#if GRADSCALE_ON_DEVICE
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

GRADSCALE_FUNCTION unsigned long long bits_of(double x) {
#if GRADSCALE_ON_DEVICE
    return (unsigned long long)__double_as_longlong(x);
#else
    unsigned long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

// Widening is exact.
GRADSCALE_FUNCTION float widened(Half x) {
#if GRADSCALE_ON_DEVICE
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    unsigned int sign = (unsigned int)(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu;
    if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    // As the bits of a float32 it is too small by 2**112, subnormals included.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}

GRADSCALE_FUNCTION float widened(BFloat x) { return float_of((unsigned int)x.bits << 16); }
GRADSCALE_FUNCTION float widened(float x) { return x; }
GRADSCALE_FUNCTION double widened(double x) { return x; }

// Narrowing rounds to the nearest, ties to even; NaN stays NaN.
GRADSCALE_FUNCTION void narrow(float wide, Half* stored) {
#if GRADSCALE_ON_DEVICE
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored->bits) : "f"(wide));
#else
    unsigned int bits = bits_of(wide), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        stored->bits = (unsigned short)(sign | 0x7E00u);
    } else if (magnitude >= 0x477FF000u) {
        stored->bits = (unsigned short)(sign | 0x7C00u);  // from 65520 on
    } else if (magnitude < 0x38800000u) {
        // Subnormal: added to 0.5, its last bit lies where that of a float16 is.
        unsigned int rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        stored->bits = (unsigned short)(sign | rounded);
    } else {
        unsigned int rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
        stored->bits = (unsigned short)(sign | ((rounded >> 13) - (112u << 10)));
    }
#endif
}

GRADSCALE_FUNCTION void narrow(float wide, BFloat* stored) {
    unsigned int bits = bits_of(wide);
    bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    stored->bits = (unsigned short)(is_nan ? bits >> 16 | 0x40u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

GRADSCALE_FUNCTION void narrow(float wide, float* stored) { *stored = wide; }
GRADSCALE_FUNCTION void narrow(float wide, double* stored) { *stored = wide; }
GRADSCALE_FUNCTION void narrow(double wide, double* stored) { *stored = wide; }
GRADSCALE_FUNCTION void narrow(double wide, float* stored) { *stored = (float)wide; }

// By the exponent, which no fast-math option of a compiler takes for granted.
GRADSCALE_FUNCTION bool is_bad(Half x) { return (x.bits & 0x7C00u) == 0x7C00u; }
GRADSCALE_FUNCTION bool is_bad(BFloat x) { return (x.bits & 0x7F80u) == 0x7F80u; }
GRADSCALE_FUNCTION bool is_bad(float x) { return (bits_of(x) & 0x7F800000u) == 0x7F800000u; }
GRADSCALE_FUNCTION bool is_bad(double x) { return (bits_of(x) >> 52 & 0x7FFu) == 0x7FFu; }

// Elements that are read or written at once: as many as fit 16 bytes of the wider type.
template <typename In, typename Out>
struct Width {
    static const int value = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T elements[N];
};

template <typename In, typename Out>
GRADSCALE_FUNCTION bool unscale_one(const In* source, Out* target, float inverse) {
    const auto wide = widened(*source);
    Out stored;
    narrow(wide * (decltype(widened(In())))inverse, &stored);
    *target = stored;
    return is_bad(stored);
}

// Elements from `begin` up to `end` of an array without gaps, of which this thread takes every `threads`-th pack.
template <typename In, typename Out>
GRADSCALE_FUNCTION bool unscale_dense(
    const In* source, Out* target, Index begin, Index end, float inverse, int thread, int threads
) {
    const int width = Width<In, Out>::value;
    typedef Pack<In, width> Sources;
    typedef Pack<Out, width> Targets;
    bool bad = false;
    // The first element from which on both can be moved in packs; `end` where there is none.
    Index head = begin;
    while (head < end && head < begin + width &&
           ((Address)(source + head) % sizeof(Sources) != 0 || (Address)(target + head) % sizeof(Targets) != 0)) {
        ++head;
    }
    if (head == begin + width) head = end;
    const Index packs = (end - head) / width, tail = head + packs * width;
    for (Index i = begin + thread; i < head; i += threads) bad |= unscale_one(source + i, target + i, inverse);
    for (Index i = thread; i < packs; i += threads) {
        const Sources read = *(const Sources*)(source + head + i * width);
        Targets made;
        GRADSCALE_UNROLL
        for (int k = 0; k < width; ++k) bad |= unscale_one(read.elements + k, made.elements + k, inverse);
        *(Targets*)(target + head + i * width) = made;
    }
    for (Index i = tail + thread; i < end; i += threads) bad |= unscale_one(source + i, target + i, inverse);
    return bad;
}

// The same of an array with gaps: the place of each element is computed from its number.
template <typename In, typename Out>
GRADSCALE_FUNCTION bool unscale_strided(
    const Row& row, Index begin, Index end, float inverse, int thread, int threads
) {
    bool bad = false;
    for (Index i = begin + thread; i < end; i += threads) {
        Index left = i, from = 0, to = 0;
        for (int axis = (int)row.dimensions - 1; axis >= 0; --axis) {
            const Index place = left % row.shape[axis];
            left /= row.shape[axis];
            from += place * row.source_strides[axis];
            to += place * row.target_strides[axis];
        }
        bad |= unscale_one((const In*)row.source + from, (Out*)row.target + to, inverse);
    }
    return bad;
}

// The last row whose first chunk is not beyond `chunk`: rows without elements have none.
GRADSCALE_FUNCTION int row_of(const Index* first_chunks, int rows, Index chunk) {
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_chunks[middle] <= chunk) low = middle; else high = middle;
    }
    return low;
}

// Rounded once, and exact for powers of two. Above 2**126 it is subnormal, which is kept.
GRADSCALE_FUNCTION float reciprocal(float scale) { return (float)(1.0 / (double)scale); }

// What one thread of a block does; returns whether it has stored something that is not finite.
template <typename In, typename Out>
GRADSCALE_FUNCTION bool unscale_block(
    const Row* table, const Index* first_chunks, int rows, Index chunk_size, float scale,
    Index block, Index blocks, int thread, int threads
) {
    const float inverse = reciprocal(scale);
    bool bad = false;
    for (Index chunk = block; chunk < first_chunks[rows]; chunk += blocks) {
        const int index = row_of(first_chunks, rows, chunk);
        const Row& row = table[index];
        const Index begin = (chunk - first_chunks[index]) * chunk_size;
        const Index end = begin + chunk_size < row.size ? begin + chunk_size : row.size;
        bad |= row.dimensions == 0
            ? unscale_dense((const In*)row.source, (Out*)row.target, begin, end, inverse, thread, threads)
            : unscale_strided<In, Out>(row, begin, end, inverse, thread, threads);
    }
    return bad;
}

}  // namespace gradscale

#if GRADSCALE_ON_DEVICE

#define GRADSCALE_KERNEL(name, In, Out)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) name(                                                    \
        const gradscale::Row* table, const gradscale::Index* first_chunks, int rows, gradscale::Index chunk_size, \
        const float* scale, int* nonfinite                                                                     \
    ) {                                                                                                        \
        const bool bad = gradscale::unscale_block<In, Out>(                                                    \
            table, first_chunks, rows, chunk_size, *scale, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x      \
        );                                                                                                     \
        if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMax(nonfinite, 1);                                \
    }

#else

#define GRADSCALE_KERNEL(name, In, Out)                                                                        \
    extern "C" void name(                                                                                      \
        const gradscale::Row* table, const gradscale::Index* first_chunks, int rows, gradscale::Index chunk_size, \
        const float* scale, int* nonfinite, gradscale::Index blocks, int threads                               \
    ) {                                                                                                        \
        for (gradscale::Index block = 0; block < blocks; ++block) {                                            \
            for (int thread = 0; thread < threads; ++thread) {                                                 \
                const bool bad = gradscale::unscale_block<In, Out>(                                            \
                    table, first_chunks, rows, chunk_size, *scale, block, blocks, thread, threads              \
                );                                                                                             \
                if (bad) *nonfinite = 1;                                                                       \
            }                                                                                                  \
        }                                                                                                      \
    }

#endif

GRADSCALE_KERNEL(unscale_float16_float16, gradscale::Half, gradscale::Half)
GRADSCALE_KERNEL(unscale_float16_float32, gradscale::Half, float)
GRADSCALE_KERNEL(unscale_float16_float64, gradscale::Half, double)
GRADSCALE_KERNEL(unscale_bfloat16_bfloat16, gradscale::BFloat, gradscale::BFloat)
GRADSCALE_KERNEL(unscale_bfloat16_float32, gradscale::BFloat, float)
GRADSCALE_KERNEL(unscale_bfloat16_float64, gradscale::BFloat, double)
GRADSCALE_KERNEL(unscale_float32_float16, float, gradscale::Half)
GRADSCALE_KERNEL(unscale_float32_bfloat16, float, gradscale::BFloat)
GRADSCALE_KERNEL(unscale_float32_float32, float, float)
GRADSCALE_KERNEL(unscale_float32_float64, float, double)
GRADSCALE_KERNEL(unscale_float64_float32, double, float)
GRADSCALE_KERNEL(unscale_float64_float64, double, double)
