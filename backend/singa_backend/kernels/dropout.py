"""Random bits, masks made of them, and Dropout in training, with its gradient.

A mask of the generator Philox is computed in parts that stay in the cache: bits, comparison and factor of a part, then the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .. import dtypes
from ..devices.random_streams import random_stream
from ..ir.sizes import OpenSize, is_open, late, now
from ..proto.schemas import SINGA_DOMAIN
from .table import Follower, Site, gradient, kernel, training
from .values import ANY, FINITE, NAN, Bound, Buffer, Value, last_order
from .views import ints

BLOCKS = 1 << 14
"""Blocks of four words that are computed at once: their four numbers are 512 KiB."""

DRAWS = 1 << 14
"""Float64 numbers that are drawn at once."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = (1 << 32) - 1
_BITS = 24
"""The bits of a uniform number in float32: the upper ones of a word."""

# --- Philox


def _word(value: int) -> np.ndarray:
    return np.array(value & 2 * _SIGN - 1, np.uint64)


_SIGN = 1 << 63
_HALF = _word(32)
_COLUMN = np.array([[m] for m in _MULTIPLIERS], np.uint64)


class PhiloxWords:
    """The words of a key, in parts.

    Of the four counters of a block, the first and second are the halves of one uint64, c0 << 32 | c1, and so are the others.
    A round replaces these two numbers t and s by m1 * (s >> 32) ^ t << 32 ^ k0 << 32 and m0 * (t >> 32) ^ s << 32 ^ k1 << 32.

    Args:
        key: the seed and the number of the draw.
    """

    def __init__(self, key: np.ndarray) -> None:
        seed, draw = (int(k) for k in key.reshape(-1))
        k, keys = [seed & _WORD, seed >> 32 & _WORD], []
        for _ in range(_ROUNDS):
            keys.append([n << 32 for n in k])
            k = [(v + w) & _WORD for v, w in zip(k, _WEYL, strict=True)]
        t = (draw & _WORD) * _MULTIPLIERS[1] ^ keys[0][0]  # after the first round t is equal for all blocks
        self.first = _word((draw >> 32 & _WORD) << 32 ^ keys[0][1])
        self.second = _word(t << 32 ^ keys[1][0]), _word((t >> 32) * _MULTIPLIERS[0] ^ keys[1][1])
        self.others = [np.array(k, np.uint64).reshape(2, 1) for k in keys[2:]]

    def write(self, start: int, counters: np.ndarray, out: np.ndarray, both: np.ndarray, held: np.ndarray) -> None:
        """Write the words of the blocks from number `start` on.

        Args:
            start: the number, below 2**32 as those of all blocks.
            counters: 0, 1, 2 and so on, a number for each block.
            out: two uint64 for each block, which are four words.
            both: two uint64 for each block, which are overwritten.
            held: two more.
        """
        multiply, left, right, xor = np.multiply, np.left_shift, np.right_shift, np.bitwise_xor
        t, s = both
        np.add(counters, _word(start), s)
        multiply(s, _COLUMN[0], s)
        xor(s, self.first, s)
        right(s, _HALF, t)
        multiply(t, _COLUMN[1], t)
        xor(t, self.second[0], t)
        left(s, _HALF, s)
        xor(s, self.second[1], s)
        crossed = held[::-1]
        for k in self.others:
            right(both, _HALF, held)
            multiply(held, _COLUMN, held)
            left(both, _HALF, both)
            xor(both, k, both)
            xor(both, crossed, both)
        right(both, _HALF, held)
        left(both, _HALF, both)
        for n in range(2):
            np.bitwise_or(both[n], held[n], out[:, n])


WORDS = np.dtype(np.uint32)


@dataclass(eq=False)
class DrawnForm:
    """What the followers of Philox make of its words.

    Attributes:
        dtype: of the result.
        count: the number of the followers.
        bound: the number below which a uniform number is dropped, if the result is a mask or made of one.
        keeps: whether the mask has the elements that are kept, and not those that are dropped.
        factor: what the kept elements of a factor are.
    """

    dtype: np.dtype[Any] = WORDS
    count: int = 0
    bound: Value | None = None
    keeps: bool = False
    factor: Value | None = None


def _casts(one: Follower, dtype: Any) -> bool:
    if one.name == "CastLike":
        return one.other is not None and one.other.dtype == dtype
    return one.name == "Cast" and one.attributes["to"] == dtypes.onnx_code(dtype)


def _number(one: Follower, name: str, value: float | None = None) -> bool:
    """Whether a call has one number as its second operand, this one."""
    other = one.other
    if one.name != name or one.place or other is None or other.size != 1:
        return False
    return value is None or (other.constant and float(other.array.reshape(-1)[0]) == value)


