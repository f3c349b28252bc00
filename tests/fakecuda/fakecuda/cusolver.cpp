// cuSOLVER: the LU factorization, with which CuPy computes determinants, and inverses by it.
#include <cstdlib>

#include "factorize.h"
#include "library.h"

namespace {
int status(int error) { return error >= 900 ? 6 : error; }  // execution failed
}

EXPORT int cusolverDnCreate(void** handle) { *handle = calloc(1, sizeof(void*)); return 0; }
EXPORT int cusolverDnDestroy(void* handle) { free(handle); return 0; }
EXPORT int cusolverDnSetStream(void* handle, void* stream) { *(void**)handle = stream; return 0; }
EXPORT int cusolverDnGetStream(void* handle, void** stream) { *stream = *(void**)handle; return 0; }
EXPORT int cusolverGetProperty(int, int* value) { *value = 12; return 0; }

#define GETRF(letter, T) \
    EXPORT int cusolverDn##letter##getrf_bufferSize(void*, int, int, T*, int, int* size) { *size = 1; return 0; } \
    EXPORT int cusolverDn##letter##getrf(void* handle, int m, int n, T* a, int lda, T*, int* pivots, int* info) { \
        const auto compute = [=] { return factorize(m, n, a, lda, pivots, info), 0; }; \
        return status(fake_call({"cusolverDn" #letter "getrf", *(void**)handle, {a, pivots, info}, compute, 0, false, false})); \
    }
GETRF(S, float)
GETRF(D, double)

#define GETRS(letter, T) \
    EXPORT int cusolverDn##letter##getrs(void* handle, int turned, int n, int columns, const T* a, int lda, const int* pivots, T* b, \
                                         int ldb, int* info) { \
        if (turned) return 9; /* not supported */ \
        const auto compute = [=] { \
            for (int k = 0; k < columns; k++) solve(n, a, lda, pivots, b + (long)k * ldb); \
            *info = 0; \
            return 0; \
        }; \
        return status(fake_call({"cusolverDn" #letter "getrs", *(void**)handle, {a, pivots, b, info}, compute, 0, false, false})); \
    }
GETRS(S, float)
GETRS(D, double)
