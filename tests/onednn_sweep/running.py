"""Runs of one implementation of a primitive on guarded buffers, and what each run must keep."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import MemoryDesc, OneDnnError, Primitive, loading, primitives, trust

from .pages import CANARY, FILLS, NO_ACCESS, fill, guarded, spread, whole_pages

_STRIDES, _PADDED, _FORMAT, _COUNT, _BLOCKS, _AXES = 14, 260, 262, 263, 264, 265
"""What can be queried of a description, by oneDNN's numbers."""

PLACES = ("end", "start", "aligned", "shifted")
"""Where a buffer is: against the page after it, against the page before it, at the last multiple of 64, 4 bytes after one."""

TURNS = (("end", "nan"), ("start", "big"), ("aligned", "random"), ("shifted", "zero"), ("end", "random"))
"""The runs of an implementation: where its buffers are, and what they hold before; all return equal bits."""


class Fault(NamedTuple):
    """What a run broke: "crash", "hang", "error", "outside", "padding", "input", "wrong", "unstable"."""

    sort: str
    detail: str


class Layout:
    """Where the elements of a tensor are in its buffer.

    Attributes:
        nbytes: the bytes up to the last element or its padding; those of the description if only oneDNN knows the layout.
    """

    def __init__(self, md: MemoryDesc) -> None:
        self.md, self.nbytes, self._offsets = md, md.nbytes, dict[tuple[int, ...], np.ndarray]()
        self.blocks: list[tuple[int, int]] = []
        self.steps: tuple[int, ...] | None = None
        kind = self._number(_FORMAT)
        self.padded = self._array(_PADDED, len(md.shape), c_int64)
        if kind != 2:
            return
        count = self._number(_COUNT)
        sizes, axes = (self._array(what, count, c_int64) for what in (_BLOCKS, _AXES))
        self.blocks = list(zip(sizes, axes, strict=True))
        self.steps = self._array(_STRIDES, len(md.shape), c_int64)
        block = int(np.prod([size for size, _ in self.blocks], dtype=np.int64))
        inner = [int(np.prod([s for s, a in self.blocks if a == axis], dtype=np.int64)) for axis in range(len(md.shape))]
        outer = [(n // b, step) for n, b, step in zip(self.padded, inner, self.steps, strict=True)]
        counts = [max([block, *(n * step for n, step in outer if n > least)]) for least in (0, 1)]  # some count axes of size 1
        if md.nbytes not in [n * md.dtype.itemsize for n in counts]:
            self.steps = None  # sums of the weights follow the elements
        elif 0 not in md.shape:
            self.nbytes = (int(self.offsets(self.padded).max()) + 1) * md.dtype.itemsize

    def _number(self, what: int) -> int:
        out = c_int()
        loading.needed().call("memory_desc_query", self.md.handle, what, ctypes.byref(out))
        return out.value

    def _array(self, what: int, count: int, of: Any) -> tuple[int, ...]:
        out = c_void_p()
        loading.needed().call("memory_desc_query", self.md.handle, what, ctypes.byref(out))
        return tuple((of * count).from_address(out.value)) if out.value and count else ()

    def offsets(self, shape: tuple[int, ...]) -> np.ndarray:
        """The place of each element of a tensor of this shape, in elements; it is a sum of one number for each axis."""
        if shape in self._offsets:
            return self._offsets[shape]
        assert self.steps is not None
        parts = []
        for axis, size in enumerate(shape):
            index, step, place = np.arange(size), 1, np.zeros(size, np.int64)
            for block, of in reversed(self.blocks):
                if of == axis:
                    place += index % block * step
                    index //= block
                step *= block
            parts.append((place + index * self.steps[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]))
        made = self._offsets[shape] = reduce(np.add, parts)
        return made

    def pack(self, array: np.ndarray | bytes, memory: np.ndarray) -> None:
        """Write elements into a buffer; what is in its gaps stays."""
        if isinstance(array, bytes):
            memory[:] = np.frombuffer(array, np.uint8)
        elif self.steps is None:
            memory[:] = reordered(np.ascontiguousarray(array), self.md)
        else:
            items = memory.view(self.md.dtype)
            items[self.offsets(self.padded)] = 0
            items[self.offsets(self.md.shape)] = array

    def unpack(self, memory: np.ndarray) -> np.ndarray:
        """The elements in a buffer; its bytes if only oneDNN knows the layout."""
        return memory.copy() if self.steps is None else memory.view(self.md.dtype)[self.offsets(self.md.shape)]

    def dirty(self, memory: np.ndarray, before: np.ndarray) -> str:
        """What a run wrote where there are no elements: the padding must be 0, and gaps stay."""
        if self.steps is None:
            return ""
        items, inside = memory.view(self.md.dtype), np.zeros(memory.size // self.md.dtype.itemsize, bool)
        inside[self.offsets(self.padded)] = True
        if not np.array_equal(
            memory.view(f"u{self.md.dtype.itemsize}")[~inside], before.view(f"u{self.md.dtype.itemsize}")[~inside]
        ):
            return "a gap was written"
        inside[self.offsets(self.md.shape)] = False
        here = self.offsets(self.padded)[inside[self.offsets(self.padded)]]
        return f"{np.count_nonzero(items[here])} elements of the padding are not 0" if items[here].any() else ""


def reordered(array: np.ndarray, md: MemoryDesc) -> np.ndarray:
    """The bytes of an array in a layout that only oneDNN knows."""
    plain, out = MemoryDesc.of(array.dtype, array.shape), np.zeros(md.nbytes, np.uint8)
    step = dnn.reorder(plain, md, allow_reference=True)
    arguments = {dnn.args.FROM: (plain, array.ctypes.data), dnn.args.TO: (md, out.ctypes.data)}
    scratch = np.zeros(step.scratchpad_nbytes, np.uint8)
    if scratch.size:
        arguments[dnn.args.SCRATCHPAD] = (step.query("scratchpad"), scratch.ctypes.data)
    dnn.bind(step, arguments).run()
    return out


@dataclass
class Problem:
    """A primitive and its data.

    Attributes:
        create: creates the primitive.
        inputs: what each argument holds before a run; bytes for a layout that only oneDNN knows.
        expected: what each argument must hold after it; None for what is not compared.
        tolerance: of the results, relative to the largest value; 0 for exact ones.
        layouts: the descriptions of arguments that the primitive does not tell, or not with their sizes.
        shared: arguments that use the buffer of another one.
        judge: what is wrong with the results, in place of a comparison; "" for nothing.
        overwritten: inputs that a run may change.
    """

    create: Callable[[], Primitive]
    inputs: Mapping[int, np.ndarray | bytes]
    expected: Mapping[int, np.ndarray | None]
    tolerance: float = 0.0
    layouts: Mapping[int, MemoryDesc] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    judge: Callable[[Mapping[int, np.ndarray]], str] | None = None
    overwritten: frozenset[int] = frozenset()

    def wrong(self, results: Mapping[int, np.ndarray]) -> str:
        """The first result that is not right."""
        if self.judge is not None:
            return self.judge(results)
        for arg, want in self.expected.items():
            if want is not None and not close(results[arg], want, self.tolerance):
                return f"argument {arg} {differing(results[arg], want)}"
        return ""


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    """Whether a result is right: exact, or within a part of the largest value."""
    if not tolerance:
        return bool(np.array_equal(got.astype(want.dtype), want, equal_nan=want.dtype.kind == "f"))
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return False
    bound = tolerance * (float(np.abs(want[finite]).max(initial=1e-6)) + np.abs(want[finite]))
    return bool((np.abs(got[finite].astype(np.float64) - want[finite]) <= bound).all())


def differing(got: np.ndarray, want: np.ndarray) -> str:
    with np.errstate(all="ignore"):
        apart = np.abs(got.astype(np.float64) - want)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(apart), np.inf, apart))), apart.shape)
    return f"is {got[at]:.7g} instead of {want[at]:.7g} at {[int(i) for i in at]}, {np.count_nonzero(apart > 1e-6)} differ"


