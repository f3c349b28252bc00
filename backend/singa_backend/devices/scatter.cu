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

#define FLOAT(T, WIDEN, NARROW) \
    __device__ T sum(T a, T b) { return NARROW(WIDEN(a) + WIDEN(b)); } \
    __device__ T product(T a, T b) { return NARROW(WIDEN(a) * WIDEN(b)); } \
    __device__ bool reaches(T a, T b) { return WIDEN(a) >= WIDEN(b); } \
    __device__ bool undefined(T a) { return WIDEN(a) != WIDEN(a); }
FLOAT(float, , )
FLOAT(double, , )
FLOAT(__half, __half2float, __float2half_rn)
FLOAT(__nv_bfloat16, __bfloat162float, __float2bfloat16_rn)

template <class R>
__device__ Complex<R> sum(Complex<R> a, Complex<R> b) { return {a.re + b.re, a.im + b.im}; }
template <class R>
__device__ Complex<R> product(Complex<R> a, Complex<R> b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
template <class R>
__device__ bool undefined(Complex<R> a) { return a.re != a.re || a.im != a.im; }
template <class R>
__device__ bool reaches(Complex<R> a, Complex<R> b) {  // by the real part, then by the imaginary part
    return (a.re > b.re && a.im == a.im && b.im == b.im) || (a.re == b.re && a.im >= b.im);
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
