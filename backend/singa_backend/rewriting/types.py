"""The shapes of the values of a graph, and the values that are sizes: one inference for plans and files.

The rules are declared with the operators (see ir/shapes.py); for an operator without a rule, its traits determine what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from ..ir.declaration import newest_declaration
from ..ir.graph import Node, Value
from ..ir.shapes import MOST, Known, Shape, broadcast_shapes, listed, valid_axes
from .rewriter import Rewriter

SAME = frozenset({"unary", "shape_of_first"})
"""Traits of operators whose result has the shape of the first input."""


class Types:
    """Shapes and sizes, as far as they are known before the graph runs; sizes of one name are equal.

    Args:
        edit: the graph.
    """

    def __init__(self, edit: Rewriter) -> None:
        self.attribute = edit.attribute
        self._edit = edit
        self._given: Mapping[Value, Shape] = {}
        self._shapes: dict[Value, Shape] = {}
        self._sizes: dict[Value, Known] = {}
        self._fresh = 0

    def input(self, call: Node, index: int) -> Value | None:
        """An input of a call; None for an absent one."""
        return call.input(index)

    def shape(self, value: Value | None) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        return None if value is None else self._shapes.get(value)

    def sizes(self, value: Value | None) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""
        return None if value is None else self._sizes.get(value)

    def computed_sizes(self) -> Mapping[Value, Known]:
        """The values of calls that are sizes."""
        return self._sizes

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._fresh += 1
        return f"?{self._fresh}"

    def infer_all(self, calls: Iterable[Node]) -> None:
        """Infer the shapes of all values again, after some became known."""
        self._shapes, self._sizes = dict(self._given), {}
        for call in calls:
            self.infer(call)

    def infer(self, call: Node) -> None:
        """Add what is known of the outputs of a call; the values before it must be known."""
        edit, domain = self._edit, call.domain
        if domain and not edit.version(call):
            return  # a function
        declaration = newest_declaration(domain, call.op_type if domain else edit.operator(call))
        if declaration is None:
            return
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):  # the call fails when it runs
            rule = declaration.shapes_rule
            found = rule(self, call) if rule is not None else self._by_traits(declaration.traits, call)
            for value, shape in zip(call.outputs, found if isinstance(found, list) else [found], strict=False):
                if shape is not None and value is not None:
                    self._shapes.setdefault(value, shape)
            first = call.outputs[0]
            if declaration.sizes_rule is not None and first is not None:
                sizes = declaration.sizes_rule(self, call)
                if sizes is not None and not (isinstance(sizes, tuple) and len(sizes) > MOST):
                    self._sizes[first] = sizes

    def _by_traits(self, traits: frozenset[str], call: Node) -> Shape | None:
        if traits & SAME:
            return self.shape(call.inputs[0])
        if "broadcasting" in traits:
            return broadcast_shapes(self, [self.shape(i) for i in call.inputs])
        if "reduction" in traits:
            return self._reduced(call)
        if "rank_of_first" in traits:
            shape = self.shape(call.inputs[0])
            return None if shape is None else tuple(self.fresh() for _ in shape)
        return None

    def _reduced(self, call: Node) -> Shape | None:
        shape, (given, axes) = self.shape(call.inputs[0]), listed(self, call, "axes", 1)
        if shape is None or (given and axes is None):
            return None
        if not axes and not self.attribute(call, "noop_with_empty_axes"):
            axes = tuple(range(len(shape)))
        gone = valid_axes(axes or (), len(shape))
        if gone is None:
            return None
        keep = self.attribute(call, "keepdims", 1)
        return tuple(1 if i in gone else d for i, d in enumerate(shape) if keep or i not in gone)
