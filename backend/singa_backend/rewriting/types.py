"""The shapes of the values of a graph, and the values that are sizes: one inference for plans and files.

The rules are declared with the operators (see ir/shapes.py); for an operator without a rule, its traits determine what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ..ir.declaration import newest_declaration
from ..ir.graph import Node, Value
from ..ir.shapes import FAILURES, FRESH, MOST, Known, Shape
from .rewriter import Rewriter


class Types:
    """Shapes and sizes, as far as they are known before the graph runs; sizes of one name are equal.

    Args:
        edit: the graph.
    """

    def __init__(self, edit: Rewriter) -> None:
        self.attribute, self.version = edit.attribute, edit.version
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

    def dtype(self, value: Value | None) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        return self._edit.dtype(value)

    def constant(self, value: Value | None) -> np.ndarray | None:
        """A value that is a constant tensor; None for any other."""
        return self._edit.constant(value)

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._fresh += 1
        return f"{FRESH}{self._fresh}"

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
        with suppress(*FAILURES):
            rule = declaration.shapes_inference
            found = None if rule is None else rule(self, call)
            for value, shape in zip(call.outputs, found if isinstance(found, list) else [found], strict=False):
                if shape is not None and value is not None:
                    self._shapes.setdefault(value, shape)
            first = call.outputs[0]
            if declaration.sizes_rule is not None and first is not None:
                sizes = declaration.sizes_rule(self, call)
                if sizes is not None and not (isinstance(sizes, tuple) and len(sizes) > MOST):
                    self._sizes[first] = sizes