def _form(followers: Sequence[Follower]) -> DrawnForm:
    """The longest form that followers make: words, uniform numbers, a mask, its elements as floats, these times a factor."""
    f, form = list(followers[:8]), DrawnForm()
    uniform = len(f) >= 4 and _casts(f[0], np.int64) and _number(f[1], "Div", 1 << 32 - _BITS)
    if not (uniform and _casts(f[2], np.float32) and _number(f[3], "Mul", 2.0**-_BITS)):
        return form
    form.dtype, form.count = np.dtype(np.float32), 4
    if len(f) < 5 or not _number(f[4], "Less"):
        return form
    form.dtype, form.count, form.bound = np.dtype(np.bool_), 5, f[4].other
    rest = f[5:]
    if rest and rest[0].name == "Not":
        form.count, form.keeps = 6, True
        del rest[0]
    if rest and _casts(rest[0], np.float32):
        form.dtype, form.count = np.dtype(np.float32), form.count + 1
        if len(rest) > 1 and _number(rest[1], "Mul"):
            form.count, form.factor = form.count + 1, rest[1].other
    return form


def _least(bound: np.ndarray) -> int:
    """The lowest word whose uniform number is not below a bound."""
    share = float(bound.reshape(-1)[0])
    return math.ceil(min(max(share, 0.0), 1.0) * 2**_BITS) << 32 - _BITS if share == share else 0


