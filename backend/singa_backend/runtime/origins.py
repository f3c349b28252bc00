"""Find where the first NaN or infinity of a run comes from: a node, an input, an initializer or an attribute.

A node is the origin if it makes a NaN or an infinity and all its inputs are finite.  Operators that compute each place of the
result from the same place of the inputs are judged place by place.  Attributes count as inputs, so that a Constant or a Pad with
-inf is not an origin; a mask of -inf and what it is added to are not either.  A node that makes a NaN of infinities (a Softmax of
a row of -inf) is the origin if there is no other and the outputs hold NaN: models remove such NaNs on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from .. import dtypes
from ..comparison import finite
from ..errors import OperatorError
from ..ir.declaration import has_trait, newest_declaration
from ..ir.graph import Node
from ..rendering import printable

PLACES = 4
"""Places of a result whose input values are listed."""

_FEW = 6
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators that only pass on what the nodes of their graphs make."""


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or infinity of a run comes from.

    Attributes:
        kind: "node" if a node made it; "input", "initializer", "attribute" or "value" if that held a NaN, and no node made one
            before.
        name: the name of the node, the input, the initializer or the attribute.
        operator: the operator type of the node, or of the node with the attribute; "" otherwise.
        value: the name of the value that holds it; an element of a sequence has its index.
        path: the nodes whose graphs contain the node, outermost first, with the iteration: "Loop 'l' (iteration 2)".
        nan: the number of NaNs in the value.
        inf: the number of infinite elements in the value.
        size: the number of elements of the value.
        causes: the input values at the first places, one text for each place: "Log of -1.5 at [0, 3]".
        where: the fields of an error: node, operator, opset, version, dtypes and shapes; empty if `kind` is not "node".
        of_infinity: whether the node made a NaN of inputs that hold infinity and no NaN.
    """

    kind: str
    name: str
    operator: str
    value: str
    path: tuple[str, ...]
    nan: int
    inf: int
    size: int
    causes: tuple[str, ...]
    where: Mapping[str, Any]
    of_infinity: bool = False

    def __str__(self) -> str:
        """Return the origin in one line."""
        what = " and ".join(["NaN"] * (self.nan > 0) + ["infinity"] * (self.inf > 0))
        count = ", ".join([f"{self.nan} NaN"] * (self.nan > 0) + [f"{self.inf} infinite"] * (self.inf > 0))
        of = f"{count} of {self.size} value{'s' * (self.size != 1)}"
        within = "".join(f" in {step}" for step in reversed(self.path))
        if self.kind == "node":
            head = f"{printable(self.operator)} {_quoted(self.name)}{within} makes {what} in {_quoted(self.value)}"
        else:
            owner = f" of {printable(self.operator)} {_quoted(self.value)}{within}" if self.kind == "attribute" else ""
            head = f"the {self.kind} {_quoted(self.name)}{owner} holds {what}"
        return f"{head}: {', '.join(self.causes)} ({of})"

    def to_dict(self) -> dict[str, Any]:
        """Return the origin as plain data, for ``--json``.

        Returns:
            A dict of the attributes without `where`, and the text under "message".
        """
        fields = ("kind", "name", "operator", "value", "nan", "inf", "size", "of_infinity")
        data = {name: getattr(self, name) for name in fields}
        return data | {"path": list(self.path), "causes": list(self.causes), "message": str(self)}


class NonFinite(OperatorError):
    """A run with `validate=True` found the origin of a NaN or an infinity (SX409).

    Attributes:
        origin: where it comes from.
        outputs: the outputs of the run, which was completed.
    """

    default_code = "SX409"
    origin: Origin
    outputs: Any

    @classmethod
    def of(cls, origin: Origin, outputs: Any) -> NonFinite:
        """Create the error.

        Args:
            origin: where the first NaN or infinity comes from.
            outputs: the outputs of the run.

        Returns:
            The error, located at the node.
        """
        counts = finite.counts(list(outputs))
        hint = "" if any(counts) else "all outputs are finite: the model removed it"
        error = cls(str(origin), hint=hint, **origin.where)
        error.origin, error.outputs = origin, outputs
        return error


class Watch:
    """An observer of one run, which keeps the first origin.

    Args:
        states: the name and the value of each initializer of the main graph, then of the inner graphs.
        feeds: the inputs of the run by name.
        get: copies a value from the device to the host.
    """

    def __init__(self, states: Sequence[tuple[str, Any]], feeds: Mapping[str, Any], get: Callable[[Any], Any]) -> None:
        self.origin: Origin | None = None
        self._of_infinity: Origin | None = None
        self._get = get
        self._held = [("input", name, value) for name, value in feeds.items()]
        self._held += [("initializer", name, value) for name, value in states if name not in feeds]

    def __call__(self, node: Node, inputs: Sequence[Any], outputs: Sequence[Any], path: Sequence[tuple[Node, int]]) -> None:
        """Look at one operator; the first origin is kept."""
        if self.origin is not None or (node.domain == "" and node.op_type in _CONTROL):
            return
        made = [
            (name, at, array, *found)
            for name, value in zip(node.output_names, outputs, strict=False)
            for at, array in finite.leaves(self._get(value))
            if any(finite.counts(array)) and (found := finite.masks(array))
        ]
        if not made:
            return
        read = [self._get(v) for v in inputs]
        attributes = {k: v for k, v in node.attributes.items() if k in node.given or not node.inputs}
        for name, at, array, nan, bad in made:
            fresh, of_infinity = _fresh(node, read, list(attributes.values()), array, nan, bad)
            if not fresh.any():
                continue
            if not of_infinity or self._of_infinity is None:
                causes = _causes(node, read, array, fresh)
                found_here = _node_origin(node, read, name + at, path, array, nan, bad, causes, of_infinity)
                self._of_infinity = self._of_infinity or found_here
            if not of_infinity:
                self.origin = found_here
                return
        if self._of_infinity is None and any(nan.any() for *_, nan, _ in made):
            self.origin = self._attribute(node, attributes, path) or self._source(node, inputs, read)

    def finish(self, outputs: Sequence[Any]) -> None:
        """Look at the outputs of the run, on the host: a NaN in them is made of infinities, or no operator passed it on."""
        if self.origin is None and any(map(finite.has_nan, outputs)):
            self.origin = self._of_infinity or next(self._holders(lambda _: True), None)

    def _attribute(self, node: Node, attributes: Mapping[str, Any], path: Sequence[tuple[Node, int]]) -> Origin | None:
        return next(
            (
                _holds("attribute", k, v, node.op_type, node.name, _steps(path))
                for k, v in attributes.items()
                if finite.has_nan(v)
            ),
            None,
        )

    def _source(self, node: Node, inputs: Sequence[Any], read: Sequence[Any]) -> Origin:
        """The input or initializer whose NaN the node read, directly or through nodes that only pass on values."""
        nans = [(name, v, h) for name, v, h in zip(node.input_names, inputs, read, strict=False) if finite.has_nan(h)]
        ids = {id(v) for _, v, _ in nans}
        found = next(self._holders(lambda v: id(v) in ids), None) or next(self._holders(lambda _: True), None)
        return found or _holds("value", nans[0][0], nans[0][2])

    def _holders(self, wanted: Callable[[Any], bool]) -> Iterator[Origin]:
        for kind, name, value in self._held:
            if wanted(value) and finite.has_nan(host := self._get(value)):
                yield _holds(kind, name, host)


def _fresh(
    node: Node, read: Sequence[Any], attributes: Sequence[Any], array: np.ndarray, nan: np.ndarray, bad: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Where the node itself made a NaN or an infinity, and whether it made NaN of infinities only."""
    nan_in, bad_in = np.zeros(array.shape, bool), np.zeros(array.shape, bool)
    pairs = _placewise(node, read, array)
    for _, a in finite.leaves(pairs or []):
        nan_here, bad_here = finite.masks(a)
        nan_in |= nan_here
        bad_in |= bad_here
    for value in attributes if pairs is not None else [*read, *attributes]:
        nans, infs = finite.counts(value)
        nan_in |= nans > 0
        bad_in |= nans + infs > 0
    fresh = bad & ~bad_in
    if fresh.any() and has_trait(node.domain, node.op_type, "masks"):
        fresh &= nan | (array.astype(np.float64) > 0)
    return (fresh, False) if fresh.any() else (nan & ~nan_in, True)


