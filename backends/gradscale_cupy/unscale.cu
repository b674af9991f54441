// The kernels of gradscale_cupy: divide many arrays by the scale in one launch, judge what they store, and clip it.
//
// CuPy compiles them when they are first needed, without headers; nvcc compiles them in CI; and the tests compile them
// as C++ for the host, with what they need of CUDA in front, and GRADSCALE_INSTRUCTIONS defined.
//
// One launch serves one pair of types. A table has a row for each array. An array is cut into chunks of as many
// elements as the launch says, each of which is a block's: a second table says of which array, and which part of it. A
// chunk is read and written in 16 bytes at once, but for its ends.
//
// For clipping, other kernels store a sum of squares for each chunk while they divide, one more adds these up, always
// in one order, and a last one multiplies what was stored.
//
// GRADSCALE_ONLY is GRADSCALE_unscale, GRADSCALE_square, GRADSCALE_clip or GRADSCALE_add to compile kernels of that
// kind alone, and GRADSCALE_SOURCE and GRADSCALE_TARGET are the types to compile them for; without these all are.

// Threads of a block, a multiple of 32: known here, the places that a thread reads and writes are few registers.
#define GRADSCALE_THREADS 256

#define GRADSCALE_FUNCTION __device__ __forceinline__
#define GRADSCALE_KERNEL extern "C" __global__ void __launch_bounds__(GRADSCALE_THREADS)

