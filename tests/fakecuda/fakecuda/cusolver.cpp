// cuSOLVER: the LU factorization, with which CuPy computes determinants, and inverses by it.
#include <cstdlib>

#include "factorize.h"
#include "library.h"

EXPORT int cusolverDnCreate(void** handle) { *handle = malloc(8); return 0; }
EXPORT int cusolverDnDestroy(void* handle) { free(handle); return 0; }
EXPORT int cusolverDnSetStream(void*, void* stream) { fake_library_stream(stream); return 0; }
EXPORT int cusolverDnGetStream(void*, void** stream) { *stream = nullptr; return 0; }
EXPORT int cusolverGetProperty(int, int* value) { *value = 12; return 0; }

#define GETRF(letter, T) \
    EXPORT int cusolverDn##letter##getrf_bufferSize(void*, int, int, T*, int, int* size) { *size = 1; return 0; } \
    EXPORT int cusolverDn##letter##getrf(void*, int m, int n, T* a, int lda, T*, int* pivots, int* info) { \
        if (called("cusolverDn" #letter "getrf", {a, pivots, info})) return 0; \
        factorize(m, n, a, lda, pivots, info); \
        return 0; \
    }
GETRF(S, float)
GETRF(D, double)

#define GETRS(letter, T) \
    EXPORT int cusolverDn##letter##getrs(void*, int turned, int n, int columns, const T* a, int lda, const int* pivots, T* b, \
                                         int ldb, int* info) { \
        called("cusolverDn" #letter "getrs", {a, pivots, b, info}); \
        if (turned) return 9; /* not supported */ \
        for (int k = 0; k < columns; k++) solve(n, a, lda, pivots, b + (long)k * ldb); \
        *info = 0; \
        return 0; \
    }
GETRS(S, float)
GETRS(D, double)

