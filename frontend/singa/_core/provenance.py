"""The provenance of tensors: the operators that computed them, without intermediate values; `to_onnx` replays them into a graph.

Every operator on tensors attaches a `RecordedCall` to its results, in training and in evaluation. It refers to the leaves that
were read (parameters, inputs) and to the origins of other inputs, never to their arrays. A chain of more than `LONGEST`
operators, such as a state that is fed back forever, is cut: its beginning is dropped. A leaf of more than `SMALL` bytes is not
kept alive, so that a sum over many batches does not hold the batches; only the last `RECENT` bytes of them in each thread are.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from singa_backend.errors import InvalidInput

if TYPE_CHECKING:
    from singa_backend.ir.graph import Graph

LONGEST = 20_000
"""The maximum number of operators in a chain."""

SMALL = 1 << 10
"""The maximum size in bytes of a leaf that is kept alive by the tensors computed from it."""

RECENT = 32 << 20
"""The total size in bytes of the larger leaves that are kept alive: those that a thread has read last."""

Replay = Callable[[list[Any], bool], Sequence[Any]]
"""Replays a call: (tensors, numbers and None in the order of the arguments, whether in training) -> tensors."""


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One call of an operator.

    Attributes:
        name: The name of the operator.
        replay: Computes the call again.
        args: For each argument a Link to the result of an operator, a leaf Tensor, a Leaf, or a plain value.
        depth: The length of the longest chain of operators that ends here.
        operator: The custom operator, written in Python; None for ONNX operators.
        types: For a custom operator, (dtype, shape) of each result.
        graph: The graph of the file if the operator is a whole ONNX model; None otherwise.
        parameters: The parameters of that model by name.
        serial: The number of the call: a file has the nodes in the order of the program, and draws random numbers in that order.
    """

    name: str
    replay: Replay
    args: tuple[Any, ...]
    depth: int
    operator: Any = None
    types: tuple[Any, ...] = ()
    graph: Graph | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True, slots=True)
class Link:
    """One result of a RecordedCall."""

    origin: RecordedCall
    index: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A large leaf, to which provenance holds only a weak reference."""

    ref: weakref.ref[Any]
    what: str

    def get(self) -> Any:
        """The leaf; raises InvalidInput if it no longer exists."""
        found = self.ref()
        if found is None:
            raise InvalidInput(
                f"an input of this computation ({self.what}) no longer exists",
                code="SX363",
                hint="keep it in a variable or an attribute until the export, or export the model",
            )
        return found


class _Recent(threading.local):
    """The larger leaves that this thread has read last, and their total size in bytes."""

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
    """A flag that is true while a thread is in a context, which it may enter several times."""

    def __init__(self, name: str) -> None:
        self._entered = ContextVar(name, default=0)

    def __enter__(self) -> None:
        self._entered.set(self._entered.get() + 1)

    def __exit__(self, *error: object) -> None:
        self._entered.set(self._entered.get() - 1)

    def __bool__(self) -> bool:
        return self._entered.get() > 0


retaining = _Context("retaining")
"""The context in which origins keep every leaf alive, for an export or a step that is recorded."""

suspended = _Context("suspended")
"""The context in which results have no origin: updates of states, and calls within an operator that has an origin as a whole."""

CHANGED = RecordedCall("a change in place", lambda xs, training: [], (), 0)
"""The origin of a tensor that was changed in place by results of operators."""


def record(
    results: Sequence[Any],
    name: str,
    replay: Replay,
    args: Sequence[Any],
    operator: Any = None,
    types: tuple[Any, ...] = (),
    graph: Graph | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> None:
    """Attach an origin to the results of a call."""
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
    origin = RecordedCall(name, replay, tuple(found), depth + 1, operator, types, graph, parameters or {})
    for i, y in enumerate(results):
        if y is not None:
            y._origin = Link(origin, i)


def _leaf(x: Any) -> Any:
    """The reference of an origin to a leaf: the leaf if it is small or a parameter, otherwise a weak reference."""
    data = getattr(x, "_data", x)
    size = getattr(data, "nbytes", 0)
    if size <= SMALL or retaining or getattr(x, "stores_grad", False):
        return x
    _recent.add(x, size)
    return Leaf(weakref.ref(x), f"{data.dtype}{list(data.shape)}")


def changed(tensor: Any, *others: Any) -> Link | None:
    """The link of a tensor after a change in place: CHANGED if operators computed it or one of the others, otherwise None."""
    return Link(CHANGED, 0) if any(getattr(x, "_origin", None) is not None for x in (tensor, *others)) else None


def forget(tensor: Any) -> None:
    """Make a tensor a leaf, because it was filled with values."""
    tensor._origin = None


def replay(
    outputs: Sequence[Any], given: dict[int, Any], links: dict[Link, Any], do: Callable[[RecordedCall, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Replay the calls that computed these tensors.

    Args:
        outputs: The tensors.
        given: Replacements of leaves, by the id of the leaf.
        links: Replacements of results of operators.
        do: (origin, its arguments) -> its results.

    Returns:
        The replayed tensors.
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


def order(ends: Sequence[Link], links: dict[Link, Any] | None = None) -> list[RecordedCall]:
    """The origins that these results depend on, in the order of the calls: each after those that it needs."""
    known = links or {}
    found: dict[int, RecordedCall] = {}
    pending = [e.origin for e in ends if e not in known]
    while pending:
        origin = pending.pop()
        if origin.serial not in found:
            found[origin.serial] = origin
            pending += [a.origin for a in origin.args if isinstance(a, Link) and a not in known]
    return [found[serial] for serial in sorted(found)]
