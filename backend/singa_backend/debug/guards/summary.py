"""The summary of an array: elements at positions that spread over every axis, and signed sums over groups of each axis.

A difference in one channel moves a sampled element or a sum of its group.  The signs are drawn, so the rounding errors of another
implementation do not add up in a sum, which has the tolerance of an element.  Small arrays are stored whole, and arrays that must
be equal have a hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes
from ...comparison.difference import Difference, Tolerance, difference, same_kind
from ...comparison.tolerances import COMPARE, narrowest
from .draws import digest, key_of, words


@dataclass(frozen=True)
class Level:
    """How much is stored of an array: sampled elements, and groups of each of the last four axes."""

    samples: int
    groups: int

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of elements and of sums that are stored of an array of floats; none of the latter if it is stored whole."""
        size = math.prod(shape)
        return (size, 0) if size <= 2 * self.samples else (self.samples, sum(self.sizes(shape)))

    def axes(self, shape: tuple[int, ...]) -> list[int]:
        """The axes over whose groups sums are stored."""
        return [a for a in range(len(shape)) if shape[a] > 1][-_AXES:]

    def sizes(self, shape: tuple[int, ...]) -> list[int]:
        """The number of groups of each of these axes."""
        return [min(shape[a], self.groups) for a in self.axes(shape)]


LEVELS = (Level(64, 32), Level(32, 16), Level(16, 8), Level(8, 4))
"""From the most to the least."""

_BLOCK = 1 << 20
_AXES = 4


def exact(dtype: np.dtype[Any]) -> bool:
    """Whether values of a dtype must be equal."""
    return not (dtypes.is_float(dtype) or dtype.kind == "c")


