"""Limits on the memory, time and size that reading and running a model may use, checked before memory is allocated.

    prepare(model, limits=Limits(tensor_bytes=8 << 30, deadline=2.0)).run(inputs, cancel=event)

A `Limits` holds the bounds; a `Budget` counts what one `prepare` or one `run` has used.  `current()` returns the budget of the
current call, so that the array namespace (devices/namespaces.py), the reader and any operator's body can check it:

    admit(shape, dtype)        before a tensor is created          admit_bytes(n)   before n bytes are allocated
    for i in rounds(n): ...    a loop in Python                    holding(values)  values kept while subgraphs run
"""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from .deadline import SHORTEST, Deadline
from .errors import InvalidInput, OperatorError, ResourceExhausted

__all__ = ["Flag", "Limits"]

P = ParamSpec("P")
R = TypeVar("R")

GIB = 1 << 30
_OBJECT = np.dtype(object)
_NODE = 4096
"""Approximate bytes of a node that was read: calls of functions can multiply nodes."""
_ENTRY = 112
"""Approximate bytes that Python uses for an array or a string in addition to its content."""


class Flag(Protocol):
    """A flag that another thread sets to stop a run, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether the flag is set.

        Returns:
            True once the flag is set.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """Bounds on one `prepare` or one `run`.

    A call that would exceed a bound raises ResourceExhausted; no loop is shortened and no result is truncated.

    Attributes:
        tensor_bytes: bytes of one tensor, by shape and element size; in an empty tensor a dimension of 0 counts as 1.
            Default: 4 GiB.
        live_bytes: bytes of all live tensors and the next one.  Default: None, 75 % of the machine's or device's memory.
        executions: number of nodes and subgraphs that run; those in subgraphs and functions count each time.  Default: 10^8.
        iterations: number of iterations of one Loop or Scan, or of another loop whose length depends on values.  Default: 10^6.
        nesting: depth of If, Loop, Scan and functions within each other.  Default: 64.
        rank: number of dimensions of a tensor.  Default: 64, NumPy's maximum.
        deadline: seconds, checked between nodes and iterations.  If it passes while the plan for new shapes is made, the plan is
            finished (for at most a minute) and kept, so that the next run has it, and then the call fails.  Default: None, no
            deadline.
        nodes: number of nodes that are read; a function counts once for each set of attributes of its calls.  Default: 10^6.
        model_bytes: bytes of the model file.  Default: 2 GiB, the maximum of Protocol Buffers.
        entries: number of inputs or outputs of one node, and of numbers in an attribute that configures it, such as axes or a
            permutation; attributes that hold data are not counted.  Default: 65,536.

    Raises:
        InvalidInput: a bound is not a positive number.
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
    entries: int = 1 << 16

    def __post_init__(self) -> None:
        """Check that every bound is a positive number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            whole = field.name != "deadline"
            plain = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not plain or not value > 0 or (isinstance(value, int) and value > sys.float_info.max):
                kind = "an integer" if whole else "a number"
                raise InvalidInput(f"the limit {field.name} must be {kind} above 0, got {value!r}", code="SX309")


def check_number(name: str, value: Any, low: float, *, whole: bool = False) -> None:
    """Check an argument that is a number.

    Args:
        name: the name of the argument.
        value: its value; None is accepted.
        low: the lowest value.
        whole: whether it must be an integer.

    Raises:
        InvalidInput: it is not a finite number of at least `low` (SX309).
    """
    if value is None:
        return
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not (low <= value <= sys.float_info.max):
        kind = "an integer" if whole else "a finite number"
        raise InvalidInput(f"{name} must be {kind} of at least {low}, got {value!r}", code="SX309")


@cache
def physical_memory() -> int:
    """Bytes of memory that this process may use: the minimum of the machine's memory and its control group's limit."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # the file is missing, or holds "max"
            continue
    return min(sizes)


