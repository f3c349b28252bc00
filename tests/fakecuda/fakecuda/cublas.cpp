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
enum Status { SUCCESS = 0, EXECUTION_FAILED = 13, INTERNAL_ERROR = 14, NOT_SUPPORTED = 15 };

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

size_t size_of(int type) { return type == FLOAT ? 4 : type == DOUBLE || type == COMPLEX ? 8 : type == DOUBLE_COMPLEX ? 16 : 2; }

using Wide = std::complex<double>;

// A call's scalar, which belongs to the host: a graph has a copy.  It is float64 only where the computation is float64.
Wide scalar(int compute, int type, const void* value) {
    if (type == COMPLEX) return Wide(*(const std::complex<float>*)value);
    if (type == DOUBLE_COMPLEX) return *(const Wide*)value;
    if (compute == 64 || compute == 65) return __half2float(*(const __half*)value);  // CUBLAS_COMPUTE_16F
    if (compute == 70 || compute == 71) return *(const double*)value;                // CUBLAS_COMPUTE_64F
    return *(const float*)value;
}

struct Handle {
    void* stream = nullptr;
    const void* workspace = nullptr;
};

struct Product {
    int ta, tb, m, n, k;
    Wide alpha, beta;
    const void* a;
    int at;
    long lda;
    const void* b;
    int bt;
    long ldb;
    void* c;
    int ct;
    long ldc;
    long long sa = 0, sb = 0, sc = 0;  // from one product to the next one, in elements
    int count = 1;

    template <class A, class C, class S> int typed(const void* a, const void* b, void* c, S alpha, S beta) const {
        product<A, C, S>(ta, tb, m, n, k, alpha, (const A*)a, lda, (const A*)b, ldb, beta, (C*)c, ldc);
        return SUCCESS;
    }
    int one(const void* a, const void* b, void* c) const {
        const double x = alpha.real(), y = beta.real();
        if (at == FLOAT && ct == FLOAT) return typed<float, float>(a, b, c, x, y);
        if (at == DOUBLE && ct == DOUBLE) return typed<double, double>(a, b, c, x, y);
        if (at == HALF && ct == HALF) return typed<__half, __half>(a, b, c, x, y);
        if (at == HALF && ct == FLOAT) return typed<__half, float>(a, b, c, x, y);
        if (at == BFLOAT16 && ct == BFLOAT16) return typed<__nv_bfloat16, __nv_bfloat16>(a, b, c, x, y);
        if (at == BFLOAT16 && ct == FLOAT) return typed<__nv_bfloat16, float>(a, b, c, x, y);
        if (ct == COMPLEX) return typed<std::complex<float>, std::complex<float>>(a, b, c, alpha, beta);
        return typed<Wide, Wide>(a, b, c, alpha, beta);
    }
    int all() const {
        for (int i = 0; i < count; i++)
            one((const char*)a + i * sa * (long long)size_of(at), (const char*)b + i * sb * (long long)size_of(bt), (char*)c + i * sc * (long long)size_of(ct));
        return SUCCESS;
    }
    double bytes() const {
        const double left = (sa ? count : 1) * (double)m * k * size_of(at), right = (sb ? count : 1) * (double)k * n * size_of(bt);
        return left + right + (beta == Wide(0) ? 1 : 2) * (double)count * m * n * size_of(ct);
    }
    double flops() const { return (at == COMPLEX || at == DOUBLE_COMPLEX ? 8.0 : 2.0) * count * m * n * k; }
    bool supported() const {
        const bool number = at == FLOAT || at == DOUBLE || at == HALF || at == BFLOAT16 || at == COMPLEX || at == DOUBLE_COMPLEX;
        return number && at == bt && (at == ct || (ct == FLOAT && (at == HALF || at == BFLOAT16)));
    }
};

int status(int error) { return error >= 900 ? EXECUTION_FAILED : error ? INTERNAL_ERROR : SUCCESS; }

int call(const char* name, void* handle, const Product& product) {
    if (!product.supported()) return NOT_SUPPORTED;
    const Handle& from = *(Handle*)handle;
    FakeCall call{name, from.stream, {product.a, product.b, product.c}, [product] { return product.all(); }, 1, true};
    call.workspace = from.workspace, call.bytes = product.bytes(), call.flops = product.flops();
    return status(fake_call(call));
}

}  // namespace

EXPORT int cublasCreate_v2(void** handle) { *handle = new Handle; return SUCCESS; }
EXPORT int cublasDestroy_v2(void* handle) { delete (Handle*)handle; return SUCCESS; }
EXPORT int cublasGetVersion_v2(void*, int* version) { *version = 130000; return SUCCESS; }
EXPORT int cublasSetStream_v2(void* handle, void* stream) { *(Handle*)handle = {stream}; return SUCCESS; }  // its workspace is then the library's, as in CUDA
EXPORT int cublasGetStream_v2(void* handle, void** stream) { *stream = ((Handle*)handle)->stream; return SUCCESS; }
EXPORT int cublasSetMathMode(void*, int) { return SUCCESS; }
EXPORT int cublasGetMathMode(void*, int* mode) { *mode = 0; return SUCCESS; }
EXPORT int cublasSetPointerMode_v2(void*, int) { return SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return SUCCESS; }
EXPORT int cublasSetWorkspace_v2(void* handle, void* workspace, size_t) { ((Handle*)handle)->workspace = workspace; return SUCCESS; }

