"""Linear algebra: matrix products of floats, integers and quantized numbers, Einstein sums, determinants."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import WorkShape, operator
from ..ir.shapes import Dim, KnownShapes, Shape, Unsure, agree
from ..ir.sizes import broadcast_sizes
from ._api import Array
from ._common import clamped, length
from ._flops import product
from ._shapes import multiplied

_BITS = 16
"""Bits of a limb: integers whose products exceed floats are split into limbs."""


@operator("MatMul", 1, 9, 13,
          traits=("product", "finite", "linear", "reads_quantized", "half_products"),
          weights={0: "a factor", 1: "the weight"})  # fmt: skip
def matmul(xp: Xp, a: Array, b: Array) -> Array:
    """Multiply as NumPy: a vector is a row on the left, a column on the right; axes before the last two broadcast."""
    if not a.ndim or not b.ndim:
        raise OperatorError(f"the inputs must be vectors or matrices, got shapes {a.shape} and {b.shape}", code="SX404")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise OperatorError(
            f"the inner sizes must be equal, got {a.shape[-1]} and {inner} in shapes {a.shape} and {b.shape}", code="SX404"
        )
    if a.dtype.kind in "iu":
        return integer_product(xp, a, b)
    return xp.matmul(a, b)


matmul.flops(product)
matmul.shapes(multiplied())


@matmul.gradient
def matmul_gradient(op: Op, dy: V, a: V, b: V, needs: tuple[bool, ...]) -> tuple[V, V]:
    """A vector is a row on the left and a column on the right."""
    left, right = op.rank(a) == 1, op.rank(b) == 1
    row, column = (op.Unsqueeze(a, [0]) if left else a), (op.Unsqueeze(b, [1]) if right else b)
    if right:
        dy = op.Unsqueeze(dy, [-1])
    if left:
        dy = op.Unsqueeze(dy, [-2])
    da = op.sum_to(op.MatMul(dy, op.swap(column)), row) if needs[0] else None
    db = op.sum_to(op.MatMul(op.swap(row), dy), column) if needs[1] else None
    return (op.Squeeze(da, [0]) if left and needs[0] else da, op.Squeeze(db, [1]) if right and needs[1] else db)


def integer_product(xp: Xp, a: Array, b: Array) -> Array:
    """Return the matrix product of integers of one dtype, exact modulo its range; use float products where exact.

    Float products are tens of times as fast as integer ones, for which there is no library.
    """
    k = a.shape[-1]
    work = a.size * (b.size // k if k else 0)
    if work < 2**15:  # too small to search for the largest elements
        return xp.matmul(a, b)
    bound = k * _largest(xp, a) * _largest(xp, b)
    if bound < 2**53:
        kind = np.float32 if bound < 2**24 else np.float64
        return _wrap(xp.matmul(a.astype(kind), b.astype(kind)), a.dtype)
    if k >= 2 ** (53 - 2 * _BITS):
        return xp.matmul(a, b)
    # a = sum of a_i * 2**(16 i), the last limb signed; products beyond the dtype's bits vanish modulo its range.
    parts = a.dtype.itemsize * 8 // _BITS
    left, right = ([_limb(x, i, parts) for i in range(parts)] for x in (a, b))
    y = 0
    for s in range(parts):
        for i in range(s + 1):
            y = y + (_wrap(xp.matmul(left[i], right[s - i]), a.dtype) << (_BITS * s))
    return y


def _largest(xp: Xp, x: Array) -> int:
    """Return a bound of |x|: that of an 8-bit dtype, otherwise the maximum."""
    return 2**8 if x.dtype.itemsize == 1 else int(xp.largest(x))


def _limb(x: Array, i: int, parts: int) -> Array:
    y = x >> (_BITS * i)
    return (y if i == parts - 1 else y & (2**_BITS - 1)).astype(np.float64)


def _wrap(y: Array, dtype: np.dtype[Any]) -> Array:
    """Convert floats with integer values below 2**53 to integers, modulo the dtype's range."""
    return y.astype(np.int64).astype(dtype)


# --- Gemm


@operator("Gemm", 7, 9, 11, 13,
          traits=("product", "finite", "linear", "reads_quantized"), meaning_since=7,
          weights={0: "a factor", 1: "the weight", 2: "the bias"})  # fmt: skip
