"""Machine code as a step of a plan: whether there is some for an expression, and the frame with its sizes and addresses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import Compiled, NotCompiled, compiled, kept, level, waits
from ..elementwise.expression import Term, order
from ..elementwise.machine_code import STRIP, emit, grows
from ..elementwise.primitives import NotEmitted
from ..ir.sizes import late, now
from . import onednn
from .elementwise import collapsed
from .table import Site
from .values import Bound, Buffer, Value, address_of, strides_of

MISSING = "its machine code is not made yet"
"""Why machine code does not compute a step in a first run."""

WORTH = 1 << 12
"""The work of a step, in elements times primitives, from which machine code is compiled; code that is kept is used for less.
Deterministic sessions, and runs that wait for code, compile for any work: what they compute does not depend on the cache."""

TOGETHER = 1 << 16
"""The work of all steps of an expression in this process from which its code is compiled while the program runs."""

PARALLEL = 1 << 19
"""The work from which several threads compute a step."""

ALL = 1 << 40
"""More than a step has to claim: for one thread."""

CHUNK = 1 << 14
"""The elements that a thread claims at a time."""


@dataclass(frozen=True)
class ReducedAxes:
    """What an expression reduces.

    Attributes:
        shape: of the elements.
        axes: those that are reduced, counted from the end; none of an elementwise expression.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of what is left, with axes of 1."""
        return tuple(1 if i - len(self.shape) in self.axes else d for i, d in enumerate(self.shape))

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The shape of what is left, without the axes."""
        return tuple(d for i, d in enumerate(self.shape) if i - len(self.shape) not in self.axes)


@dataclass(frozen=True)
class MachineStep:
    """The machine code of an expression, and how its frame is filled; see elementwise/machine_code.py.

    Attributes:
        function: the function.
        reads: the inputs, in the order of the pointers.
        sizes: the inner, the outer and the middle size, and the depth.
        steps: for each pointer the steps along the outer, the middle, the deep and the inner axis.
        threads: the number of threads.
        chunk: what a thread claims at a time.
    """

    function: Compiled
    reads: tuple[Value, ...]
    sizes: tuple[int, int, int, int]
    steps: tuple[tuple[int, ...], ...]
    threads: Any
    chunk: Any

    def emit(self, site: Site, ys: Sequence[Value], name: str) -> None:
        """Add the step that computes results."""
        values = [*self.reads, *ys]
        lengths = [late(lambda n, t: n * t, s[0], self.threads) for s in self.steps[len(values) :]]  # of the rows of scratch
        scratch = site.scratch(late(lambda *n: sum(n), *lengths)) if lengths else None
        numbers = [self.chunk, *self.sizes, *(n for s in self.steps for n in s)]
        bind = FrameStep(self.function, self.threads, numbers, values, scratch, lengths)
        site.emit(bind, reads=self.reads, writes=ys, kernel=f"machine.{name}", scratch=scratch)


@dataclass(frozen=True)
class InnerFrame:
    """A frame that another one has an address of.

    Attributes:
        frame: the memory, int64.
        start: where the numbers begin in it.
        numbers: they, before the addresses.
        values: whose addresses follow.
    """

    frame: Value
    start: int
    numbers: Sequence[Any]
    values: Sequence[Value]

    def write(self) -> None:
        """Write the present numbers and addresses."""
        self.frame.array[self.start :] = [*map(now, self.numbers), *(v.address for v in self.values)]