def parts(value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a value, with the end of the name of each: itself, elements of a sequence, keys and values of a map."""
    if isinstance(value, np.ndarray):
        yield "", value
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from ((f"/{i}{end}", array) for end, array in parts(one))
    elif isinstance(value, dict):
        keys = sorted(value, key=str)
        yield "/keys", np.array([str(k) for k in keys], object)
        yield "/values", _values([value[k] for k in keys])


def _values(values: list[Any]) -> np.ndarray:
    """The values of a map; its floats are those of ZipMap, which makes float32."""
    if values and isinstance(values[0], str):
        return np.array(values, object)
    made = np.array(values)
    return made.astype(np.float32) if made.dtype == np.float64 else made


def positions(shape: tuple[int, ...], level: Level, key: int) -> np.ndarray:
    """The flat indices of the sampled elements: along every axis they are spread evenly, in an order of their own."""
    size = math.prod(shape)
    if size <= 2 * level.samples:
        return np.arange(size)
    found = np.zeros(level.samples, np.int64)
    at = np.arange(level.samples, dtype=np.uint64)
    for axis, count in enumerate(shape):
        random = words(key + 1 + axis & (1 << 64) - 1, at)
        order = np.argsort(random, kind="stable")
        jitter = (random >> np.uint64(40)).astype(np.float64) / 2.0**24
        found = found * count + np.minimum(count - 1, ((order + jitter) * count / level.samples).astype(np.int64))
    return found


def sums(value: np.ndarray, level: Level, key: int) -> np.ndarray:
    """The signed sums of the finite elements over the groups of each of the last axes, divided by the root of their number."""
    shape = value.shape
    flat = value.reshape(-1)
    axes, totals = level.axes(shape), list(map(np.zeros, level.sizes(shape)))
    strides = [math.prod(shape[a + 1 :]) for a in axes]
    for start in range(0, flat.size, _BLOCK):
        at = np.arange(start, min(start + _BLOCK, flat.size), dtype=np.uint64)
        block = flat[start : start + _BLOCK].astype(np.float64)
        signed = np.where(words(key, at) & np.uint64(1), block, -block)
        signed[~np.isfinite(block)] = 0.0
        for total, axis, stride in zip(totals, axes, strides, strict=True):
            group = at // np.uint64(stride) % np.uint64(shape[axis]) % np.uint64(len(total))
            total += np.bincount(group.astype(np.int64), signed, len(total))
    found = [t / math.sqrt(flat.size / len(t)) for t in totals]
    with np.errstate(over="ignore"):  # sums of the largest values are infinite in float32
        return np.concatenate(found).astype(np.float32) if found else np.zeros(0, np.float32)


@dataclass(frozen=True)
class Summary:
    """What a guard stores of one array.

    Attributes:
        dtype: of the array.
        shape: of the array.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        elements: the elements at `positions`.
        sums: the signed sums; empty if the array is stored whole, or must be equal.
        rms: the root of the mean square of the finite elements.
        special: the numbers of NaNs and infinities.
        digest: of arrays that must be equal and are not stored whole; otherwise "".
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rtol: float
    atol: float
    elements: np.ndarray
    sums: np.ndarray
    rms: float
    special: tuple[int, int]
    digest: str

    @property
    def whole(self) -> bool:
        """Whether every element is stored."""
        return self.elements.size == math.prod(self.shape)

    @property
    def size(self) -> int:
        """The approximate bytes of its line in a file."""
        width = 8 * self.elements.size if self.dtype == dtypes.STRING else self.elements.nbytes
        return 190 + (width + self.sums.nbytes) * 4 // 3


def real(value: np.ndarray) -> np.ndarray:
    """A complex array as real and imaginary parts in a last axis; others as they are."""
    return np.stack([value.real, value.imag], -1) if value.dtype.kind == "c" else value


def summarize(value: np.ndarray, level: Level, tolerance: Tolerance, key: str) -> Summary:
    """Summarize an array; `key` seeds the positions and signs."""
    bound = tolerance.bound(value)
    plain = real(value)
    at = positions(plain.shape, level, key_of(key))
    elements, whole = plain.reshape(-1)[at], len(at) == plain.size
    atol = float(f"{bound.atol or 0.0:.6g}")
    if exact(plain.dtype):
        hashed = "" if whole else digest(plain)
        return Summary(plain.dtype, plain.shape, 0.0, atol, elements, np.zeros(0, np.float32), 0.0, (0, 0), hashed)
    square, count, special = 0.0, 0, [0, 0]
    for start in range(0, plain.size, _BLOCK):
        block = plain.reshape(-1)[start : start + _BLOCK].astype(np.float64)
        finite = np.isfinite(block)
        special[0] += int(np.isnan(block).sum())
        special[1] += int(np.isinf(block).sum())
        with np.errstate(over="ignore"):
            square += float(np.square(block[finite]).sum())
        count += int(finite.sum())
    rms = math.sqrt(square / count) if count and math.isfinite(square) else 0.0
    signed = np.zeros(0, np.float32) if whole else sums(plain, level, key_of(key))
    return Summary(
        plain.dtype, plain.shape, bound.rtol, atol, elements, signed, float(f"{rms:.6g}"), (special[0], special[1]), ""
    )


def judge(value: Any, stored: Summary, level: Level, key: str, rounded: np.dtype[Any] | None = None) -> Difference:
    """Compare an array with the summary of the trusted one.

    Floats of another dtype have the tolerance of the narrower one, or of `rounded`, to which a value was rounded before.
    """
    if not isinstance(value, np.ndarray):
        return difference(value, np.zeros(stored.shape, stored.dtype))
    plain = real(value)
    names = (dtypes.onnx_name(plain.dtype), dtypes.onnx_name(stored.dtype))
    if not same_kind(plain.dtype, stored.dtype) or plain.shape != stored.shape:
        return Difference("dtype" if names[0] != names[1] else "shape", names, (plain.shape, stored.shape), excess=math.inf)
    narrow = narrowest(d for d in (plain.dtype, rounded, stored.dtype) if d is not None)
    if not exact(stored.dtype) and narrow != stored.dtype:
        wider = COMPARE.bound(narrow).rtol / COMPARE.bound(stored.dtype).rtol
        stored = replace(stored, rtol=stored.rtol * wider, atol=stored.atol * wider)
    tolerance = Tolerance(stored.rtol, stored.atol, mixed=True)
    at = positions(plain.shape, level, key_of(key))
    found = difference(plain.reshape(-1)[at], stored.elements, tolerance)
    if found.at:
        found = replace(found, at=tuple(int(i) for i in np.unravel_index(at[found.at[0]], plain.shape)))
    found = replace(found, shapes=(plain.shape, plain.shape))
    if stored.whole or not found.agrees:
        return found
    if exact(plain.dtype):
        if digest(plain) == stored.digest:
            return found
        return replace(
            found, verdict="differs", excess=math.inf, outside=1, mine=digest(plain), theirs=f"{stored.digest} (hashes)"
        )
    with np.errstate(over="ignore"):
        special = (int(np.isnan(plain).sum()), int(np.isinf(plain).sum()))
    if special != stored.special:
        mine, theirs = (f"{n} NaN and {i} Inf" for n, i in (special, stored.special))
        return replace(found, verdict="differs", excess=math.inf, outside=1, mine=mine, theirs=theirs)
    bound = Tolerance(stored.rtol, stored.atol + stored.rtol * stored.rms)
    rest = difference(sums(plain, level, key_of(key)), stored.sums, bound)
    if rest.excess <= found.excess:
        return found
    return replace(found, verdict=rest.verdict, excess=rest.excess, outside=rest.outside, size=found.size + rest.size,
                   mine=f"a signed sum of {rest.mine}", theirs=rest.theirs, at=rest.at)  # fmt: skip
