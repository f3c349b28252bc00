"""The graph of a plan as rules rewrite it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...ir.shapes import Shape
from ...kernels.values import LazyConstant
from ...rewriting.rewriter import MOST, Rewriter, Values
from ..flat import ORIGINS, call_of, operator
from .facts import Facts, Type
from .lazy import multiplied


class PlanRewriter(Rewriter):
    """The graph of a plan, in which a node may be of any version and every constant is known.

    Args:
        graph: the graph.
        types: the dtypes and shapes of values that are known.

    Attributes:
        facts: the dtypes and shapes of values, as far as they are known.
    """

    is_valid = False
    keeps_views = True

    def __init__(self, graph: ir.Graph, types: Mapping[ir.Value, Type] | None = None) -> None:
        super().__init__(graph)
        self.facts = Facts(self, types or {})
        for node in graph.nodes:
            self.facts.infer(node)

    # --- nodes

    def operator(self, node: ir.Node | None) -> str:
        """The operator of ONNX's domain that a node calls in its present meaning; "" for any other."""
        return operator(node)

    def with_trait(self, trait: str) -> list[ir.Node]:
        """The nodes that call operators of ONNX's domain with a trait."""
        return self.named(*(name for name in self.graph.op_types if has_trait("", name, trait)))

    # --- values

    def dtype(self, value: ir.Value | None) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        return self.facts.dtype(value)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        return self.facts.shape(value)

    def known_sizes(self) -> list[tuple[ir.Value, np.ndarray]]:
        """The computed sizes that are known as numbers, with their contents."""
        return self.facts.known_sizes()

    def reader(self, value: ir.Value | None) -> ir.Node | None:
        """The only node that reads a value, which is not an output; None otherwise."""
        users = {} if value is None or value.is_output else value.users
        return next(iter(users)) if len(users) == 1 else None

    # --- constants

    def constant(self, value: ir.Value | None, most: int = MOST) -> np.ndarray | None:
        """A constant tensor of any size; None for any other value."""
        array = self.weight(value)
        return array.array() if isinstance(array, LazyConstant) else array

    def constant_bytes(self, value: ir.Value | None) -> int:
        """The size of a constant; 0 for any other value."""
        array = self.weight(value)
        return 0 if array is None else array.nbytes

    def weight(self, value: ir.Value | None) -> np.ndarray | LazyConstant | None:
        """A constant tensor, which may have to be computed; None for any other value."""
        array = None if value is None else value.constant
        return array if isinstance(array, (np.ndarray, LazyConstant)) else None

    def scalar(self, value: ir.Value | None) -> float | None:
        """A constant float32 of one element that never adds an axis to what it is combined with; None for any other value."""
        array = self.constant(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype == np.float32 else None

    # --- changes

    def call(self, op_type: str, inputs: Values, origins: Sequence[ir.Node], outputs: Values = (), **attributes: Any) -> ir.Node:
        """A node of an operator's newest version, which returns a new value if `outputs` is not given."""
        return call_of(op_type, inputs, outputs, origins, **attributes)

    def again(self, node: ir.Node, inputs: Values, outputs: Values, origins: Sequence[ir.Node], **changes: Any) -> ir.Node:
        """A node of the same operator on other inputs: of the same version, or of the newest one if attributes change."""
        if not changes:
            nodes = tuple(n for one in origins for n in one.origins)[-ORIGINS:]
            return node.copy(inputs, outputs or [ir.Value()], nodes)
        given = {k: node.attributes[k] for k in node.given if k not in changes}
        return self.call(node.op_type, inputs, origins, outputs, **given, **{k: v for k, v in changes.items() if v is not None})

    def add_constant(self, array: np.ndarray | LazyConstant, *sources: ir.Value | None, suffix: str = "") -> ir.Value:
        """A new constant with the name of the first of those that it was computed from."""
        name = sources[0].name if sources and sources[0] is not None else ""
        return ir.Value(name + suffix if name else "", constant=array)

    def scaled(self, weight: ir.Value, factors: np.ndarray, *sources: ir.Value | None) -> ir.Value | None:
        """A new constant: a weight multiplied by factors; None if it is not finite."""
        array = self.weight(weight)
        made = None if array is None else multiplied(array, factors)
        return None if made is None else self.add_constant(made, weight)

    def insert(self, node: ir.Node, before: ir.Node) -> None:
        """Add a node before another one, and note what is known of its outputs."""
        super().insert(node, before)
        self.facts.infer(node)

    def fold(self, node: ir.Node, results: Mapping[ir.Value, np.ndarray]) -> bool:
        """Replace a node by constants; False for strings, which plans do not keep."""
        if any(r.dtype == object for r in results.values()):
            return False
        for value, result in results.items():
            value.constant = result
        self._remove(node)
        return True

    def alias(self, old: ir.Value | None, new: ir.Value | None) -> bool:
        """Let every reader of a value read another one instead; False if no node returns the value any more."""
        node = None if old is None else old.producer
        if node is None or old is None or new is None:
            return False
        self.facts.join(old, new)
        old.replace_all_uses_with(new)
        self.graph.drop_unused([old])
        return True
