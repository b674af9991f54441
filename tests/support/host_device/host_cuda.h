// CUDA on the host: the kernels of a source, with a thread for each thread of a block, barriers, votes and shuffles.
//
// Each CUDA thread has a stack of its own and runs until it comes to a barrier; then the next one does. A barrier opens
// when all have come to it. The order of the threads turns around at each barrier, and the next block begins with the
// other one, so that a barrier that is missing shows.
// Blocks run one after the other, and launches as well, as if each device had one stream.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// Blocks run one after the other.
#define __shared__ static

struct Place {
    unsigned int x = 0, y = 0, z = 0;
};

// Not static: they change in the midst of a kernel, in a call that the compiler cannot look into.
Place threadIdx, blockIdx, blockDim, gridDim;

namespace host {

const unsigned int kWarp = 32;
const std::size_t kStack = 64 * 1024;

enum State { kRuns, kWaitsForBlock, kWaitsForWarp, kIsOver };

struct Thread {
    ucontext_t context;
    State state;
    int line;            // of the barrier that it waits at
    double given;        // to the other threads at that barrier
    unsigned int other;  // the lane whose gift it takes
    double taken;
};

struct Block {
    ucontext_t scheduler;
    std::vector<Thread> threads;
    std::vector<char> stacks;
    unsigned int current;
    void (*call)(void*);
    void* arguments;
    char failure[200];
};

Block block;
std::mutex launching;

double wait(State state, int line, double given, unsigned int other) {
    Thread& mine = block.threads[block.current];
    mine.state = state;
    mine.line = line;
    mine.given = given;
    mine.other = other;
    swapcontext(&mine.context, &block.scheduler);
    return mine.taken;
}

void begin() {
    block.call(block.arguments);
    block.threads[block.current].state = kIsOver;
}

// Tells whether threads from `first` on wait at one barrier, all of them.
bool are_there(unsigned int first, unsigned int count, State state) {
    for (unsigned int k = first; k < first + count; ++k) {
        if (block.threads[k].state != state || block.threads[k].line != block.threads[first].line) return false;
    }
    return true;
}

bool opens_block() {
    const unsigned int count = block.threads.size();
    if (!are_there(0, count, kWaitsForBlock)) return false;
    bool any = false;
    for (const Thread& one : block.threads) any |= one.given != 0.0;
    for (Thread& one : block.threads) {
        one.taken = any;
        one.state = kRuns;
    }
    return true;
}

bool opens_warp(unsigned int first) {
    if (first + kWarp > block.threads.size() || !are_there(first, kWarp, kWaitsForWarp)) return false;
    for (unsigned int lane = 0; lane < kWarp; ++lane) {
        Thread& one = block.threads[first + lane];
        // Of a lane that is not there each keeps its own.
        one.taken = block.threads[first + (one.other < kWarp ? one.other : lane)].given;
    }
    for (unsigned int lane = 0; lane < kWarp; ++lane) block.threads[first + lane].state = kRuns;
    return true;
}

// Runs the threads of a block to their end; returns whether they have come to it.
bool run_block() {
    const unsigned int count = block.threads.size();
    for (unsigned int k = 0; k < count; ++k) {
        Thread& one = block.threads[k];
        one.state = kRuns;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = &block.stacks[k * kStack];
        one.context.uc_stack.ss_size = kStack;
        one.context.uc_link = &block.scheduler;
        makecontext(&one.context, begin, 0);
    }
    for (bool forwards = blockIdx.x % 2 == 0;; forwards = !forwards) {
        unsigned int over = 0;
        for (unsigned int n = 0; n < count; ++n) {
            const unsigned int k = forwards ? n : count - 1 - n;
            if (block.threads[k].state == kRuns) {
                block.current = threadIdx.x = k;
                swapcontext(&block.scheduler, &block.threads[k].context);
            }
            over += block.threads[k].state == kIsOver;
        }
        if (over == count) return true;
        bool opened = opens_block();
        for (unsigned int first = 0; first < count; first += kWarp) opened |= opens_warp(first);
        if (!opened) {
            const Thread& one = block.threads[0];
            const Thread* another = &one;
            for (const Thread& other : block.threads) {
                if (other.state != one.state || other.line != one.line) another = &other;
            }
            const char* names[] = {"runs", "waits for its block", "waits for its warp", "is over"};
            std::snprintf(block.failure, sizeof block.failure,
                          "the threads of block %u do not meet: one %s (line %d), another %s (line %d)", blockIdx.x,
                          names[one.state], one.line, names[another->state], another->line);
            return false;
        }
    }
}

// Runs a kernel with arguments, in so many blocks of so many threads. Returns what went wrong, or null.
typedef std::function<const char*(unsigned int blocks, unsigned int threads)> Launch;

template <typename... Types, std::size_t... Numbers>
Launch prepared(void (*kernel)(Types...), void* const* values, bool meets, std::index_sequence<Numbers...>) {
    // As CUDA does, which copies them when it is asked to launch.
    std::tuple<Types...> arguments(*static_cast<Types*>(values[Numbers])...);
    return [kernel, arguments, meets](unsigned int blocks, unsigned int threads) -> const char* {
        const std::lock_guard<std::mutex> lock(launching);
        auto call = [&] { std::apply(kernel, arguments); };
        gridDim.x = blocks;
        blockDim.x = threads;
        if (!meets) {
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
                for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) call();
            }
            return nullptr;
        }
        block.call = [](void* it) { (*static_cast<decltype(call)*>(it))(); };
        block.arguments = &call;
        block.threads.resize(threads);
        block.stacks.resize(threads * kStack);
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            if (!run_block()) return block.failure;
        }
        return nullptr;
    };
}