class FrameStep:
    """Binds machine code to the present sizes and addresses; see elementwise/machine_code.py for the frame.

    Attributes:
        function: the code.
        frames: the frame, and the same one for one thread.
        threads: the number of threads.
        numbers: what a thread claims at a time, and the numbers that follow in the frame.
        values: the inputs and the results.
        scratch: temporary memory.
        lengths: the bytes of each array in it.
        inner: other frames.
        start: the place of the first address.
        is_written: whether the binding of a plan writes the frames of all steps at once.
        moved: then the addresses that differ from run to run: where each is, and the value.
    """

    def __init__(
        self,
        function: Compiled,
        threads: Any,
        numbers: Sequence[Any],
        values: Sequence[Value],
        scratch: Buffer | None = None,
        lengths: Sequence[Any] = (),
        inner: Sequence[InnerFrame] = (),
    ) -> None:
        self.function, self.threads, self.numbers, self.values = function, threads, numbers, values
        self.scratch, self.lengths, self.inner = scratch, lengths, inner
        self.start = 3 + len(numbers)
        row = [*map(now, numbers), *[0] * (len(values) + len(lengths))]
        self.frames = np.array([[0, *regions(now(threads)), *row], [0, 1, 0, *row]], np.int64)
        self._address = FrameAddress(self.frames)
        self.is_written = False
        self.moved: list[tuple[np.ndarray, Value]] = []

    def move(self, memory: np.ndarray) -> None:
        """Let the frames be in other memory."""
        memory[...] = self.frames
        self.frames, self._address = memory, FrameAddress(memory)

    def moved_by(self, moves: Mapping[int, Any]) -> FrameStep:
        """The same step, with the values in some buffers so many bytes further.

        Args:
            moves: the bytes, by the id of the buffer.
        """
        values = [replace(v, offset=v.offset + moves[id(v.buffer)]) if id(v.buffer) in moves else v for v in self.values]
        return FrameStep(self.function, self.threads, self.numbers, values, self.scratch, self.lengths, self.inner)

    def __call__(self) -> Bound:
        if not self.is_written:
            self._write()
        for target, v in self.moved:
            target[...] = v.address
        return [(self.function.call, (self._address,))]

    def _write(self) -> None:
        for one in self.inner:
            one.write()
        if type(self.threads) is not int:
            self.frames[0, 1:3] = regions(now(self.threads))
        row = [*[n if type(n) is int else n.now() for n in self.numbers], *[v.address for v in self.values]]
        if self.lengths:
            base = 0 if self.scratch is None or self.scratch.memory is None else address_of(self.scratch.memory)
            row += [*accumulate(map(now, self.lengths), initial=base)][:-1]
        self.frames[:, 3:] = row


def regions(threads: int) -> tuple[int, int]:
    """The number of threads, and the address of the function that starts them, or 0 for one thread."""
    region = onednn.parallel_region() if threads > 1 else 0
    return threads if region else 1, region


