"""Recipes of products, distances and inverses."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw, Skip
from ..registry import recipe

PARAMETERS = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "Softsign": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",),
    "Celu": ("alpha",), "ThresholdedRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Selu": ("alpha", "gamma"),
}  # fmt: skip


def drawn_activation(d: Draw, along: bool = False) -> None:
    name = d.pick(sorted(PARAMETERS) + ["Softmax"] * along)
    d.attributes["activation"] = name
    if name == "Softmax":
        d.attributes["activation_axis"] = -1
    for key in PARAMETERS.get(name, ()):
        d.attributes[f"activation_{key}"] = d.real(0.1, 1.5)


def _factor(d: Draw, shape: tuple[int, ...], transposed: int, batch: int) -> tuple[int, ...]:
    """The shape of a factor that is `shape` after it is turned."""
    lead, (rows, columns) = shape[:-2], shape[-2:]
    if transposed:
        rows, columns = columns, rows
    return (rows, *lead, columns) if batch else (*lead, rows, columns)


@recipe("FusedMatMul TransposeMatMul FusedMatMulActivation", MICROSOFT)
def fused_matmul(d: Draw) -> None:
    batches = d.schema.name != "TransposeMatMul"
    m, k, n = (d.size() for _ in range(3))
    lead, other = d.pair(0, 2)
    shapes: list[tuple[int, ...]] = []
    vectors = [d.chance(0.1), d.chance(0.1)]
    if vectors[1]:
        lead = ()  # the ledger's entry on transA and a vector covers a result with one axis
    for letter, shape, vector in zip("AB", ((*lead, m, k), (*other, k, n)), vectors, strict=True):
        if vector:
            d.attr(f"trans{letter}", [0, 1], 0)  # a vector is not turned
            shapes.append((k,))
            continue
        transposed = d.attr(f"trans{letter}", [0, 1], 0)
        batch = d.attr(f"transBatch{letter}", [0, 1], 0) if batches and len(shape) > 2 else 0
        shapes.append(_factor(d, shape, transposed, batch))
    for i, shape in enumerate(shapes):
        d.put(d.array(i, shape, "tame"))
    d.attr("alpha", d.real, 1.0)
    if d.has("activation"):
        drawn_activation(d, along=not all(vectors))


@recipe("FusedGemm", MICROSOFT)
def fused_gemm(d: Draw) -> None:
    m, k, n = (d.size() for _ in range(3))
    ta, tb = d.attr("transA", [0, 1], 0), d.attr("transB", [0, 1], 0)
    if d.dtype(0).kind in "iu":
        raise Skip
    d.put(d.array(0, (k, m) if ta else (m, k), "tame"), d.array(1, (n, k) if tb else (k, n), "tame"))
    if d.chance(0.7):
        d.put(d.array(2, d.broadcast((m, n)), "tame"))
    for name in ("alpha", "beta"):
        d.attr(name, d.real, 1.0)
    drawn_activation(d)


@recipe("SparseToDenseMatMul", MICROSOFT)
def sparse_to_dense_matmul(d: Draw) -> None:
    """The sparse factor is drawn as a dense array: onnxruntime takes no such input, and only the body judges."""
    d.types["T"] = d.types["T1"]
    m, k, n = (d.size() for _ in range(3))
    ta, tb = d.attr("transA", [0, 1], 0), d.attr("transB", [0, 1], 0)
    a, b = d.array("T1", (k, m) if ta else (m, k), "tame"), d.array("T1", (n, k) if tb else (k, n), "tame")
    d.put(np.where(d.rng.random(a.shape) < 0.6, np.zeros(1, a.dtype), a), b)
    d.attr("alpha", d.real, 1.0)


@recipe("CDist", MICROSOFT)
def cdist(d: Draw) -> None:
    columns = d.size(6)
    d.put(d.array(0, (d.size(), columns), "tame"), d.array(1, (d.size(), columns), "tame"))
    d.attr("metric", ["euclidean", "sqeuclidean"], "sqeuclidean")


@recipe("Inverse", MICROSOFT)
def inverse(d: Draw) -> None:
    """Matrices whose diagonal dominates: their inverses magnify errors little."""
    n = d.size(4)
    x = d.array(np.float32, (*d.shape(0, 2, 3), n, n), "around")
    d.put((x + (n + 1) * np.eye(n)).astype(d.dtype(0)))


@recipe("ComplexMul ComplexMulConj", MICROSOFT)
def complex_mul(d: Draw) -> None:
    a, b = d.pair(0, 3)
    d.put(d.array(0, (*a, 2), "tame"), d.array(1, (*b, 2), "tame"))
