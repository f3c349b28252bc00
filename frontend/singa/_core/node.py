"""An ONNX operator on the tape, recorded by the calls of `ops.py`, and the gradients of one call for `creator.backward(dy)`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import helper

from singa_backend import dtypes
from singa_backend.autodiff.tape import gradients as rule_gradients
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.interpreters.base import Interpreter, Subgraph
from singa_backend.interpreters.builder import GraphBuilder, Symbol
from singa_backend.ir.declaration import Declaration

from ..device import Device, default_device
from . import trace
from .tape import Dummy, Operator, _eager, _is_float, _is_tensor, _operators, _same_device, _serial, creator_of, vocabulary
from .variable import Variable, of


class Node(Operator):
    """An ONNX operator on the tape; its gradient is computed by the gradient rule of its declaration.

    Only the values that the rule names are kept.

    Args:
        op_type: The name of the operator.
        domain: Its domain; "" for ONNX's own.
        declaration: The declaration of the operator in `singa_backend`.
        attributes: The attributes by name.
        opset: The opset of the domain.
        version: The schema version of the call; None for the last one of the declaration.
    """

    _span: FunctionCall | None = None
    """The call of a function that ends with this node; None if the function is this node only."""

    _dtypes: Sequence[Any] = ()
    """The dtype of each input; None for one that is not a Tensor."""

    hidden: Sequence[Any] = ()
    """What the call returned besides its outputs, for the kernel of its gradient."""

    _results: Sequence[tuple[Any, Any]] = ()
    """(dtype, shape) of each output."""

    def __init__(
        self,
        op_type: str,
        domain: str,
        declaration: Declaration,
        attributes: dict[str, Any],
        opset: int,
        version: int | None = None,
    ) -> None:
        super().__init__(f"{op_type}#{_operators.next()}")
        self.op_type, self.domain, self.opset, self.version = op_type, domain, opset, version
        self.declaration = declaration
        self.attributes = attributes
        self.node = ""
        self._values: list[Any] = []
        self._outputs: list[Any] = []
        self._read: list[tuple[weakref.ref[Variable], int] | None] = []

    def keep(self, values: Sequence[Any], outputs: Sequence[Any], tensors: Sequence[Variable | None] = ()) -> None:
        """Keep the inputs and outputs that the gradient rule names.

        Args:
            values: The value of each input.
            outputs: The value of each output.
            tensors: The tensors of the inputs, then those of the outputs. They must not change until the gradient is computed.
        """
        self._choose(values, outputs)
        self._dtypes = [None if t is None else getattr(v, "dtype", None) for t, v in zip(tensors, values, strict=False)]
        self._results = [(getattr(v, "dtype", None), getattr(v, "shape", ())) for v in outputs] if tensors else []
        kept = zip(tensors, (*self._values, *self._outputs), strict=False)
        self._read = [None if t is None or v is None or v is _NOT_KEPT else (weakref.ref(t), t._version) for t, v in kept]

    def _choose(self, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keep the values that the gradient rule names; the others are replaced by `_NOT_KEPT` or None."""
        rule = self.declaration.gradient_rule
        if rule is None:
            self._values = list(values)
            self._outputs = [None] * len(outputs) if trace.current() is None else list(outputs)
            return
        named = [d.name for d in self.declaration.inputs]
        names = set(rule.names)
        last = len(named) - 1
        everything = trace.current() is not None or "captured" in names or any(d.variadic for d in self.declaration.inputs)
        self._values = [
            v if everything or named[min(i, last)] in names else (v if v is None else _NOT_KEPT) for i, v in enumerate(values)
        ]
        keeps = bool({"y", "ys"} & names) or len(outputs) > 1 or trace.current() is not None
        self._outputs = list(outputs) if keeps else [None] * len(outputs)

    def backward(self, *dys: Any) -> Any:
        """Compute the gradients of the inputs of the call on arrays.

        If a function of `autograd` ends with this node, they are those of the tensors passed to the function.

        Args:
            *dys: The gradient of each result: an array or a Tensor of its shape, or a number for all elements; 1 if there are
                none.

        Returns:
            An array; a tuple of arrays if there are several inputs, with None for one without a gradient and without the last
            ones that have none; None if none has one.

        Raises:
            InvalidInput: There are more gradients than results or a shape differs (SX373), a gradient is on another device
                (SX344), or a tensor that the gradient needs was changed (SX370).
            UnsupportedModel: The operator has no gradient for these inputs or attributes.
        """
        if trace.current() is not None:
            raise trace.NotTraceable(f"the backward of {self.name} on arrays cannot become part of a graph")
        if self._span is not None:
            return _unpacked(_span_gradients(self, self._span, dys))
        device = _device_of(self)
        given = _given([(self, i) for i in range(len(self._results))], dys, device).get(self, [])
        needs = [t is not None and dtypes.is_float(t) for t in self._dtypes]
        return _unpacked(self._backward(given, needs, device) if any(d is not None for d in given) else [])

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        kept = self._refuse_changed(dys, needs)  # a kernel may read another value than the rule does
        return self._by_rule(vocabulary(device) if kept else _eager(device), self._values, self._outputs, dys, needs)

    def _backward_recorded(self, op: Interpreter[Any], dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        self._refuse_changed([None if d is None else d._data for d in dys], needs)
        values = [self._value_as_tensor(i, device) for i in range(len(self._values))]
        outputs = [None if y is None else self._again(y, i, device) for i, y in enumerate(self._outputs)]
        for y in outputs:
            if y is not None:
                y.requires_grad = _is_float(y._data, device)
        return self._by_rule(op, values, outputs, dys, needs)

    def _by_rule(
        self, op: Interpreter[Any], values: list[Any], outputs: list[Any], dys: list[Any], needs: list[bool]
    ) -> list[Any]:
        try:
            return rule_gradients(op, self.declaration, values, outputs, self.attributes, dys, needs, self.version, self.hidden)
        except UnsupportedModel as error:
            raise error.locate(node=self.node or self.name) from None

    def _value_as_tensor(self, i: int, device: Device) -> Any:
        """The Tensor of an input that was kept; for one that has another value now, a Tensor of the old value."""
        value, x, creator = self._values[i], self.inputs[i], self.creators[i]
        if value is None or value is _NOT_KEPT:
            return value
        if x is None or creator is None:
            return of(value, device, False)
        if x._creator is creator and trace.value(x) is value:
            return x
        if trace.current() is None and isinstance(creator, Dummy):
            raise InvalidInput(
                f"the storage of {x.name or creator.name} was replaced after {self.name} had read it, so that no gradient of its "
                "gradient reaches it",
                code="SX370",
                hint="compute the gradients before the update, or compute the loss again",
            )
        return creator._again(value, creator.place(x), device)

    def _refuse_changed(self, dys: list[Any], needs: list[bool]) -> bool:
        """Raise InvalidInput (SX370) if a tensor whose old value the gradient needs was changed in place.

        Returns:
            Whether no tensor of the call was changed.
        """
        changed = {i: t for i, r in enumerate(self._read) if r and (t := r[0]()) is not None and t._version != r[1]}
        for i in sorted(changed.keys() & self._needed_values(dys, needs)) if changed else ():
            what = f"{changed[i].name or creator_of(changed[i]).name} was changed after {self.name} had read it"
            raise InvalidInput(
                f"{what}, and the gradient of {self.name} needs the old value",
                code="SX370",
                hint="compute the gradients of every loss before the update, or compute the loss again",
            )
        return not changed

    def _needed_values(self, dys: list[Any], needs: list[bool]) -> set[int]:
        """The indices of the inputs and outputs whose values the gradient needs; of the others it needs the shape at most."""
        values = [*self._values, *self._outputs]
        every = set(range(len(values)))
        if any(isinstance(v, Subgraph) for v in self.attributes.values()) or any(isinstance(v, list) for v in values):
            return every
        builder = GraphBuilder(self.opset)

        def symbol(v: Any) -> Any:
            if v is None or v is _NOT_KEPT:
                return v
            return builder.input("x", helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), v.shape))

        symbols, count = [symbol(v) for v in values], len(self._values)
        made = rule_gradients(
            builder,
            self.declaration,
            symbols[:count],
            symbols[count:],
            self.attributes,
            [symbol(d) for d in dys],
            needs,
            self.version,
        )
        builder.finish([g for g in made if g is not None])
        return {i for i in every if isinstance(symbols[i], Symbol) and symbols[i].ir.is_used}


