// What a CUDA kernel may use, for g++: indices of threads, barriers, shuffles, votes, atomics, intrinsics, shared memory.
//
// The threads of a block run one after the other.  If the kernel waits (a barrier, a shuffle), each thread has its own stack, and a
// wait switches to the next thread.  The order of threads and blocks is ascending or descending: a kernel that lacks a barrier then
// computes different bits.
#pragma once
#include <cassert>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <sys/mman.h>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "kernel.h"

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __device__
#define __global__
#define __host__
#define __shared__ static __attribute__((section("fake_shared")))
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

using std::abs;
using std::fmod;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::pow;
using std::signbit;

// What the driver knows of the thread that runs (watch.h).
extern "C" unsigned fake_thread, fake_threads, fake_epoch;

// Constants for kernels, as in CUDA: g++ adds no call of watch.h to their reads.
extern const uint3 threadIdx __asm__("fake_thread_index"), blockIdx __asm__("fake_block_index");
extern const uint3 blockDim __asm__("fake_block_size"), gridDim __asm__("fake_grid_size");
asm(R"(
.irp name, fake_thread_index, fake_block_index, fake_block_size, fake_grid_size
.local \name
.comm \name, 16, 16
.endr
)");
static inline __attribute__((always_inline)) void fake_set(const uint3& to, unsigned x, unsigned y, unsigned z) {
    uint3& written = const_cast<uint3&>(to);
    written.x = x, written.y = y, written.z = z;
}
static inline __attribute__((always_inline)) void fake_set(const uint3& to, const uint3& from) { fake_set(to, from.x, from.y, from.z); }
static const int warpSize = 32;

// The shared memory of fixed size of all kernels of this library; absent without any.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_fake_shared[], __stop_fake_shared[];

// ---- Subnormal numbers
// With -ftz=true, NVRTC's option that CuPy always passes, float32 instructions read subnormal numbers as zeros of their signs, and
// write such zeros in their places; float64 instructions keep them.  The processor's mode flushes both, so that it is on for the
// time of one float32 instruction: these macros of the assembler replace the instructions that g++ writes for float32.  Functions
// of the mathematical library are replaced by the linker (build.py); those that only move bits (copysign, nextafter) flush nothing.
asm(R"(
.ifdef FAKE_FLUSHES
.pushsection .rodata
.balign 4
.local fake_flush, fake_keep, fake_one
fake_flush: .long 0x9fc0
fake_keep: .long 0x1f80
fake_one: .long 0x3f800000
.popsection
.irp name, addss, subss, mulss, divss, sqrtss, minss, maxss, comiss, ucomiss, cmpss, cmpeqss, cmpneqss, cmpltss, cmpnltss, cmpless, cmpnless, cmpordss, cmpunordss, cvtss2sd, cvtsd2ss
.macro \name operands:vararg
    ldmxcsr fake_flush(%rip)
    {load} \name \operands
    ldmxcsr fake_keep(%rip)
.endm
.endr
.irp name, andps, xorps
.macro \name source, target
    {load} \name \source, \target
    mulss fake_one(%rip), \target
.endm
.endr
.endif
)");
// What compiler.py writes in the place of PTX, whose instructions without .ftz keep subnormal numbers.
extern "C" float fake_ptx_add(float, float), fake_ptx_sub(float, float), fake_ptx_mul(float, float);
extern "C" int fake_ptx_ge(float, float);

template <typename T, int n, bool c, bool i> class CArray;  // of CuPy

#define FAKE_UNWATCHED __attribute__((no_sanitize("thread")))  // without calls of watch.h

