"""Attention: two products and a softmax between them, which read and write heads by strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ir.sizes import OpenSize, broadcast_sizes, is_open, now, settled
from .copies import joined
from .lowering import F32, derived
from .products import MatrixProduct
from .softmaxes import softmax_in_place
from .table import Site, kernel
from .values import ANY, FINITE, INFINITE, REACHED, Value

LOWEST = np.float32(np.finfo(np.float32).min)
"""Is added in place of negative infinity, so that the softmax of a query without visible keys is not NaN."""


def heads_of(site: Site, x: Value, count: int | None) -> Value:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    site.require(count and count > 0 and x.shape[2] % count == 0, "the heads do not divide the last axis")
    assert count is not None
    batch, length, size = x.shape[0], x.shape[1], x.shape[2] // count
    return x.view((batch, count, length, size), (x.strides[0], x.strides[2] * size, x.strides[1], x.strides[2]))


def turned(x: Value, i: int, j: int) -> Value:
    """A view with two axes swapped."""
    shape, strides = list(x.shape), list(x.strides)
    shape[i], shape[j], strides[i], strides[j] = shape[j], shape[i], strides[j], strides[i]
    return x.view(shape, strides)


def hidden_keys(queries: int, keys: int, past: int, causal: int, left: int, right: int) -> np.ndarray:
    """Negative infinity for the keys that their places hide from a query, 0 for others; of shape (queries, keys).

    Args:
        queries: their number.
        keys: their number.
        past: the place of the first query.
        causal: whether keys after a query are hidden.
        left: how many keys before it a query sees; -1 for all.
        right: how many after it; -1 for all.
    """
    position, key = np.arange(queries)[:, None] + past, np.arange(keys)
    hidden = np.zeros((queries, keys), np.bool_)
    if causal:
        hidden |= key > position
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def mask_of(site: Site, shape: Sequence[Any], key: Any, make: Callable[[], np.ndarray]) -> Value:
    """What hides keys, by their places only: a constant, or a value that each run fills if sizes differ between runs.

    Args:
        site: the place.
        shape: of the mask.
        key: what the constant depends on.
        make: returns it for the present sizes; each row has an element that is not negative infinity.
    """
    if not is_open(shape):
        return site.shared_constant(key, make)
    bias = site.new(shape, F32, finiteness=INFINITE)
    bias.low = REACHED
    site.emit(lambda: [(np.copyto, (bias.array, make()))], reads=(), writes=(bias,), kernel="numpy.copyto")
    return bias


class Bias:
    """What is added to the scores: a mask, and negative infinity where a key must not be seen.

    Attributes:
        terms: the values that are added.
        visible: for each query 1, or 0 if it sees no key; None if each sees a key.
    """

    def __init__(self, site: Site, mask: Value | None, shape: tuple[int, ...], past: int) -> None:
        self.site, self.shape, self.past = site, shape, past
        self.terms: list[Value] = []
        self.visible: Value | None = None
        hides = self._hides()
        if mask is None:
            if hides:
                self._hidden_term()
        elif mask.constant and mask.contents is None:
            if is_open((*shape, past)):
                raise OpenSize("a constant mask is joined with numbers")
            array = mask.array
            what = ("mask", shape, past, self._windows())
            self.terms = [derived(site, mask, what, lambda: self._joined(array, self._forbidden() if hides else None))]
            site.require((self.terms[0].array.max(-1) > -np.inf).all(), "a query sees no key")
            self.terms[0].low, self.terms[0].finiteness = REACHED, INFINITE
        elif mask.dtype == np.bool_ or mask.shape[-1] != shape[-1]:
            self._dynamic(mask, hides)
        else:
            site.require(mask.dtype == F32 and mask.finiteness == FINITE, "the mask may not be finite")
            self.terms = [mask]
            if hides:
                self._hidden_term()

    def _windows(self) -> tuple[int, int, int]:
        given = self.site.attributes
        return given["is_causal"], given.get("left_window_size", -1), given.get("right_window_size", -1)

    def _hides(self) -> bool:
        """Whether causality or windows may hide keys."""
        causal, left, right = self._windows()
        self.site.require(min(left, right) >= -1, "a window is not valid")
        if left >= 0 or right >= 0:
            return True
        return bool(causal) and not (self.shape[2] == 1 and self.shape[3] == self.past + 1)

    def _forbidden(self) -> np.ndarray:
        """What causality and windows hide at the present sizes."""
        queries, keys = settled(self.shape[2:])
        return hidden_keys(queries, keys, now(self.past), *self._windows())

    def _hidden_term(self) -> None:
        """Add what hides keys."""
        windows, shape = self._windows(), self.shape[2:]
        if is_open(shape) and max(windows[1:]) >= 0:
            raise OpenSize("a query of another size may see no key")
        term = mask_of(self.site, shape, ("windows", shape, self.past, windows), self._forbidden)
        self.site.require(not term.constant or (term.array.max(-1) > -np.inf).all(), "a query sees no key")
        self.terms.append(term)

    def _joined(self, mask: np.ndarray, forbidden: np.ndarray | None) -> np.ndarray:
        bias = np.where(mask, np.float32(0), np.float32(-np.inf)) if mask.dtype == np.bool_ else mask.astype(F32)
        missing = self.shape[-1] - bias.shape[-1]
        if missing:
            pads = [*[(0, 0)] * (bias.ndim - 1), (0, missing)]
            bias = np.pad(bias, pads, constant_values=np.float32(-np.inf))
        return bias if forbidden is None else bias + forbidden

    def _dynamic(self, mask: Value, hides: bool) -> None:
        """Add the steps that make a bias of a boolean or a short mask."""
        site = self.site
        site.require(mask.dtype in (np.bool_, F32) and mask.finiteness == FINITE, "the mask may not be finite")
        wide = mask.shape[:-1] if not hides else broadcast_sizes(mask.shape[:-1], self.shape[2:3])
        bias = site.new((*wide, self.shape[-1]), F32, finiteness=FINITE)
        visible = site.new((*wide, 1), F32, finiteness=FINITE)
        given = bias.view((*wide, mask.shape[-1]), bias.strides)
        truth = mask.dtype == np.bool_

        def bind() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
            array, part = bias.array, given.array
            calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(array.fill, (LOWEST,))]
            calls.append((np.copyto, (part, np.float32(0), "same_kind", mask.array) if truth else (part, mask.array)))
            if hides:
                calls.append((np.copyto, (array, LOWEST, "same_kind", self._forbidden() < 0)))
            calls.append((_seen, (array, np.empty(settled(visible.shape), np.bool_), visible.array)))
            return calls

        site.emit(bind, reads=(mask,), writes=(bias, visible), kernel="numpy.where")
        self.terms, self.visible = [bias], visible


def _seen(bias: np.ndarray, work: np.ndarray, visible: np.ndarray) -> None:
    """Set `visible` to whether a row has an element that is not the lowest."""
    np.maximum.reduce(bias, axis=-1, out=visible, keepdims=True)
    np.greater(visible, LOWEST, work)
    np.copyto(visible, work)


@kernel("Attention", 23, 24, 25, on="onednn")
def attention(
    site: Site,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    lengths: Value | None = None,
) -> tuple[Value | None, ...]:
    """Scores by a product with the keys, read as columns; softmax in place; a product with the values, written by strides."""
    given = site.attributes
    site.require(lengths is None and not (site.outputs[3:] and site.outputs[3]), "lengths, or the scores are an output")
    site.require(all(x is None or x.dtype == F32 for x in (q, k, v, past_key, past_value)), "not float32")
    site.require(
        given["softmax_precision"] in (None, 1) and given["qk_matmul_output_mode"] in range(4), "another precision or mode"
    )
    site.require(q.ndim == k.ndim == v.ndim and q.ndim in (3, 4), "another rank")
    site.require((past_key is None) == (past_value is None), "only one past")
    flat = q.ndim == 3
    if flat:
        q, k, v = (heads_of(site, x, given[n]) for x, n in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads")))
    else:
        site.require(
            given["q_num_heads"] in (None, q.shape[1]) and given["kv_num_heads"] in (None, k.shape[1]), "the heads differ"
        )
    past = 0
    if past_key is not None and past_value is not None:
        for old, new in ((past_key, k), (past_value, v)):
            site.require(
                old.ndim == 4 and old.shape[:2] == new.shape[:2] and old.shape[3] == new.shape[3], "the past does not fit"
            )
        past = past_key.shape[2]
        k, v = joined(site, (past_key, k), 2), joined(site, (past_value, v), 2)
    (batch, heads, queries, size), (keys, kv_heads) = q.shape, (k.shape[2], k.shape[1])
    fits = (batch, kv_heads, size, keys) == (k.shape[0], v.shape[1], k.shape[3], v.shape[2]) and v.shape[0] == batch
    site.require(fits and q.size and k.size and v.size and heads % kv_heads == 0, "the shapes do not match, or are empty")
    site.require(max(q.finiteness, k.finiteness, v.finiteness) == FINITE, "the inputs may not be finite")
    bias = Bias(site, _checked(site, mask, (batch, heads, queries, keys)), (batch, heads, queries, keys), past)
    scale = 1 / math.sqrt(size) if given["scale"] is None else given["scale"]
    softcap = given["softcap"]
    site.require(math.isfinite(scale) and math.isfinite(softcap), "a factor is not finite")
    site.needs_finite()

    before = [("linear", scale, 0.0)] if scale != 1 else []
    if softcap:
        before += [("linear", 1 / softcap, 0.0), ("tanh", 0.0, 0.0), ("linear", softcap, 0.0)]
    shape = (batch, heads, queries, v.shape[-1])
    if flat:
        y = site.new((batch, queries, heads * v.shape[-1]), F32, finiteness=FINITE)
        out = heads_of(site, y, heads)
    else:
        y = out = site.new(shape, F32, (0, 2, 1, 3), finiteness=FINITE)
    target = attended(site, q, k, v, out, before, bias.terms)
    if bias.visible is not None:
        factor = in_groups(bias.visible, q, k)
        site.emit(
            lambda: [(np.multiply, (target.array, factor.array, target.array))],
            reads=(target, factor), writes=(target,), kernel="numpy.multiply",
        )  # fmt: skip
    return y, k.view(k.shape, k.strides), v.view(v.shape, v.strides), None


def in_groups(x: Value, q: Value, k: Value) -> Value:
    """Values of the heads of the queries as (kv_heads, heads / kv_heads), if heads share keys."""
    return x if q.shape[1] == k.shape[1] else split(x, k.shape[1], q.shape[2] == 1)


def attended(
    site: Site, q: Value, k: Value, v: Value, out: Value, before: Sequence[tuple[str, float, float]], terms: Sequence[Value]
) -> Value:
    """Emit the products and the softmax of attention.

    Args:
        site: the place.
        q: the queries, of shape (batch, heads, queries, size).
        k: the keys, of fewer heads if these are shared.
        v: the values.
        out: receives the result; its heads may lie by strides.
        before: what is applied to the scores: the scale, a cap.
        terms: what is added to them then.

    Returns:
        The result, with its heads in groups.
    """
    right, values = k, v
    if q.shape[1] > k.shape[1] and q.shape[2] > 1:
        right, values = (x.view((*x.shape[:2], 1, *x.shape[2:]), (*x.strides[:2], 0, *x.strides[2:])) for x in (k, v))
    product = MatrixProduct(site, in_groups(q, q, k), turned(right, -1, -2))
    scores = product.emit(before=before, added=[in_groups(t, q, k) for t in terms])
    softmax_in_place(site, scores)
    scores.finiteness, scores.low = FINITE, ANY
    target = in_groups(out, q, k)
    MatrixProduct(site, scores, values).emit(target=target)
    return target


def _checked(site: Site, mask: Value | None, shape: tuple[int, ...]) -> Value | None:
    """A mask that broadcasts to the scores; the last axis may be short."""
    if mask is None:
        return None
    site.require(0 < mask.ndim <= 4 and mask.size and mask.shape[-1] <= shape[-1], "the mask does not fit")
    site.require(site.version > 23 or mask.shape[-1] == shape[-1], "the mask does not fit")
    lead = mask.shape[:-1]
    site.require(all(m in (1, s) for m, s in zip(lead[::-1], shape[-2::-1], strict=False)), "the mask does not fit")
    return mask


def split(x: Value, kv_heads: int, single: bool) -> Value:
    """The heads as two axes, (kv_heads, heads / kv_heads); the second takes the place of the axis of a single query."""
    if x.ndim < 3:
        return x
    heads, step = x.shape[-3], x.strides[-3]
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    steps = (step * groups[1], step)
    if single:
        return x.view((*x.shape[:-3], *groups, x.shape[-1]), (*x.strides[:-3], *steps, x.strides[-1]))
    return x.view((*x.shape[:-3], *groups, *x.shape[-2:]), (*x.strides[:-3], *steps, *x.strides[-2:]))
