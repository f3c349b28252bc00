"""What rules of rewriting work with: a graph, what is known of its values for one purpose, and how its nodes are replaced.

A rule reads the structure from nodes and values themselves.  It first matches without a change, then makes one `put`, `fold` or
`alias`, which may refuse.  Nodes that nothing uses afterwards are removed, so that a value in the middle of a pattern that other
nodes read remains correct.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..ir.graph import Graph, Node, Value
from ..ir.shapes import Shape

Values = Sequence[Value | None]
"""Inputs or outputs of a node; None for an absent one."""
MOST = 1 << 26
"""The maximum bytes of a constant that is read, if a rule sets no bound."""
FEW = 64
"""The maximum number of integers of a constant that are read as a list."""


class Rewriter(ABC):
    """A graph that rules rewrite: the parts of a plan, or a graph of a file.

    Args:
        graph: the graph.

    Attributes:
        graph: the graph.
        refused: the nodes of constants that `constant_nodes` leaves out.
        is_valid: whether a rule may remove nodes that would fail; otherwise they must stay, and fail when they run.
        keeps_views: whether a constant may be a view of another one, and then needs no memory.
        kept: operators whose nodes are not removed when nothing uses them any more.
    """

    is_valid: ClassVar[bool]
    keeps_views: ClassVar[bool]
    kept: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.refused: set[Node] = set()

    # --- nodes

    def named(self, *names: str) -> list[Node]:
        """The nodes of these operators of ONNX's domain, in their present meaning."""
        return [node for node in self.graph.named(*names) if self.operator(node)]

    def constant_nodes(self) -> Iterator[Node]:
        """The nodes whose inputs are all constants or absent, in order; those too that become such while they are walked."""
        for node in self.graph:
            stays = node in self.refused or node.op_type in self.kept
            if not stays and all(v is None or self.is_constant(v) for v in node.inputs):
                yield node

    @abstractmethod
    def operator(self, node: Node | None) -> str:
        """The operator of ONNX's domain that a node calls in its present meaning; "" for any other node, and for None.

        Operators whose old versions mean something else, such as Add with an axis, have no name in those versions.
        """

    def version(self, node: Node) -> int:
        """The schema version that a node calls; 0 if it is not an operator of ONNX or another known domain."""
        return node.version or 0

    def attribute(self, node: Node, name: str, default: Any = None) -> Any:
        """An attribute: a number, a list of numbers, a str or a tensor; `default` if the node and its schema have none."""
        return node.get(name, default)

    def runnable(self, node: Node) -> Node | None:
        """A node as the definition of its operator takes it; None if it cannot be computed alone."""
        return None if node.graphs else node

    # --- values

    def made_by(self, value: Value | None, *names: str) -> Node | None:
        """The node that returns a value, if it calls one of these operators and the value is its first output."""
        node = None if value is None else value.producer
        return node if node is not None and self.operator(node) in names and node.outputs[0] is value else None

    def inside(self, values: Iterable[Value], pattern: Iterable[Node]) -> bool:
        """Whether nodes of a pattern are the only ones that use these values."""
        nodes = set(pattern)
        return not any(v.pinned or any(user not in nodes for user, _ in v.uses) for v in values)

    @abstractmethod
    def dtype(self, value: Value | None) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""

    @abstractmethod
    def shape(self, value: Value | None) -> Shape | None:
        """The shape of a value; None if its rank is not known.  Sizes of one name are equal."""

    def rank(self, value: Value | None) -> int | None:
        """The number of axes of a value; None if it is not known."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    @abstractmethod
    def known_sizes(self) -> Iterable[tuple[Value, np.ndarray]]:
        """The values of nodes that are sizes and known as numbers, with their contents."""

    # --- constants

    @abstractmethod
    def constant(self, value: Value | None, most: int = MOST) -> np.ndarray | None:
        """A constant tensor; None for any other value, and for one of more than `most` bytes that would have to be read."""

    def is_constant(self, value: Value | None) -> bool:
        """Whether a value is constant."""
        return value is not None and value.constant is not None

    @abstractmethod
    def constant_bytes(self, value: Value | None) -> int:
        """The size of a constant, without reading it; 0 for any other value."""

    def trains(self, value: Value | None) -> bool:
        """Whether a value is a constant that training may change: its numbers must not become attributes, or be left out."""
        return False

    def ints(self, value: Value | None) -> tuple[int, ...] | None:
        """A constant of few integers; None for any other value."""
        array = self.constant(value, 8 * FEW)
        return None if array is None or array.dtype.kind not in "iu" or array.size > FEW else tuple(array.reshape(-1).tolist())

    def listed(self, node: Node, name: str, index: int) -> tuple[bool, tuple[int, ...] | None]:
        """A list of integers, an attribute in some versions and an input in others: (whether it is given, its value).

        (True, None): an input that is not constant.
        """
        value = self.attribute(node, name)
        if value is not None:
            return True, tuple(int(v) for v in value)
        source = node.input(index)
        return source is not None, self.ints(source)

    def number(self, node: Node, value: Value | None) -> float | None:
        """A constant float32 of one element in an elementwise node of two inputs, which has the shape of the other input."""
        array = self.constant(value, FEW)
        if array is None or array.size != 1 or array.dtype != np.float32:
            return None
        if array.ndim:
            rank = self.rank(node.inputs[0] if node.inputs[1] is value else node.inputs[1])
            if rank is None or rank < array.ndim:
                return None
        return float(array.reshape(-1)[0])

    # --- changes

    def offers(self, op_type: str) -> bool:
        """Whether `put` can write nodes of an operator of ONNX's domain in the form of its newest version."""
        return True

    @abstractmethod
    def call(self, op_type: str, inputs: Values, origins: Sequence[Node], outputs: Values = (), **attributes: Any) -> Node:
        """A node in the form of the operator's newest version, for `put`; it returns a new value if `outputs` is not given.

        Args:
            op_type: the operator, of ONNX's domain.
            inputs: the values that it reads.
            origins: the nodes that it replaces, for names and reports.
            outputs: the values that it returns.
            **attributes: those that differ from the defaults.
        """

    @abstractmethod
    def again(self, node: Node, inputs: Values, outputs: Values, origins: Sequence[Node], **changes: Any) -> Node:
        """A node of the same operator on other inputs, for `put`.

        Args:
            node: the node, whose attributes the new one has.
            inputs: the values that it reads.
            outputs: the values that it returns; a new one if there are none.
            origins: the nodes that it replaces.
            **changes: attributes that differ; None for those that it does not have.
        """

    @abstractmethod
    def add_constant(self, array: np.ndarray, *sources: Value | None, suffix: str = "") -> Value:
        """A new constant, which was computed from others; it is trainable if one of those is.

        Args:
            array: the contents.
            *sources: the constants; the name is that of the first.
            suffix: of the name.
        """

    @abstractmethod
    def scaled(self, weight: Value, factors: np.ndarray, *sources: Value | None) -> Value | None:
        """A new constant: a weight multiplied by factors, which were computed from other constants; None if it is not finite.

        Raises:
            ValueError: the shapes do not broadcast.
        """

    def put(self, root: Node, *nodes: Node, also: Iterable[Node] = ()) -> bool:
        """Replace a node, and `also` later ones, by others in its place, which return their outputs.

        Nodes that nothing uses any more are removed.  False, without a change, if the graph cannot hold the new nodes.
        """
        if not all(map(self._fits, nodes)):
            return False
        for node in nodes:
            self.insert(node, root)
        for gone in (root, *also):
            if gone in self.graph:
                self._remove(gone)
        return True

    def _fits(self, node: Node) -> bool:
        """Whether the graph can hold a new node, which may be written in another form for it."""
        return True

    def insert(self, node: Node, before: Node) -> None:
        """Add a node before another one."""
        self.graph.insert(node, before)

    def _remove(self, node: Node) -> None:
        """Remove a node, and those before it that nothing uses any more."""
        self.graph.remove(node)
        self.graph.drop_unused(node.reads, self.kept)

    @abstractmethod
    def fold(self, node: Node, results: Mapping[Value, np.ndarray]) -> bool:
        """Replace a node by the constants that it returns; False, without a change, if the graph must keep it."""

    @abstractmethod
    def alias(self, old: Value | None, new: Value | None) -> bool:
        """Let every reader of a value read another, equal one; False if nothing changes.

        An output that must keep its name may be returned by an Identity instead.
        """
