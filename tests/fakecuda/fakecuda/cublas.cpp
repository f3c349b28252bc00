// cuBLAS: the functions that CuPy calls for products, solutions and inverses.  Sums are computed in float64.
#include <complex>
#include <cstdlib>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "factorize.h"
#include "library.h"

namespace {

enum Type { FLOAT = 0, DOUBLE = 1, HALF = 2, COMPLEX = 4, DOUBLE_COMPLEX = 5, BFLOAT16 = 14 };  // cudaDataType
enum Status { SUCCESS = 0, NOT_SUPPORTED = 15 };

template <class T> struct Sum { using type = double; };
template <class T> struct Sum<std::complex<T>> { using type = std::complex<double>; };

template <class T> typename Sum<T>::type load(const T& x) { return typename Sum<T>::type(x); }
double load(const __half& x) { return __half2float(x); }
double load(const __nv_bfloat16& x) { return __bfloat162float(x); }
template <class T, class S> void store(T& x, S value) { x = T(value); }
void store(__half& x, double value) { x = __float2half((float)value); }
void store(__nv_bfloat16& x, double value) { x = __float2bfloat16((float)value); }

template <class T> T conjugate(T x) { return x; }
template <class T> std::complex<T> conjugate(std::complex<T> x) { return std::conj(x); }

// C = alpha * op(A) op(B) + beta * C, columns first
template <class A, class C, class S>
void product(int ta, int tb, int m, int n, int k, S alpha, const A* a, long lda, const A* b, long ldb, S beta, C* c, long ldc) {
    std::vector<S> rows((size_t)m * k), column(k);
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++) {
            S value = load(ta ? a[l + i * lda] : a[i + l * lda]);
            rows[(size_t)i * k + l] = ta == 2 ? conjugate(value) : value;
        }
    for (int j = 0; j < n; j++) {
        for (int l = 0; l < k; l++) {
            S value = load(tb ? b[j + l * ldb] : b[l + j * ldb]);
            column[l] = tb == 2 ? conjugate(value) : value;
        }
        for (int i = 0; i < m; i++) {
            S sum = 0;
            for (int l = 0; l < k; l++) sum += rows[(size_t)i * k + l] * column[l];
            C& result = c[i + j * ldc];
            store(result, beta == S(0) ? alpha * sum : alpha * sum + beta * S(load(result)));  // with beta 0, C may be uninitialized
        }
    }
}

template <class A, class C>
void typed(int ta, int tb, int m, int n, int k, double alpha, const void* a, long lda, const void* b, long ldb, double beta, void* c, long ldc) {
    product<A, C, double>(ta, tb, m, n, k, alpha, (const A*)a, lda, (const A*)b, ldb, beta, (C*)c, ldc);
}

size_t size_of(int type) { return type == FLOAT ? 4 : type == DOUBLE || type == COMPLEX ? 8 : type == DOUBLE_COMPLEX ? 16 : 2; }

// The scalars are float64 only where the computation is float64.
int any(int compute, int at, int bt, int ct, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, long lda,
        const void* b, long ldb, const void* beta, void* c, long ldc) {
    if (at != bt) return NOT_SUPPORTED;
    if (ct == COMPLEX || ct == DOUBLE_COMPLEX) {
        if (at != ct) return NOT_SUPPORTED;
        using Wide = std::complex<double>;
        using Narrow = std::complex<float>;
        if (ct == COMPLEX) product<Narrow, Narrow, Wide>(ta, tb, m, n, k, Wide(*(Narrow*)alpha), (Narrow*)a, lda, (Narrow*)b, ldb, Wide(*(Narrow*)beta), (Narrow*)c, ldc);
        else product<Wide, Wide, Wide>(ta, tb, m, n, k, *(Wide*)alpha, (Wide*)a, lda, (Wide*)b, ldb, *(Wide*)beta, (Wide*)c, ldc);
        return SUCCESS;
    }
    const bool half_scalars = compute == 64 || compute == 65;  // CUBLAS_COMPUTE_16F
    const bool double_scalars = compute == 70 || compute == 71;  // CUBLAS_COMPUTE_64F
    const double x = double_scalars ? *(double*)alpha : half_scalars ? __half2float(*(__half*)alpha) : *(float*)alpha;
    const double y = double_scalars ? *(double*)beta : half_scalars ? __half2float(*(__half*)beta) : *(float*)beta;
    if (at == FLOAT && ct == FLOAT) typed<float, float>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else if (at == DOUBLE && ct == DOUBLE) typed<double, double>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else if (at == HALF && ct == HALF) typed<__half, __half>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else if (at == HALF && ct == FLOAT) typed<__half, float>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else if (at == BFLOAT16 && ct == BFLOAT16) typed<__nv_bfloat16, __nv_bfloat16>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else if (at == BFLOAT16 && ct == FLOAT) typed<__nv_bfloat16, float>(ta, tb, m, n, k, x, a, lda, b, ldb, y, c, ldc);
    else return NOT_SUPPORTED;
    return SUCCESS;
}

}  // namespace

