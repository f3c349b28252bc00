"""Products of matrices with transposed factors, a factor alpha and an activation; complex products, distances, inverses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape, broadcast_shapes
from ..linalg import gemm_flops, gemm_shapes
from ._api import BOOL, INT, Array, Op, V, Xp, microsoft
from ._fused import ALONG_AN_AXIS, activated, named


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


def _turned(op: Op, x: V, transposed: int, batch: int) -> V:
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
    op: Op,
    a: V,
    b: V,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> V:
    """Compute alpha * A' * B', where ' exchanges the last two axes, and moves the first axis behind those of the batch.

    A vector is not transposed: it is a row on the left and a column on the right.
    """
    y = op.MatMul(_turned(op, a, transA, transBatchA), _turned(op, b, transB, transBatchB))
    return y if alpha == 1 else op.Mul(y, alpha)


fused_matmul.shapes(fused_shapes)


@microsoft("TransposeMatMul", 1, traits=("product",), weights={0: "a factor", 1: "the weight"})
def transpose_matmul(op: Op, a: V, b: V, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> V:
    """Compute alpha * A' * B'; the older name of FusedMatMul."""
    return fused_matmul(op, a, b, alpha=alpha, transA=transA, transB=transB)


transpose_matmul.shapes(fused_shapes)


@microsoft("FusedMatMulActivation", 1, traits=("product",), weights={0: "a factor", 1: "the weight"})
def fused_matmul_activation(
    op: Op,
    a: V,
    b: V,
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
) -> V:
    """Compute the activation of FusedMatMul's result."""
    y = fused_matmul(op, a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma, "axis": activation_axis}
    return activated(op, y, activation, lambda name: named(name, given, ALONG_AN_AXIS))


fused_matmul_activation.shapes(fused_shapes)


@microsoft("FusedGemm", 1, traits=("product",), weights={0: "a factor", 1: "the weight", 2: "the bias"})
def fused_gemm(
    op: Op,
    a: V,
    b: V,
    c: V | None = None,
    *,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> V:
    """Compute the activation of Gemm's result."""
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return activated(op, y, activation, lambda name: named(name, given))


fused_gemm.flops(gemm_flops)
fused_gemm.shapes(gemm_shapes)


@microsoft("SparseToDenseMatMul", 1, traits=("product",), weights={1: "a factor"})
def sparse_to_dense_matmul(op: Op, a: V, b: V, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> V:
    """Compute alpha * A' * B' for matrices, A given as a dense array.

    As in onnxruntime, alpha counts for float32 only.
    """
    return fused_matmul(op, a, b, alpha=alpha if op.dtype(a) == np.float32 else 1.0, transA=transA, transB=transB)


@sparse_to_dense_matmul.accepts
def sparse_to_dense_matmul_accepts(a: Array, b: Array) -> None:
    if a.ndim != 2 or b.ndim != 2:
        raise OperatorError(f"A and B must be matrices, got shapes {a.shape} and {b.shape}", code="SX404")


sparse_to_dense_matmul.shapes(fused_shapes)


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


def _check_pairs(a: Array, b: Array) -> None:
    """Raise OperatorError unless the last axis of both holds a real and an imaginary part."""
    for x in (a, b):
        if not x.ndim or x.shape[-1] != 2:
            raise OperatorError(f"the last axis must hold the real and the imaginary part, got shape {x.shape}", code="SX404")


def _complex(op: Op, a: V, b: V, sign: int) -> V:
    """Return the products of complex numbers A and B, or with sign -1 of A and the conjugates of B."""
    (x, y), (u, v) = (op.Split(z, axis=-1, num_outputs=2, outputs=2) for z in (a, b))
    same, crossed = (op.Sub, op.Add) if sign > 0 else (op.Add, op.Sub)
    return op.Concat(same(op.Mul(x, u), op.Mul(y, v)), crossed(op.Mul(y, u), op.Mul(x, v)), axis=-1)


@microsoft("ComplexMul", 1)
def complex_mul(op: Op, a: V, b: V) -> V:
    """Multiply complex numbers."""
    return _complex(op, a, b, 1)


complex_mul.accepts(_check_pairs)


@microsoft("ComplexMulConj", 1)
def complex_mul_conj(op: Op, a: V, b: V) -> V:
    """Multiply complex numbers A by the conjugates of B."""
    return _complex(op, a, b, -1)


complex_mul_conj.accepts(_check_pairs)
