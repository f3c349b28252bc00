"""What the kernels on oneDNN share: descriptions of values, copies in another memory order, steps that run a primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from ..ir.sizes import OpenSize
from ..proto.tensor_data import release
from . import onednn as dnn
from .copies import copied
from .onednn import MemoryDesc, Primitive
from .table import Site
from .values import ALIGNMENT, Bound, Buffer, Value, address_of, aligned, last_order, strides_of

SMALL = 1 << 19
"""Floating-point operations up to which a primitive is faster with one thread than with two."""

F32 = np.dtype(np.float32)

LARGE = 1 << 12
"""The number of elements from which oneDNN moves them faster than NumPy."""

MOVED = tuple(np.dtype(t) for t in (np.float32, np.float16, np.int32, np.int8, np.uint8))
"""The dtypes that oneDNN moves."""


SPACED = 256
"""Rows of a multiple of this many floats are in four of the 64 sets of the first cache, which a walk along a column fills."""

GAP = 16
"""The floats between such rows that keep them apart: one line of the cache."""


@lru_cache(maxsize=8192)
def _desc(dtype: np.dtype[Any], shape: tuple[int, ...], steps: tuple[int, ...]) -> MemoryDesc:
    return MemoryDesc.of(dtype, shape, steps)


@lru_cache(maxsize=8192)
def unset(dtype: np.dtype[Any], shape: tuple[int, ...]) -> MemoryDesc:
    """A description whose layout a primitive chooses."""
    return MemoryDesc.any(dtype, shape)


def desc(x: Value) -> MemoryDesc:
    """The description of a value; axes of size 1 have the strides of an array with the channels last."""
    size = x.dtype.itemsize
    strides = strides_of(x.shape, size, last_order(x.ndim)) if x.channels_last else x.strides
    return _desc(x.dtype, x.shape, tuple(s // size for s in strides))


def dense_desc(dtype: Any, shape: Sequence[int], order: Sequence[int] | None = None) -> MemoryDesc:
    """The description of an array without gaps; `order` lists its axes from the outermost in memory to the innermost."""
    size = np.dtype(dtype).itemsize
    return _desc(np.dtype(dtype), tuple(shape), tuple(s // size for s in strides_of(shape, size, order)))


def strided_desc(dtype: Any, shape: Sequence[int], strides: Sequence[int]) -> MemoryDesc:
    """The description of an array with these strides in bytes."""
    size = np.dtype(dtype).itemsize
    return _desc(np.dtype(dtype), tuple(shape), tuple(s // size for s in strides))


def require_plain(site: Site, *values: Value | None, dtypes: Sequence[Any] = (F32,)) -> None:
    """Decline unless oneDNN can read the values: of these dtypes, not empty, not broadcast, of at most 6 axes."""
    site.require(dnn.library() is not None, "there is no oneDNN")
    for v in values:
        if v is not None:
            site.require(v.dtype in dtypes, f"the dtype is {v.dtype}")
            if v.is_open:
                raise OpenSize("its size differs between runs")
            site.require(v.size, "an input is empty")
            site.require(0 < v.ndim <= 6, f"an input has rank {v.ndim}")
            size = v.dtype.itemsize
            plain = all(d == 1 or (s > 0 and s % size == 0) for d, s in zip(v.shape, v.strides, strict=True))
            site.require(plain, "an input is broadcast or reversed in memory")


def require_gradient(site: Site, dy: Value, shape: Sequence[int]) -> None:
    """Decline a gradient unless it has the shape of its result; it may be broadcast, because it is then copied."""
    site.require(dnn.library() is not None, "there is no oneDNN")
    site.require(dy.dtype == F32 and dy.size and dy.shape == tuple(shape), "the gradient does not have the type of the result")


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """Create primitives for one thread in the `with` block if there is little work."""
    if work > SMALL:
        yield
    else:
        with dnn.using_threads(1):
            yield


def emit(
    site: Site,
    primitive: Primitive,
    arguments: Mapping[int, tuple[MemoryDesc, Value]],
    writes: Sequence[Value],
    name: str = "",
    moves: Sequence[Mapping[int, int]] = ({},),
) -> None:
    """Add the step that runs a primitive.

    Args:
        site: the place.
        primitive: the primitive.
        arguments: the description and the value of each argument.
        writes: the values that are written.
        name: of the step, for reports; by default that of the primitive.
        moves: for each run of the primitive, the bytes from the begin of a value to the argument, if they are not 0.
    """
    nbytes = primitive.scratchpad_nbytes
    scratch = site.scratch(nbytes) if nbytes else None

    held: list[dnn.BoundPrimitive] = []

    def bind() -> Bound:
        begins = {arg: v.address for arg, (_, v) in arguments.items()}
        if scratch is not None:
            assert scratch.memory is not None
            begins[dnn.args.SCRATCHPAD] = address_of(scratch.memory)
        for run, move in enumerate(moves):
            places = {arg: place + move.get(arg, 0) for arg, place in begins.items()}
            if run < len(held):  # a memory that is moved costs less than a new one
                for arg, place in places.items():
                    held[run].memories[arg].move(place)
                continue
            given = {arg: (md, places[arg]) for arg, (md, _) in arguments.items()}
            if scratch is not None:
                given[dnn.args.SCRATCHPAD] = (primitive.query("scratchpad"), places[dnn.args.SCRATCHPAD])
            held.append(dnn.bind(primitive, given, [arg for arg, (_, v) in arguments.items() if v.constant]))
        return [(one.execute, one.args) for one in held]

    made = {id(v) for v in writes}
    reads = [v for _, v in arguments.values() if id(v) not in made]
    kernel = f"{name or primitive.kind.removesuffix('_forward')} {primitive.implementation}"
    site.emit(bind, reads=reads, writes=writes, kernel=kernel, scratch=scratch, notes=primitive.notes)


def moves_of(runs: Iterable[int], steps: Mapping[int, int]) -> list[dict[int, int]]:
    """For `emit`: the places of arguments that are at equal distances, in bytes, by the number of the run."""
    return [{arg: run * step for arg, step in steps.items()} for run in runs]


def remark(site: Site, refusal: dnn.Unimplemented) -> None:
    """Note for reports that other code is used, if the refused one is not trusted."""
    if isinstance(refusal, dnn.NotTrusted):
        site.notes.append(str(refusal))


def copy(site: Site, x: Value, y: Value) -> None:
    """Add the step that copies x to y, of the same shape and dtype and another memory order."""
    forward = all(d == 1 or s > 0 for v in (x, y) for d, s in zip(v.shape, v.strides, strict=True))
    if not x.is_open and x.size >= LARGE and x.dtype in MOVED and forward and dnn.library() is not None:
        try:
            with threads_for(x.size * 8):
                made = dnn.reorder(desc(x), desc(y))
            emit(site, made, {dnn.args.FROM: (desc(x), x), dnn.args.TO: (desc(y), y)}, (y,))
            return
        except dnn.OneDnnError:
            pass
    if copied(site, x, y):
        return
    site.emit(lambda: [(np.copyto, (y.array, x.array))], reads=(x,), writes=(y,), kernel="reorder numpy.copyto")


def ordered(site: Site, x: Value, order: Sequence[int]) -> Value:
    """The value with its axes in this order in memory, outermost first: itself, or a copy that later calls use too."""
    strides = strides_of(x.shape, x.dtype.itemsize, order)
    if all(d == 1 or s == t for d, s, t in zip(x.shape, x.strides, strides, strict=True)):
        return x

    def make() -> Value:
        y = site.new(x.shape, x.dtype, order, x.finiteness)
        copy(site, x, y)
        return y

    return make() if x.constant else site.kept(x, ("order", tuple(order)), make)


def channels_last(site: Site, x: Value) -> Value:
    """The value with the channels innermost in memory."""
    return ordered(site, x, last_order(x.ndim))


def packs_products() -> bool:
    """Whether oneDNN has products of float32 matrices with packed weights; below AVX-512 they read rows."""
    library = dnn.library()
    return library is not None and library.isa.startswith("avx512")


def spaced(shape: Sequence[int]) -> MemoryDesc:
    """The layout of the right operand of a product, (..., k, n), float32: oneDNN's choice, or rows for code that reads them.

    Rows of a multiple of `SPACED` floats have a `GAP` after them.  The layout does not depend on the rows on the left, and the
    results have the same bits as those without gaps.
    """
    if packs_products():
        return unset(F32, tuple(shape))
    row = shape[-1] + (0 if shape[-1] % SPACED else GAP)
    return strided_desc(F32, shape, strides_of((*shape[:-1], row), F32.itemsize))


def packed(site: Site, w: Value, given: MemoryDesc, wanted: MemoryDesc) -> Value:
    """A copy of weights in the layout that a primitive has chosen: once for all plans of a constant, otherwise in every run."""
    if given == wanted:
        return w
    if not w.constant:
        y = Value(site.scratch(wanted.nbytes), (wanted.nbytes,), (1,), np.dtype(np.uint8), 0, False, w.finiteness)
        with threads_for(w.size * 8):
            made = dnn.reorder(given, wanted)
        emit(site, made, {dnn.args.FROM: (given, w), dnn.args.TO: (wanted, y)}, (y,), "pack weights")
        return y

    def make() -> Value:
        source = w.buffer.read()
        assert source is not None
        made = laid_out(source[w.offset :], given, wanted)
        release(source)
        return made

    found: Value = site.derived(w, ("packed", given, wanted), make)
    return found


def laid_out(source: np.ndarray, given: MemoryDesc, wanted: MemoryDesc) -> Value:
    """The contents of an array, which `given` describes, in another layout."""
    memory = aligned(wanted.nbytes)
    arguments = {dnn.args.FROM: (given, int(source.ctypes.data)), dnn.args.TO: (wanted, int(memory.ctypes.data))}
    with dnn.using_threads(1):  # pages that are touched first take most of the time; threads would wait for each other
        reorder = dnn.reorder(given, wanted)
        need = aligned(max(reorder.scratchpad_nbytes, ALIGNMENT))
        if reorder.scratchpad_nbytes:
            arguments[dnn.args.SCRATCHPAD] = (reorder.query("scratchpad"), int(need.ctypes.data))
        dnn.bind(reorder, arguments).run()
    return pinned(memory)


def pinned(memory: np.ndarray) -> Value:
    """Memory outside of the arena, as bytes."""
    return Value(Buffer(memory.nbytes, memory, pinned=True), (memory.nbytes,), (1,), np.dtype(np.uint8), 0, True)


def aligned_array(shape: Sequence[int], dtype: np.dtype[Any]) -> Value:
    """A constant outside of the arena whose contents are to be written."""
    strides = strides_of(shape, dtype.itemsize)
    memory = aligned(max(math.prod(shape) * dtype.itemsize, 1))
    return Value(Buffer(memory.nbytes, memory, pinned=True), tuple(shape), strides, dtype, 0, True)


def derived(site: Site, w: Value, what: Any, make: Callable[[], np.ndarray]) -> Value:
    """An array that is computed from a constant, once for all plans."""

    def made() -> Value:
        array = make()
        value = aligned_array(array.shape, array.dtype)
        np.copyto(value.array, array)
        return value

    found: Value = site.derived(w, what, made)
    return found