// ---- Threads
namespace fake {

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Thread {
    void* stack_pointer;
    uint3 index;
    State state;
    unsigned lanes;  // that must arrive at the warp's barrier
};

const int MOST_THREADS = 1024, STACK = 64 << 10, LANES = 32;
static Thread threads[MOST_THREADS];
static int count, running;
static void* scheduler;
static bool has_stacks;
static void (*body)(void*);
static void* argument;
static char* shared_memory;  // dynamic; the page after its end cannot be accessed
static unsigned long long slots[MOST_THREADS][2];
static unsigned first_thread;  // of the block, counted through all blocks

// Saves the registers that a function must keep on this stack, and continues on the other.
extern "C" void fake_switch(void** from, void* to);
asm(R"(
.text
.local fake_switch
.type fake_switch, @function
fake_switch:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
.size fake_switch, . - fake_switch
)");

FAKE_UNWATCHED static void enter() {
    body(argument);
    threads[running].state = DONE;
    fake_switch(&threads[running].stack_pointer, scheduler);
    abort();  // a thread that is done is not continued
}

FAKE_UNWATCHED static void wait(State state, unsigned lanes = ~0u) {
    if (!has_stacks) {
        fprintf(stderr, "fakecuda: a kernel waits that compiler.py took for one that does not\n");
        abort();
    }
    Thread& self = threads[running];
    self.state = state;
    self.lanes = lanes;
    fake_switch(&self.stack_pointer, scheduler);
    fake_set(threadIdx, self.index);
}

static void* page_end(size_t size) {  // memory of `size` bytes before a page that cannot be accessed
    const size_t page = 4096, whole = (size + page - 1) / page * page;
    char* mapping = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(mapping + whole, page, PROT_NONE);
    return mapping + whole - size;
}

// Lets the warps continue whose lanes have all arrived.
FAKE_UNWATCHED static bool release_warps() {
    bool released = false;
    for (int warp = 0; warp < count; warp += LANES) {
        const int size = count - warp < LANES ? count - warp : LANES;
        unsigned waiting = 0, done = 0;
        for (int i = 0; i < size; i++) {
            waiting |= unsigned(threads[warp + i].state == AT_WARP_BARRIER) << i;
            done |= unsigned(threads[warp + i].state == DONE) << i;
        }
        const unsigned present = size == LANES ? ~0u : (1u << size) - 1;
        for (int i = 0; i < size; i++)
            if (threads[warp + i].state == AT_WARP_BARRIER) {
                const unsigned lanes = threads[warp + i].lanes & present & ~done;
                if (lanes & ~waiting) continue;
                for (int k = 0; k < size; k++)
                    if (lanes >> k & 1) threads[warp + k].state = READY;
                released = true;
                break;
            }
    }
    return released;
}

FAKE_UNWATCHED static bool release_block() {
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (threads[i].state == AT_WARP_BARRIER || threads[i].state == READY) return false;
        any |= threads[i].state == AT_BLOCK_BARRIER;
    }
    for (int i = 0; i < count; i++)
        if (threads[i].state == AT_BLOCK_BARRIER) threads[i].state = READY;
    return any;
}

FAKE_UNWATCHED static uint3 index_of(int i) {
    uint3 index;
    index.x = i % blockDim.x, index.y = i / blockDim.x % blockDim.y, index.z = i / (blockDim.x * blockDim.y);
    return index;
}

