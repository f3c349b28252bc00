"""Products of matrices with transposed factors, a factor alpha and an activation; complex products, distances, inverses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape, broadcast_shapes
from ..linalg import gemm, gemm_flops, gemm_shapes, matmul
from ._api import BOOL, INT, Array, Op, V, Xp, microsoft
from ._fused import ALONG_AN_AXIS, activated, activated_nodes, named


def order(rank: int, transposed: int, batch: int) -> list[int]:
    """The axes of a factor as ... x rows x columns; with `batch` the axis of rows stands before those of the batch.

    Raises:
        OperatorError: there is no axis of a batch.
    """
    axes = list(range(rank))
    if batch:
        if rank < 3:
            raise OperatorError(f"transBatchA and transBatchB need 3 axes or more, got {rank}", code="SX404")
        axes = [*axes[1:-1], 0, rank - 1]
    if transposed and rank > 1:
        axes[-2:] = axes[:-3:-1]
    return axes


def _turned(xp: Xp, x: Array, transposed: int, batch: int) -> Array:
    return xp.transpose(x, order(x.ndim, transposed, batch)) if x.ndim > 1 or batch else x


def _turned_nodes(op: Op, x: V, transposed: int, batch: int) -> V:
    if not (transposed or batch):
        return x
    axes = order(op.rank(x), transposed, batch)
    return x if axes == sorted(axes) else op.Transpose(x, perm=axes)


def fused_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shapes = []
    for x, letter in zip(call.inputs, "AB", strict=False):
        shape = known.shape(x)
        batch = known.attribute(call, f"transBatch{letter}", 0)
        if not shape or (batch and len(shape) < 3):
            return None
        shapes.append(tuple(shape[i] for i in order(len(shape), known.attribute(call, f"trans{letter}", 0), batch)))
    a, b = shapes
    lead = broadcast_shapes(known, [a[:-2], b[:-2]]) or ()
    return (*lead, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@microsoft("FusedMatMul", 1, traits=("product",), weights={0: "a factor", 1: "the weight"})
def fused_matmul(
    xp: Xp,
    a: Array,
    b: Array,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    """Compute alpha * A' * B', where ' exchanges the last two axes, and moves the first axis behind those of the batch.

    A vector is not transposed: it is a row on the left and a column on the right.
    """
    y = matmul(xp, _turned(xp, a, transA, transBatchA), _turned(xp, b, transB, transBatchB))
    return y if alpha == 1 else y * alpha


fused_matmul.shapes(fused_shapes)


@fused_matmul.decomposition
def fused_matmul_body(op: Op, a: V, b: V, alpha: float, transA: int, transB: int, transBatchA: int, transBatchB: int) -> V:
    y = op.MatMul(_turned_nodes(op, a, transA, transBatchA), _turned_nodes(op, b, transB, transBatchB))
    return y if alpha == 1 else op.Mul(y, alpha)


@microsoft("TransposeMatMul", 1, traits=("product",), weights={0: "a factor", 1: "the weight"})
def transpose_matmul(xp: Xp, a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    """Compute alpha * A' * B'; the older name of FusedMatMul."""
    return fused_matmul(xp, a, b, alpha=alpha, transA=transA, transB=transB)


transpose_matmul.shapes(fused_shapes)


@transpose_matmul.decomposition
def transpose_matmul_body(op: Op, a: V, b: V, alpha: float, transA: int, transB: int) -> V:
    return fused_matmul_body(op, a, b, alpha, transA, transB, 0, 0)


@microsoft("FusedMatMulActivation", 1, traits=("product",), weights={0: "a factor", 1: "the weight"})
def fused_matmul_activation(
    xp: Xp,
    a: Array,
    b: Array,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_axis: int | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    """Compute the activation of FusedMatMul's result."""
    y = fused_matmul(xp, a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma, "axis": activation_axis}
    return activated(xp, y, activation, lambda name: named(name, given, ALONG_AN_AXIS))


fused_matmul_activation.shapes(fused_shapes)