def format_bytes(size: int) -> str:
    """A number of bytes with a binary unit, such as "4.0 GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}" if size < 1 << 60 else f"2^{size.bit_length() - 1} bytes"
    return f"{size} bytes"


def exhausted(name: str, code: str, message: str) -> ResourceExhausted:
    """The error of a limit; its hint shows how to raise the limit."""
    hint = f"if this is intended, raise the limit: prepare(model, limits=Limits({name}=...)), or sonnx run --limit {name}=..."
    return ResourceExhausted(message, code=code, hint=hint)


def raise_shortage(what: str, error: OSError) -> None:
    """Raise the error of a file that cannot be opened now, although the file is not the reason; return if it may be.

    Args:
        what: the file.
        error: the system's error.

    Raises:
        ResourceExhausted: the process or the machine has too many open files (SX612), or no memory (SX601).
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        whose = "this process" if error.errno == errno.EMFILE else "this machine"
        hint = "close files, or allow more: `ulimit -n` shows and sets the number for a process"
        raise ResourceExhausted(f"{what} cannot be opened: {whose} has too many open files", code="SX612", hint=hint)
    if error.errno == errno.ENOMEM:
        raise ResourceExhausted(f"{what} cannot be opened: there is too little memory", code="SX601")


def reports_shortage(call: Callable[P, R]) -> Callable[P, R]:
    """A function that raises ResourceExhausted (SX601, SX602) in place of MemoryError and RecursionError."""

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MemoryError as error:
            raise ResourceExhausted(f"out of memory: {error}", code="SX601") from error
        except RecursionError as error:
            text = "graphs and functions nest deeper than Python's stack allows"
            raise ResourceExhausted(text, code="SX602", hint="flatten the model") from error

    return checked


def too_many_dimensions(message: str) -> ResourceExhausted:
    """The error for a rank that the array module does not support."""
    return ResourceExhausted(f"a tensor has too many dimensions: {message}", code="SX607")


class Exchanges:
    """The exchanges with other processes of one run, in order.

    A plan may give up a run that has begun an exchange, and another plan or the definitions repeat the run. No process can take
    back what it has sent: the repeated run continues with the exchanges of the first one, and begins only those that follow.

    Attributes:
        at: the number of exchanges that the present attempt has begun.
        tickets: of each exchange that the run has begun.
        results: of those that have ended, by ticket.
    """

    def __init__(self) -> None:
        self.at = 0
        self.tickets: list[int] = []
        self.results: dict[int, Any] = {}

    def begin(self, start: Callable[[], int]) -> int:
        """The ticket of the next exchange, which `start` begins unless an earlier attempt of the run did."""
        if self.at == len(self.tickets):
            self.tickets.append(start())
        self.at += 1
        return self.tickets[self.at - 1]

    def end(self, ticket: int, wait: Callable[[int], Any]) -> Any:
        """The result of an exchange, for which `wait` waits unless an earlier attempt of the run did."""
        if ticket not in self.results:
            self.results[ticket] = wait(ticket)
        return self.results[ticket]