def gemm(
    xp: Xp,
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """Compute alpha * A' * B' + beta * C, where C broadcasts to the product's shape."""
    if a.ndim != 2 or b.ndim != 2:
        raise OperatorError(f"A and B must be matrices, got shapes {a.shape} and {b.shape}", code="SX404")
    y = matmul(xp, a.T if transA else a, b.T if transB else b)
    if c is not None and not _broadcasts(c.shape, y.shape):
        raise OperatorError(f"C of shape {c.shape} does not broadcast to the product's shape {y.shape}", code="SX404")
    y = _scaled(y, alpha)
    if c is not None and beta != 0:  # as in BLAS, C is not read when beta is zero
        y = y + _scaled(c, beta)
    return y if y.dtype == a.dtype else xp.cast(y, a.dtype)


@gemm.flops
def gemm_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    return 2 * math.prod(output) * (inputs[0] or ())[0 if attributes.get("transA") else 1]


@gemm.shapes
def gemm_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    a, b = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    rows, inner = _matrix(known, a, known.attribute(call, "transA", 0))
    other, columns = _matrix(known, b, known.attribute(call, "transB", 0))
    if not agree((inner,), (other,)):
        raise Unsure
    return rows, columns


def _matrix(known: KnownShapes[Any], shape: Shape | None, transposed: int) -> tuple[Dim, Dim]:
    """The rows and columns of a factor of Gemm."""
    if (shape is not None and len(shape) != 2) or transposed not in (0, 1):
        raise Unsure
    rows, columns = (known.fresh(), known.fresh()) if shape is None else shape
    return (columns, rows) if transposed else (rows, columns)


@gemm.gradient
def gemm_gradient(
    op: Op, dy: V, a: V, b: V, c: V, alpha: float, beta: float, transA: int, transB: int, needs: tuple[bool, ...]
) -> list[V]:
    """For y = alpha A' B' + beta C: dA' = alpha dy B'^T and dB' = alpha A'^T dy."""
    grads: list[V] = [None] * len(needs)
    if needs[0]:
        grads[0] = (
            op.Gemm(b, dy, alpha=alpha, transA=transB, transB=1) if transA else op.Gemm(dy, b, alpha=alpha, transB=1 - transB)
        )
    if needs[1]:
        grads[1] = (
            op.Gemm(dy, a, alpha=alpha, transA=1, transB=transA) if transB else op.Gemm(a, dy, alpha=alpha, transA=1 - transA)
        )
    if len(needs) > 2 and needs[2]:
        dc = op.sum_to(dy, c)
        grads[2] = dc if beta == 1 else op.Mul(dc, beta)
    return grads


def _scaled(y: Array, factor: float) -> Array:
    """Compute `factor * y`; an integer times a factor with an integer value stays an integer."""
    if factor == 1:
        return y
    whole = y.dtype.kind in "iu" and float(factor).is_integer() and (factor >= 0 or y.dtype.kind == "i")
    return y * (int(factor) if whole else factor)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether `shape` broadcasts to `to` without changing it."""
    try:
        return broadcast_sizes(shape, to) == to
    except ValueError:
        return False


@operator("Gemm", 1, 6)
def gemm_1(
    xp: Xp,
    a: Array,
    b: Array,
    c: Array,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """Before opset 7, C must have the product's shape unless broadcast=1."""
    y = gemm(xp, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    if not broadcast and c.shape != y.shape:
        raise OperatorError(f"without broadcast=1, C must have the product's shape {y.shape}, got {c.shape}", code="SX404")
    return y


@gemm_1.decomposition
def gemm_1_decomposition(op: Op, a: V, b: V, c: V, alpha: float, beta: float, transA: int, transB: int) -> V:
    return op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


# --- quantized


def _per_row(v: Array, x: Array) -> Array:
    """Reshape a zero point or scale of the left matrix: one value, a vector with one per row, or a tensor that broadcasts."""
    if v.size == 1:
        return v.reshape(())
    return v.reshape(-1, 1) if v.ndim == 1 and x.ndim > 1 else v


def _per_column(v: Array) -> Array:
    return v.reshape(()) if v.size == 1 else v


def _centred(xp: Xp, x: Array, zero: Array | None) -> Array:
    """Compute `x - zero` in int32; raise OperatorError if the zero point does not broadcast to x."""
    y = x.astype(np.int32)
    if zero is None:
        return y
    if not _broadcasts(zero.shape, x.shape):
        raise OperatorError(f"zero point of shape {zero.shape} does not broadcast to a matrix of shape {x.shape}", code="SX404")
    return y - zero.astype(np.int32)


@operator("MatMulInteger", 10, traits=("product",))
def matmul_integer(xp: Xp, a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
    left = _centred(xp, a, None if a_zero_point is None else _per_row(a_zero_point, a))
    right = _centred(xp, b, None if b_zero_point is None else _per_column(b_zero_point))
    return matmul(xp, left, right)


matmul_integer.flops(product)
matmul_integer.shapes(multiplied())


@operator("QLinearMatMul", 10, 21, traits=("product",), widen=False)
def qlinear_matmul(
    xp: Xp,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Array:
    """Compute saturate(round(real / y_scale) + y_zero_point) with real = (a - za) sa @ (b - zb) sb.

    The sums are exact; the product with the float32 factor sa * sb / y_scale is in float32, as in QLinearConv.
    """
    if y_scale.ndim == 1 and y_scale.size > 1:
        raise OperatorError(f"y_scale must be a scalar or have two axes, got shape {y_scale.shape}", code="SX404")
    za, sa = _per_row(a_zero_point, a), _per_row(a_scale, a).astype(np.float32)
    zb, sb = _per_column(b_zero_point), _per_column(b_scale).astype(np.float32)
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        exact = matmul(xp, _centred(xp, a, za), _centred(xp, b, zb))
    else:
        limits.admit_broadcast([a, za])
        limits.admit_broadcast([b, zb])
        exact = matmul(xp, a.astype(np.float32) - za.astype(np.float32), b.astype(np.float32) - zb.astype(np.float32))
    if a.ndim == 1:
        sa = sa.reshape(())
    elif b.ndim == 1 and sa.ndim:
        sa = sa[..., 0]  # the product of a matrix and a vector does not have columns
    if b.ndim == 1:
        sb = sb.reshape(())
    elif a.ndim == 1 and sb.ndim > 1:
        sb = sb[..., 0, :]
    limits.admit_broadcast([exact, sa, sb, _per_column(y_scale), _per_column(y_zero_point)])
    real = exact.astype(np.float32) * (sa * sb / _per_column(y_scale).astype(np.float32))
    return _quantized(xp, real, _per_column(y_zero_point))


qlinear_matmul.flops(product)
qlinear_matmul.shapes(multiplied(3))


qlinear_matmul.no_gradient("zero: the result is rounded")


def _quantized(xp: Xp, y: Array, zero: Array) -> Array:
    dtype = np.dtype(zero.dtype)
    if dtype in dtypes.FLOAT8:
        top = float(dtypes.float_info(dtype).max)
        return xp.clip(y.astype(np.float32) + zero.astype(np.float32), -top, top).astype(dtype)
    bounds = np.iinfo(dtype)
    return xp.cast(clamped(xp, xp.rint(y) + zero.astype(np.float64), bounds.min, bounds.max), dtype)


# --- Einsum, Det


def _einsum_shape(terms: str, result: str | None, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of an Einstein sum, with the axes of '...'; errors in the equation are left to NumPy."""
    sizes: dict[str, int] = {}
    free: dict[int, int] = {}  # axes of '...', counted from the last one
    for term, shape in zip(terms.split(","), shapes, strict=True):
        before, dots, after = term.partition("...")
        middle = shape[len(before) : len(shape) - len(after)] if dots else ()
        for letter, size in [*zip(before, shape, strict=False), *zip(after[::-1], shape[::-1], strict=False)]:
            sizes[letter] = max(size, sizes.get(letter, 1))
        for i, size in enumerate(middle[::-1]):
            free[i] = max(size, free.get(i, 1))
    letters = [c for c in sizes if terms.count(c) == 1] if result is None else result.replace("...", "")
    return (*free.values(), *(sizes.get(c, 1) for c in letters))


@operator("Einsum", 12, 28, traits=("product", "finite", "linear"))
def einsum(xp: Xp, *xs: Array, equation: str) -> Array:
    text = equation.replace(" ", "")
    terms, arrow, result = text.partition("->")
    if terms.count(",") + 1 != len(xs):
        raise OperatorError(f"the equation must have {len(xs)} terms, got {terms.count(',') + 1} in {equation!r}", code="SX404")
    if not set(text.replace("->", "", 1).replace(",", "").replace("...", "")) <= set(string.ascii_letters):
        raise OperatorError(f"the equation must consist of letters, commas, '...' and '->', got {equation!r}", code="SX404")
    limits.admit(_einsum_shape(terms, result if arrow else None, [x.shape for x in xs]), xs[0].dtype)
    if len(xs) == 1:
        return _einsum_of_one(xp, xs[0], terms, result if arrow else None)
    # Two terms at a time: NumPy keeps intermediate products within the size of the largest term or the result.
    if arrow and "..." in terms and "..." not in result:  # sum the axes absent from the result, including those of '...'
        y = xp.einsum(f"{terms}->...{result}", *xs, optimize=True)
        unnamed = tuple(range(y.ndim - len(result)))
        return y.sum(axis=unnamed, dtype=y.dtype) if unnamed else y
    return xp.einsum(text, *xs, optimize=True)


def _einsum_of_one(xp: Xp, x: Array, term: str, result: str | None) -> Array:
    """Return a diagonal, the sum over the axes that the result does not name, and an order of the others."""
    letters = "".join(dict.fromkeys(term.replace(".", "")))
    dots = "..." if "..." in term else ""
    if result is None:
        result = dots + "".join(sorted(c for c in letters if term.count(c) == 1))
    y = xp.einsum(f"{term}->{dots}{letters}", x)
    free = y.ndim - len(letters)
    unnamed = () if "..." in result else range(free)
    y = xp.sum_over(y, (*unnamed, *(free + i for i, c in enumerate(letters) if c not in result)))
    rest = "".join(c for c in letters if c in result)
    return xp.einsum(f"{dots if '...' in result else ''}{rest}->{result}", y)


@einsum.flops
def einsum_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    equation = attributes["equation"]
    text = equation.decode() if isinstance(equation, bytes) else equation
    sizes: dict[str, int] = {}
    for term, shape in zip(text.replace(" ", "").partition("->")[0].split(","), inputs, strict=True):
        if "..." in term:
            raise TypeError
        sizes |= zip(term, shape or (), strict=True)
    return max(len(inputs), 1) * math.prod(sizes.values())


@einsum.gradient
def einsum_gradient(op: Op, dy: V, xs: list[V], equation: str, needs: tuple[bool, ...]) -> list[V]:
    """Multiply dy by the other factors and sum over the axes absent from the factor."""
    text, arrow, result = equation.replace(" ", "").partition("->")
    terms = text.split(",")
    if not arrow:  # the letters that occur once, in alphabetical order
        result = "..." * ("..." in text) + "".join(sorted(c for c in set(text) - set(".,") if text.count(c) == 1))
    return [_einsum_back(op, dy, result, xs, terms, i) if need else None for i, need in enumerate(needs)]


def _einsum_back(op: Op, dy: V, result: str, xs: list[V], terms: list[str], i: int) -> V:
    """Return the gradient of the factor i."""

    def free(term: str, x: V) -> int:
        """Return the number of axes of the '...' of a term."""
        return op.rank(x) - len(term.replace("...", "")) if "..." in term else 0

    before, _, after = terms[i].partition("...")
    letters, x = before + after, xs[i]
    pairs = [(result, dy), *((t, v) for j, (t, v) in enumerate(zip(terms, xs, strict=True)) if j != i)]
    named = "".join(t for t, _ in pairs)
    unused = iter(sorted(set(string.ascii_letters) - set("".join(terms))))
    place = [k if k < len(before) else k + free(terms[i], x) for k in range(len(letters))]  # the axis of each letter
    fresh: list[str] = []
    for k, letter in enumerate(letters):
        if letter in fresh:  # a diagonal: the gradient outside it is zero
            count = op.Range(0, length(op, x, place[k]), 1)
            fresh.append(next(unused))
            eye = op.cast(op.Equal(op.Unsqueeze(count, [1]), count), x)
            pairs.append((letter + fresh[k], eye))
            named += letter + fresh[k]
        else:
            fresh.append(letter)
    mine, others = free(terms[i], x), [free(t, v) for j, (t, v) in enumerate(zip(terms, xs, strict=True)) if j != i]
    spread = max([*others, mine if "..." in result else 0], default=0)
    out = "..." * any("..." in t for t, _ in pairs) + "".join(c for c in fresh if c in named)
    g = op.Einsum(*(v for _, v in pairs), equation=",".join(t for t, _ in pairs) + "->" + out)
    if spread > mine:
        g = op.ReduceSum(g, list(range(spread - mine)), keepdims=0)
    missing = [*range(mine - spread), *(mine + k for k, c in enumerate(fresh) if c not in named)]
    if missing:
        g = op.Unsqueeze(g, missing)
    if mine and before:
        n = len(before)
        g = op.Transpose(g, perm=[*range(mine, mine + n), *range(mine), *range(mine + n, mine + len(letters))])
    if any(c not in result for c in letters) or ("..." in terms[i] and "..." not in result):
        g = op.Expand(g, op.Shape(x))
    return op.sum_to(g, x)  # an axis of size 1 is broadcast, also if it has a letter


@operator("Det", 11, 22)
def det(xp: Xp, x: Array) -> Array:
    """Compute in float64, because of the cancellation in a determinant."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise OperatorError(f"the matrices must be square, got shape {x.shape}", code="SX404")
    if x.size == 0:
        return xp.full(x.shape[:-2], 1, dtype=x.dtype)
    return xp.linalg.det(x.astype(np.float64)).astype(x.dtype)


@det.gradient
def det_gradient(op: Op, dy: V, x: V) -> V:
    """Use cofactors, so that x may be singular: that of x_ij is the determinant with the unit vector e_j as row i."""
    count = op.Range(0, op.Squeeze(op.Shape(x, start=-1), [0]), 1)
    eye = op.Equal(op.Unsqueeze(count, [1]), count)
    rows, units = op.Unsqueeze(eye, [1, 3]), op.cast(op.Unsqueeze(eye, [0, 2]), x)  # (i, _, row, _) and (_, j, _, column)
    cofactors = op.Det(op.Where(rows, units, op.Unsqueeze(x, [-4, -3])))
    return op.Mul(op.Unsqueeze(dy, [-2, -1]), cofactors)