@fused_matmul_activation.decomposition
def fused_matmul_activation_body(
    op: Op,
    a: V,
    b: V,
    activation: str,
    activation_alpha: float | None,
    activation_axis: int | None,
    activation_beta: float | None,
    activation_gamma: float | None,
    alpha: float,
    transA: int,
    transB: int,
    transBatchA: int,
    transBatchB: int,
) -> V:
    y = fused_matmul_body(op, a, b, alpha, transA, transB, transBatchA, transBatchB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma, "axis": activation_axis}
    return activated_nodes(op, y, activation, lambda name: named(name, given, ALONG_AN_AXIS))


@microsoft("FusedGemm", 1, traits=("product",), weights={0: "a factor", 1: "the weight", 2: "the bias"})
def fused_gemm(
    xp: Xp,
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """Compute the activation of Gemm's result."""
    y = gemm(xp, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return activated(xp, y, activation, lambda name: named(name, given))


fused_gemm.flops(gemm_flops)
fused_gemm.shapes(gemm_shapes)


@fused_gemm.decomposition
def fused_gemm_body(
    op: Op,
    a: V,
    b: V,
    c: V | None,
    activation: str | None,
    activation_alpha: float | None,
    activation_beta: float | None,
    activation_gamma: float | None,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> V:
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return activated_nodes(op, y, activation, lambda name: named(name, given))


@microsoft("SparseToDenseMatMul", 1, traits=("product",), weights={1: "a factor"})
def sparse_to_dense_matmul(xp: Xp, a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    """Compute alpha * A' * B' for matrices, A given as a dense array.

    As in onnxruntime, alpha counts for float32 only.
    """
    if a.ndim != 2 or b.ndim != 2:
        raise OperatorError(f"A and B must be matrices, got shapes {a.shape} and {b.shape}", code="SX404")
    return fused_matmul(xp, a, b, alpha=alpha if a.dtype == np.float32 else 1.0, transA=transA, transB=transB)


sparse_to_dense_matmul.shapes(fused_shapes)


@sparse_to_dense_matmul.decomposition
def sparse_to_dense_matmul_body(op: Op, a: V, b: V, alpha: float, transA: int, transB: int) -> V:
    return fused_matmul_body(op, a, b, alpha if op.dtype(a) == np.float32 else 1.0, transA, transB, 0, 0)


# --- distances and inverses --------------------------------------------------------------------------------------------


@microsoft("CDist", 1)
def cdist(xp: Xp, a: Array, b: Array, *, metric: str = "sqeuclidean") -> Array:
    """Compute the distance of each row of A from each row of B: "euclidean", or its square, "sqeuclidean"."""
    if metric not in ("euclidean", "sqeuclidean"):
        raise OperatorError(f"metric must be euclidean or sqeuclidean, got {metric!r}", code="SX404")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise OperatorError(f"A and B must be matrices with equal rows, got shapes {a.shape} and {b.shape}", code="SX404")
    squares = xp.zeros((a.shape[0], b.shape[0]), dtype=a.dtype)
    for column in limits.rounds(a.shape[1]):  # one axis at a time: the differences of all would be a third axis
        squares += (a[:, column, None] - b[:, column]) ** 2
    return squares if metric == "sqeuclidean" else xp.sqrt(squares)


@cdist.shapes
def cdist_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    a, b = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    return None if not a or not b else (a[0], b[0])


@cdist.decomposition
def cdist_body(op: Op, a: V, b: V, metric: str) -> V:
    difference = op.Sub(op.Unsqueeze(a, [1]), op.Unsqueeze(b, [0]))
    if metric == "euclidean":
        return op.ReduceL2(difference, [2], keepdims=0)
    return op.ReduceSumSquare(difference, [2], keepdims=0)


@microsoft("Inverse", 1, traits=("shape_of_first",))
def inverse(xp: Xp, x: Array) -> Array:
    """Compute the inverse of each matrix."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise OperatorError(f"X must hold square matrices, got shape {x.shape}", code="SX404")
    return xp.linalg.inv(x)


@inverse.decomposition
def inverse_body(op: Op, x: V) -> V:
    """Eliminate one column after the other of the matrix and the unit matrix next to it, with the largest pivot of each."""
    rows = op.Shape(x, start=-1)
    narrow = op.dtype(x) in dtypes.NARROW_FLOATS
    wide = op.Cast(x, to=dtypes.onnx_code(np.float32)) if narrow else x
    numbers = op.Range(0, op.Squeeze(rows, [0]), 1)
    unit = op.cast(op.Equal(op.Unsqueeze(numbers, [1]), numbers), wide)
    batch = op.ReduceProd(op.Shape(x, end=-2), keepdims=1)
    flat = op.Reshape(wide, op.Concat(batch, rows, rows, axis=0), allowzero=1)
    both = op.Concat(flat, op.Expand(op.Unsqueeze(unit, [0]), op.Shape(flat)), axis=2)

    def step(inner: Op, k: V, go: V, m: V) -> list[V]:
        column = inner.Gather(m, k, axis=2)
        count = inner.Range(0, inner.Squeeze(inner.Shape(m, start=1, end=2), [0]), 1)
        below = inner.GreaterOrEqual(count, k)
        sizes = inner.Where(below, inner.Abs(column), inner.cast(inner.constant(-1.0, np.float32), column))
        pivot = inner.Equal(count, inner.ArgMax(sizes, axis=1, keepdims=1))
        zero = inner.cast(inner.constant(0.0, np.float32), m)
        chosen = inner.ReduceSum(inner.Where(inner.Unsqueeze(pivot, [2]), m, zero), [1], keepdims=1)
        own = inner.Unsqueeze(inner.Gather(m, k, axis=1), [1])
        m = inner.Where(inner.Unsqueeze(pivot, [2]), own, m)  # exchange the rows; that of k follows
        scaled = inner.Div(chosen, inner.Unsqueeze(inner.Gather(chosen, k, axis=2), [2]))
        rest = inner.Sub(m, inner.Mul(inner.Unsqueeze(inner.Gather(m, k, axis=2), [2]), scaled))
        here = inner.Unsqueeze(inner.Equal(count, k), [1])
        return [go, inner.Where(here, scaled, rest)]

    graph = op.graph(step, [INT, BOOL, op.type(both)])
    (made,) = op.call("Loop", [op.Squeeze(rows, [0]), op.constant(True), both], {"body": graph}, 1)
    y = op.Reshape(op.Slice(made, rows, op.Add(rows, rows), [2]), op.Shape(x), allowzero=1)
    return op.cast(y, x)


@inverse.gradient
def inverse_gradient(op: Op, dy: V, y: V) -> V:
    """For Y = X^-1: dX = -Y^T dY Y^T."""
    turned = op.swap(y)
    return op.Neg(op.MatMul(op.MatMul(turned, dy), turned))


# --- complex products: the last axis has the real and the imaginary part ------------------------------------------------


def _parts(x: Array) -> tuple[Array, Array]:
    if not x.ndim or x.shape[-1] != 2:
        raise OperatorError(f"the last axis must hold the real and the imaginary part, got shape {x.shape}", code="SX404")
    return x[..., 0], x[..., 1]


def _complex_nodes(op: Op, a: V, b: V, sign: int) -> V:
    """Sums of products with the real part and, turned by a quarter, the imaginary part."""
    real, imaginary = op.Split(b, axis=-1, num_outputs=2, outputs=2)
    x, y = op.Split(a, axis=-1, num_outputs=2, outputs=2)
    turned = op.Concat(op.Neg(y), x, axis=-1)
    second = op.Mul(turned, imaginary)
    return op.Add(op.Mul(a, real), second) if sign > 0 else op.Sub(op.Mul(a, real), second)


@microsoft("ComplexMul", 1)
def complex_mul(xp: Xp, a: Array, b: Array) -> Array:
    """Multiply complex numbers."""
    (x, y), (u, v) = _parts(a), _parts(b)
    return xp.stack([x * u - y * v, x * v + y * u], axis=-1)


@complex_mul.decomposition
def complex_mul_body(op: Op, a: V, b: V) -> V:
    return _complex_nodes(op, a, b, 1)


@microsoft("ComplexMulConj", 1)
def complex_mul_conj(xp: Xp, a: Array, b: Array) -> Array:
    """Multiply complex numbers A by the conjugates of B."""
    (x, y), (u, v) = _parts(a), _parts(b)
    return xp.stack([x * u + y * v, y * u - x * v], axis=-1)


@complex_mul_conj.decomposition
def complex_mul_conj_body(op: Op, a: V, b: V) -> V:
    return _complex_nodes(op, a, b, -1)
