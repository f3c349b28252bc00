// The LU factorization with row pivots.
#pragma once
#include <cmath>
#include <utility>

// Row pivots from 1; `info` is the first zero pivot.  Columns first.
template <class T>
static void factorize(int m, int n, T* a, int lda, int* pivots, int* info) {
    *info = 0;
    for (int j = 0; j < (m < n ? m : n); j++) {
        int best = j;
        for (int i = j + 1; i < m; i++)
            if (std::abs(a[i + (long)j * lda]) > std::abs(a[best + (long)j * lda])) best = i;
        if (pivots) pivots[j] = best + 1;
        if (best != j)
            for (int k = 0; k < n; k++) std::swap(a[j + (long)k * lda], a[best + (long)k * lda]);
        const T pivot = a[j + (long)j * lda];
        if (pivot == T(0)) {
            if (!*info) *info = j + 1;
            continue;
        }
        for (int i = j + 1; i < m; i++) {
            const T factor = a[i + (long)j * lda] /= pivot;
            for (int k = j + 1; k < n; k++) a[i + (long)k * lda] -= factor * a[j + (long)k * lda];
        }
    }
}
