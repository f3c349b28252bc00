"""Einsum, where it is a product of two batches of matrices, a sum over axes, or an order of axes."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from .elementwise import FLOATS, nan_of_infinite
from .lowering import F32
from .products import MatrixProduct, contiguous
from .reductions import reduced
from .table import Site, kernel
from .values import Value, merged


def _letters(site: Site, terms: Sequence[str], result: str | None, values: Sequence[Value]) -> tuple[list[str], str]:
    """The terms and the result with one letter for each axis, those of '...' included."""
    free = [c for c in string.ascii_letters if c not in "".join(terms)]
    deepest = 0
    made = []
    for term, v in zip(terms, values, strict=True):
        before, dots, after = term.partition("...")
        rest = v.ndim - len(before) - len(after)
        site.require(rest >= 0 if dots else rest == 0, "a term does not match its operand")
        deepest = max(deepest, rest)
        site.require(len(free) >= deepest and "." not in before + after, "not a valid term")
        made.append(before + "".join(free[:rest][::-1]) + after)
    dotted = "".join(free[:deepest][::-1])
    if result is None:
        named = "".join(terms).replace(".", "")
        return made, dotted + "".join(sorted(c for c in set(named) if named.count(c) == 1))
    site.require("..." in result or not deepest, "the axes of '...' are summed")
    return made, result.replace("...", dotted)


def _sizes(site: Site, terms: Sequence[str], result: str, values: Sequence[Value]) -> dict[str, int]:
    """The size of each letter; declines if a letter has several, or occurs twice in a term."""
    sizes: dict[str, int] = {}
    for term, v in zip(terms, values, strict=True):
        site.require(len(set(term)) == len(term) and term.isalpha(), "a letter occurs twice in a term")
        for letter, size in zip(term, v.shape, strict=True):
            site.require(sizes.setdefault(letter, size) == size, "the sizes of a letter differ")
    site.require(len(set(result)) == len(result) and set(result) <= set(sizes), "not a valid result")
    return sizes


@kernel("Einsum", 12, 28, on="onednn")
def einsum(site: Site, *values: Value) -> Value:
    text = site.attributes["equation"].replace(" ", "")
    left, arrow, right = text.partition("->")
    site.require(left.count(",") + 1 == len(values) <= 2, "more than two terms, or another number of operands")
    terms, result = _letters(site, left.split(","), right if arrow else None, values)
    sizes = _sizes(site, terms, result, values)
    if len(values) == 1:
        x, letters = values[0], "".join(c for c in terms[0] if c in result)
        if letters != terms[0]:
            site.require(x.dtype in FLOATS, f"elements of {x.dtype}")
            x = reduced(site, x, tuple(i for i, c in enumerate(terms[0]) if c not in result), False, np.add, nan_of_infinite)
        return _ordered(x, letters, result)
    return _multiplied(site, (terms[0], terms[1]), result, (values[0], values[1]), sizes)


def _multiplied(site: Site, terms: tuple[str, str], result: str, values: tuple[Value, Value], sizes: dict[str, int]) -> Value:
    """The product of two operands whose axes the terms name."""
    (a, b), (x, y) = terms, values
    site.require(x.dtype == y.dtype == F32 and x.size and y.size, "not float32, or empty")
    site.require(set(a) ^ set(b) <= set(result), "a letter of one term only is summed")
    batch = [c for c in result if c in a and c in b]
    rows, columns = ([c for c in result if c in one and c not in batch] for one in (a, b))
    inner = [c for c in a if c in b and c not in batch]
    site.require((rows or columns) and inner, "it is not a product of matrices")
    if rows and result[-1] in rows:  # the last axis in memory belongs to the right operand
        x, y, a, b, rows, columns = y, x, b, a, columns, rows
    one = _matrix(site, x, a, batch, rows, inner)
    two = _matrix(site, y, b, batch, inner, columns)
    names = "".join([*batch, *rows, *columns])
    product = MatrixProduct(site, one, two, y)
    if len(rows) == len(columns) == 1 and names == result:
        return product.emit(site.followers)
    shape = tuple(sizes[c] for c in result)
    z = site.new(shape, F32, finiteness=product.finiteness)
    target = _joined(_ordered(z, result, names), len(batch), len(rows))
    if target is None or (columns and target.strides[-1] != F32.itemsize):
        z = site.new([sizes[c] for c in names], F32, finiteness=product.finiteness)
        target = _joined(z, len(batch), len(rows))
        z = _ordered(z, names, result)
    assert target is not None
    product.emit(target=target)
    return z


def _ordered(x: Value, letters: str, wanted: str) -> Value:
    places = [letters.index(c) for c in wanted]
    return x.view([x.shape[p] for p in places], [x.strides[p] for p in places])


def _joined(x: Value, batch: int, rows: int) -> Value | None:
    """A batch of matrices whose rows and columns are each several axes of the value; None if these are not evenly spaced."""
    parts = [(x.shape[s], x.strides[s]) for s in (slice(batch, batch + rows), slice(batch + rows, None))]
    joined = [merged(shape, strides) for shape, strides in parts]
    if None in joined:
        return None
    (m, step), (n, inner) = ((d, F32.itemsize if d == 1 else s) for d, s in (j for j in joined if j is not None))
    return x.view((*x.shape[:batch], m, n), (*x.strides[:batch], step, inner))


def _matrix(site: Site, x: Value, letters: str, batch: list[str], rows: list[str], columns: list[str]) -> Value:
    x = _ordered(x, letters, "".join([*batch, *rows, *columns]))
    return _joined(x, len(batch), len(rows)) or _joined(contiguous(site, x), len(batch), len(rows)) or x
