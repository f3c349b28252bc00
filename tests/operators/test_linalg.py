"""Matrix products, Gemm, quantized products, Einstein sums and determinants, against loops and known values."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

rng = np.random.default_rng(7)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A matrix product of Python numbers."""
    rows = [[sum(int(p) * int(q) for p, q in zip(r, c, strict=True)) for c in b.T] for r in a]
    return np.array(rows, object).reshape(len(a), b.shape[1])


@pytest.mark.parametrize("opset", [1, 9, 13])
def test_matmul_ranks(check: Any, opset: int) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
    y = np.array([[20, 23, 26, 29], [56, 68, 80, 92]], np.float32)
    check("MatMul", [a, b], [y], opset=opset)
    check("MatMul", [a[0], b], [y[0]], opset=opset)
    check("MatMul", [a, b[:, 1]], [y[:, 1]], opset=opset)
    check("MatMul", [a[1], b[:, 1]], [y[1, 1]], opset=opset)
    check("MatMul", [a[None, None], np.stack([b, 2 * b])], [np.stack([y, 2 * y])[None]], opset=opset)
    check("MatMul", [np.stack([a, a]), b[:, 0]], [np.stack([y[:, 0]] * 2)], opset=opset)
    check("MatMul", [np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)], [np.zeros((2, 3), np.float32)], opset=opset)
    check("MatMul", [np.zeros((0, 3), np.float32), b], [np.zeros((0, 4), np.float32)], opset=opset)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("bits", [4, 20, 31, 64])
@pytest.mark.parametrize("n", [2, 40])
def test_matmul_of_integers_wraps_exactly(check: Any, dtype: Any, bits: int, n: int) -> None:
    info = np.iinfo(dtype)
    low, high = max(info.min, -(2 ** (bits - 1))), min(info.max, 2**bits - 1)
    a, b = (rng.integers(low, high, (n, n), dtype, endpoint=True) for _ in range(2))
    a[0, 0] = low
    wrapped = np.array([[int(v) % 2**info.bits for v in row] for row in product(a, b)], np.uint64).astype(dtype)
    check("MatMul", [a, b], [wrapped], opset=13)
    check("MatMul", [a.reshape(1, n, n), b], [wrapped.reshape(1, n, n)], opset=9)


def test_matmul_beyond_float64(check: Any) -> None:
    big = 2**53 + 1
    check("MatMul", [np.array([[big, 1]]), np.array([[1], [1]])], [np.array([[big + 1]])], opset=9)


def test_matmul_narrow(check: Any) -> None:
    x = np.full((1, 4), 300, np.float16)
    check("MatMul", [x, np.full((4, 1), 0.5, np.float16)], [np.array([[600]], np.float16)], opset=13)
    one = np.ones((1, 1000), ml_dtypes.bfloat16)
    check("MatMul", [one, one.T], [np.array([[1000]], ml_dtypes.bfloat16)], opset=13)


def test_matmul_errors(fails: Any) -> None:
    x = np.ones((2, 3), np.float32)
    fails("MatMul", [x, x], "inner sizes must be equal", opset=13)
    fails("MatMul", [x, np.float32(1)], "vectors or matrices", opset=13)


A, B = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[1, 0], [2, 1], [0, 3]], np.float32)
AB = np.array([[5, 11], [14, 23]], np.float32)


@pytest.mark.parametrize("opset", [1, 6, 7, 9, 11, 13])
def test_gemm(check: Any, opset: int) -> None:
    for ta, tb, dtype in itertools.product((0, 1), (0, 1), (np.float32, np.float64)):
        a, b, c = (v.astype(dtype) for v in (A.T if ta else A, B.T if tb else B, np.array([[1, 2], [3, 4]])))
        check("Gemm", [a, b, c], [(AB / 2 - 2 * c).astype(dtype)], opset=opset, alpha=0.5, beta=-2.0, transA=ta, transB=tb)
    broadcast = {"broadcast": 1} if opset < 7 else {}
    for c in (np.float32(7), np.array([7], np.float32), np.array([7, 8], np.float32), np.array([[7], [8]], np.float32)):
        check("Gemm", [A, B, c], [AB + c], opset=opset, **broadcast)
    nothing = np.zeros((2, 0), np.float32)
    check("Gemm", [nothing, nothing, AB], [-AB], opset=opset, transB=1, beta=-1.0)


