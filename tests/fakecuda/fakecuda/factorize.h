// The LU factorization with row pivots, and what it solves.
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

// Replaces x by the solution of A y = x, by the factorization of A.  Columns first.
template <class T>
static void solve(int n, const T* a, int lda, const int* pivots, T* x) {
    for (int i = 0; pivots && i < n; i++) std::swap(x[i], x[pivots[i] - 1]);
    for (int i = 0; i < n; i++)
        for (int l = 0; l < i; l++) x[i] -= a[i + (long)l * lda] * x[l];
    for (int i = n; i-- > 0;) {
        for (int l = i + 1; l < n; l++) x[i] -= a[i + (long)l * lda] * x[l];
        x[i] /= a[i + (long)i * lda];
    }
}

// The inverse of the matrix with this factorization; `info` is the first zero pivot.
template <class T>
static void invert(int n, const T* a, int lda, const int* pivots, T* c, int ldc, int* info) {
    *info = 0;
    for (int j = n; j-- > 0;)
        if (a[j + (long)j * lda] == T(0)) *info = j + 1;
    for (int k = 0; !*info && k < n; k++) {
        for (int i = 0; i < n; i++) c[i + (long)k * ldc] = T(i == k);
        solve(n, a, lda, pivots, c + (long)k * ldc);
    }
}