@kernel("Philox", 1, on="numpy", domain=SINGA_DOMAIN, takes="sizes")
def philox(site: Site, key: Value, shape: Value) -> Value:
    """Random words, uniform numbers of float32, or a mask and its factor, as Dropout needs them."""
    sizes = ints(site, shape, "the shape")
    count = math.prod(sizes)
    site.require(all(d > 0 for d in sizes) and count <= 1 << 34, "it is empty, or a number of a block has more than 32 bits")
    site.require(key.size == 2 and key.dtype == np.int64, "the key is not two numbers")
    form = _form(site.followers)
    site.absorb(form.count)
    finiteness = FINITE if form.factor is None else form.factor.finiteness
    y = site.new(sizes, form.dtype, None, finiteness)
    y.low = ANY
    scratch = site.scratch(late(lambda n: sum(EACH) * _part(n), count))

    def bind() -> Bound:
        part = _part(now(count))
        both, held, counters, words, bits = _parts(scratch, [n * part for n in EACH])
        pair, other = (b.view(np.uint64).reshape(2, part) for b in (both, held))
        index, pairs, flat = counters.view(np.uint64), words.view(np.uint64).reshape(part, 2), words.view(np.uint32)
        mask, target, given = bits.view(np.bool_), y.array.reshape(-1), key.array

        def run() -> None:
            drawn, finish = PhiloxWords(given), _finish(form)
            index[...] = np.arange(part, dtype=np.uint64)
            for start, size in _spans(-(-target.size // 4), part):
                drawn.write(start, index[:size], pairs[:size], pair[:, :size], other[:, :size])
                out = target[4 * start : 4 * (start + size)]
                finish(flat[: len(out)], mask[: len(out)], out)

        return [(run, ())]

    site.emit(bind, reads=(key, form.bound, form.factor), writes=(y,), kernel="numpy.philox", scratch=scratch)
    return y


EACH = (16, 16, 8, 16, 4)
"""The bytes for each block of two pairs of numbers, counters, words, and bits of a mask."""


def _part(count: int) -> int:
    """The blocks that are computed at once for so many words."""
    return min(BLOCKS, -(-count // 4))


def _parts(scratch: Buffer, lengths: Sequence[int]) -> list[np.ndarray]:
    assert scratch.memory is not None
    ends = np.cumsum([0, *lengths]).tolist()
    return [scratch.memory[a:b] for a, b in pairwise(ends)]


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """The parts of a length: where each begins, and its length."""
    return ((start, min(most, count - start)) for start in range(0, count, most))


def _finish(form: DrawnForm) -> Any:
    """What makes the result of a part, of its words and of an array of bool of their number."""
    if form.bound is None:
        return _words if form.dtype == np.uint32 else _uniform
    least, factor = _least(form.bound.array), form.factor
    by = None if factor is None else factor.array.reshape(-1)[0]

    def finish(words: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        bits = out if out.dtype == np.bool_ else mask
        if not least:
            bits[...] = form.keeps
        else:
            (np.greater if form.keeps else np.less_equal)(words, np.uint32(least - 1), bits)
        if bits is not out:
            np.copyto(out, bits)
        if by is not None:
            np.multiply(out, by, out)

    return finish


def _words(words: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, words)


def _uniform(words: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    np.right_shift(words, np.uint32(32 - _BITS), words)
    np.copyto(out, words.view(np.int32), casting="unsafe")
    np.multiply(out, np.float32(2.0**-_BITS), out)


# --- Dropout


def _ratio(site: Site, x: Value, ratio: Value | None, training_mode: Value | None) -> float:
    """The ratio of a Dropout in training."""
    site.require(
        training_mode is not None and training_mode.constant and training_mode.dtype == np.bool_, "the mode is not constant"
    )
    assert training_mode is not None
    site.require(training_mode.size == 1 and training_mode.array.any(), "it is not training")
    site.require(x.dtype in (np.float32, np.float64), "elements of other types")
    site.require(x.size and x.ndim, "it is empty or a number")
    site.require(ratio is None or (ratio.constant and ratio.size == 1), "the ratio is not a constant")
    share = 0.5 if ratio is None else float(ratio.array.reshape(-1)[0])
    site.require(0 <= share < 1, "the ratio is not in [0, 1)")
    return share


def _mask(site: Site, shape: tuple[int, ...], share: float) -> Value:
    """The mask of a Dropout: a constant if it has a seed."""
    seed = site.attributes.get("seed")
    if is_open(shape) and (seed is not None or not share):
        raise OpenSize("a mask that is the same in each run has one size")
    if not share:
        return site.shared_constant(("kept", shape), lambda: np.ones(shape, np.bool_))
    if seed is not None:
        key = ("kept", shape, share, seed)
        return site.shared_constant(key, lambda: np.asarray(random_stream(seed).uniform(0.0, 1.0, shape) >= share))
    y = site.new(shape, np.bool_, None, FINITE)
    scratch = site.scratch(late(lambda n: 8 * min(DRAWS, n), y.size))

    def bind() -> Bound:
        target = y.array.reshape(-1)
        part = min(DRAWS, target.size)
        (numbers,) = _parts(scratch, (8 * part,))
        drawn = numbers.view(np.float64)

        def run() -> None:
            stream = random_stream(None)
            for start, size in _spans(target.size, part):
                stream.random(out=drawn[:size])
                np.greater_equal(drawn[:size], share, target[start : start + size])

        return [(run, ())]

    site.emit(bind, reads=(), writes=(y,), kernel="numpy.random", scratch=scratch)
    return y


def _dropped(site: Site, x: Value, ratio: Value | None, training_mode: Value | None) -> tuple[Value, Value]:
    """A Dropout in training: the result and the mask."""
    share = _ratio(site, x, ratio, training_mode)
    mask = _mask(site, x.shape, share)
    if not share:
        return x.view(x.shape, x.strides), mask
    grown = x.dtype.type(1 / (1 - share))
    order = last_order(x.ndim) if x.ndim > 2 and x.channels_last else None
    y = site.new(x.shape, x.dtype, order, FINITE if x.finiteness == FINITE else NAN)
    y.low = ANY

    def bind() -> Bound:
        return [(np.multiply, (x.array, mask.array, y.array)), (np.multiply, (y.array, grown, y.array))]

    site.emit(bind, reads=(x, mask), writes=(y,), kernel="numpy.dropout")
    return y, mask


@kernel("Dropout", 12, 13, 22, on="numpy")
def dropout(site: Site, x: Value, ratio: Value | None = None, training_mode: Value | None = None) -> tuple[Value, Value]:
    """A Dropout in training; a seed draws the same mask in each run."""
    return _dropped(site, x, ratio, training_mode)


@training("Dropout", 12, 13, 22, on="numpy")
def dropout_training(site: Site, x: Value, ratio: Value | None = None, training_mode: Value | None = None) -> tuple[Value, ...]:
    """A Dropout, which also returns where its gradient passes: its mask or, without one, what its rule concludes from the result.

    The elements of which an input or output is 0 then pass if the input is 0, and those that are not finite pass.
    """
    y, mask = _dropped(site, x, ratio, training_mode)
    if site.outputs[1]:
        return y, mask, mask
    kept, other = (site.new(x.shape, np.bool_, None, FINITE) for _ in range(2))

    def bind() -> Bound:
        to, rest = kept.array, other.array
        return [
            (np.not_equal, (y.array, 0, to)), (np.equal, (x.array, 0, rest)), (np.logical_or, (to, rest, to)),
        ]  # fmt: skip

    site.emit(bind, reads=(x, y), writes=(kept, other), kernel="numpy.kept")
    return y, mask, kept


@gradient("Dropout", 12, 13, 22, reads=("dy0", "x1?", "x2?", "y1?", "h0"), on="numpy", hidden=1)
def dropout_gradient(
    site: Site, dy: Value, ratio: Value | None, training_mode: Value | None, mask: Value | None, kept: Value
) -> Value:
    """The gradient where elements were kept, scaled like them."""
    share = _ratio(site, dy, ratio, training_mode)
    given = kept if mask is None else mask
    site.require(dy.shape == given.shape, "the gradient does not have the shape of the result")
    one = dy.dtype.type(1)
    grown = one / (one - dy.dtype.type(share))  # as the rule rounds it
    dx = site.new(dy.shape, dy.dtype, None, FINITE if dy.finiteness == FINITE else NAN)

    def bind() -> Bound:
        return [(np.multiply, (dy.array, given.array, dx.array)), (np.multiply, (dx.array, grown, dx.array))]

    site.emit(bind, reads=(dy, given), writes=(dx,), kernel="numpy.dropout gradient")
    return dx