def machine_step(
    site: Site, results: tuple[Term, ...], rows: ReducedAxes, layout: Sequence[int], leaves: Sequence[Value], work: int
) -> MachineStep | None:
    """The machine code of terms; None if there is none, or not yet.

    Args:
        site: the place.
        results: the terms.
        rows: what they reduce.
        layout: the order of the axes of the results in memory.
        leaves: the inputs.
        work: of the step.
    """
    forms = [rows.shape if r.size == math.prod(rows.shape) else rows.kept for r in results]
    models = [Value(Buffer(0), f, strides_of(f, r.dtype.itemsize, layout), r.dtype) for f, r in zip(forms, results, strict=True)]
    walk = _walk(rows, layout, [*models, *leaves])
    if walk is None:
        return None
    sizes, moves, across = walk
    own = moves[len(models) :]
    is_repeated = sizes[3] != 1 and not any(m[-2] for m in own)  # the depth is walked for an input that is deep
    classes = tuple(
        "deep " * bool(m[-2] or is_repeated) + movement(m[-1], v.dtype.itemsize) for m, v in zip(own, leaves, strict=True)
    )
    found = machine_code(site, results, classes, work, rows.axes, across)
    if found is None:
        return None
    function, places, types = found
    width = STRIP * LANES if across else sizes[0]
    length, terms = width * sizes[3], order(results)
    reads = tuple(leaves[i] if i >= 0 else _count(site, terms[~i]) for i in places)
    steps = [moves[len(models) + i] if i >= 0 else (0, 0, 0, 0) for i in places] + moves[: len(models)]
    steps += [(-(-length * t.itemsize // 64) * 64, 0, width * t.itemsize, t.itemsize) for t in types]
    single = sizes[1] * sizes[2] == 1
    flat, alone = single and not rows.axes, single and rows.axes and not across
    one = alone or site.options.threads == 1
    threads = 1 if one else late(_threads, work, site.options.threads)
    chunk = ALL if one else CHUNK if flat else late(_chunk, length)
    return MachineStep(function, reads, sizes, tuple(steps), threads, chunk)


def _threads(work: int, most: int) -> int:
    return most if work > PARALLEL else 1


def _chunk(length: int) -> int:
    return max(1, CHUNK // length)


_Steps = tuple[int, int, int, int]


def _walk(rows: ReducedAxes, layout: Sequence[int], values: Sequence[Value]) -> tuple[_Steps, list[_Steps], bool] | None:
    """The sizes and the steps of a `MachineStep`, and whether the inner axis is not reduced; None if there are more axes."""
    axes: list[tuple[bool, int, list[int]]] = []  # whether it is reduced, its size, and the step of each value
    moving = [a for a in layout if rows.shape[a] != 1]
    for is_reduced, run in groupby(moving, key=lambda a: a - len(rows.shape) in rows.axes):
        dims, steps = collapsed(rows.shape, list(run), values)
        axes += [(is_reduced, d, [s[i] if s else 0 for s in steps]) for i, d in enumerate(dims)]
    still = (False, 1, [0] * len(values))
    *rest, inner = axes or [still]
    lead, deep = ([a for a in rest if a[0] == kind] for kind in (False, True))
    across = bool(rows.axes) and not inner[0]
    if len(lead) > 2 or len(deep) > 1 or (across and not deep):
        return None
    outer, middle, below = [still] * (2 - len(lead)) + lead + (deep or [still])
    moves = list(zip(outer[2], middle[2], below[2], inner[2], strict=True))
    return (inner[1], outer[1], middle[1], below[1]), moves, across


def movement(step: int, itemsize: int) -> str:
    """How machine code reads a value with this step along the inner axis."""
    return "scalar" if step == 0 else "row" if step == itemsize else "strided"


def _count(site: Site, t: Term) -> Value:
    """The number of elements along axes."""
    count = math.prod(t.args[0].shape[a] for a in t.extra)
    return site.number(count, t.dtype)


class FrameAddress(int):
    """The address of a frame, which it keeps.

    Attributes:
        frames: the frame, and the same one for one thread.
        single: the address of the one for one thread.
        keeps: what its numbers refer to.
    """

    frames: np.ndarray
    single: int
    keeps: Any = None

    def __new__(cls, frames: np.ndarray) -> FrameAddress:
        made = super().__new__(cls, frames.ctypes.data)
        made.frames, made.single = frames, int(frames[1].ctypes.data)
        return made

    @property
    def threads(self) -> int:
        """The number of threads now."""
        return int(self.frames[0, 1])


Code = tuple[Compiled, tuple[int, ...], tuple[np.dtype[Any], ...]]
"""A function; the place of each input, or ~i for the size that is term i of `order`; the dtypes of its rows of scratch."""

_KNOWN: dict[str, Code | str] = {}
"""The code of each key, or why there is none."""

_ASKED: Counter[str] = Counter()
"""The work of the steps that have asked for code that is not there."""


def machine_code(
    site: Site, results: tuple[Term, ...], classes: tuple[str, ...], work: int, axes: tuple[int, ...] = (), across: bool = False
) -> Code | None:
    """The machine code of terms; None if there is none, or not yet.

    Args:
        site: the place.
        results: the terms.
        classes: how each input moves.
        work: of the step.
        axes: those that are reduced, counted from the end.
        across: whether the inner axis in memory is not one of them.
    """
    key = f"{_key(results, axes)} {classes} {across} {level()}"
    found = _KNOWN.get(key)
    if found is None:
        try:
            function = None if key in _ASKED else kept(key, "k")
            if function is not None:
                kept_code = _KNOWN[key] = _noted(function)
                return kept_code
            waited = site.options.deterministic or waits() or (site.is_open and not site.trains)
            _ASKED[key] += now(work)
            if not waited and now(work) < WORTH and _ASKED[key] < TOGETHER:
                return None
            code = emit("k", results, dict(enumerate(classes)), axes, across)
        except (NotEmitted, NotCompiled) as reason:
            _KNOWN[key] = str(reason)
            return None
        terms = {id(t): i for i, t in enumerate(order(results))}
        inputs = [t.extra if t.op == "input" else ~terms[id(t)] for t in code.inputs]
        make = partial(_made, key, code.text, f"{' '.join(map(str, inputs))}\n{' '.join(t.str for t in code.scratch)}")
        if not waited:
            site.wanted[key] = make
            return None
        found = make()
    return None if isinstance(found, str) else found


def _made(key: str, text: str, notes: str) -> Code | str:
    """Compile machine code; what is known of it from now on."""
    found: Code | str = "it cannot be made"
    try:
        found = _noted(compiled(key, "k", lambda: text, notes=notes))
    except (NotEmitted, NotCompiled) as reason:
        found = str(reason)
    finally:
        _KNOWN[key] = found
    return found


def _noted(function: Compiled) -> Code:
    """A function with its inputs and its rows of scratch, which its notes list."""
    inputs, scratch = function.notes.split("\n")
    return function, tuple(map(int, inputs.split())), tuple(map(np.dtype, scratch.split()))


@lru_cache(maxsize=1024)
def _key(results: tuple[Term, ...], axes: tuple[int, ...]) -> str:
    """All on which the code of an expression depends."""
    places: dict[Term, int] = {}
    rows = []
    for t in order(results):
        places[t] = len(places)
        extra = t.extra
        if t.op in ("reduce", "expand", "size", "position"):
            extra = t.extra[0] if t.op == "reduce" else t.op == "expand" and grows(t, axes)
        rows.append((t.op, tuple(places[a] for a in t.args), t.dtype.str, extra))
    return repr((rows, [places[r] for r in results]))
