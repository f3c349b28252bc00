"""A graph as the rules of rewriting see it: `GraphView`, which a region of a plan and a graph of a model implement.

Values and calls are opaque to a rule: it passes them from one method of the view to another.  A rule first matches without a
change, then makes one `put`, `fold` or `alias`, which may refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from ..ir.graph import Node
from ..ir.shapes import Shape

MOST = 1 << 26
"""The maximum bytes of a constant that is read, if a rule sets no bound."""


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

    @property
    def is_valid(self) -> bool:
        """Whether a rule may remove calls that would fail; otherwise a call that may fail must stay, and fail when it runs."""

    @property
    def absent(self) -> Any:
        """What stands for an absent input or output of a call."""

    @property
    def keeps_views(self) -> bool:
        """Whether a constant may be a view of another one, and then needs no memory."""

    # --- calls ---

    def named(self, *names: str) -> Sequence[C]:
        """The calls of these operators of ONNX's domain, in their present meaning, that the graph has now."""

    def calls(self) -> Sequence[C]:
        """All calls in an order in which they can run."""

    def constant_calls(self) -> Iterable[C]:
        """The calls whose inputs are all constants or absent, in order; those too that become such while they are walked."""

    def refuse(self, call: C) -> None:
        """Leave a call of constants out of `constant_calls` from now on."""

    def alive(self, call: C) -> bool:
        """Whether the graph still has a call."""

    def operator(self, call: C | None) -> str:
        """The operator of ONNX's domain that a call has in its present meaning; "" for any other call, and for None.

        Operators whose old versions mean something else, such as Add with an axis, have no name in those versions.
        """

    def version(self, call: C) -> int:
        """The schema version that a call of an operator of ONNX has; 0 for any other call."""

    def name(self, call: C) -> tuple[str, str]:
        """The domain and the name of what a call calls, whatever its version means."""

    def node(self, call: C) -> Node | None:
        """A call as the definition of its operator takes it; None if it cannot be computed alone."""

    def attribute(self, call: C, name: str, default: Any = None) -> Any:
        """An attribute: a number, a list of numbers, a str or a tensor; `default` if the call and its schema have none."""

    def input(self, call: C, index: int) -> V | None:
        """An input of a call; None for an absent one."""

    # --- values ---

    def has_one_output(self, call: C) -> bool:
        """Whether all outputs of a call but the first are absent."""

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

    def constant(self, value: V, most: int = MOST) -> np.ndarray | None:
        """A constant tensor; None for any other value, and for one of more than `most` bytes that would have to be read."""

    def is_constant(self, value: V) -> bool:
        """Whether a value is constant."""

    def constant_bytes(self, value: V) -> int:
        """The size of a constant, without reading it; 0 for any other value."""

    def trains(self, value: V) -> bool:
        """Whether a value is a constant that training may change: its numbers must not become attributes, or be left out."""

    def ints(self, value: V) -> tuple[int, ...] | None:
        """A constant of few integers; None for any other value."""

    def known_sizes(self) -> Iterable[tuple[V, np.ndarray]]:
        """The values of calls that are sizes and known as numbers, with their contents."""

    def number(self, call: C, value: V) -> float | None:
        """A constant float32 of one element in an elementwise call of two inputs, which has the shape of the other input."""

    # --- changes ---

    def offers(self, op_type: str) -> bool:
        """Whether `put` can write calls of an operator of ONNX's domain in the form of its newest version."""

    def call(self, op_type: str, inputs: Sequence[V], origins: Sequence[C], outputs: Sequence[V] = (), **attributes: Any) -> C:
        """A call in the form of the operator's newest version, for `put`; it returns a new value if `outputs` is not given.

        Args:
            op_type: the operator, of ONNX's domain.
            inputs: the values that it reads.
            origins: the calls that it replaces, for names and reports.
            outputs: the values that it returns.
            **attributes: those that differ from the defaults.
        """

    def again(self, call: C, inputs: Sequence[V], outputs: Sequence[V], origins: Sequence[C], **changes: Any) -> C:
        """A call of the same operator on other inputs, for `put`.

        Args:
            call: the call, whose attributes the new one has.
            inputs: the values that it reads.
            outputs: the values that it returns; a new one if there are none.
            origins: the calls that it replaces.
            **changes: attributes that differ; None for those that it does not have.
        """

    def add_constant(self, array: np.ndarray, *sources: V, suffix: str = "") -> V:
        """A new constant, which was computed from others; it is trainable if one of those is.

        Args:
            array: the value.
            *sources: the constants; the name is that of the first.
            suffix: of the name.
        """

    def scaled(self, weight: V, factors: np.ndarray, *sources: V) -> V | None:
        """A new constant: a weight multiplied by factors, which were computed from other constants; None if it is not finite.

        Raises:
            ValueError: the shapes do not broadcast.
        """

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


def rank(view: GraphView[V, C], value: V) -> int | None:
    """The number of axes of a value; None if it is not known."""
    shape = view.shape(value)
    return None if shape is None else len(shape)
