"""What is known of the values of a plan before it runs: dtypes, and the shapes of `Types`.

A dtype is that of a class of values: the operators' schemas bind the inputs and outputs of each node to one element type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...ir import graph as ir
from ...ir.declaration import has_trait, newest_declaration
from ...ir.shapes import FAILURES, MOST, Dim, Known, Shape, is_known
from ...ir.signature import parameter, signature_of
from ...kernels.values import LazyConstant
from ...proto.schemas import schemas
from ...rewriting.rewriter import Rewriter
from ...rewriting.types import Types
from ..flat import has_kernel_only, operator

Type = tuple[np.dtype[Any] | None, Sequence[int | str | None] | None]
"""A dtype and a shape, each None if it is not known; so is each size that is not known."""

TENSOR = (np.ndarray, LazyConstant)
"""The types of constant tensors."""


def is_pointwise(node: ir.Node | None) -> bool:
    """Whether a node computes one value for each place of its inputs, broadcast."""
    name = operator(node)
    return has_trait("", name, "unary") or has_trait("", name, "broadcasting")


class Facts(Types):
    """Dtypes and shapes of the values of a plan.

    Args:
        edit: the graph.
        types: the dtypes and shapes of values that the caller knows, such as those of the inputs.
    """

    def __init__(self, edit: Rewriter, types: Mapping[ir.Value, Type]) -> None:
        super().__init__(edit)
        self._parent: dict[ir.Value, ir.Value] = {}
        self._dtypes = {value: np.dtype(dtype) for value, (dtype, _) in types.items() if dtype is not None}
        self._given = {value: self._named(shape) for value, (_, shape) in types.items() if shape is not None}
        self._shapes.update(self._given)

    def _named(self, shape: Sequence[int | str | None]) -> Shape:
        return tuple(self.fresh() if d is None else f"={d}" if isinstance(d, str) else int(d) for d in shape)

    # --- asking ---

    def dtype(self, value: ir.Value | None) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        if value is None:
            return None
        array = value.constant
        return array.dtype if isinstance(array, TENSOR) else self._dtypes.get(self._root(value))

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        if value is None:
            return None
        array = value.constant
        return array.shape if isinstance(array, TENSOR) else self._shapes.get(value)

    def rank_at_least(self, value: ir.Value | None, rank: int) -> bool:
        """Whether a value is known to have at least so many axes."""
        shape = self.shape(value)
        return rank <= 0 if shape is None else len(shape) >= rank

    def last(self, value: ir.Value | None) -> Dim | None:
        """The size of the last axis; None if it is not known."""
        shape = self.shape(value)
        return shape[-1] if shape else None

    def sizes(self, value: ir.Value | None) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""
        if value is None:
            return None
        array = value.constant
        if isinstance(array, np.ndarray):
            if array.dtype not in (np.int64, np.int32) or array.ndim > 1 or array.size > MOST:
                return None
            found = array.tolist()
            return found if isinstance(found, int) else tuple(found)
        return self._sizes.get(value)

    def known_sizes(self) -> list[tuple[ir.Value, np.ndarray]]:
        """The computed sizes that are known as numbers: the values and their contents."""
        found = []
        for value, sizes in self._sizes.items():
            if value.constant is None and is_known(sizes) and (dtype := self.dtype(value)) is not None:
                found.append((value, np.array(sizes, dtype)))
        return found

    # --- inference ---

    def join(self, a: ir.Value, b: ir.Value) -> None:
        """Note that two values are equal."""
        a, b = self._root(a), self._root(b)
        if a is not b:
            self._parent[b] = a
            if b in self._dtypes:
                self._dtypes.setdefault(a, self._dtypes[b])

    def _root(self, value: ir.Value) -> ir.Value:
        parent = self._parent
        while (up := parent.get(value, value)) is not value:
            parent[value] = value = parent.get(up, up)
        return value

    def infer(self, call: ir.Node) -> None:
        """Add what is known of the outputs of a node; the values before it must be known."""
        self._infer_dtypes(call)
        super().infer(call)

    def _infer_dtypes(self, node: ir.Node) -> None:
        if node.operator is None or has_kernel_only(node):  # what only plans have is in no schema
            return
        signature = signature_of(schemas[node.domain, node.op_type][node.operator.version])
        seen: dict[str, ir.Value] = {}
        for values, parameters in ((node.inputs, signature.inputs), (node.outputs, signature.outputs)):
            for i, value in enumerate(values):
                formal = parameters[i] if i < len(parameters) else parameter(parameters, i)
                if value is None or formal is None or formal.bound is None:
                    continue
                kind = formal.bound
                if not isinstance(kind, str):
                    self._dtypes.setdefault(self._root(value), kind)
                elif kind in seen:
                    self.join(seen[kind], value)
                else:
                    seen[kind] = value
                if isinstance(constant := value.constant, TENSOR):
                    self._dtypes.setdefault(self._root(value), constant.dtype)
        declaration, first = newest_declaration(node.domain, node.op_type), node.outputs[0]
        if declaration is not None and declaration.dtypes_rule is not None and first is not None:
            with suppress(*FAILURES):
                dtype = declaration.dtypes_rule(self, node)
                if dtype is not None:
                    self._dtypes.setdefault(self._root(first), dtype)