_NOT_KEPT: Any = type("NotKept", (), {"__repr__": lambda self: "a value that the rule does not name"})()


# --- the gradients of one call, for `creator.backward(dy)`


class FunctionCall(NamedTuple):
    """The nodes that one call of a function recorded.

    Attributes:
        start: The serial number before the call.
        inputs: The id of each tensor passed to the function; None for an absent one.
        results: For each result its creator and its index among the outputs of that; None if it has no gradient.
    """

    start: int
    inputs: tuple[int | None, ...]
    results: tuple[tuple[weakref.ref[Node], int] | None, ...]


def start_of_call() -> int:
    """The serial number before a call of a function, for `end_of_call`."""
    return next(_serial)


def end_of_call(start: int, xs: Sequence[Any], ys: Sequence[Any]) -> None:
    """Make `creator.backward` of the results of a function compute the gradients of the function.

    Args:
        start: The number from `start_of_call`.
        xs: The tensors passed to the function; None for an absent one.
        ys: The results.
    """
    made = [y._creator if y is not None and isinstance(y._creator, Node) and y._creator.serial > start else None for y in ys]
    nodes = {n for n in made if n is not None}
    results = tuple(None if n is None else (weakref.ref(n), n.place(y)) for n, y in zip(made, ys, strict=True))
    ids = tuple(None if x is None else id(x) for x in xs)
    for node in nodes:
        same = [r[1] for r in results if r is not None] == list(range(len(results))) and len(nodes) == 1
        direct = same and [i for _, i, _, _ in node.src] == [i for i in ids if i is not None]
        node._span = None if direct else FunctionCall(start, ids, results)


