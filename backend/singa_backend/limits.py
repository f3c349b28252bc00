"""What a model may use of this machine: bounds that hold from load on, are checked before memory is taken, and raise.

    prepare(model, limits=Limits(tensor_bytes=8 << 30, deadline=2.0)).run(inputs, cancel=event)

A `Limits` is what was allowed; a `Budget` is what one `prepare` or one `run` has used of it.  The budget of the call at
hand is found by `current()`, so that the array namespace (arrays.py), the reader and any operator's body can ask it:

    admit(shape, dtype)        a tensor is about to be made        admit_bytes(n)   so much memory is about to be taken
    for i in rounds(n): ...    a loop in Python                    holding(values)  what a body keeps while subgraphs run
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .errors import InvalidInput, OperatorError, ResourceExhausted

GIB = 1 << 30
_OBJECT = np.dtype(object)
_NODE = 4096
"""About what a node takes that is read: functions may make many of few."""
_ENTRY = 112
"""About what Python spends on an array or a string, beside its content."""


class Flag(Protocol):
    """What can be set from another thread to stop a run: a `threading.Event` is one."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """Bounds on one `prepare` or `run`.  Each raises ResourceExhausted; none shortens a loop or cuts a result.

    tensor_bytes: one tensor, by shape and element size; in an empty one a dimension of 0 counts as 1.
    live_bytes: the tensors alive at one time and the next one; None stands for 75 % of the machine's or device's memory.
    executions: nodes and bodies that are run; those of subgraphs and functions count each time.
    iterations: rounds of one Loop or Scan, and of other loops that a node's values make long.
    nesting: If, Loop, Scan and functions within each other.
    rank: dimensions of a tensor.  NumPy has no more than 64.
    deadline: seconds, looked at between nodes and rounds; None for no deadline.
    nodes: nodes that are read; those of a function count once for each set of attributes that it is called with.
    model_bytes: the model file.  Protocol Buffers have no more than 2 GiB.

    Raises InvalidInput for a bound that is no positive number.
    """

    tensor_bytes: int = 4 * GIB
    live_bytes: int | None = None
    executions: int = 10**8
    iterations: int = 10**6
    nesting: int = 64
    rank: int = 64
    deadline: float | None = None
    nodes: int = 10**6
    model_bytes: int = 2 * GIB

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            whole = field.name != "deadline"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
                kind = "an integer" if whole else "a number"
                raise InvalidInput(f"the limit {field.name} is {value!r}; it must be {kind} above 0", code="SX309")


@cache
def physical_memory() -> int:
    """Bytes of memory that this process may have: the machine's, or what its control group leaves of it."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(sizes)