def _traits(node: Node) -> frozenset[str]:
    return node.operator.declaration.traits if node.operator else frozenset()


def _placewise(node: Node, read: Sequence[Any], array: np.ndarray) -> list[np.ndarray] | None:
    """The inputs in the shape of the result; None if a place of the result is not computed from the same place of each."""
    traits = _traits(node)
    if not traits & {"unary", "broadcasting"}:
        return None
    tensors = [v for v in read if isinstance(v, (np.ndarray, np.generic))]
    if len(tensors) < sum(v is not None for v in read):
        return None
    if "unary" in traits:
        tensors = [v for i, v in enumerate(tensors) if i == 0 or np.size(v) == 1]
    try:
        return [np.broadcast_to(v if np.ndim(v) <= array.ndim else np.reshape(v, ()), array.shape) for v in tensors]
    except ValueError:
        return None


def _causes(node: Node, read: Sequence[Any], array: np.ndarray, fresh: np.ndarray) -> tuple[str, ...]:
    places = [tuple(int(i) for i in np.unravel_index(k, array.shape)) for k in islice(np.flatnonzero(fresh), PLACES)]
    values = _placewise(node, read, array)
    name = printable(node.op_type)
    if values:
        declaration = newest_declaration(node.domain, node.op_type)
        symbol = declaration.symbol if declaration is not None and len(values) == 2 else ""
        rest = int(fresh.sum()) - len(places)
        texts = []
        for at in places:
            words = [_number(v[at]) for v in values]
            called = f"{name} {words[0]} {symbol} {words[1]}" if symbol else f"{name} of {', '.join(words[:8])}"
            texts.append(called + (f" at {list(at)}" if at else ""))
        return (*texts, *([f"and {rest} more places"] if rest else []))
    known = [(n, v) for n, v in zip(node.input_names, read, strict=False) if v is not None]
    words = [f"{_quoted(n)} {_described(v)}" for n, v in known[:8]] or ["no inputs"]
    first = f", first at {list(places[0])}" if places[0] else ""
    return (f"{name} of {', '.join(words)}{first}",)


