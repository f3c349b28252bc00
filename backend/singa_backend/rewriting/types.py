"""The shapes of the values of a graph, and the values that are sizes: one inference for regions of plans and graphs of models.

The rules are declared with the operators (see ir/shapes.py); for an operator without a rule, its traits determine what is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic

import numpy as np

from ..ir.declaration import newest_declaration
from ..ir.shapes import FAILURES, FRESH, MOST, Known, Shape
from .view import C, GraphView, V


class Types(Generic[V, C]):
    """Shapes and sizes, as far as they are known before the graph runs; sizes of one name are equal.

    Args:
        view: the graph.
    """

    def __init__(self, view: GraphView[V, C]) -> None:
        self.attribute, self.input, self.version = view.attribute, view.input, view.version
        self._view = view
        self._given: Mapping[V, Shape] = {}
        self._shapes: dict[V, Shape] = {}
        self._sizes: dict[V, Known] = {}
        self._fresh = 0

    def shape(self, value: V) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        return self._shapes.get(value)

    def sizes(self, value: V) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""
        return self._sizes.get(value)

    def computed_sizes(self) -> Mapping[V, Known]:
        """The values of calls that are sizes."""
        return self._sizes

    def dtype(self, value: V) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        return self._view.dtype(value)

    def constant(self, value: V) -> np.ndarray | None:
        """A value that is a constant tensor; None for any other."""
        return self._view.constant(value)

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._fresh += 1
        return f"{FRESH}{self._fresh}"

    def infer_all(self, calls: Sequence[C]) -> None:
        """Infer the shapes of all values again, after some became known."""
        self._shapes, self._sizes = dict(self._given), {}
        for call in calls:
            self.infer(call)

    def infer(self, call: C) -> None:
        """Add what is known of the outputs of a call; the values before it must be known."""
        domain, name = self._view.name(call)
        if domain and not self._view.version(call):
            return  # a function
        declaration = newest_declaration(domain, name if domain else self._view.operator(call))
        if declaration is None:
            return
        with suppress(*FAILURES):
            rule = declaration.shapes_inference
            found = None if rule is None else rule(self, call)
            for value, shape in zip(call.outputs, found if isinstance(found, list) else [found], strict=False):
                if shape is not None and value != self._view.absent:
                    self._shapes.setdefault(value, shape)
            if declaration.sizes_rule is not None and call.outputs[0] != self._view.absent:
                sizes = declaration.sizes_rule(self, call)
                if sizes is not None and not (isinstance(sizes, tuple) and len(sizes) > MOST):
                    self._sizes[call.outputs[0]] = sizes