class Walker:
    """Takes the place of `trust.refusal` while a primitive is created: passes over the first implementations.

    Args:
        index: the one that is created; None to pass over all.
    """

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        self.offered: list[tuple[str, str]] = []

    def __call__(self, candidate: trust.Candidate) -> trust.Skipped | None:
        refused = trust.refusal(candidate)
        self.offered.append((candidate.implementation, "" if refused is None else refused.reason))
        if self.index is None or len(self.offered) <= self.index:
            return trust.Skipped(candidate.implementation, "passed over")
        return None


@contextmanager
def _walking(walker: Walker) -> Iterator[None]:
    before = primitives.refusal, primitives._existing
    primitives.refusal, primitives._existing = walker, weakref.WeakValueDictionary()
    try:
        yield
    finally:
        primitives.refusal, primitives._existing = before


def offered(problem: Problem) -> list[tuple[str, str]]:
    """The implementations that oneDNN offers, each with the reason why it is not trusted, or ""."""
    walker = Walker()
    with _walking(walker):
        try:
            problem.create()
        except OneDnnError:
            if not walker.offered:
                raise
    return walker.offered


def created(problem: Problem, index: int) -> Primitive:
    """The primitive by one of these implementations."""
    with _walking(Walker(index)):
        return problem.create()


class Stage:
    """The guarded buffers of a primitive.

    Args:
        problem: the primitive's data.
        primitive: the primitive.
        only: the argument that is guarded; None for all.
        protection: of the pages.
    """

    def __init__(self, problem: Problem, primitive: Primitive, only: int | None = None, protection: int = NO_ACCESS) -> None:
        self.problem, self.only = problem, only
        arguments = [*{**problem.inputs, **problem.expected}]
        if primitive.scratchpad_nbytes:
            arguments.append(dnn.args.SCRATCHPAD)
        self.mds = {a: problem.layouts.get(a) or primitive.query("argument", a) for a in arguments}
        self.layouts = {a: Layout(md) for a, md in self.mds.items() if a not in problem.shared}
        sizes = [layout.nbytes + (0 if only in (None, a) else 4096) for a, layout in self.layouts.items()]
        self.memory = guarded(sizes, protection)
        starts = zip(spread(sizes)[0], sizes, strict=True)
        self.rooms = {a: self.memory[s : s + whole_pages(n)] for a, (s, n) in zip(self.layouts, starts, strict=True)}
        whole = {a: (md, int(self.memory.ctypes.data)) for a, md in self.mds.items()}
        self.call = dnn.bind(primitive, whole)

    def _placed(self, arg: int, place: str) -> int:
        """The first byte of a buffer in its room."""
        free = self.rooms[arg].size - self.layouts[arg].nbytes
        if self.only not in (None, arg):
            return free // 2 & ~63
        if place == "shifted":
            return (free - 4 & ~63) + 4 if free >= 4 else 0
        return {"end": free, "start": 0, "aligned": free & ~63}[place]

    def run(self, place: str, how: str, seed: int = 1) -> tuple[dict[int, np.ndarray], list[Fault]]:
        """One run; its results and what it broke."""
        rng, problem, buffers = np.random.default_rng(seed), self.problem, dict[int, np.ndarray]()
        for arg, layout in self.layouts.items():
            at, room = self._placed(arg, place), self.rooms[arg]
            room[:] = CANARY
            buffers[arg] = memory = room[at : at + layout.nbytes]
            fill(memory, how, rng)
            if arg in problem.inputs:
                layout.pack(problem.inputs[arg], memory)
        for arg, memory in self.call.memories.items():
            memory.move(buffers[problem.shared.get(arg, arg)].ctypes.data)
        before = {arg: memory.copy() for arg, memory in buffers.items()}
        self.call.run()
        faults = [Fault("outside", f"argument {a}: {text}") for a in buffers if (text := self._outside(a, place))]
        written = {problem.shared.get(a, a) for a in problem.expected}
        for arg, memory in buffers.items():
            if arg not in written and arg not in problem.overwritten and arg in problem.inputs:
                if not np.array_equal(memory, before[arg]):
                    faults.append(Fault("input", f"argument {arg} was changed"))
            elif arg in written and (text := self.layouts[arg].dirty(memory, before[arg])):
                faults.append(Fault("outside" if "gap" in text else "padding", f"argument {arg}: {text}"))
        results = {a: self.layouts[problem.shared.get(a, a)].unpack(buffers[problem.shared.get(a, a)]) for a in problem.expected}
        return results, faults

    def _outside(self, arg: int, place: str) -> str:
        """Which bytes around a buffer were written."""
        at, room = self._placed(arg, place), self.rooms[arg]
        end = at + self.layouts[arg].nbytes
        before, after = np.flatnonzero(room[:at] != CANARY), np.flatnonzero(room[end:] != CANARY)
        texts = [f"{at - before[0]} bytes before it were written"] if before.size else []
        return "; ".join(texts + ([f"{after[-1] + 1} bytes after it were written"] if after.size else []))