// Runs a block whose threads wait for each other.  Returns what failed, or null.
FAKE_UNWATCHED static const char* run_block(bool descending) {
    static char* stacks = (char*)mmap(nullptr, (size_t)STACK * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    has_stacks = true;
    for (int i = 0; i < count; i++) {
        void** top = (void**)(stacks + (size_t)STACK * (i + 1));
        *--top = nullptr;
        *--top = (void*)enter;
        for (int k = 0; k < 6; k++) *--top = nullptr;  // the registers that fake_switch restores
        threads[i] = {top, index_of(i), READY, 0};
    }
    for (;;) {
        bool all_done = true;
        for (int k = 0; k < count; k++) {
            running = descending ? count - 1 - k : k;
            Thread& thread = threads[running];
            if (thread.state == READY) {
                fake_set(threadIdx, thread.index), fake_thread = first_thread + running;
                fake_switch(&scheduler, thread.stack_pointer);
            }
            all_done &= thread.state == DONE;
        }
        if (all_done) break;
        fake_epoch++;
        if (!release_warps() && !release_block()) return "threads wait for each other at different barriers";
    }
    has_stacks = false;
    return nullptr;
}

template <class... P>
struct Call {
    void (*kernel)(P...);
    void** arguments;
    template <size_t... I>
    FAKE_UNWATCHED void operator()(std::index_sequence<I...>) { kernel(*(typename std::remove_reference<P>::type*)arguments[I]...); }
    FAKE_UNWATCHED static void run(void* self) { (*(Call*)self)(std::index_sequence_for<P...>()); }
};

template <class... P>
FAKE_UNWATCHED static const char* launch(void (*kernel)(P...), const FakeLaunch& how, void** arguments, bool waits) {
    fake_set(gridDim, how.grid[0], how.grid[1], how.grid[2]);
    fake_set(blockDim, how.block[0], how.block[1], how.block[2]);
    count = how.block[0] * how.block[1] * how.block[2];
    has_stacks = false;
    shared_memory = nullptr;
    if (how.shared) {
        static unsigned size;
        static char* memory;
        if (size != how.shared) memory = (char*)page_end(size = how.shared);
        shared_memory = memory;
    }
    Call<P...> call{kernel, arguments};
    body = Call<P...>::run;
    argument = &call;
    const size_t blocks = (size_t)how.grid[0] * how.grid[1] * how.grid[2];
    for (size_t k = 0; k < blocks; k++) {
        const size_t b = how.descending ? blocks - 1 - k : k;
        fake_set(blockIdx, b % how.grid[0], b / how.grid[0] % how.grid[1], b / ((size_t)how.grid[0] * how.grid[1]));
        first_thread = b * count, fake_threads = count;
        if (shared_memory) memset(shared_memory, 0xCD, how.shared);
        if (__start_fake_shared) memset(__start_fake_shared, 0xCD, __stop_fake_shared - __start_fake_shared);
        if (waits) {
            if (const char* failure = run_block(how.descending)) return failure;
            continue;
        }
        for (int i = 0; i < count; i++) {
            const int k = how.descending ? count - 1 - i : i;
            fake_set(threadIdx, index_of(k)), fake_thread = first_thread + k;
            body(argument);
        }
    }
    return nullptr;
}

template <class T> struct Points : std::is_pointer<T> {};
template <class T, int n, bool c, bool i> struct Points<CArray<T, n, c, i>> : std::true_type {};
template <class... P>
struct Pointers {
    static const bool* of(void (*)(P...)) {
        static const bool pointers[] = {Points<P>::value..., false};
        return pointers;
    }
};
template <class... P>
static const bool* pointers_of(void (*kernel)(P...)) { return Pointers<P...>::of(kernel); }

template <class... P>
struct Sizes {
    static const size_t* of(void (*)(P...)) {
        static const size_t sizes[] = {sizeof(P)..., 0};
        return sizes;
    }
};
template <class... P>
static const size_t* sizes_of(void (*kernel)(P...)) { return Sizes<P...>::of(kernel); }
template <class... P>
static constexpr int parameters_of(void (*)(P...)) { return sizeof...(P); }

static inline unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

// The value of another lane of the warp.
template <class T>
static T exchange(unsigned lanes, T value, int lane) {
    static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
    const unsigned self = thread_number(), source = (self & ~31u) + lane;
    memcpy(slots[self], &value, sizeof value);
    wait(AT_WARP_BARRIER, lanes);
    T result;
    memcpy(&result, slots[source < (unsigned)count ? source : self], sizeof result);
    wait(AT_WARP_BARRIER, lanes);
    return result;
}

static unsigned vote(unsigned lanes, bool value) {
    const unsigned self = thread_number(), first = self & ~31u;
    slots[self][0] = value;
    wait(AT_WARP_BARRIER, lanes);
    unsigned result = 0;
    for (unsigned i = 0; i < 32 && first + i < (unsigned)count; i++)
        if (lanes >> i & 1 && slots[first + i][0]) result |= 1u << i;
    wait(AT_WARP_BARRIER, lanes);
    return result;
}

template <class To, class From>
static inline To bits(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From), "bits are kept");
    memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace fake

// ---- Barriers, shuffles, votes
static inline void __syncthreads() { fake::wait(fake::AT_BLOCK_BARRIER); }
static inline void __syncwarp(unsigned lanes = ~0u) { fake::wait(fake::AT_WARP_BARRIER, lanes); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T>
static T __shfl_sync(unsigned lanes, T value, int lane, int width = 32) {
    const int self = fake::thread_number() & 31;
    return fake::exchange(lanes, value, (self & ~(width - 1)) | (lane & (width - 1)));
}
template <class T>
static T __shfl_xor_sync(unsigned lanes, T value, int mask, int width = 32) {
    const int self = fake::thread_number() & 31, lane = self ^ mask;
    return fake::exchange(lanes, value, (lane & ~(width - 1)) <= (self & ~(width - 1)) ? lane : self);
}
template <class T>
static T __shfl_down_sync(unsigned lanes, T value, unsigned delta, int width = 32) {
    const int self = fake::thread_number() & 31, lane = self + delta;
    return fake::exchange(lanes, value, (lane & ~(width - 1)) == (self & ~(width - 1)) ? lane : self);
}
template <class T>
static T __shfl_up_sync(unsigned lanes, T value, unsigned delta, int width = 32) {
    const int self = fake::thread_number() & 31, lane = self - (int)delta;
    return fake::exchange(lanes, value, lane >= (self & ~(width - 1)) ? lane : self);
}
static inline unsigned __ballot_sync(unsigned lanes, int value) { return fake::vote(lanes, value); }
static inline int __any_sync(unsigned lanes, int value) { return fake::vote(lanes, value) != 0; }
static inline int __all_sync(unsigned lanes, int value) { return fake::vote(lanes, !value) == 0; }
static inline unsigned __activemask() { return ~0u; }
static inline int __syncthreads_or(int value) {
    static int result;
    __syncthreads();
    result = 0;
    __syncthreads();
    result |= value;
    __syncthreads();
    return result;
}

// ---- Atomics: one processor thread runs all threads of the device
#define FAKE_ATOMIC(T) \
    FAKE_UNWATCHED static inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; } \
    FAKE_UNWATCHED static inline T atomicSub(T* p, T v) { T old = *p; *p = old - v; return old; } \
    FAKE_UNWATCHED static inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
