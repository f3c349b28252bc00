"""Where the values of a run are on a device: settings and shapes stay on the host.

A value that an operator reads on the host (`Host[...]` inputs: shapes, axes, ratios) would otherwise be copied to the device and
back, and the host would wait for all work before it.  Therefore

* small initializers and constants, and those that are read on the host, are in both places;
* inputs of a run that are read on the host stay there;
* Shape, Size and arithmetic on small values of the host are computed on the host.

In a frame, a NumPy array of a dtype that the device has is a value on the host.  `Placed` copies it to the device, once in a run,
if an operator computes with it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..devices import namespaces
from ..devices.device import Device, is_host_value
from ..ir.declaration import Declaration, has_trait
from ..ir.graph import Graph, Node
from ..ir.run_order import run_order
from ..ir.versioned import VersionedOperator, reads_on_host, runs_on_host

SMALL = 64
"""A value of at most this many elements may be a shape, axes or ratios: a tensor has at most 64 dimensions."""

_COPIES = 256
"""The number of copies that a run keeps."""

_FROM_SHAPES = frozenset({"Shape", "Size"})
"""Operators that read the shapes of their inputs only."""


def _product(values: np.ndarray) -> float:
    product: float = math.prod(values.reshape(-1).tolist())  # an int of any size
    return product


def _steps(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> float:
    """The number of elements of a Range."""
    if not start.size == limit.size == delta.size == 1 or not delta.any():
        return 0  # Range refuses them
    return float((limit.item() - start.item()) / delta.item())


_GROWING: dict[str, Callable[..., float]] = {
    "ConstantOfShape": _product,
    "Expand": lambda x, shape: x.size * _product(shape),
    "Range": _steps,
    "Tile": lambda x, repeats, axis=None: x.size * _product(repeats),  # version 1 has an axis
}
"""Operators whose results may be large, with a bound of their size."""


@cache
def _is_arithmetic(name: str) -> bool:
    return name in _GROWING or any(has_trait("", name, t) for t in ("unary", "broadcasting", "reduction", "on_sizes"))


class Placement:
    """The places of an executor's initializers and constants.

    Args:
        device: a device other than the host.
        graph: the executor's graph.
    """

    def __init__(self, device: Device, graph: Graph) -> None:
        self.device = device
        self._forms: dict[int, tuple[Any, np.ndarray]] = {}  # ids of both arrays -> that of the device, and that of the host
        self._constants: dict[int, list[Any]] = {}  # id of a Constant node -> its outputs
        self._reads: dict[int, frozenset[int] | None] = {}  # id of a node -> `_host_inputs`
        self._read: dict[int, frozenset[int]] = {}  # id of a graph -> its slots that are read on the host
        self._find(graph)

    def _find(self, graph: Graph) -> frozenset[int]:
        """The slots of a graph that some operator reads on the host, those of its subgraphs included."""
        known = self._read.get(id(graph))
        if known is not None:
            return known
        found: set[int] = set()
        for node in run_order(graph).nodes:
            inputs = node.input_slots
            if node.operator is not None:
                found.update(s for i, s in enumerate(inputs) if s >= 0 and reads_on_host(node.operator.declaration, i))
            for inner in node.graphs:
                here = self._find(inner)
                found.update(node.captures[v].slot for v in inner.captured if v.slot in here)
                if inner is node.function:
                    found.update(s for s, v in zip(inputs, inner.inputs, strict=False) if s >= 0 and v.slot in here)
        self._read[id(graph)] = frozenset(found)
        return self._read[id(graph)]

    def state(self, graph: Graph, slot: int, value: np.ndarray) -> Any:
        """Put an initializer on the device; remember its values if they may be read on the host."""
        return self._both(value, read=slot in self._find(graph))

    def _both(self, value: Any, *, read: bool) -> Any:
        placed = self.device.put(value)
        if self.device.xp.isarray(placed) and (read or value.size <= SMALL):
            self._forms[id(placed)] = self._forms[id(value)] = placed, value
        return placed

    def is_known(self, value: Any) -> bool:
        """Whether the values of an array are known on the host."""
        return id(value) in self._forms

    def on_host(self, value: Any) -> Any:
        """The values of an array if they are known on the host; otherwise the value itself."""
        form = self._forms.get(id(value))
        return value if form is None else form[1]

    def on_device(self, value: np.ndarray) -> Any:
        """The copy on the device of the values of an initializer or a constant; None for other arrays."""
        form = self._forms.get(id(value))
        return None if form is None else form[0]

    def feed(self, graph: Graph, slot: int, value: Any) -> Any:
        """Put an input of a run on the device, unless an operator reads it on the host."""
        stays = isinstance(value, np.ndarray) and slot in self._read.get(id(graph), ())
        return value if stays else self.device.put(value)

    def constant(self, node: Node, make: Callable[[], list[Any]]) -> list[Any]:
        """The outputs of a Constant node, which are computed and copied to the device once."""
        found = self._constants.get(id(node))
        if found is None:
            found = self._constants[id(node)] = [self._both(v, read=True) for v in make()]  # the node keeps the values anyway
            self.device.synchronize()  # another run may be on another stream
        return found

    def arguments(self, node: Node, inputs: list[Any]) -> list[Any] | None:
        """The inputs of a node as its operator takes them on the device: the usual case, without a look at values.

        None if the node may compute on the host, or a value must be copied.
        """
        if id(node) not in self._reads:
            self._reads[id(node)] = _host_inputs(node)
        on_host = self._reads[id(node)]
        if on_host is None:
            return None
        array, forms, known = self.device.xp.ndarray, self._forms, True
        args = list(inputs) if on_host else inputs
        for i, v in enumerate(inputs):
            if v is None:
                continue
            if i in on_host:
                if v.__class__ is array:
                    if id(v) not in forms:
                        return None
                    v = forms[id(v)][1]
                if v.__class__ is not np.ndarray or v.dtype.kind not in "biuf":
                    return None
                args[i] = v
            elif v.__class__ is not array:
                return None
            else:
                known = known and id(v) in forms
        return None if known else args

    def owned(self) -> set[int]:
        """The ids of constants, and of the values on the host."""
        constants = list(self._constants.values())  # other runs add to them
        return {*self._forms, *(id(v) for values in constants for v in values)}


class Placed:
    """The places of the values of one run."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.device = placement.device
        self._copies: dict[int, tuple[np.ndarray, Any]] = {}  # id of an array on the host -> the array, and its copy

    def on_device(self, value: Any) -> Any:
        """The value on the device; strings and dtypes that it lacks stay on the host."""
        if not isinstance(value, np.ndarray) or is_host_value(value):
            return value
        known = self.placement.on_device(value)
        if known is not None:
            return known
        found = self._copies.get(id(value))
        if found is None:
            if len(self._copies) == _COPIES:
                self._copies.clear()
            found = self._copies[id(value)] = value, self.device.put(value)
        return found[1]

    def compute(self, node: Node, operator: VersionedOperator, inputs: list[Any], attributes: dict[str, Any]) -> list[Any]:
        """Compute a node where its values are."""
        args = self.arguments(node, operator, inputs, attributes)
        if args is None:
            return self.compute_on_host(node, operator, inputs, attributes)
        return operator.compute(self.device.xp, args, attributes, len(node.outputs))

    def arguments(
        self, node: Node, operator: VersionedOperator, inputs: list[Any], attributes: dict[str, Any]
    ) -> Sequence[Any] | None:
        """The inputs of a node as its operator takes them on the device; None if it computes on the host."""
        ready = self.placement.arguments(node, inputs)
        if ready is not None:
            return ready
        declaration = operator.declaration
        if declaration.name == "Constant" and not declaration.domain:
            return None
        known = [self.placement.on_host(v) for v in inputs]
        if runs_on_host(declaration, attributes, inputs) or computes_on_host(declaration, known):
            return None
        return [
            h if reads_on_host(declaration, i) else self.on_device(v) for i, (v, h) in enumerate(zip(inputs, known, strict=True))
        ]

    def compute_on_host(
        self, node: Node, operator: VersionedOperator, inputs: list[Any], attributes: dict[str, Any]
    ) -> list[Any]:
        """Compute a node for which `arguments` is None."""
        declaration, wanted, numpy = operator.declaration, len(node.outputs), namespaces.numpy
        if declaration.name == "Constant" and not declaration.domain:
            return self.placement.constant(node, lambda: operator.compute(numpy, inputs, attributes, wanted))
        values = [self.placement.on_host(v) for v in inputs]
        if runs_on_host(declaration, attributes, inputs):
            values = [self.device.get(v) for v in values]
        made = operator.compute(numpy, values, attributes, wanted)
        return [v if _is_plain(v) and v.size <= SMALL else self.device.put(v) for v in made]

    def repeats(self, node: Node, inputs: Sequence[Any], *, fixed: bool) -> bool:
        """Whether a node that computes on the host has the same results for inputs of the same types.

        Args:
            node: the node.
            inputs: its inputs.
            fixed: whether their values are the same too.
        """
        operator = node.operator
        assert operator is not None
        if operator.declaration.name == "Constant" and not operator.declaration.domain:
            return True
        if operator.declaration.domain or runs_on_host(operator.declaration, node.attributes, inputs):
            return False
        return fixed or operator.declaration.name in _FROM_SHAPES


