"""Recipes of matrix products and related operators."""

from __future__ import annotations

import numpy as np

from ..strategies import Draw
from .numbers import drawn_scale, drawn_zero
from .registry import recipe


def _operands(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes that MatMul accepts."""
    m, k, n = (d.size() for _ in range(3))
    if d.chance(0.05):
        k = 0
    batch, other = d.pair(0, 2)
    a: tuple[int, ...] = (*batch, m, k)
    b: tuple[int, ...] = (*other, k, n)
    if d.chance(0.12):
        a = (k,)
    if d.chance(0.12):
        b = (k,)
    return a, b


@recipe("MatMul")
def mat_mul(d: Draw) -> None:
    a, b = _operands(d)
    kind = d.pick(["small", "tame"])
    d.put(d.array(0, a, kind), d.array(1, b, kind))


@recipe("MatMulInteger")
def mat_mul_integer(d: Draw) -> None:
    a, b = _operands(d)
    d.put(d.array(0, a), d.array(1, b))
    if d.chance(0.7):
        d.put(_zero(d, 2, a[-2] if len(a) > 1 else 0, len(a)) if d.chance(0.8) else None)
        if d.chance(0.7):
            d.put(_zero(d, 3, b[-1] if len(b) > 1 else 0, len(b)))
    if d.inputs[-1] is None:
        d.inputs.pop()


def _zero(d: Draw, which: int, rows: int, rank: int) -> np.ndarray:
    """Draw one zero point, or one for each row of A or column of B if they are matrices."""
    each = rank == 2 and d.chance(0.4) and which == 3
    return d.array(which, (rows,) if each else ())


@recipe("QLinearMatMul")
def q_linear_mat_mul(d: Draw) -> None:
    a, b = _operands(d)
    scale = "TS" if d.v >= 21 else "tensor(float)"
    for which, shape in ((0, a), (3, b)):
        d.put(d.array(which, shape, "tame"), drawn_scale(d, scale, ()), drawn_zero(d, d.dtype(which), ()))
    d.put(drawn_scale(d, scale, ()), drawn_zero(d, d.dtype(7), ()))


@recipe("Gemm")
def gemm(d: Draw) -> None:
    m, k, n = (d.size() for _ in range(3))
    if d.chance(0.05):
        k = 0
    ta, tb = d.attr("transA", [0, 1], 0), d.attr("transB", [0, 1], 0)
    d.put(d.array(0, (k, m) if ta else (m, k), "tame"), d.array(1, (n, k) if tb else (k, n), "tame"))
    if d.v >= 11 and d.chance(0.3):
        pass
    elif d.v < 7:
        d.attributes["broadcast"] = 1
        d.put(d.array(2, d.pick([(n,), (1,), (m, n)]), "tame"))
    else:
        d.put(d.array(2, d.broadcast((m, n)), "tame"))
    whole = d.dtype(0).kind in "iu"
    least = 0 if d.dtype(0).kind == "u" else -2  # a negative real cannot become an unsigned integer
    for name in ("alpha", "beta"):
        d.attr(name, lambda: float(d.whole(least, 3)) if whole else d.real(), 1.0)


EQUATIONS = (
    "ij->ji", "ij,jk->ik", "bij,bjk->bik", "ij->", "ii->i", "ii", "i,i->", "i,j->ij", "...ij,...jk->...ik", "...i->...",
    "ij,ij->ij",
    "ij,jk,kl->il", "abc->cab", "bij,bj->bi", "...ij->...ji", "i,ij->j", "ijk,ilm,njm->nlk", "...,...->...", "ij,jk", "ba->",
)  # fmt: skip


@recipe("Einsum")
def einsum(d: Draw) -> None:
    equation = d.pick(EQUATIONS)
    sizes: dict[str, int] = {}
    batch, other = d.pair(0, 2)
    for i, term in enumerate(equation.split("->")[0].split(",")):
        letters = term.replace("...", "")
        shape = tuple(sizes.setdefault(c, d.whole(0 if d.chance(0.02) else 1, 4)) for c in letters)
        d.put(d.array(0, ((batch, other)[i] if term.startswith("...") else ()) + shape, "tame"))
    d.attributes["equation"] = equation if d.chance(0.8) else equation.replace(",", " , ").replace("->", " -> ")


@recipe("Det")
def det(d: Draw) -> None:
    n = d.whole(1, 4)
    d.put(d.array(0, (*d.shape(0, 2, 3), n, n), "tame"))
