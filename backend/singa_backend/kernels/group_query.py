"""GroupQueryAttention of onnxruntime for sequences without padding: rotation, the new rows of the caches, and attention.

The caches have one row for each element of the past, and grow; or they are buffers with room for the new rows, which are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.sizes import now, settled
from ..proto.schemas import MICROSOFT
from .attention import attended, heads_of, hidden_keys, mask_of
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

    def rows_of_past(self, sizes: Sequence[int], seqlens: np.ndarray, total: np.ndarray, positions: int) -> int:
        """The number of rows of the past: those of caches that grow, or a part of those of buffers.

        Args:
            sizes: the batch, the rows of the query, and those of a cache.
            seqlens: the index of the last row of each sequence.
            total: the number of rows.
            positions: the number of rotations.

        Raises:
            Invalid: if a sequence has not all rows of the past and of the query, or a position has no rotation.
        """
        batch, rows, capacity = sizes
        count = int(total.reshape(-1)[0])
        past = count - rows if rows <= count <= capacity else capacity
        if seqlens.reshape(-1).tolist() != [past + rows - 1] * batch or count != past + rows:
            raise Invalid("the sequences have padding")
        if self.rotary and count > positions:
            raise Invalid("a position is out of range")
        return past

    def hidden(self, rows: int, past: int) -> np.ndarray:
        """Negative infinity for the keys that a query does not see, 0 for others; of shape (rows, past + rows)."""
        return hidden_keys(rows, past + rows, past, 1, self.window - 1 if self.window > 0 else -1, -1)

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


@kernel("GroupQueryAttention", 1, on="numpy", domain=MICROSOFT)
def group_query_attention(site: Site, query: Value, *more: Value | None) -> tuple[Value | None, ...]:
    given = (query, *more)
    last = max(i for i, v in enumerate(given) if v is not None) + 1
    site.require(not (why := reason_against(site.attributes, last, len(site.outputs))), why)
    key, value, past_key, past_value, seqlens, total, cos, sin = (*more, *[None] * len(PARTS))[: len(PARTS) - 1]
    attention = GroupQuery.of(site.attributes)
    floats = [v for v in (query, key, value, past_key, past_value, cos, sin) if v is not None]
    site.require(all(v.dtype == np.float32 for v in floats), "not float32")
    site.require(seqlens is not None and total is not None, "no lengths")
    site.require((key is None) == (value is None) and (past_key is None) == (past_value is None), "a part is absent")
    site.require(attention.fits(query, key, past_key, past_value, cos), "the shapes do not match")
    site.require((cos is not None and sin is not None) or not attention.rotary, "no cosines or sines")
    assert seqlens is not None and total is not None
    batch, rows = query.shape[:2]
    capacity = 0 if past_key is None else past_key.shape[2]
    positions = 0 if cos is None else cos.shape[0]
    sizes = batch, rows, capacity
    try:
        past = attention.rows_of_past(settled(sizes), site.present(seqlens), site.present(total), positions)
    except Invalid as error:
        site.refuse(str(error))
    grows = past == now(capacity)
    length = capacity + rows if grows else capacity
    size = query.shape[2] // (attention.heads + (2 * attention.groups if key is None else 0))
    y = site.new((batch, rows, attention.heads * size), np.float32, finiteness=NAN)
    shape = (batch, attention.groups, length, size)
    (copied_key, key_rows), (copied_value, value_rows) = (_extended(site, x, rows, shape, grows) for x in (past_key, past_value))
    presents = key_rows, value_rows
    inputs = [v for v in (query, key, value, past_key, past_value, seqlens, total, cos, sin) if v is not None]
    by_code = grows and max(v.finiteness for v in floats) == FINITE and rows != 1 and library() is not None
    turned = site.new((batch, attention.heads, rows, size), np.float32, finiteness=FINITE if by_code else NAN)
    scratch = site.scratch(turned.nbytes) if attention.rotary else None

    def bind() -> Bound:
        memory = None if scratch is None or scratch.memory is None else scratch.memory[: now(turned.nbytes)].view(np.float32)
        arrays = [None if v is None else v.array for v in (query, key, value, copied_key, copied_value, cos, sin)]
        targets = [turned.array, *(p.array for p in presents)]
        out = None if by_code else y.array
        return [(_run, (attention, settled(sizes), grows, arrays, (seqlens.array, total.array), targets, out, memory))]

    writes = (turned, *presents, *(() if by_code else (y,)))
    site.emit(bind, reads=inputs, writes=writes, kernel="numpy.group_query", scratch=scratch)
    if by_code:  # BLAS would use several threads
        site.needs_finite()
        presents[0].finiteness = presents[1].finiteness = y.finiteness = FINITE
        key_of = ("group query", rows, capacity, attention.window)
        hidden = mask_of(site, (rows, length), key_of, lambda: attention.hidden(now(rows), now(capacity)))
        scale = attention.scale or 1 / math.sqrt(size)
        out = heads_of(site, y, attention.heads)
        attended(site, turned, presents[0], presents[1], out, [("linear", scale, 0.0)], [hidden])
    return (y, *presents)[: len(site.outputs)]


def _extended(site: Site, past: Value | None, rows: Any, shape: Sequence[Any], grows: bool) -> tuple[Value | None, Value]:
    """A cache that must be copied, or None, and the value that has it and further rows: in its memory if it can grow there."""
    present = site.grown(past, 2, rows) if past is not None and grows else None
    if present is None:
        return past, site.new(shape, np.float32, finiteness=NAN)
    present.finiteness = NAN
    return None, present


def _run(
    attention: GroupQuery, sizes: tuple[int, ...], grows: bool, arrays: list[Any], lengths: tuple[np.ndarray, np.ndarray],
    targets: list[np.ndarray], out: np.ndarray | None, memory: np.ndarray | None,
) -> None:  # fmt: skip
    """Write the rotated queries and the caches, and the result if it has an array."""
    query, key, value, past_key, past_value, cos, sin = arrays
    past = attention.rows_of_past(sizes, *lengths, 0 if cos is None else cos.shape[0])
    if grows != (past == sizes[2]):
        raise Invalid("a cache has another kind of room")
    q, k, v = attention.split(query, key, value)
    end = past + sizes[1]
    turned, keys, values = targets
    for whole, before in ((keys, past_key), (values, past_value)):
        if before is not None:
            whole[:, :, :past], whole[:, :, end:] = before[:, :, :past], 0
    values[:, :, past:end] = v
    if attention.rotary:
        angles = attention.angles(cos, sin, past, sizes[1])
        attention.turn(q, angles, turned, memory)
        attention.turn(k, angles, keys[:, :, past:end], memory)
    else:
        turned[...], keys[:, :, past:end] = q, k
    if out is not None:
        attention.attend(turned, keys[:, :, :end], values[:, :, :end], past, out)