def _host_inputs(node: Node) -> frozenset[int] | None:
    """The inputs that a node reads on the host, if it computes on the device whenever another one is there; None otherwise."""
    operator = node.operator
    if operator is None or node.graphs:
        return None
    declaration = operator.declaration
    if not declaration.domain and declaration.name in (*_FROM_SHAPES, "CastLike", "Constant"):
        return None
    if "run" in declaration.services.values() or runs_on_host(declaration, node.attributes, ()):
        return None
    return frozenset(i for i in range(len(node.inputs)) if reads_on_host(declaration, i))


def _is_plain(value: Any) -> bool:
    """Whether a value is an array on the host of a dtype that the device has."""
    return isinstance(value, np.ndarray) and not is_host_value(value)


def computes_on_host(declaration: Declaration, known: Sequence[Any]) -> bool:
    """Whether a call computes with shapes, or with small values that are all on the host."""
    if declaration.domain:
        return False
    if declaration.name in _FROM_SHAPES:
        return True
    if not _is_arithmetic(declaration.name) or not known:
        return False
    if declaration.name == "CastLike":
        known = known[:1]  # of the other input only the dtype is read
    if not all(v is None or (_is_plain(v) and v.size <= SMALL) for v in known):
        return False
    bound = _GROWING.get(declaration.name)
    return bound is None or bound(*known) <= SMALL