def test_gemm_without_c(check: Any) -> None:
    for opset in (11, 13):
        check("Gemm", [A, B], [3 * AB], opset=opset, alpha=3.0)
        check("Gemm", [A, B, None], [AB], opset=opset)
    check("Gemm", [A, B, np.full((2, 2), np.nan, np.float32)], [AB], opset=13, beta=0.0)  # as in BLAS, C is not read


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_gemm_of_integers(check: Any, dtype: Any) -> None:
    a, b, c = A.astype(dtype), B.astype(dtype), np.array([3, 5], dtype)
    for opset in (9, 11, 13):
        check("Gemm", [a, b, c], [(2 * AB + 3 * c).astype(dtype)], opset=opset, alpha=2.0, beta=3.0)
    check("Gemm", [a, b, c], [np.array([[4, 8], [8, 14]], dtype)], opset=13, alpha=0.5, beta=0.5)  # truncated once
    if np.dtype(dtype).itemsize == 8:
        big = np.array([[2**53 + 1]], dtype)
        check("Gemm", [big, big // big, big], [3 * big], opset=9, alpha=2.0)


def test_gemm_errors(fails: Any) -> None:
    for opset in (1, 6):
        fails("Gemm", [A, B, np.ones(2, np.float32)], "without broadcast=1", opset=opset)
    fails("Gemm", [A, B, np.ones((3, 2, 2), np.float32)], "does not broadcast", opset=13)
    fails("Gemm", [A, B, np.ones(3, np.float32)], "does not broadcast", opset=13)
    fails("Gemm", [A[0], B], "A and B must be matrices", opset=13)
    fails("Gemm", [A, B], "inner sizes must be equal", opset=13, transA=1)


def test_matmul_integer(check: Any) -> None:
    a = np.array([[11, 7, 3], [10, 6, 2]], np.uint8)
    b = np.array([[1, -4], [2, 5], [-3, 6]], np.int8)
    a64, b64 = a.astype(np.int64), b.astype(np.int64)
    check("MatMulInteger", [a, b], [product(a, b).astype(np.int32)], opset=10)
    for za in (np.uint8(12), np.array([12], np.uint8)):
        check("MatMulInteger", [a, b, za], [product(a64 - 12, b).astype(np.int32)], opset=10)
    rows, columns = np.array([12, 3], np.uint8), np.array([-1, 4], np.int8)
    check("MatMulInteger", [a, b, rows, columns], [product(a64 - rows[:, None], b64 - columns).astype(np.int32)], opset=10)
    check("MatMulInteger", [a, b, None, columns], [product(a64, b64 - columns).astype(np.int32)], opset=10)
    stack = np.stack([a, a])
    zeros = np.array([1, 2, 3, 4], np.uint8).reshape(2, 2, 1)
    y = np.stack([product(v, b) for v in stack.astype(np.int64) - zeros]).astype(np.int32)
    check("MatMulInteger", [stack, b, zeros], [y], opset=10)
    check("MatMulInteger", [a[0], b[:, 0], np.uint8(1)], [np.int32(10 + 12 - 6)], opset=10)
    check("MatMulInteger", [a[:, :0], b[:0]], [np.zeros((2, 2), np.int32)], opset=10)
    full = np.full((1, 40000), 255, np.uint8)
    check(
        "MatMulInteger", [full, full.T], [np.array([[255 * 255 * 40000 - 2**32]], np.int64).astype(np.int32)], opset=10
    )  # wraps


def test_matmul_integer_errors(fails: Any) -> None:
    a = np.ones((2, 3), np.uint8)
    fails("MatMulInteger", [a, a.T, np.ones(4, np.uint8)], "zero point of shape", opset=10)


@pytest.mark.parametrize("opset", [10, 21])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_qlinear_matmul(check: Any, opset: int, dtype: Any) -> None:
    a, b = rng.integers(0, 100, (2, 5)).astype(dtype), rng.integers(0, 100, (5, 3)).astype(np.int8)
    info, zy = np.iinfo(dtype), dtype(9)
    for za, sa, zb, sb in (
        (dtype(40), np.float32(0.5), np.int8(3), np.float32(0.25)),
        (
            np.array([40, 2], dtype),
            np.array([0.5, 0.125], np.float32),
            np.array([1, 2, 3], np.int8),
            np.array([0.25, 2, 1], np.float32),
        ),
    ):
        exact = product(a.astype(int) - (za[:, None] if za.ndim else za), b.astype(int) - zb).astype(float)
        real = exact * (sa[:, None] if sa.ndim else sa) * sb / 4
        y = np.clip(np.rint(real) + 9, info.min, info.max).astype(dtype)
        check("QLinearMatMul", [a, sa, za, b, sb, zb, np.float32(4), zy], [y], opset=opset)


def test_qlinear_matmul_rounds_ties_to_even_before_the_zero_point(check: Any) -> None:
    a, one = np.array([[1], [3], [5]], np.uint8), np.float32(1)
    b, zero = np.array([[1]], np.uint8), np.uint8(0)
    check(
        "QLinearMatMul", [a, one, zero, b, one, zero, np.float32(2), np.uint8(1)], [np.array([[1], [3], [3]], np.uint8)], opset=10
    )


def test_qlinear_matmul_ranks(check: Any) -> None:
    a, b, one = np.array([[1, 2], [3, 4]], np.uint8), np.array([[5, 6], [7, 8]], np.uint8), np.float32(1)
    zero = np.uint8(0)
    s = np.array([1, 2], np.float32)
    z = np.zeros(2, np.uint8)
    check("QLinearMatMul", [a, s, z, b[:, 0], one, zero, one, zero], [np.array([19, 86], np.uint8)], opset=10)
    check("QLinearMatMul", [a[0], one, zero, b, s, z, one, zero], [np.array([19, 44], np.uint8)], opset=10)
    stack = np.stack([a, a])
    rows = np.array([1, 2, 3, 4], np.float32).reshape(2, 2, 1)
    y = np.array([[[19, 22], [86, 100]], [[57, 66], [172, 200]]], np.uint8)
    check("QLinearMatMul", [stack, rows, np.zeros((2, 2, 1), np.uint8), b, one, zero, one, zero], [y], opset=21)


def test_qlinear_matmul_narrow(check: Any) -> None:
    for scale in (np.float16, ml_dtypes.bfloat16):
        one = np.asarray(0.5, scale)
        a, zero = np.array([[100, 100]], np.int8), np.int8(0)
        check("QLinearMatMul", [a, one, zero, a.T, one, zero, one, zero], [np.array([[127]], np.int8)], opset=21)
    for f8 in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz):
        x, zero, one = np.array([[2, 0.5], [-4, 16]], f8), np.asarray(0, f8), np.float32(1)
        top = float(ml_dtypes.finfo(f8).max)
        y = np.array([[8, 36], [-288, 1016]], np.float32).clip(-top, top).astype(f8)
        check("QLinearMatMul", [x, one, zero, x, one, zero, np.float32(0.25), zero], [y], opset=21)


def test_qlinear_matmul_errors(fails: Any) -> None:
    a, one, zero = np.ones((2, 2), np.uint8), np.float32(1), np.uint8(0)
    two = np.ones(2, np.float32)
    fails(
        "QLinearMatMul",
        [a, one, zero, a, one, zero, two, np.zeros(2, np.uint8)],
        "y_scale must be a scalar or have two axes",
        opset=10,
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("bA", [(2, 3)]), ("ii", [(3, 3)]), ("ii->i", [(3, 3)]),
     (" b i j , b j k -> b i k ", [(2, 3, 4), (2, 4, 2)]), ("i,j,k->kij", [(2,), (3,), (2,)]), ("->", [()]),
     (",ij->ji", [(), (2, 3)]),
     ("ij->", [(2, 3)]), ("ij,jk->ik", [(2, 0), (0, 3)]), ("aB,Bc->ca", [(2, 3), (3, 2)]), ("iji->j", [(2, 3, 2)])],
)  # fmt: skip
def test_einsum(check: Any, equation: str, shapes: list[tuple[int, ...]]) -> None:
    """Against the sum over every index, one by one."""
    text = equation.replace(" ", "")
    terms, arrow, result = text.partition("->")
    names = terms.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(terms) - {","} if terms.count(c) == 1))
    xs = [rng.integers(-5, 6, s) for s in shapes]
    size = {c: n for name, s in zip(names, shapes, strict=True) for c, n in zip(name, s, strict=True)}
    y = np.zeros([size[c] for c in result], np.int64)
    for values in itertools.product(*(range(n) for n in size.values())):
        at = dict(zip(size, values, strict=True))
        factors = [x[tuple(at[c] for c in name)] for x, name in zip(xs, names, strict=True)]
        y[tuple(at[c] for c in result)] += np.prod(factors, dtype=int)
    for dtype in (np.int64, np.int16, np.float32, np.float64, np.float16):
        check("Einsum", [x.astype(dtype) for x in xs], [y.astype(dtype)], opset=12, equation=equation)
    bf = ml_dtypes.bfloat16
    check("Einsum", [x.astype(bf) for x in xs], [y.astype(np.float32).astype(bf)], opset=28, equation=equation)