namespace gradscale {

typedef long long Index;
typedef unsigned long long Address;

const int kThreads = GRADSCALE_THREADS;

// What the host writes, as plan.py has it: arrays without gaps, in one order.
struct Row {
    const void* source;
    void* target;
    Index size;
};
static_assert(sizeof(Row) == 24, "plan.py writes rows of 24 bytes");

struct Chunk {
    int row;
    int number;  // of those before it in the same array
};
static_assert(sizeof(Chunk) == 8, "plan.py writes chunks of 8 bytes");

// The types of the elements: half precision as its bits, and complex numbers as pairs of their parts.
struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

// As the kernels' names have them.
typedef Half float16;
typedef BFloat bfloat16;
typedef float float32;
typedef double float64;

// CuPy compiles with -ftz=true, which takes subnormal float32 for 0; instructions that do not say .ftz keep them.
#ifndef GRADSCALE_INSTRUCTIONS
typedef unsigned short HalfBits;
GRADSCALE_FUNCTION float product(float x, float y) { asm("mul.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); return x; }
GRADSCALE_FUNCTION float single_of(double x) { float y; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x)); return y; }
GRADSCALE_FUNCTION double double_of(float x) { double y; asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x)); return y; }
GRADSCALE_FUNCTION float single_of(HalfBits x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
GRADSCALE_FUNCTION HalfBits half_of(float x) { HalfBits y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
// Rounded once, as through float64, and exact for powers of two. Above 2**126 it is subnormal, which is kept.
GRADSCALE_FUNCTION float reciprocal(float x) { float y; asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif
GRADSCALE_FUNCTION double product(double x, float y) { return x * double_of(y); }
GRADSCALE_FUNCTION double double_of(double x) { return x; }

// Widening is exact.
GRADSCALE_FUNCTION float widened(Half x) { return single_of(x.bits); }
GRADSCALE_FUNCTION float widened(BFloat x) { return __uint_as_float((unsigned int)x.bits << 16); }
GRADSCALE_FUNCTION float widened(float x) { return x; }
GRADSCALE_FUNCTION double widened(double x) { return x; }

// Narrowing rounds to the nearest, ties to even; NaN stays NaN.
GRADSCALE_FUNCTION void narrow(float wide, Half* stored) { stored->bits = half_of(wide); }
GRADSCALE_FUNCTION void narrow(float wide, BFloat* stored) {
    unsigned int bits = __float_as_uint(wide);
    bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    stored->bits = (unsigned short)(is_nan ? bits >> 16 | 0x40u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

GRADSCALE_FUNCTION void narrow(float wide, float* stored) { *stored = wide; }
GRADSCALE_FUNCTION void narrow(float wide, double* stored) { *stored = double_of(wide); }
GRADSCALE_FUNCTION void narrow(double wide, double* stored) { *stored = wide; }
GRADSCALE_FUNCTION void narrow(double wide, float* stored) { *stored = single_of(wide); }

// By the exponent, which no fast-math option of a compiler takes for granted.
GRADSCALE_FUNCTION bool is_bad(Half x) { return (x.bits & 0x7C00u) == 0x7C00u; }
GRADSCALE_FUNCTION bool is_bad(BFloat x) { return (x.bits & 0x7F80u) == 0x7F80u; }
GRADSCALE_FUNCTION bool is_bad(float x) { return (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u; }
GRADSCALE_FUNCTION bool is_bad(double x) { return (__double_as_longlong(x) >> 52 & 0x7FF) == 0x7FF; }

// Elements that are read or written at once: as many as fit 16 bytes of the wider type.
template <typename In, typename Out>
struct Width {
    static const int value = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T elements[N];
};

// What a thread has found in the elements that it has stored.
struct Verdict {
    bool bad = false;
    template <typename Out> GRADSCALE_FUNCTION void count(Out stored) { bad |= is_bad(stored); }
};

struct VerdictAndSquares {
    bool bad = false;
    double squares = 0.0;
    template <typename Out> GRADSCALE_FUNCTION void count(Out stored) {
        bad |= is_bad(stored);
        const double wide = double_of(widened(stored));
        squares += wide * wide;
    }
};

template <typename In, typename Out, typename Found>
GRADSCALE_FUNCTION void unscale_one(const In* source, Out* target, float inverse, Found& found) {
    Out stored;
    narrow(product(widened(*source), inverse), &stored);
    *target = stored;
    found.count(stored);
}

// A chunk, of which this thread takes every 256th pack.
template <typename In, typename Out, typename Found>
GRADSCALE_FUNCTION void unscale_dense(const In* source, Out* target, int size, float inverse, Found& found) {
    const int width = Width<In, Out>::value, thread = threadIdx.x;
    // Packs that a thread reads before it waits for the first: memory has to be asked for more than there are threads.
    const int kInFlight = 4;
    // Addresses out of a table may be of any memory, which each access would look up, unless the compiler knows better.
    __builtin_assume(__isGlobal(source));
    __builtin_assume(__isGlobal(target));
    typedef Pack<In, width> Sources;
    typedef Pack<Out, width> Targets;
    // The first element from which on both can be moved in packs; `size` if there is none.
    int head = 0;
    while (head < size && head < width &&
           ((Address)(source + head) % sizeof(Sources) != 0 || (Address)(target + head) % sizeof(Targets) != 0)) {
        ++head;
    }
    if (head == width) head = size;
    const int packs = (size - head) / width, tail = head + packs * width;
    // The elements at both ends; before the packs, which need the registers.
    for (int n = thread; n < head + size - tail; n += kThreads) {
        const int k = n < head ? n : tail + n - head;
        unscale_one(source + k, target + k, inverse, found);
    }
    const Sources* from = (const Sources*)(source + head);
    Targets* to = (Targets*)(target + head);
    const auto store = [&](int i, const Sources& read) {
        Targets made;
        #pragma unroll
        for (int k = 0; k < width; ++k) unscale_one(read.elements + k, made.elements + k, inverse, found);
        to[i] = made;
    };
    int i = thread;
    for (; i + (kInFlight - 1) * kThreads < packs; i += kInFlight * kThreads) {
        Sources read[kInFlight];
        #pragma unroll
        for (int n = 0; n < kInFlight; ++n) read[n] = from[i + n * kThreads];
        #pragma unroll
        for (int n = 0; n < kInFlight; ++n) store(i + n * kThreads, read[n]);
    }
    #pragma unroll 1  // three at most
    for (; i < packs; i += kThreads) {
        // Read at once: through a reference each element would be.
        const Sources read = from[i];
        store(i, read);
    }
}

// Which arrays are cut into which chunks, as plan.py has it.
struct Table {
    const Row* rows;
    const Chunk* chunks;
    int chunk_size;
};

// What arrays are multiplied by, computed once the row of a chunk has been asked for: neither load waits for the other.
struct Reciprocal {
    float scale;
    GRADSCALE_FUNCTION float operator()() const { return reciprocal(scale); }
};
struct Factor {
    float factor;
    GRADSCALE_FUNCTION float operator()() const { return factor; }
};

// The chunk of this block.
template <typename In, typename Out, typename By, typename Found>
GRADSCALE_FUNCTION void unscale_chunk(const Table& table, By by, Found& found) {
    const Chunk chunk = table.chunks[blockIdx.x];
    const Row row = table.rows[chunk.row];
    const float inverse = by();
    const Index begin = (Index)chunk.number * table.chunk_size, left = row.size - begin;
    const int size = left < table.chunk_size ? (int)left : table.chunk_size;
    unscale_dense((const In*)row.source + begin, (Out*)row.target + begin, size, inverse, found);
}

// The sum over the threads of a block, in an order that is always the same; thread 0 gets it.
GRADSCALE_FUNCTION double sum_of_block(double x) {
    __shared__ double of_warps[kThreads / 32];
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / 32; ++warp) x += of_warps[warp];
    }
    return x;
}

template <typename In, typename Out, typename By>
GRADSCALE_FUNCTION void unscale_block(const Table& table, By by, int* nonfinite) {
    Verdict found;
    unscale_chunk<In, Out>(table, by, found);
    if (nonfinite != nullptr && __syncthreads_or(found.bad) && threadIdx.x == 0) atomicMax(nonfinite, 1);
}

template <typename In, typename Out>
GRADSCALE_FUNCTION void square_block(const Table& table, Reciprocal by, int* nonfinite, double* squares) {
    VerdictAndSquares found;
    unscale_chunk<In, Out>(table, by, found);
    const double sum = sum_of_block(found.squares);
    const bool bad = __syncthreads_or(found.bad);
    if (threadIdx.x == 0) {
        squares[blockIdx.x] = sum;
        if (bad) atomicMax(nonfinite, 1);
    }
}

}  // namespace gradscale

#define GRADSCALE_TABLE const gradscale::Row* rows, const gradscale::Chunk* chunks, int chunk_size

#define GRADSCALE_unscale 1
#define GRADSCALE_square 2
#define GRADSCALE_clip 3
#define GRADSCALE_add 4

// Of each pair of a gradient's type and that of the array it is written to; and of each type.
#ifdef GRADSCALE_SOURCE
#define GRADSCALE_ONE(kernel, ...) kernel(__VA_ARGS__)
#define GRADSCALE_PAIRS(kernel) GRADSCALE_ONE(kernel, GRADSCALE_SOURCE, GRADSCALE_TARGET)
#define GRADSCALE_TYPES(kernel) GRADSCALE_ONE(kernel, GRADSCALE_SOURCE)
#else
#define GRADSCALE_PAIRS(kernel)                                                                 \
    kernel(float16, float16) kernel(float16, float32) kernel(float16, float64)                  \
    kernel(bfloat16, bfloat16) kernel(bfloat16, float32) kernel(bfloat16, float64)              \
    kernel(float32, float16) kernel(float32, bfloat16) kernel(float32, float32)                 \
    kernel(float32, float64) kernel(float64, float32) kernel(float64, float64)
#define GRADSCALE_TYPES(kernel) kernel(float16) kernel(bfloat16) kernel(float32) kernel(float64)
#endif

#if !defined(GRADSCALE_ONLY) || GRADSCALE_ONLY == GRADSCALE_unscale

#define GRADSCALE_UNSCALE(source, target)                               \
    GRADSCALE_KERNEL unscale_##source##_##target(                       \
        GRADSCALE_TABLE, const float* scale, int* nonfinite             \
    ) {                                                                 \
        const gradscale::Table table = {rows, chunks, chunk_size};      \
        gradscale::unscale_block<gradscale::source, gradscale::target>( \
            table, gradscale::Reciprocal{*scale}, nonfinite);           \
    }

GRADSCALE_PAIRS(GRADSCALE_UNSCALE)

#endif
#if !defined(GRADSCALE_ONLY) || GRADSCALE_ONLY == GRADSCALE_square

#define GRADSCALE_SQUARE(source, target)                                     \
    GRADSCALE_KERNEL square_##source##_##target(                             \
        GRADSCALE_TABLE, const float* scale, int* nonfinite, double* squares \
    ) {                                                                      \
        const gradscale::Table table = {rows, chunks, chunk_size};           \
        gradscale::square_block<gradscale::source, gradscale::target>(       \
            table, gradscale::Reciprocal{*scale}, nonfinite, squares);       \
    }

GRADSCALE_PAIRS(GRADSCALE_SQUARE)

#endif
#if !defined(GRADSCALE_ONLY) || GRADSCALE_ONLY == GRADSCALE_clip

// Gradients that need no clipping are not touched: neither by 1, nor by a factor that is not a number.
#define GRADSCALE_CLIP(type)                                                   \
    GRADSCALE_KERNEL clip_##type(GRADSCALE_TABLE, const float* factor) {       \
        const gradscale::Table table = {rows, chunks, chunk_size};             \
        if (*factor < 1.0f)                                                    \
            gradscale::unscale_block<gradscale::type, gradscale::type>(        \
                table, gradscale::Factor{*factor}, nullptr);                   \
    }

GRADSCALE_TYPES(GRADSCALE_CLIP)

#endif
#if !defined(GRADSCALE_ONLY) || GRADSCALE_ONLY == GRADSCALE_add

// One block adds up the sums of the chunks.
GRADSCALE_KERNEL add_squares(const double* squares, gradscale::Index chunks, double* sum) {
    double mine = 0.0;
    for (gradscale::Index chunk = threadIdx.x; chunk < chunks; chunk += GRADSCALE_THREADS) mine += squares[chunk];
    mine = gradscale::sum_of_block(mine);
    if (threadIdx.x == 0) *sum = mine;
}

#endif
