"""GroupQueryAttention of onnxruntime for sequences without padding: rotation, the new rows of the caches, and attention.

A plan computes one length; an open plan calls `GroupQuery` with caches that grow in their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..proto.schemas import MICROSOFT
from .attention import attended, heads_of
from .onednn import library
from .table import Invalid, Site, kernel
from .values import FINITE, NAN, Bound, Value

PARTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"
)  # fmt: skip
"""The inputs that this form has; a call with further ones is computed by the definition."""


def reason_against(attributes: Mapping[str, Any], present: int, wanted: int) -> str:
    """Why a call is computed by the definition; "" if it has the form of this kernel.

    Args:
        attributes: those of the call, defaults included.
        present: the number of inputs that are present or precede a present one.
        wanted: the number of outputs that are used or precede a used one.
    """
    if present > len(PARTS) or wanted > 3:
        return "positions, a bias, norms or scores"
    plain = attributes["causal"] and not attributes["softcap"] and attributes["smooth_softmax"] != 1
    whole = attributes["kv_cache_bit_width"] == 0 and not attributes["sliding_window_cache"] and not attributes["qk_output"]
    return "" if plain and whole else "not causal, a cap of the scores, a smooth softmax, or a cache of few bits"


@dataclass(frozen=True)
class GroupQuery:
    """The computation of calls with these attributes, on float32.

    Attributes:
        heads: the number of heads of the queries.
        groups: the number of heads of the keys and values.
        scale: the factor of the scores; 0 for 1 / sqrt(size).
        window: the number of keys that a query sees, its own included; -1 for all.
        rotary: whether queries and keys are rotated.
        interleaved: whether a pair of features is adjacent.
    """

    heads: int
    groups: int
    scale: float
    window: int
    rotary: bool
    interleaved: bool

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> GroupQuery:
        """The computation of a call."""
        return cls(
            attributes["num_heads"],
            attributes["kv_num_heads"],
            attributes["scale"] or 0.0,
            attributes["local_window_size"],
            bool(attributes["do_rotary"]),
            bool(attributes["rotary_interleaved"]),
        )

    def whole(self, query: np.ndarray) -> np.ndarray:
        """Packed queries, keys and values as (batch, heads of all, rows, size), a view."""
        batch, rows, width = query.shape
        heads = self.heads + 2 * self.groups
        return query.reshape(batch, rows, heads, width // heads).transpose(0, 2, 1, 3)

    def split(self, query: np.ndarray, key: np.ndarray | None, value: np.ndarray | None) -> list[np.ndarray]:
        """Queries, keys and values as (batch, heads, rows, size), views of the inputs."""
        batch, rows, _ = query.shape
        if key is None or value is None:
            every = self.whole(query)
            return [every[:, : self.heads], every[:, self.heads : self.heads + self.groups], every[:, self.heads + self.groups :]]
        counts = (self.heads, self.groups, self.groups)
        return [
            x.reshape(batch, rows, n, x.shape[2] // n).transpose(0, 2, 1, 3)
            for x, n in zip((query, key, value), counts, strict=True)
        ]

    def angles(self, cos: np.ndarray, sin: np.ndarray, past: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The factors of a feature and of its partner, (rows, features that are rotated), for positions from `past` on."""
        c, s = cos[past : past + rows], sin[past : past + rows]
        if self.interleaved:
            return np.repeat(c, 2, 1), np.stack((-s, s), 2).reshape(rows, -1)
        return np.concatenate((c, c), 1), np.concatenate((-s, s), 1)

    def turn(
        self, x: np.ndarray, angles: tuple[np.ndarray, np.ndarray], out: np.ndarray, memory: np.ndarray | None = None
    ) -> None:
        """Write x, rotated; `memory`: float32 elements to compute with, at least as many as x has."""
        c, s = angles
        width = c.shape[1]
        given, made = x[..., :width], out[..., :width]
        partner = np.empty(given.shape, np.float32) if memory is None else memory[: given.size].reshape(given.shape)
        half = width // 2
        first, second = (slice(0, width, 2), slice(1, width, 2)) if self.interleaved else (slice(half), slice(half, width))
        partner[..., first], partner[..., second] = given[..., second], given[..., first]
        np.multiply(partner, s, out=partner)
        np.multiply(given, c, out=made)
        np.add(made, partner, out=made)
        if width < x.shape[3]:
            out[..., width:] = x[..., width:]

    def check(self, query: np.ndarray, past: int, seqlens: np.ndarray, total: Any, cos: Any) -> None:
        """Raise Invalid unless each sequence has all rows of the past and of the query."""
        length = past + query.shape[1]
        lengths = seqlens.reshape(-1).tolist()
        if lengths != [length - 1] * query.shape[0] or np.asarray(total).reshape(-1)[0] != length:
            raise Invalid("the sequences have padding")
        if self.rotary and (cos is None or length > cos.shape[0]):
            raise Invalid("a position is out of range")

    def hidden(self, rows: int, past: int) -> np.ndarray:
        """Negative infinity for the keys that a query does not see, 0 for others; of shape (rows, past + rows)."""
        key, row = np.arange(past + rows), np.arange(past, past + rows)[:, None]
        unseen = key > row
        if self.window > 0:
            unseen |= key <= row - self.window
        return np.where(unseen, np.float32(-np.inf), np.float32(0))

    def attend(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, past: int, out: np.ndarray) -> None:
        """Write the result of attention, of shape (batch, rows, heads * size), for the rows after those of the past."""
        batch, heads, rows, size = q.shape
        share, total = heads // self.groups, keys.shape[2]
        factor = self.scale or 1 / math.sqrt(size)
        wide = (q * np.float32(factor)).reshape(batch, self.groups, share * rows, size)
        scores = np.matmul(wide, keys.swapaxes(-1, -2)).reshape(batch, heads, rows, total)
        if rows > 1 or self.window > 0:
            scores += self.hidden(rows, past)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        y = np.matmul(scores.reshape(batch, self.groups, share * rows, total), values)
        out.reshape(batch, rows, heads, size)[...] = y.reshape(batch, heads, rows, size).transpose(0, 2, 1, 3)

    def fits(self, query: Any, key: Any, past: Any, other: Any, cos: Any) -> bool:
        """Whether the shapes of the inputs match; those of a cache are (batch, groups, rows, size)."""
        if query.ndim != 3 or not query.size or self.groups < 1 or self.heads % self.groups:
            return False
        batch, rows, width = query.shape
        if key is None:
            if width % (self.heads + 2 * self.groups):
                return False
            size = width // (self.heads + 2 * self.groups)
        else:
            if width % self.heads or key.shape != (batch, rows, width // self.heads * self.groups):
                return False
            size = width // self.heads
        if self.rotary and (cos is None or cos.ndim != 2 or 2 * cos.shape[1] > size):
            return False
        return past is None or (past.shape == other.shape and past.ndim == 4 and past.shape[::3] == (batch, size)
                                and past.shape[1] == self.groups)  # fmt: skip


def checked(made: GroupQuery, given: Sequence[np.ndarray | None]) -> tuple[list[Any], int]:
    """The parts of a call and the number of rows of its past: those of caches that grow, or a part of those of buffers.

    Args:
        made: the computation.
        given: the inputs, in the order of `PARTS`; further ones are absent.

    Raises:
        Invalid: if the sequences have padding, the shapes do not match, or the elements are not float32.
    """
    parts: list[Any] = [*given, *[None] * len(PARTS)][: len(PARTS)]
    query, key, value, past_key, past_value, seqlens, total, cos, sin = parts
    if query is None or past_key is None or past_value is None or seqlens is None or total is None:
        raise Invalid("a part is absent")
    floats = [x for x in (query, key, value, past_key, past_value, cos, sin) if x is not None]
    if any(x.dtype != np.float32 for x in floats) or not made.fits(query, key, past_key, past_value, cos):
        raise Invalid("not float32, or the shapes do not match")
    past, rows, count = past_key.shape[2], query.shape[1], int(np.asarray(total).reshape(-1)[0])
    past = count - rows if rows <= count <= past else past
    made.check(query, past, seqlens, total, cos)
    return parts, past


def grow(
    made: GroupQuery, given: Sequence[np.ndarray | None], extend: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The outputs of a call whose caches grow in their memory, or are buffers with room for its rows.

    Args:
        made: the computation.
        given: the inputs, in the order of `PARTS`; further ones are absent.
        extend: returns a cache with new rows after the number of rows that is passed.

    Raises:
        Invalid: as for `checked`.
    """
    (query, key, value, past_key, past_value, _, _, cos, sin), past = checked(made, given)
    q, k, v = made.split(query, key, value)
    if made.rotary and cos is not None and sin is not None:
        angles = made.angles(cos, sin, past, query.shape[1])
        if key is None:  # both are parts of one array
            both = made.whole(query)[:, : made.heads + made.groups]
            turned = np.empty(both.shape, np.float32)
            made.turn(both, angles, turned)
            q, k = turned[:, : made.heads], turned[:, made.heads :]
        else:
            parts = q, k
            q, k = (np.empty(x.shape, np.float32) for x in parts)
            for x, y in zip(parts, (q, k), strict=True):
                made.turn(x, angles, y)
    keys, values = extend(past_key, k, past), extend(past_value, v, past)
    out = np.empty((query.shape[0], query.shape[1], made.heads * q.shape[3]), np.float32)
    length = past + query.shape[1]
    made.attend(q, keys[:, :, :length], values[:, :, :length], past, out)
    return out, keys, values


@kernel("GroupQueryAttention", 1, on="numpy", domain=MICROSOFT)
def group_query_attention(site: Site, query: Value, *more: Value | None) -> tuple[Value | None, ...]:
    given = (query, *more)
    last = max(i for i, v in enumerate(given) if v is not None) + 1
    site.require(not (why := reason_against(site.attributes, last, len(site.outputs))), why)
    key, value, past_key, past_value, seqlens, total, cos, sin = (*more, *[None] * len(PARTS))[: len(PARTS) - 1]
    made = GroupQuery.of(site.attributes)
    floats = [v for v in (query, key, value, past_key, past_value, cos, sin) if v is not None]
    site.require(all(v.dtype == np.float32 and (v.contiguous or not v.size) for v in floats), "not float32, or not in C order")
    site.require(seqlens is not None and total is not None, "no lengths")
    site.require((key is None) == (value is None) and (past_key is None) == (past_value is None), "a part is absent")
    site.require(made.fits(query, key, past_key, past_value, cos), "the shapes do not match")
    site.require(sin is not None or not made.rotary, "no cosines or sines")
    assert seqlens is not None and total is not None
    past = 0 if past_key is None else past_key.shape[2]
    try:
        made.check(query.array, past, seqlens.array, total.array, None if cos is None else cos.array)
    except Invalid as error:
        site.refuse(str(error))
    batch, rows = query.shape[:2]
    size = query.shape[2] // (made.heads + (2 * made.groups if key is None else 0))
    y = site.new((batch, rows, made.heads * size), np.float32, finiteness=NAN)
    presents = [site.new((batch, made.groups, past + rows, size), np.float32, finiteness=NAN) for _ in range(2)]
    inputs = [v for v in (query, key, value, past_key, past_value, seqlens, total, cos, sin) if v is not None]
    finite = max(v.finiteness for v in floats) == FINITE and rows > 1 and library() is not None
    turned = site.new((batch, made.heads, rows, size), np.float32, finiteness=FINITE if finite else NAN)
    scratch = site.scratch(turned.nbytes) if made.rotary else None

    def bind() -> Bound:
        memory = None if scratch is None or scratch.memory is None else scratch.memory[: turned.nbytes].view(np.float32)
        arrays = [None if v is None else v.array for v in (query, key, value, past_key, past_value, cos, sin)]
        out = None if finite else y.array
        targets = [turned.array, *(p.array for p in presents)]
        return [(_run, (made, past, arrays, seqlens.array, total.array, targets, out, memory))]

    writes = (turned, *presents, *(() if finite else (y,)))
    site.emit(bind, reads=inputs, writes=writes, kernel="numpy.group_query", scratch=scratch)
    if finite:  # BLAS would use several threads
        site.needs_finite()
        presents[0].finiteness = presents[1].finiteness = y.finiteness = FINITE
        hidden = site.shared_constant(("group query", rows, past, made.window), lambda: made.hidden(rows, past))
        scale = made.scale or 1 / math.sqrt(size)
        attended(site, turned, presents[0], presents[1], heads_of(site, y, made.heads), [("linear", scale, 0.0)], [hidden])
    return (y, *presents)[: len(site.outputs)]


def _run(
    made: GroupQuery, past: int, arrays: list[Any], lengths: np.ndarray, count: np.ndarray, targets: list[np.ndarray],
    out: np.ndarray | None, memory: np.ndarray | None,
) -> None:  # fmt: skip
    """Write the rotated queries and the caches, and the result if it has an array."""
    query, key, value, past_key, past_value, cos, sin = arrays
    made.check(query, past, lengths, count, cos)
    q, k, v = made.split(query, key, value)
    turned, keys, values = targets
    if past:
        keys[:, :, :past], values[:, :, :past] = past_key, past_value
    values[:, :, past:] = v
    if made.rotary:
        angles = made.angles(cos, sin, past, query.shape[1])
        made.turn(q, angles, turned, memory)
        made.turn(k, angles, keys[:, :, past:], memory)
    else:
        turned[...], keys[:, :, past:] = q, k
    if out is not None:
        made.attend(turned, keys, values, past, out)