// The values are as cuLaunchKernel has them: where each argument lies. Threads that do not meet need no stacks.
template <typename... Types>
Launch prepared(void (*kernel)(Types...), void* const* values, bool meets = true) {
    return prepared(kernel, values, meets, std::index_sequence_for<Types...>());
}

}  // namespace host

inline void __syncthreads(int line = __builtin_LINE()) { host::wait(host::kWaitsForBlock, line, 0.0, 0); }

inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return host::wait(host::kWaitsForBlock, line, predicate != 0, 0) != 0.0;
}

inline double __shfl_down_sync(unsigned int, double x, unsigned int distance, int line = __builtin_LINE()) {
    return host::wait(host::kWaitsForWarp, line, x, threadIdx.x % host::kWarp + distance);
}

inline int atomicMax(int* address, int value) {
    const int before = *address;
    if (value > before) *address = value;
    return before;
}

#define __builtin_assume(condition)

template <typename To, typename From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To made;
    std::memcpy(&made, &x, sizeof made);
    return made;
}
inline unsigned int __float_as_uint(float x) { return same_bits<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }

// What the kernels say in PTX.
#define GRADSCALE_INSTRUCTIONS

namespace gradscale {

inline float product(float x, float y) { return x * y; }
inline float reciprocal(float x) { return 1.0f / x; }
inline float single_of(double x) { return (float)x; }
inline double double_of(float x) { return x; }

typedef unsigned short HalfBits;

inline float single_of(HalfBits x) {
    const unsigned int sign = (unsigned int)(x & 0x8000u) << 16, magnitude = x & 0x7FFFu;
    if (magnitude >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    // As the bits of a float32 it is too small by 2**112, subnormals included.
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

// Rounds to the nearest, ties to even; NaN stays NaN.
inline HalfBits half_of(float x) {
    const unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (HalfBits)(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return (HalfBits)(sign | 0x7C00u);  // from 65520 on
    if (magnitude < 0x38800000u) {
        // Subnormal: added to 0.5, its last bit lies where that of a float16 is.
        return (HalfBits)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f)));
    }
    const unsigned int rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return (HalfBits)(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace gradscale