def format_bytes(size: int) -> str:
    """A number of bytes for people: 4.0 GiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}" if size < 1 << 60 else f"2^{size.bit_length() - 1} bytes"
    return f"{size} bytes"


def exhausted(name: str, code: str, message: str) -> ResourceExhausted:
    """The error of a limit, with the way to raise it."""
    hint = f"where that is meant, allow more: prepare(model, limits=Limits({name}=...)), or sonnx run --limit {name}=..."
    return ResourceExhausted(message, code=code, hint=hint)


def too_many_dimensions(message: str) -> ResourceExhausted:
    """The error for a rank that the array module does not have."""
    return ResourceExhausted(f"a tensor of too many dimensions: {message}", code="SX607")


class Budget:
    """What one call has used of its limits.

    roots: containers of live values: frames of the graphs that are running, and what bodies hold.
    """

    def __init__(self, limits: Limits, cancel: Flag | None = None, memory: int | None = None) -> None:
        self.limits = limits
        self.cancel = cancel
        self.tensor_bytes = limits.tensor_bytes
        self.live_bytes = limits.live_bytes or (memory or physical_memory()) * 3 // 4
        self.left = limits.executions
        self.end = None if limits.deadline is None else time.monotonic() + limits.deadline
        self.watched = self.end is not None or cancel is not None
        self.alarm = limits.executions + 1 if self.watched else 0  # below this many executions left, `watch`
        self.low_rank = limits.rank < 64
        self.roots: list[Any] = []
        # Live bytes are counted anew, by walking the roots, only when what was made since the last count could pass the limit.
        self.made = 0
        self.room = self.live_bytes
        self.kept = 0
        self.nodes = 0

    def begin(self, resident: int, *roots: Any) -> None:
        """A run begins with these containers, that hold so many bytes."""
        self.roots += roots
        self.room = self.live_bytes - resident

    def keep(self, size: int) -> None:
        """So many bytes are taken for as long as the call lasts."""
        self.kept += size
        self.room -= size
        if self.made > self.room:
            self.settle(size)

    @contextmanager
    def holding(self, *containers: Any) -> Iterator[None]:
        """What is in these containers counts among the live values."""
        held = len(self.roots)
        self.roots += containers
        try:
            yield
        finally:
            del self.roots[held:]

    def read_node(self) -> None:
        """One node more is read."""
        self.nodes += 1
        if self.nodes > self.limits.nodes:
            most = self.limits.nodes
            raise exhausted("nodes", "SX611", f"the model has more than {most} nodes, those of its functions included")
        if self.watched:
            self.watch()
        self.keep(_NODE)

    # --- time

    def step(self) -> None:
        """One node or body more."""
        self.left -= 1
        if self.left < self.alarm:
            self.watch()

    def watch(self) -> None:
        """Raise when the executions are used up, the deadline has passed or the flag is set."""
        if self.left < 0:
            raise exhausted("executions", "SX605", f"more than {self.limits.executions} nodes were executed")
        if self.end is not None and time.monotonic() > self.end:
            raise exhausted("deadline", "SX608", f"the deadline of {self.limits.deadline} seconds has passed")
        if self.cancel is not None and self.cancel.is_set():
            raise ResourceExhausted("the call was cancelled by its flag", code="SX609")

    def check_rounds(self, count: int) -> None:
        """Raise unless a loop may have so many rounds."""
        most = self.limits.iterations
        if count > most:
            raise exhausted("iterations", "SX606", f"{count} iterations are needed; the limit is {most}")

    def rounds(self, count: int | None) -> Iterator[int]:
        """0, 1, ... as range(count) gives them, or without end for None; raises before the first when there are too many."""
        most = self.limits.iterations
        if count is not None:
            self.check_rounds(count)
        for i in range(most if count is None else count):
            if self.watched:
                self.watch()
            yield i
        if count is None:
            raise exhausted("iterations", "SX606", f"the loop has not ended after {most} iterations, the limit")

    # --- memory

    def admit(self, shape: Sequence[int], itemsize: int) -> None:
        """Raise unless a tensor of this shape may be made."""
        size = itemsize
        for d in shape:
            size *= int(d) or 1
        if size > self.tensor_bytes or size > self.room - self.made:
            self.admit_bytes(size, f"a tensor of shape {_shown(shape)}")
        if len(shape) > self.limits.rank:
            self.check_rank(len(shape))

    def check_rank(self, rank: int) -> None:
        """Raise unless a tensor may have so many dimensions."""
        if rank > self.limits.rank:
            raise exhausted("rank", "SX607", f"a tensor of {rank} dimensions is needed; the limit is {self.limits.rank}")

    def admit_bytes(self, size: int, what: str = "the result") -> None:
        """Raise unless so many bytes may be taken at once."""
        if size > self.tensor_bytes:
            limit = format_bytes(self.tensor_bytes)
            raise exhausted("tensor_bytes", "SX603", f"{what} needs {format_bytes(size)}; one tensor may have {limit}")
        if self.made + size > self.room:
            self.settle(size)

    def account(self, values: Sequence[Any]) -> None:
        """A node gave these values: count it, and them."""
        self.left -= 1
        if self.left < self.alarm:
            self.watch()
        made = self.made
        for value in values:
            try:
                size = value.nbytes or _least(value)
            except AttributeError:  # None, or a list or a map, whose tensors were counted when they were made
                size = 0 if value is None else len(value) * _ENTRY
            if size > self.tensor_bytes or self.low_rank:
                self.admit(getattr(value, "shape", ()), size // (getattr(value, "size", 1) or 1))
            made += size + _ENTRY
        made, self.made = made - self.made, made
        if self.made > self.room:
            self.settle(made)

    def count(self, size: int) -> None:
        """So many bytes were taken that no array shows: the text of strings."""
        self.admit_bytes(size, "the text of the strings")
        self.made += size

    def settle(self, more: int = 0) -> None:
        """Count what is alive; raise when that and `more` are too much."""
        live = self.kept + size_of(self.roots)
        if live + more > self.live_bytes:
            raise exhausted(
                "live_bytes",
                "SX604",
                f"{format_bytes(more)} more are needed where {format_bytes(live)} are alive; "
                f"all tensors together may have {format_bytes(self.live_bytes)}",
            )
        self.room, self.made = self.live_bytes - live, more


def size_of(value: Any) -> int:
    """The bytes of a value with all that it holds.  Arrays are counted once, views as what they look at."""
    seen: dict[int, Any] = {}
    pending, total = [value], 0
    while pending:
        v = pending.pop()
        if v is None or id(v) in seen:
            continue
        if isinstance(v, (list, tuple, dict)):
            seen[id(v)] = v
            total += len(v) * 8
            pending += v.values() if isinstance(v, dict) else v
            continue
        v = getattr(v, "_a", v)  # out of a StrictArray
        while hasattr(getattr(v, "base", None), "dtype"):  # a mapped file is no array: of it counts what is looked at
            v = v.base
        if id(v) in seen or not hasattr(v, "nbytes"):
            total += _ENTRY
            continue
        seen[id(v)] = v
        total += v.nbytes + _ENTRY
        if v.dtype == _OBJECT:
            total += sum(_ENTRY + len(s) for s in {id(s): s for s in v.reshape(-1)}.values() if isinstance(s, str))
    return total


def _least(value: Any) -> int:
    """What an empty array counts: its dimensions may still make loops long."""
    return 0 if value.size else math.prod(d or 1 for d in value.shape) * int(value.dtype.itemsize)


def _shown(shape: Sequence[int]) -> str:
    dims = [str(d) for d in shape[:8]]
    return f"[{', '.join(dims)}{', ...' if len(shape) > 8 else ''}]"


# --- the budget of the call at hand -----------------------------------------------------------------------------------

_current: ContextVar[Budget] = ContextVar("singa_budget")


def current() -> Budget:
    """The budget of the call at hand; outside of any, a new one with the default limits."""
    budget = _current.get(None)
    return Budget(Limits()) if budget is None else budget


def ensured() -> AbstractContextManager[Budget]:
    """A context in which there is a budget: that of the call at hand, or a new one with the default limits."""
    return spend(current())


@contextmanager
def spend(budget: Budget) -> Iterator[Budget]:
    """The context in which `current()` is this budget."""
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def admit(shape: Sequence[int], dtype: np.dtype[Any] | type[Any] | str) -> None:
    """Raise unless a tensor of this shape and dtype may be made."""
    current().admit(shape, np.dtype(dtype).itemsize)


def check_rank(rank: int) -> None:
    """Raise unless a tensor may have so many dimensions."""
    current().check_rank(rank)


def check_nesting(depth: int) -> None:
    """Raise unless graphs and functions may lie so deep within each other."""
    most = current().limits.nesting
    if depth > most:
        raise exhausted("nesting", "SX602", f"graphs and functions nest deeper than {most}")


def admit_bytes(size: int, what: str = "the result") -> None:
    """Raise unless so many bytes may be taken at once."""
    current().admit_bytes(size, what)


def count_bytes(size: int) -> None:
    """`Budget.count` of the call at hand."""
    current().count(size)


def rounds(count: int | None) -> Iterator[int]:
    """`Budget.rounds` of the call at hand."""
    return current().rounds(count)


def blocks(size: int, step: int) -> Iterator[int]:
    """Where each block of `step` begins below `size`; the deadline is looked at before each, as for `rounds`."""
    return (i * step for i in rounds(-(-size // step)))


def check_rounds(count: int) -> None:
    """Raise unless a loop may have so many rounds, before it begins."""
    current().check_rounds(count)


def holding(*containers: Any) -> AbstractContextManager[None]:
    """`Budget.holding` of the call at hand, for a body that gathers values while its subgraphs run."""
    return current().holding(*containers)


def admit_broadcast(values: Sequence[Any]) -> None:
    """Raise unless the shapes of these arrays go together, and their elementwise result may be made.

    Shapes that do not fit are refused here: two of three arrays may, and make a large one before the third is met.
    """
    try:
        shape = np.broadcast_shapes(*(v.shape for v in values))
    except ValueError:
        shapes = ", ".join(str(tuple(v.shape)) for v in values)
        raise OperatorError(f"the shapes {shapes} do not broadcast", code="SX404") from None
    current().admit(shape, max(v.dtype.itemsize for v in values))


# --- the array namespace ----------------------------------------------------------------------------------------------
# What NumPy's functions will make of their arguments, for those that can make much of little: (shape, bytes of an element).

Made = tuple[Sequence[int], int]


def _of_shape(shape: Any, dtype: Any = float, *_: Any, **__: Any) -> Made:
    return (shape if isinstance(shape, (tuple, list)) else (shape,)), np.dtype(dtype).itemsize


def _full(shape: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Made:
    return _of_shape(shape, getattr(fill_value, "dtype", float) if dtype is None else dtype)


def _arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Made:
    first, last = (0, start) if stop is None else (start, stop)
    return (max(0, math.ceil((last - first) / step)),), 8 if dtype is None else np.dtype(dtype).itemsize


def _broadcast_to(x: Any, shape: Any) -> Made:
    return _of_shape(shape, x.dtype)


def _joined(arrays: Sequence[Any], *_: Any, **__: Any) -> Made:
    return (sum(a.size for a in arrays),), max((a.dtype.itemsize for a in arrays), default=0)


def _repeat(x: Any, repeats: Any, axis: int | None = None) -> Made:
    return (x.size, repeats if isinstance(repeats, int) else int(np.sum(repeats))), x.dtype.itemsize


def _tile(x: Any, reps: Sequence[int]) -> Made:
    return (x.size, *reps), x.dtype.itemsize


def _take(x: Any, indices: Any, axis: int | None = None, **_: Any) -> Made:
    rest = x.size if axis is None else x.size // (x.shape[axis] or 1)
    return (1 if axis is None else rest, getattr(indices, "size", 1)), x.dtype.itemsize


def _matmul(a: Any, b: Any, out: Any = None) -> Made:
    if out is not None or a.ndim < 1 or b.ndim < 1:
        return (), 0
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
    try:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        lead = ()
    return (*lead, *rows, *columns), max(a.dtype.itemsize, b.dtype.itemsize)


def _where(condition: Any, x: Any = None, y: Any = None) -> Made:
    arrays = [v for v in (condition, x, y) if getattr(v, "size", 1) > 1]
    if len(arrays) < 2:
        return (), 0
    try:
        shape = np.broadcast_shapes(*(v.shape for v in arrays))
    except ValueError:
        shape = ()
    return shape, max(v.dtype.itemsize for v in arrays)


def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> Made:
    return (minlength,), 8


def _nonzero(x: Any) -> Made:
    some = x.size * x.ndim < 1 << 20  # too few to count
    return (x.ndim, x.size if some else int(getattr(x, "_a", x).astype(bool).sum())), 8


def _meshgrid(*xs: Any, **_: Any) -> Made:
    return (len(xs), *(x.size for x in xs)), max((x.dtype.itemsize for x in xs), default=0)


SIZES: dict[str, Callable[..., Made]] = {
    "zeros": _of_shape, "ones": _of_shape, "empty": _of_shape, "full": _full, "arange": _arange, "broadcast_to": _broadcast_to,
    "concatenate": _joined, "stack": _joined, "repeat": _repeat, "tile": _tile, "take": _take, "matmul": _matmul,
    "where": _where, "bincount": _bincount, "nonzero": _nonzero, "flatnonzero": _nonzero, "meshgrid": _meshgrid,
}  # fmt: skip


def guarded(name: str, function: Any) -> Any:
    """A function of an array module, that asks the budget first where its result may be larger than its arguments."""
    size = SIZES.get(name)
    if size is None:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        current().admit(*size(*args, **kwargs))
        return function(*args, **kwargs)

    call.__name__ = name
    return call