class Budget:
    """Counts what one call has used of its limits.

    Attributes:
        roots: containers of live values: frames of the running graphs, and values that operator bodies hold.
        exchanges: what the run has exchanged with other processes.
        deadline: when the call must end; None if there is no limit.
    """

    def __init__(self, limits: Limits, cancel: Flag | None = None, memory: int | None = None) -> None:
        if not isinstance(limits, Limits):
            raise InvalidInput(f"limits must be a Limits, got a {type(limits).__name__}", code="SX309")
        if cancel is not None and not callable(getattr(cancel, "is_set", None)):
            raise InvalidInput(f"cancel must be a flag with is_set(), got a {type(cancel).__name__}", code="SX309")
        self.limits = limits
        self.cancel = cancel
        self.tensor_bytes = limits.tensor_bytes
        self.live_bytes = limits.live_bytes or (memory or physical_memory()) * 3 // 4
        self.left = limits.executions
        self.deadline = None if limits.deadline is None else Deadline(limits.deadline)
        self.watched = self.deadline is not None or cancel is not None
        self.alarm = limits.executions + 1 if self.watched else 0  # below this many executions left, `watch`
        self.low_rank = limits.rank < 64
        self.roots: list[Any] = []
        # Live bytes are counted again, by walking the roots, only if the bytes made since the last count could exceed the limit.
        self.made = 0
        self.room = self.live_bytes
        self.kept = 0
        self.nodes = 0
        self.exchanges = Exchanges()

    def part(self, **limits: int) -> Budget:
        """A budget for a part of the call: these limits where they are lower, and the deadline and the flag of the call."""
        lower = {name: min(limit, getattr(self.limits, name)) for name, limit in limits.items()}
        budget = Budget(replace(self.limits, live_bytes=self.live_bytes, **lower), self.cancel)
        budget.deadline = self.deadline
        return budget

    def begin(self, resident: int, *roots: Any) -> None:
        """Begin a run with these containers, which hold `resident` bytes."""
        self.roots += roots
        self.room = self.live_bytes - resident

    def restart(self) -> None:
        """Forget what was counted, but not the time: the work begins again in another way."""
        self.left, self.made, self.kept, self.room = self.limits.executions, 0, 0, self.live_bytes
        self.roots.clear()

    def keep(self, size: int) -> None:
        """Count bytes that stay allocated until the call ends."""
        self.kept += size
        self.room -= size
        if self.made > self.room:
            self.settle(size)

    @contextmanager
    def holding(self, *containers: Any) -> Iterator[None]:
        """Count the values in these containers as live."""
        held = len(self.roots)
        self.roots += containers
        try:
            yield
        finally:
            del self.roots[held:]

    def read_node(self) -> None:
        """Count one node that is read."""
        self.nodes += 1
        if self.nodes > self.limits.nodes:
            limit = self.limits.nodes
            raise exhausted("nodes", "SX611", f"the model has more than {limit} nodes, those of its functions included")
        if self.watched:
            self.watch()
        self.keep(_NODE)

    # --- time

    def step(self) -> None:
        """Count one executed node or subgraph."""
        self.left -= 1
        if self.left < self.alarm:
            self.watch()

    def steps(self, count: int) -> None:
        """Count several executed nodes."""
        self.left -= count
        if self.left < self.alarm:
            self.watch()

    def watch(self) -> None:
        """Raise if the executions are used up, the deadline has passed or the flag is set."""
        if self.left < 0:
            raise exhausted("executions", "SX605", f"more than {self.limits.executions} nodes were executed")
        if self.deadline is not None and self.deadline.remaining() <= 0:
            raise exhausted("deadline", "SX608", f"the deadline of {self.limits.deadline} seconds has passed")
        if self.cancel is not None and self.cancel.is_set():
            raise ResourceExhausted("the call was cancelled by its flag", code="SX609")

    def clock(self, runs: bool) -> AbstractContextManager[None]:
        """A context whose time counts towards the deadline, or does not: it makes what later runs need not make again."""
        return nullcontext() if self.deadline is None else self.deadline.clock(runs)

    def count_spared(self) -> None:
        """Count the time that did not count towards the deadline: nothing more is made."""
        if self.deadline is not None:
            self.deadline.count_spared()

    def plan_is_kept(self) -> None:
        """Count the time in which a plan was made that is kept.  Raises if the deadline has passed."""
        self.count_spared()
        if self.deadline is not None and self.deadline.remaining() <= 0:
            what = f"the deadline of {self.limits.deadline} seconds has passed while a plan for these shapes was made"
            raise ResourceExhausted(what, code="SX608", hint="the plan is kept: run again")

    def remaining(self) -> float | None:
        """The seconds before the deadline; None without one.  Raises if it has passed, or the flag is set."""
        self.watch()
        return None if self.deadline is None else max(SHORTEST, self.deadline.remaining())

    def check_rounds(self, count: int) -> None:
        """Raise if a loop of `count` iterations exceeds the limit."""
        limit = self.limits.iterations
        if count > limit:
            raise exhausted("iterations", "SX606", f"{count} iterations are needed; the limit is {limit}")

    def rounds(self, count: int | None) -> Iterator[int]:
        """Yield 0, 1, ... as `range(count)` does, without end for None; raises before the first if there are too many."""
        limit = self.limits.iterations
        if count is not None:
            self.check_rounds(count)
        for i in range(limit if count is None else count):
            if self.watched:
                self.watch()
            yield i
        if count is None:
            raise exhausted("iterations", "SX606", f"the loop has not ended after {limit} iterations, the limit")

    # --- memory

    def admit(self, shape: Sequence[int], itemsize: int) -> None:
        """Raise if a tensor of this shape would exceed a limit."""
        size = itemsize
        for d in shape:
            size *= int(d) or 1
        if size > self.tensor_bytes or size > self.room - self.made:
            self.admit_bytes(size, f"a tensor of shape {_shown(shape)}")
        if len(shape) > self.limits.rank:
            self.check_rank(len(shape))

    def check_rank(self, rank: int) -> None:
        """Raise if a tensor of `rank` dimensions exceeds the limit."""
        if rank > self.limits.rank:
            raise exhausted("rank", "SX607", f"a tensor of {rank} dimensions is needed; the limit is {self.limits.rank}")

    def admit_bytes(self, size: int, what: str = "the result") -> None:
        """Raise if allocating `size` bytes would exceed a limit."""
        if size > self.tensor_bytes:
            limit = format_bytes(self.tensor_bytes)
            raise exhausted("tensor_bytes", "SX603", f"{what} needs {format_bytes(size)}; the limit for one tensor is {limit}")
        if self.made + size > self.room:
            self.settle(size)

    def account(self, values: Sequence[Any]) -> None:
        """Count an executed node and the values that it returned."""
        self.left -= 1
        if self.left < self.alarm:
            self.watch()
        made = self.made
        for value in values:
            try:
                size = value.nbytes or _empty_bytes(value)
            except AttributeError:  # None, or a list or a map, whose tensors were counted when they were created
                size = 0 if value is None else len(value) * _ENTRY
            if size > self.tensor_bytes or self.low_rank:
                self.admit(getattr(value, "shape", ()), size // (getattr(value, "size", 1) or 1))
            made += size + _ENTRY
        made, self.made = made - self.made, made
        if self.made > self.room:
            self.settle(made)

    def count_tensor(self, size: int) -> None:
        """Count a tensor of this size that is created; raise if it exceeds a limit."""
        if size + _ENTRY > self.room - self.made:
            self.admit_bytes(size + _ENTRY, "a tensor")
        self.made += size + _ENTRY

    def count(self, size: int) -> None:
        """Count bytes that no array's `nbytes` includes: the text of strings."""
        self.admit_bytes(size, "the text of the strings")
        self.made += size

    def settle(self, more: int = 0) -> None:
        """Count the live bytes; raise if they and `more` bytes exceed the limit."""
        live = self.kept + size_of(self.roots)
        if live + more > self.live_bytes:
            raise exhausted(
                "live_bytes",
                "SX604",
                f"{format_bytes(more)} more are needed and live tensors use {format_bytes(live)}; "
                f"the limit for all tensors is {format_bytes(self.live_bytes)}",
            )
        self.room, self.made = self.live_bytes - live, more


def text_bytes(text: str) -> int:
    """The bytes of a string in memory."""
    return _ENTRY + len(text) * width(text)


def content_bytes(array: Any) -> int:
    """The bytes of an array, with the text of its strings."""
    texts = array.reshape(-1).tolist() if array.dtype == _OBJECT else ()
    return int(array.nbytes) + sum(text_bytes(s) for s in texts if isinstance(s, str))


def width(text: str) -> int:
    """The bytes that Python stores for each character of a string: 1, 2 or 4, as its widest one needs."""
    if text.isascii():
        return 1
    size = sys.getsizeof(text)
    return 4 if size >= 4 * len(text) else 2 if size >= 2 * len(text) else 1


def bytes_of(sizes: Iterable[int]) -> int:
    """What tensors of these sizes count."""
    return sum(size + _ENTRY for size in sizes)


def size_of(value: Any) -> int:
    """The bytes of a value and everything in it: each array counts once, a view as its base."""
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
        v = getattr(v, "_a", v)  # the array of a StrictArray
        while hasattr(getattr(v, "base", None), "dtype"):  # a mapped file is not an array: only the view of it counts
            v = v.base
        if id(v) in seen or not hasattr(v, "nbytes"):
            total += _ENTRY
            continue
        seen[id(v)] = v
        total += v.nbytes + _ENTRY
        if v.dtype == _OBJECT:
            total += sum(text_bytes(s) for s in {id(s): s for s in v.reshape(-1)}.values() if isinstance(s, str))
    return total


def _empty_bytes(value: Any) -> int:
    """The bytes that an empty array counts as, with each dimension of 0 as 1: the others may still make loops long."""
    return 0 if value.size else math.prod(d or 1 for d in value.shape) * int(value.dtype.itemsize)


def _shown(shape: Sequence[int]) -> str:
    dims = [str(d) for d in shape[:8]]
    return f"[{', '.join(dims)}{', ...' if len(shape) > 8 else ''}]"


# --- the budget of the current call -----------------------------------------------------------------------------------

_current: ContextVar[Budget | None] = ContextVar("singa_budget", default=None)
_DEFAULT = Limits()


def current() -> Budget:
    """The budget of the current call; outside a call, a new one with the default limits."""
    budget = _current.get()
    return Budget(_DEFAULT) if budget is None else budget


def ensured() -> AbstractContextManager[Budget]:
    """A context that has a budget: that of the current call, or a new one with the default limits."""
    return spend(current())


@contextmanager
def spend(budget: Budget) -> Iterator[Budget]:
    """A context in which `current()` returns this budget."""
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def enter(budget: Budget | None) -> None:
    """Let `current()` return this budget from now on in the present context; None for that of no run."""
    _current.set(budget)


def admit(shape: Sequence[int], dtype: np.dtype[Any] | type[Any] | str) -> None:
    """Raise if a tensor of this shape and dtype would exceed a limit."""
    current().admit(shape, np.dtype(dtype).itemsize)


def check_rank(rank: int) -> None:
    """Raise if a tensor of `rank` dimensions exceeds the limit."""
    current().check_rank(rank)


def check_nesting(depth: int) -> None:
    """Raise if graphs and functions nested to this depth exceed the limit."""
    limit = current().limits.nesting
    if depth > limit:
        raise exhausted("nesting", "SX602", f"graphs and functions nest deeper than {limit}")


def check_entries(count: int, what: str) -> None:
    """Raise if a node has too many inputs, outputs or numbers in an attribute.

    Args:
        count: their number.
        what: what is counted, such as "inputs of the node 'n'".

    Raises:
        ResourceExhausted: there are more than `Limits.entries` (SX614).
    """
    limit = current().limits.entries
    if count > limit:
        raise exhausted("entries", "SX614", f"the model has {count} {what}; the limit is {limit}")


def admit_bytes(size: int, what: str = "the result") -> None:
    """Raise if allocating `size` bytes would exceed a limit."""
    current().admit_bytes(size, what)


def room(size: int) -> int:
    """The largest number of bytes, at most `size`, that a tensor may have without exceeding a limit."""
    budget = current()
    size = min(size, budget.tensor_bytes)
    if size > budget.room - budget.made:
        budget.settle()
    return min(size, budget.room - budget.made)


def count_bytes(size: int) -> None:
    """Call `Budget.count` of the current call."""
    current().count(size)


def rounds(count: int | None) -> Iterator[int]:
    """Call `Budget.rounds` of the current call."""
    return current().rounds(count)


def blocks(size: int, step: int) -> Iterator[int]:
    """Yield the start of each block of `step` elements below `size`; the deadline is checked before each, as by `rounds`."""
    return (i * step for i in rounds(-(-size // step)))


def check_rounds(count: int) -> None:
    """Raise if a loop of `count` iterations exceeds the limit, before it begins."""
    current().check_rounds(count)


def holding(*containers: Any) -> AbstractContextManager[None]:
    """Call `Budget.holding` of the current call, for a body that collects values while its subgraphs run."""
    return current().holding(*containers)


def admit_broadcast(values: Sequence[Any]) -> None:
    """Raise if these arrays do not broadcast, or if their elementwise result would exceed a limit.

    The shapes are checked together: two of three arrays may broadcast to a large one before the third is found not to fit.
    """
    try:
        shape = np.broadcast_shapes(*(v.shape for v in values))
    except ValueError:
        shapes = ", ".join(str(tuple(v.shape)) for v in values)
        raise OperatorError(f"the shapes {shapes} do not broadcast", code="SX404") from None
    current().admit(shape, max(v.dtype.itemsize for v in values))
