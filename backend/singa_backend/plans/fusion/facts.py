"""What is known of the values of a region before it runs: dtypes, and the shapes of `Types`.

A dtype is that of a class of values: the operators' schemas bind the inputs and outputs of each call to one element type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...ir.declaration import has_trait, newest_declaration
from ...ir.graph import ABSENT
from ...ir.shapes import FAILURES, MOST, Dim, Known, Shape, is_known
from ...ir.signature import parameter, signature_of
from ...kernels.values import LazyConstant
from ...proto.schemas import schemas
from ...rewriting.types import Types
from ...rewriting.view import GraphView
from ..region import Region, RegionCall

Type = tuple[np.dtype[Any] | None, Sequence[int | str | None] | None]
"""A dtype and a shape, each None if it is not known; so is each size that is not known."""

TENSOR = (np.ndarray, LazyConstant)
"""The types of constant tensors."""


def operator(call: RegionCall | None) -> str:
    """The operator that a call of ONNX's domain has in its present meaning; "" for any other."""
    return "" if call is None else call.operator


def is_pointwise(call: RegionCall | None) -> bool:
    """Whether a call computes one value for each place of its inputs, broadcast."""
    name = operator(call)
    return has_trait("", name, "unary") or has_trait("", name, "broadcasting")


class Facts(Types[int, RegionCall]):
    """Dtypes and shapes of the values of a region.

    Args:
        view: the region's view.
        region: the region.
        types: the dtypes and shapes of values that the caller knows, such as those of the inputs.
    """

    def __init__(self, view: GraphView[int, RegionCall], region: Region, types: Mapping[int, Type]) -> None:
        super().__init__(view)
        self.region = region
        self._parent: dict[int, int] = {}
        self._dtypes = {value: np.dtype(dtype) for value, (dtype, _) in types.items() if dtype is not None}
        self._given = {value: self._named(shape) for value, (_, shape) in types.items() if shape is not None}
        self._shapes.update(self._given)

    def _named(self, shape: Sequence[int | str | None]) -> Shape:
        return tuple(self.fresh() if d is None else f"={d}" if isinstance(d, str) else int(d) for d in shape)

    # --- asking ---

    def dtype(self, value: int) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        array = self.region.constants.get(value)
        return array.dtype if isinstance(array, TENSOR) else self._dtypes.get(self._root(value))

    def shape(self, value: int) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        array = self.region.constants.get(value)
        return array.shape if isinstance(array, TENSOR) else self._shapes.get(value)

    def rank(self, value: int) -> int | None:
        """The number of axes of a value; None if it is not known."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def rank_at_least(self, value: int, rank: int) -> bool:
        """Whether a value is known to have at least so many axes."""
        shape = self.shape(value)
        return rank <= 0 if shape is None else len(shape) >= rank

    def last(self, value: int) -> Dim | None:
        """The size of the last axis; None if it is not known."""
        shape = self.shape(value)
        return shape[-1] if shape else None

    def sizes(self, value: int) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""
        array = self.region.constants.get(value)
        if isinstance(array, np.ndarray):
            if array.dtype not in (np.int64, np.int32) or array.ndim > 1 or array.size > MOST:
                return None
            found = array.tolist()
            return found if isinstance(found, int) else tuple(found)
        return self._sizes.get(value)

    def known_sizes(self) -> list[tuple[int, np.ndarray]]:
        """The computed sizes that are known as numbers: the values and their contents."""
        found = []
        for value, sizes in self._sizes.items():
            dtype = self.dtype(value)
            if value not in self.region.constants and dtype is not None and is_known(sizes):
                found.append((value, np.array(sizes, dtype)))
        return found

    # --- inference ---

    def join(self, a: int, b: int) -> None:
        """Note that two values are equal."""
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a
            if b in self._dtypes:
                self._dtypes.setdefault(a, self._dtypes[b])

    def _root(self, value: int) -> int:
        parent = self._parent
        while (up := parent.get(value, value)) != value:
            parent[value] = value = parent.get(up, up)
        return value

    def infer(self, call: RegionCall) -> None:
        """Add what is known of the outputs of a call; the values before it must be known."""
        self._infer_dtypes(call)
        super().infer(call)

    def _infer_dtypes(self, call: RegionCall) -> None:
        if call.node.operator is None or call.has_kernel_only:  # what only plans have is in no schema
            return
        signature = signature_of(schemas[call.node.domain, call.node.op_type][call.node.operator.version])
        seen: dict[str, int] = {}
        for values, parameters in ((call.inputs, signature.inputs), (call.outputs, signature.outputs)):
            for i, value in enumerate(values):
                formal = parameters[i] if i < len(parameters) else parameter(parameters, i)
                if value == ABSENT or formal is None or formal.bound is None:
                    continue
                kind = formal.bound
                if not isinstance(kind, str):
                    self._dtypes.setdefault(self._root(value), kind)
                elif kind in seen:
                    self.join(seen[kind], value)
                else:
                    seen[kind] = value
                if isinstance(constant := self.region.constants.get(value), TENSOR):
                    self._dtypes.setdefault(self._root(value), constant.dtype)
        declaration = newest_declaration(call.node.domain, call.node.op_type)
        if declaration is not None and declaration.dtypes_rule is not None:
            with suppress(*FAILURES):
                dtype = declaration.dtypes_rule(self, call)
                if dtype is not None:
                    self._dtypes.setdefault(self._root(call.outputs[0]), dtype)
