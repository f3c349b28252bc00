"""Where a tensor came from: the operators that made it, without their values; `to_onnx` plays them again into a graph.

Every operator on tensors leaves an `Origin` with its results, in training and in evaluation. It knows the leaves that were read
(parameters, inputs) and the origins of the rest, never their arrays. A chain of more than `LONGEST` operators, such as a state
that is fed back for ever, is cut: its beginning is forgotten. A leaf of more than `SMALL` bytes is not kept alive, so that a sum
over many batches does not hold the batches; only the last ones are, `RECENT` bytes of them in each thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from singa_backend.errors import InvalidInput

if TYPE_CHECKING:
    from singa_backend.ir.graph import Graph

LONGEST = 20_000
"""Operators in a row."""

SMALL = 1 << 10
"""Bytes up to which a leaf is kept alive by what was made of it."""

RECENT = 32 << 20
"""Bytes of the larger leaves that are kept alive: those that a thread has read last."""

Replay = Callable[[list[Any], bool], Sequence[Any]]
"""Do it again: (tensors, numbers and None in the order of the arguments, whether in training) -> tensors."""


@dataclass(eq=False, slots=True)
class Origin:
    """One call of an operator.

    name: of the operator.  replay: computes it again.  args: a Link for what an operator made, a leaf Tensor, or a plain value.
    depth: how many operators lie before it.
    operator: the user's own operator, written in Python.
    types: then, (dtype, shape) of its results.
    graph: where the operator is a whole ONNX model, that of its file.
    serial: when it was made: a file follows the program, and draws its random numbers in the program's order.
    """

    name: str
    replay: Replay
    args: tuple[Any, ...]
    depth: int
    operator: Any = None
    types: tuple[Any, ...] = ()
    graph: Graph | None = None
    serial: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True, slots=True)
class Link:
    """One result of an Origin."""

    origin: Origin
    index: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A large leaf, which lives only as long as somebody else wants it to."""

    ref: weakref.ref[Any]
    what: str

    def get(self) -> Any:
        """The leaf; raises InvalidInput where it is gone."""
        found = self.ref()
        if found is None:
            raise InvalidInput(
                f"{self.what}, which was read on the way, is gone",
                code="SX363",
                hint="hold it in a variable or an attribute until the export, or export the model",
            )
        return found


class _Recent(threading.local):
    """The larger leaves that this thread has read last, and their bytes."""

    def __init__(self) -> None:
        self.leaves: deque[tuple[Any, int]] = deque()
        self.size = 0

    def add(self, leaf: Any, size: int) -> None:
        if self.leaves and self.leaves[-1][0] is leaf:
            return
        self.leaves.append((leaf, size))
        self.size += size
        while self.size > RECENT:
            self.size -= self.leaves.popleft()[1]


_recent = _Recent()


class _Context:
    """Something that holds while a thread is in a context, however often it has entered it."""

    def __init__(self, name: str) -> None:
        self._entered = ContextVar(name, default=0)

    def __enter__(self) -> None:
        self._entered.set(self._entered.get() + 1)

    def __exit__(self, *error: object) -> None:
        self._entered.set(self._entered.get() - 1)

    def __bool__(self) -> bool:
        return self._entered.get() > 0


retaining = _Context("retaining")
"""The context in which origins keep every leaf alive: of an export, and of a step that is recorded."""

suspended = _Context("suspended")
"""The context in which results have no origin: updates of states, and what is inside an operator that has one as a whole."""

CHANGED = Origin("a change in place", lambda xs, training: [], (), 0)
"""The origin of a tensor that was changed in place by what operators made."""


def record(
    results: Sequence[Any],
    name: str,
    replay: Replay,
    args: Sequence[Any],
    operator: Any = None,
    types: tuple[Any, ...] = (),
    graph: Graph | None = None,
) -> None:
    """Give tensors an origin."""
    if suspended:
        return
    found: list[Any] = []
    depth = 0
    for x in args:
        link = getattr(x, "_origin", None)
        if link is not None:
            depth = max(depth, link.origin.depth)
            found.append(link)
        else:
            found.append(_leaf(x))
    if depth >= LONGEST:
        return
    origin = Origin(name, replay, tuple(found), depth + 1, operator, types, graph)
    for i, y in enumerate(results):
        if y is not None:
            y._origin = Link(origin, i)


def _leaf(x: Any) -> Any:
    """A leaf as an origin holds it: itself where it is small, or somebody's parameter, else without keeping it alive for long."""
    data = getattr(x, "_data", x)
    size = getattr(data, "nbytes", 0)
    if size <= SMALL or retaining or getattr(x, "stores_grad", False):
        return x
    _recent.add(x, size)
    return Leaf(weakref.ref(x), f"a leaf {data.dtype}{list(data.shape)}")


def changed(tensor: Any, *others: Any) -> Link | None:
    """The origin that a tensor has when others have changed it in place: what operators made cannot be told from it any more."""
    return Link(CHANGED, 0) if any(getattr(x, "_origin", None) is not None for x in (tensor, *others)) else None


def forget(tensor: Any) -> None:
    """The tensor was filled with values from outside: it is a leaf from here on."""
    tensor._origin = None


def replay(
    outputs: Sequence[Any], given: dict[int, Any], links: dict[Link, Any], do: Callable[[Origin, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Play again what made these tensors.

    given: by the id of a leaf, what stands in for it.  links: the same for what an operator made.
    do: (origin, its arguments) -> its results.
    """
    done: dict[int, Sequence[Any]] = {}

    def value(arg: Any) -> Any:
        if isinstance(arg, Link):
            return links[arg] if arg in links else done[id(arg.origin)][arg.index]
        leaf = arg.get() if isinstance(arg, Leaf) else arg
        return given.get(id(leaf), leaf)

    for call in order([y._origin for y in outputs if y._origin is not None], links):
        done[id(call)] = do(call, [value(a) for a in call.args])
    return [value(y._origin if y._origin is not None else y) for y in outputs]


def order(ends: Sequence[Link], links: dict[Link, Any] | None = None) -> list[Origin]:
    """The origins that these results hang on, in the order in which they were made: each after those that it needs."""
    known = links or {}
    found: dict[int, Origin] = {}
    pending = [e.origin for e in ends if e not in known]
    while pending:
        origin = pending.pop()
        if origin.serial not in found:
            found[origin.serial] = origin
            pending += [a.origin for a in origin.args if isinstance(a, Link) and a not in known]
    return [found[serial] for serial in sorted(found)]
