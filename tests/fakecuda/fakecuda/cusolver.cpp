// cuSOLVER: the LU factorization, with which CuPy computes determinants.
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