def _span_gradients(node: Node, span: FunctionCall, dys: Sequence[Any]) -> list[Any]:
    """The gradients of the inputs of a function, from those of its results."""
    device = _device_of(node)
    ends = [None if r is None else (node if r[0]() is node else r[0](), r[1]) for r in span.results]
    found: dict[Any, list[Any]] = dict(_given(ends, dys, device))
    totals: dict[int, Any] = {}
    while found:
        here = max(found, key=lambda o: o.serial)  # every reader of its outputs has a larger number, and is done
        given = found.pop(here)
        needs = [
            x is not None and (id(x) in span.inputs or (c is not None and not isinstance(c, Dummy) and c.serial > span.start))
            for x, c in zip(here.inputs, here.creators, strict=True)
        ]
        if not any(needs) or all(d is None for d in given):
            continue
        for x, creator, g in zip(here.inputs, here.creators, here._backward(given, needs, device), strict=True):
            if g is None or x is None:
                continue
            if id(x) in span.inputs:
                totals[id(x)] = _eager(device).add(totals.get(id(x)), g)
            elif creator is not None:
                count = len(creator._results) if isinstance(creator, Node) else len(creator.y_id2idx)
                slots = found.setdefault(creator, [None] * count)
                slots[creator.place(x)] = _eager(device).add(slots[creator.place(x)], g)
    return [None if i is None else totals.pop(i, None) for i in span.inputs]


def _given(ends: Sequence[tuple[Any, int] | None], dys: Sequence[Any], device: Device) -> dict[Any, list[Any]]:
    """The gradients that a caller passed, as arrays by creator: one for each of its outputs."""
    if len(dys) > len(ends):
        raise InvalidInput(f"backward takes the gradient of each of the {len(ends)} results, got {len(dys)}", code="SX373")
    found: dict[Any, list[Any]] = {}
    for i, (end, dy) in enumerate(zip(ends, dys or (1.0,), strict=False)):
        if dy is None or end is None:
            continue
        creator, index = end
        if creator is None:
            raise InvalidInput(f"result {i} of the function no longer exists", code="SX373", hint="keep all its results")
        dtype, shape = creator._results[index]
        if _is_tensor(dy):
            _same_device(device, dy.device, f"the backward of {creator.name}")
            value = dy._data
        else:
            xp = device.backend.xp
            value = dy if xp.isarray(dy) else device.backend.put(np.asarray(dy))
        if value.shape != shape and value.size != 1:
            text = f"the gradient of result {i} of {creator.name} must have its shape {tuple(shape)}, got {tuple(value.shape)}"
            raise InvalidInput(text, code="SX373")
        value = device.backend.cast(value, dtype)
        if value.shape != shape:
            value = _eager(device).call("Expand", (value.reshape(()), np.asarray(shape, np.int64)), {}, 1)[0]
        found.setdefault(creator, [None] * len(creator._results))[index] = value
    return found


def _device_of(node: Node) -> Device:
    return next((x.device for x in node.inputs if x is not None), default_device)


def _unpacked(grads: Sequence[Any]) -> Any:
    """One gradient, or a tuple, without the last ones that are None."""
    last = max((i for i, g in enumerate(grads) if g is not None), default=-1)
    return tuple(grads[: last + 1]) if last > 0 else grads[0] if last == 0 else None