EXPORT int cublasGemmEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, const void* b, int bt,
                        int ldb, const void* beta, void* c, int ct, int ldc, int compute, int) {
    return call("cublasGemmEx", handle, {ta, tb, m, n, k, scalar(compute, ct, alpha), scalar(compute, ct, beta), a, at, lda, b, bt, ldb, c, ct, ldc});
}

EXPORT int cublasGemmStridedBatchedEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda,
                                      long long sa, const void* b, int bt, int ldb, long long sb, const void* beta, void* c, int ct,
                                      int ldc, long long sc, int count, int compute, int) {
    return call("cublasGemmStridedBatchedEx", handle, {ta, tb, m, n, k, scalar(compute, ct, alpha), scalar(compute, ct, beta), a, at, lda, b, bt, ldb,
                                                       c, ct, ldc, sa, sb, sc, count});
}

EXPORT int cublasSgemmEx(void* handle, int ta, int tb, int m, int n, int k, const float* alpha, const void* a, int at, int lda, const void* b,
                         int bt, int ldb, const float* beta, void* c, int ct, int ldc) {
    return call("cublasSgemmEx", handle, {ta, tb, m, n, k, *alpha, *beta, a, at, lda, b, bt, ldb, c, ct, ldc});
}

#define GEMM(letter, T, TYPE) \
    EXPORT int cublas##letter##gemm_v2(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, const T* b, int ldb, \
                                       const T* beta, T* c, int ldc) { \
        return call("cublas" #letter "gemm", handle, {ta, tb, m, n, k, *alpha, *beta, a, TYPE, lda, b, TYPE, ldb, c, TYPE, ldc}); \
    } \
    EXPORT int cublas##letter##gemmBatched(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T** a, int lda, const T** b, \
                                           int ldb, const T* beta, T** c, int ldc, int count) { \
        const Product all{ta, tb, m, n, k, *alpha, *beta, a, TYPE, lda, b, TYPE, ldb, c, TYPE, ldc, 1, 1, 1, count}; \
        const auto compute = [=] { \
            for (int i = 0; i < count; i++) all.one(a[i], b[i], c[i]); \
            return SUCCESS; \
        }; \
        FakeCall call{"cublas" #letter "gemmBatched", ((Handle*)handle)->stream, {a, b, c}, compute, 1, true, false}; \
        call.bytes = all.bytes(), call.flops = all.flops(); \
        return status(fake_call(call)); \
    } \
    EXPORT int cublas##letter##gemmStridedBatched(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda, \
                                                  long long sa, const T* b, int ldb, long long sb, const T* beta, T* c, int ldc, \
                                                  long long sc, int count) { \
        return call("cublas" #letter "gemmStridedBatched", handle, \
                    {ta, tb, m, n, k, *alpha, *beta, a, TYPE, lda, b, TYPE, ldb, c, TYPE, ldc, sa, sb, sc, count}); \
    }
GEMM(S, float, FLOAT)
GEMM(D, double, DOUBLE)
GEMM(C, std::complex<float>, COMPLEX)
GEMM(Z, std::complex<double>, DOUBLE_COMPLEX)

#define GETRF(letter, T) \
    EXPORT int cublas##letter##getrfBatched(void* handle, int n, T** a, int lda, int* pivots, int* infos, int count) { \
        const auto compute = [=] { \
            for (int i = 0; i < count; i++) factorize(n, n, a[i], lda, pivots ? pivots + (long)i * n : nullptr, infos + i); \
            return SUCCESS; \
        }; \
        return status(fake_call({"cublas" #letter "getrfBatched", ((Handle*)handle)->stream, {a, pivots, infos}, compute, 0, false, false})); \
    }
GETRF(S, float)
GETRF(D, double)

#define GETRI(letter, T) \
    EXPORT int cublas##letter##getriBatched(void* handle, int n, T** a, int lda, int* pivots, T** c, int ldc, int* infos, int count) { \
        const auto compute = [=] { \
            for (int i = 0; i < count; i++) invert(n, a[i], lda, pivots ? pivots + (long)i * n : nullptr, c[i], ldc, infos + i); \
            return SUCCESS; \
        }; \
        return status(fake_call({"cublas" #letter "getriBatched", ((Handle*)handle)->stream, {a, pivots, c, infos}, compute, 0, false, false})); \
    }
GETRI(S, float)
GETRI(D, double)
