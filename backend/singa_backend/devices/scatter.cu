// Combines rows of `values` with rows of `out`: one thread for each element of each row that is written.
//
// `order` sorts the rows of `values` by the row of `out` that they meet, and keeps the order of equal ones.  The thread of the first
// of them combines them all, one after the other: the result is that of a loop over `values`, whatever the order of the threads.
// Elements of 2 bytes are rounded after every step, as NumPy rounds them.  No multiplication is fused with an addition (--fmad=false).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Mode { NONE, ADD, MUL, MAX, MIN };

template <class R>
struct Complex {
    R re, im;
};

// Integers wrap; the sum of two truth values is "or", their product "and".
template <class T>
__device__ T sum(T a, T b) { return T((unsigned long long)a + (unsigned long long)b); }
template <class T>
__device__ T product(T a, T b) { return T((unsigned long long)a * (unsigned long long)b); }
template <class T>
__device__ bool reaches(T a, T b) { return a >= b; }
template <class T>
__device__ bool undefined(T) { return false; }

// CuPy compiles with -ftz=true, which flushes subnormal float32 numbers in C++; these instructions keep them, as NumPy does.
__device__ float sum(float a, float b) { float c; asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
__device__ float difference(float a, float b) { float c; asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
__device__ float product(float a, float b) { float c; asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
__device__ bool reaches(float a, float b) {
    int c;
    asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(c) : "f"(a), "f"(b));
    return c;
}
__device__ bool undefined(float a) { return !reaches(a, a); }

__device__ double sum(double a, double b) { return a + b; }
__device__ double difference(double a, double b) { return a - b; }
__device__ double product(double a, double b) { return a * b; }
__device__ bool undefined(double a) { return a != a; }

#define SHORT(T, WIDEN, NARROW) \
    __device__ T sum(T a, T b) { return NARROW(sum(WIDEN(a), WIDEN(b))); } \
    __device__ T product(T a, T b) { return NARROW(product(WIDEN(a), WIDEN(b))); } \
    __device__ bool reaches(T a, T b) { return reaches(WIDEN(a), WIDEN(b)); } \
    __device__ bool undefined(T a) { return undefined(WIDEN(a)); }
SHORT(__half, __half2float, __float2half_rn)
SHORT(__nv_bfloat16, __bfloat162float, __float2bfloat16_rn)

template <class R>
__device__ Complex<R> sum(Complex<R> a, Complex<R> b) { return {sum(a.re, b.re), sum(a.im, b.im)}; }
template <class R>
__device__ Complex<R> product(Complex<R> a, Complex<R> b) {
    return {difference(product(a.re, b.re), product(a.im, b.im)), sum(product(a.re, b.im), product(a.im, b.re))};
}
template <class R>
__device__ bool undefined(Complex<R> a) { return undefined(a.re) || undefined(a.im); }
template <class R>
__device__ bool reaches(Complex<R> a, Complex<R> b) {  // by the real part, then by the imaginary part
    if (!reaches(a.re, b.re)) return false;
    return reaches(b.re, a.re) ? reaches(a.im, b.im) : !undefined(a.im) && !undefined(b.im);
}

template <class T, int mode>
__device__ T combined(T a, T b) {
    if constexpr (mode == ADD) return sum(a, b);
    if constexpr (mode == MUL) return product(a, b);
    if constexpr (mode == MAX) return reaches(a, b) || undefined(a) ? a : b;
    if constexpr (mode == MIN) return reaches(b, a) || undefined(a) ? a : b;
    return b;
}

// rows: of `out`; n: of `values`; inner: elements of a row
#define PARAMETERS(T) \
    T *out, const long long *place, const long long *order, const T *values, long long rows, long long n, long long inner
#define ARGUMENTS out, place, order, values, rows, n, inner

// A row that `out` does not have is passed over: xp.indices reports it.
template <class T, int mode>
__device__ void scatter(PARAMETERS(T)) {
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread < n * inner) {
        const long long first = thread / inner, column = thread % inner, row = place[order[first]];
        const bool begins = first == 0 || place[order[first - 1]] != row;
        if (begins && row >= 0 && row < rows) {
            T result = out[row * inner + column];
            for (long long i = first; i < n && place[order[i]] == row; i++) result = combined<T, mode>(result, values[order[i] * inner + column]);
            out[row * inner + column] = result;
        }
    }
}