def _node_origin(
    node: Node,
    read: Sequence[Any],
    value: str,
    path: Sequence[tuple[Node, int]],
    array: np.ndarray,
    nan: np.ndarray,
    bad: np.ndarray,
    causes: tuple[str, ...],
    of_infinity: bool,
) -> Origin:
    known = [v for v in read if v is not None]
    where = {
        "node": node.name,
        "operator": node.op_type,
        "opset": node.opset,
        "version": node.version,
        "dtypes": tuple(dtypes.onnx_name(v.dtype) if hasattr(v, "dtype") else type(v).__name__ for v in known),
        "shapes": tuple(getattr(v, "shape", None) for v in known),
    }
    counts = int(nan.sum()), int((bad & ~nan).sum())
    return Origin("node", node.name, node.op_type, value, _steps(path), *counts, array.size, causes, where, of_infinity)


def _holds(kind: str, name: str, value: Any, operator: str = "", owner: str = "", path: tuple[str, ...] = ()) -> Origin:
    """The origin that is a value, which holds a NaN before any node made one."""
    nan, inf = finite.counts(value)
    at, array = next((at, a) for at, a in finite.leaves(value) if finite.has_nan(a))
    place = tuple(int(i) for i in np.unravel_index(np.flatnonzero(finite.masks(array)[0])[0], array.shape))
    first = f"{at}{list(place) if place else ''}"
    size = sum(a.size for _, a in finite.leaves(value))
    return Origin(
        kind, name, operator, owner or name, path, nan, inf, size, (f"NaN at {first}" if first else "the value is NaN",), {}
    )


def _steps(path: Sequence[tuple[Node, int]]) -> tuple[str, ...]:
    """The nodes around a node, with the iteration of those that repeat their graph."""
    repeats = {"Loop", "Scan", "SequenceMap"}
    return tuple(
        f"{printable(n.op_type)} {_quoted(n.name)}" + (f" (iteration {i})" if n.op_type in repeats else "") for n, i in path
    )


def _quoted(name: str) -> str:
    return f"'{printable(name)}'"


def _number(value: Any) -> str:
    return printable(repr(value) if isinstance(value, str) else str(value).removesuffix(".0"), 40)


def _described(value: Any) -> str:
    """A value in a few words: its elements, or their range."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"(a sequence of {len(value)})" if isinstance(value, list) else f"(a {type(value).__name__})"
    array = np.asarray(value)
    kind = f"{dtypes.onnx_name(array.dtype)}{list(array.shape)}"
    if array.size <= _FEW:
        return f"{kind} {'[' if array.ndim else ''}{', '.join(map(_number, array.reshape(-1)))}{']' if array.ndim else ''}"
    if array.dtype == dtypes.STRING or array.dtype.kind in "cb":
        return kind
    wide = array.astype(np.float64)
    good = wide[np.isfinite(wide)]
    span = f" from {good.min():.6g} to {good.max():.6g}" if good.size else ""
    infinite = array.size - good.size
    return f"{kind}{span}" + (f" with {infinite} infinite" if infinite else "")