def judged(problem: Problem, primitive: Primitive, turns: Sequence[tuple[str, str]], **guard: Any) -> list[Fault]:
    """Run an implementation in all ways of `turns`; return what is broken, each sort once.

    Code for one thread that plans run with any number of threads uses two in the last run.
    """
    others = 2 if primitive.threads == 1 and primitive.implementation.startswith("brg") else primitive.threads
    stage, faults, first = Stage(problem, primitive, **guard), dict[str, Fault](), dict[int, np.ndarray]()
    wrong = []
    for place, how in turns:
        try:
            with dnn.using_threads(others if (place, how) == TURNS[-1] else primitive.threads):
                results, broken = stage.run(place, how)
        except OneDnnError as error:
            return [Fault("error", str(error))]
        for fault in broken:
            faults.setdefault(fault.sort, Fault(fault.sort, f"{fault.detail} ({place}, {how})"))
        wrong.append(problem.wrong(results))
        compared = {a: r for a, r in results.items() if a != dnn.args.WORKSPACE}
        first = first or compared
        if any(r.tobytes() != first[a].tobytes() for a, r in compared.items()):
            faults.setdefault("unstable", Fault("unstable", f"the bits differ from the first run's ({place}, {how})"))
    if all(wrong):
        faults["wrong"] = Fault("wrong", wrong[0])
    elif any(wrong):
        faults["unstable"] = Fault("unstable", next(filter(None, wrong)))
    return [*faults.values()]


__all__ = ["FILLS", "TURNS", "Fault", "Problem", "created", "judged", "offered"]
