"""A graph as the rules of rewriting see it: `GraphView`, which a region of a plan and a graph of a model implement.

Values and calls are opaque to a rule: it passes them from one method of the view to another.  A rule first matches without a
change, then makes one `put`, `fold` or `alias`, which may refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

Dim = int | str
"""A size, or the name of an unknown one: sizes of one name are equal."""
Shape = tuple[Dim, ...]


class AnyCall(Protocol):
    """A call of an operator: its values in order, the absent ones included; `GraphView.input` returns None for those."""

    @property
    def inputs(self) -> Sequence[Any]:
        """The values that it reads."""

    @property
    def outputs(self) -> Sequence[Any]:
        """The values that it returns."""


V = TypeVar("V", bound=Hashable)
"""A value of a graph."""
C = TypeVar("C", bound=AnyCall)
"""A call of a graph."""


class GraphView(Protocol[V, C]):
    """A graph that rules rewrite: calls of operators, and the values between them."""

    # --- calls ---

    def named(self, *names: str) -> Sequence[C]:
        """The calls of these operators of ONNX's domain, in their present meaning, that the graph has now."""

    def calls(self) -> Sequence[C]:
        """All calls in an order in which they can run."""

    def alive(self, call: C) -> bool:
        """Whether the graph still has a call."""

    def operator(self, call: C | None) -> str:
        """The operator of ONNX's domain that a call has in its present meaning; "" for any other call, and for None.

        Operators whose old versions mean something else, such as Add with an axis, have no name in those versions.
        """

    def version(self, call: C) -> int:
        """The schema version that a call of an operator of ONNX has; 0 for any other call."""

    def attribute(self, call: C, name: str, default: Any = None) -> Any:
        """An attribute: a number, a list of numbers, a str or a tensor; `default` if the call and its schema have none."""

    def input(self, call: C, index: int) -> V | None:
        """An input of a call; None for an absent one."""

    # --- values ---

    def producer(self, value: V) -> C | None:
        """The call that returns a value; None for inputs and constants."""

    def made_by(self, value: V, *names: str) -> C | None:
        """The call that returns a value, if it is a call of one of these operators and the value its first output."""

    def users(self, value: V) -> Collection[C]:
        """The calls that read a value, directly or in a subgraph."""

    def once(self, value: V) -> bool:
        """Whether a value is read in one place only, and is not an output."""

    def inside(self, values: Iterable[V], pattern: Iterable[C]) -> bool:
        """Whether calls of a pattern are the only ones that read these values."""

    def is_output(self, value: V) -> bool:
        """Whether a value is an output of the graph."""

    def dtype(self, value: V) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""

    def shape(self, value: V) -> Shape | None:
        """The shape of a value; None if its rank is not known."""

    # --- constants ---

    def constant(self, value: V) -> np.ndarray | None:
        """A constant tensor; None for any other value."""

    def ints(self, value: V) -> tuple[int, ...] | None:
        """A constant of few integers; None for any other value."""

    def number(self, call: C, value: V) -> float | None:
        """A constant float32 of one element in an elementwise call of two inputs, which has the shape of the other input."""

    # --- changes ---

    def call(self, op_type: str, inputs: Sequence[V], origins: Sequence[C], outputs: Sequence[V] = (), **attributes: Any) -> C:
        """A call in the form of the operator's newest version, for `put`; it returns a new value if `outputs` is not given.

        Args:
            op_type: the operator, of ONNX's domain.
            inputs: the values that it reads.
            origins: the calls that it replaces, for names and reports.
            outputs: the values that it returns.
            **attributes: those that differ from the defaults.
        """

    def add_constant(self, array: np.ndarray, *sources: V) -> V:
        """A new constant, which was computed from others; it is trainable if one of those is."""

    def put(self, root: C, *calls: C, also: Iterable[C] = ()) -> bool:
        """Replace a call, and `also` later ones, by others in its place, which return their outputs.

        Calls that nothing reads any more are removed.  False, without a change, if the graph cannot hold the new calls.
        """

    def fold(self, call: C, results: Mapping[V, np.ndarray]) -> bool:
        """Replace a call by the constants that it returns; False, without a change, if the graph must keep it."""

    def alias(self, old: V, new: V) -> bool:
        """Let every reader of a value read another, equal one, from the next `flush` on; False if nothing changes.

        An output that must keep its name may be returned by an Identity instead.
        """

    def flush(self) -> None:
        """Apply the aliases."""


def ints_of(view: GraphView[V, C], call: C, name: str, index: int) -> tuple[bool, tuple[int, ...] | None]:
    """A list of integers of a call, an attribute in some versions and an input in others: (whether it is given, its value).

    (True, None): an input that is not constant.
    """
    value = view.attribute(call, name)
    if value is not None:
        return True, tuple(int(v) for v in value)
    source = view.input(call, index)
    return source is not None, None if source is None else view.ints(source)