#define FAKE_INTEGER_ATOMIC(T) \
    FAKE_ATOMIC(T) \
    FAKE_UNWATCHED static inline T atomicMax(T* p, T v) { T old = *p; if (v > old) *p = v; return old; } \
    FAKE_UNWATCHED static inline T atomicMin(T* p, T v) { T old = *p; if (v < old) *p = v; return old; } \
    FAKE_UNWATCHED static inline T atomicAnd(T* p, T v) { T old = *p; *p = old & v; return old; } \
    FAKE_UNWATCHED static inline T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; } \
    FAKE_UNWATCHED static inline T atomicXor(T* p, T v) { T old = *p; *p = old ^ v; return old; } \
    FAKE_UNWATCHED static inline T atomicCAS(T* p, T expected, T v) { T old = *p; if (old == expected) *p = v; return old; }
FAKE_INTEGER_ATOMIC(int)
FAKE_INTEGER_ATOMIC(unsigned)
FAKE_INTEGER_ATOMIC(unsigned long long)
FAKE_ATOMIC(float)
FAKE_ATOMIC(double)
FAKE_UNWATCHED static inline unsigned short atomicCAS(unsigned short* p, unsigned short expected, unsigned short v) {
    unsigned short old = *p;
    if (old == expected) *p = v;
    return old;
}

// ---- Intrinsics
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i); return r; }
static inline int __float_as_int(float x) { return fake::bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return fake::bits<unsigned>(x); }
static inline float __int_as_float(int x) { return fake::bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return fake::bits<float>(x); }
static inline long long __double_as_longlong(double x) { return fake::bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return fake::bits<double>(x); }
static inline int __double2hiint(double x) { return (int)(fake::bits<unsigned long long>(x) >> 32); }
static inline int __double2loint(double x) { return (int)fake::bits<unsigned long long>(x); }
static inline double __hiloint2double(int high, int low) { return fake::bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
template <class T>
static inline T __ldg(const T* p) { return *p; }
static inline float __expf(float x) { return expf(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float rsqrt(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline long long clock64() { return 0; }
#define FAKE_EXTREMES(T) \
    static inline T min(T a, T b) { return b < a ? b : a; } \
    static inline T max(T a, T b) { return a < b ? b : a; }
FAKE_EXTREMES(int)
FAKE_EXTREMES(unsigned)
FAKE_EXTREMES(long)
FAKE_EXTREMES(unsigned long)
FAKE_EXTREMES(long long)
FAKE_EXTREMES(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
// Other pairs of numbers, after promotion: bool and short are int.
template <class A, class B>
using FakePromoted = typename std::enable_if<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value, decltype(A() + B())>::type;
template <class A, class B>
static inline FakePromoted<A, B> min(A a, B b) { return min((FakePromoted<A, B>)a, (FakePromoted<A, B>)b); }
template <class A, class B>
static inline FakePromoted<A, B> max(A a, B b) { return max((FakePromoted<A, B>)a, (FakePromoted<A, B>)b); }

#define FAKE_KERNEL(symbol, expression, waits) \
    static const char* fake_run_##symbol(const FakeLaunch& how, void** arguments) { return fake::launch(expression, how, arguments, waits); } \
    extern "C" __attribute__((visibility("default"))) const FakeKernel fake_kernel_##symbol = { \
        #expression, fake::parameters_of(expression), fake::sizes_of(expression), fake::pointers_of(expression), fake_run_##symbol};

// What finds an element reads no array: without the calls of watch.h, kernels take half the time.
#undef __device__
#define __device__ __attribute__((no_sanitize("thread")))
#include <cupy/carray.cuh>
#undef __device__
#define __device__
#include <cupy/atomics.cuh>
#include <cupy/bfloat16.cuh>
#include <cupy/complex.cuh>
#include <cupy/float16.cuh>
#include <cupy/math_constants.h>

// NVRTC does not have the macros of the standard headers.
#undef INFINITY
#undef NAN
#undef HUGE_VAL
#undef HUGE_VALF
#undef HUGE_VALL
#undef M_E
#undef M_PI
#undef M_SQRT1_2
#undef M_SQRT2
#undef CHAR_BIT
#undef SHRT_MAX
#undef SHRT_MIN
#undef INT_MAX
#undef INT_MIN
#undef UINT_MAX
#undef LONG_MAX
#undef LONG_MIN
#undef ULONG_MAX
#undef LLONG_MAX
#undef LLONG_MIN
#undef ULLONG_MAX
#undef INT32_MAX
#undef INT32_MIN
#undef INT64_MAX
#undef INT64_MIN