def test_einsum_ellipsis(check: Any) -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 1, 3)
    check("Einsum", [a, b], [(a * b).sum(-1)], opset=12, equation="...i,...i->...")
    check("Einsum", [a, b], [(a * b).sum(-1)], opset=12, equation="...i,...i")
    check("Einsum", [b], [b.transpose(2, 0, 1)], opset=12, equation="...i->i...")
    check("Einsum", [b], [b.sum((0, 1))], opset=12, equation="...i->i")  # what the result does not name is summed
    check("Einsum", [a, a], [(a * a).sum(1)], opset=12, equation="i...,i...->i")
    check("Einsum", [b], [b.sum()], opset=12, equation="...->")


def test_einsum_errors(fails: Any) -> None:
    x = np.ones((2, 3), np.float32)
    fails("Einsum", [x], "must have 1 terms, got 2", opset=12, equation="ij,jk->ik")
    fails("Einsum", [x], "letters", opset=12, equation="i1->i")
    fails("Einsum", [x, x], "cannot compute", opset=12, equation="ij,jk->ik")
    fails("Einsum", [x], "cannot compute", opset=12, equation="ij->k")


@pytest.mark.parametrize("opset", [11, 22])
def test_det(check: Any, opset: int) -> None:
    x = np.array([[[1, 2], [3, 4]], [[2, 4], [1, 2]], [[0, 1], [1, 0]]], np.float32)
    check("Det", [x], [np.array([-2, 0, -1], np.float32)], opset=opset)
    check("Det", [x[0].astype(np.float64)], [np.float64(-2)], opset=opset, rtol=1e-12)
    check("Det", [x[None, :1].astype(np.float16)], [np.array([[-2]], np.float16)], opset=opset)
    check("Det", [np.array([[5]], np.float32)], [np.float32(5)], opset=opset)
    check("Det", [np.zeros((3, 0, 0), np.float32)], [np.ones(3, np.float32)], opset=opset)
    check("Det", [np.zeros((0, 2, 2), np.float32)], [np.ones(0, np.float32)], opset=opset)
    nearly = np.array([[4097, 4096], [4096, 4095]], np.float32)  # the products cancel
    check("Det", [nearly], [np.float32(-1)], opset=opset, rtol=1e-6)


def test_det_errors(fails: Any) -> None:
    fails("Det", [np.ones((2, 3), np.float32)], "square", opset=11)
    fails("Det", [np.ones(3, np.float32)], "square", opset=11)