EXPORT int cublasCreate_v2(void** handle) { *handle = malloc(8); return SUCCESS; }
EXPORT int cublasDestroy_v2(void* handle) { free(handle); return SUCCESS; }
EXPORT int cublasGetVersion_v2(void*, int* version) { *version = 130000; return SUCCESS; }
EXPORT int cublasSetStream_v2(void*, void* stream) { fake_library_stream(stream); return SUCCESS; }
EXPORT int cublasGetStream_v2(void*, void** stream) { *stream = nullptr; return SUCCESS; }
EXPORT int cublasSetMathMode(void*, int) { return SUCCESS; }
EXPORT int cublasGetMathMode(void*, int* mode) { *mode = 0; return SUCCESS; }
EXPORT int cublasSetPointerMode_v2(void*, int) { return SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return SUCCESS; }
EXPORT int cublasSetWorkspace_v2(void*, void*, size_t) { return SUCCESS; }

EXPORT int cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, const void* b, int bt,
                        int ldb, const void* beta, void* c, int ct, int ldc, int compute, int) {
    const bool null = called("cublasGemmEx", {a, b, c});
    fake_count_product();
    if (null) return SUCCESS;
    return any(compute, at, bt, ct, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT int cublasGemmStridedBatchedEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda,
                                      long long sa, const void* b, int bt, int ldb, long long sb, const void* beta, void* c, int ct,
                                      int ldc, long long sc, int count, int compute, int) {
    const bool null = called("cublasGemmStridedBatchedEx", {a, b, c});
    fake_count_product();
    if (null) return SUCCESS;
    for (int i = 0; i < count; i++)
        if (int status = any(compute, at, bt, ct, ta, tb, m, n, k, alpha, (char*)a + i * sa * (long long)size_of(at), lda,
                             (char*)b + i * sb * (long long)size_of(bt), ldb, beta, (char*)c + i * sc * (long long)size_of(ct), ldc))
            return status;
    return SUCCESS;
}

EXPORT int cublasSgemmEx(void*, int ta, int tb, int m, int n, int k, const float* alpha, const void* a, int at, int lda, const void* b,
                         int bt, int ldb, const float* beta, void* c, int ct, int ldc) {
    const bool null = called("cublasSgemmEx", {a, b, c});
    fake_count_product();
    if (null) return SUCCESS;
    return any(68, at, bt, ct, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

#define GEMM(letter, T, TYPE, COMPUTE) \
    EXPORT int cublas##letter##gemm_v2(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, const T* b, int ldb, \
                                       const T* beta, T* c, int ldc) { \
        const bool null = called("cublas" #letter "gemm", {a, b, c}); \
        fake_count_product(); \
        if (null) return SUCCESS; \
        return any(COMPUTE, TYPE, TYPE, TYPE, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \
    } \
    EXPORT int cublas##letter##gemmBatched(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T** a, int lda, const T** b, \
                                           int ldb, const T* beta, T** c, int ldc, int count) { \
        const bool null = called("cublas" #letter "gemmBatched", {a, b, c}); \
        fake_count_product(); \
        if (null) return SUCCESS; \
        for (int i = 0; i < count; i++) any(COMPUTE, TYPE, TYPE, TYPE, ta, tb, m, n, k, alpha, a[i], lda, b[i], ldb, beta, c[i], ldc); \
        return SUCCESS; \
    } \
    EXPORT int cublas##letter##gemmStridedBatched(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, \
                                                  long long sa, const T* b, int ldb, long long sb, const T* beta, T* c, int ldc, \
                                                  long long sc, int count) { \
        const bool null = called("cublas" #letter "gemmStridedBatched", {a, b, c}); \
        fake_count_product(); \
        if (null) return SUCCESS; \
        for (int i = 0; i < count; i++) any(COMPUTE, TYPE, TYPE, TYPE, ta, tb, m, n, k, alpha, a + i * sa, lda, b + i * sb, ldb, beta, c + i * sc, ldc); \
        return SUCCESS; \
    }
GEMM(S, float, FLOAT, 68)
GEMM(D, double, DOUBLE, 70)
GEMM(C, std::complex<float>, COMPLEX, 68)
GEMM(Z, std::complex<double>, DOUBLE_COMPLEX, 70)

#define GETRF(letter, T) \
    EXPORT int cublas##letter##getrfBatched(void*, int n, T** a, int lda, int* pivots, int* infos, int count) { \
        if (called("cublas" #letter "getrfBatched", {a, pivots, infos})) return SUCCESS; \
        for (int i = 0; i < count; i++) factorize(n, n, a[i], lda, pivots ? pivots + (long)i * n : nullptr, infos + i); \
        return SUCCESS; \
    }
GETRF(S, float)
GETRF(D, double)

#define GETRI(letter, T) \
    EXPORT int cublas##letter##getriBatched(void*, int n, T** a, int lda, int* pivots, T** c, int ldc, int* infos, int count) { \
        called("cublas" #letter "getriBatched", {a, pivots, c, infos}); \
        for (int i = 0; i < count; i++) invert(n, a[i], lda, pivots ? pivots + (long)i * n : nullptr, c[i], ldc, infos + i); \
        return SUCCESS; \
    }
GETRI(S, float)
GETRI(D, double)
