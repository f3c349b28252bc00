"""ONNX's operators on tensors, at the newest opset.

`op.Mul(x, y)` computes; if an input requires a gradient, it records a `Node` on the tape as the creator of the result.
While a step is recorded as a graph (`trace.py`), the same calls write nodes instead of computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from onnx import TypeProto

from singa_backend import dtypes
from singa_backend.autodiff.replay import rebuild_subgraph
from singa_backend.autodiff.support import no_gradient_reason
from singa_backend.interpreters.base import Example, Interpreter, Subgraph, arguments
from singa_backend.ir.declaration import Declaration, declarations
from singa_backend.ir.versioned import VersionedOperator
from singa_backend.nodes import TrainingOutputs
from singa_backend.proto.schemas import version_at

from ..device import Device, default_device
from . import provenance, tape, trace
from .node import Node
from .tape import _anywhere, _eager, _is_tensor, _same_device, _value_on, vocabulary
from .variable import Variable, of, required

T = TypeVar("T", bound=Variable)


class TensorInterpreter(Interpreter[T]):
    """ONNX's operators on Tensors."""

    def __init__(self) -> None:
        self.opset = _eager(default_device).opset

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        if op_type == "Reshape" and trace.is_open() and isinstance(inputs[1], (list, tuple)):
            inputs = [inputs[0], trace.reshaped(inputs[1], self.shape(inputs[0]) or (), not attributes.get("allowzero"))]
        bodies = [v for v in attributes.values() if isinstance(v, Subgraph)]
        captured = [v for b in bodies for v in b.captured]
        tensors = [x if _is_tensor(x) else None for x in inputs]
        every = [*tensors, *(v if _is_tensor(v) else None for v in captured)]
        device = _common_device(every, op_type, domain, self.opset)
        op = vocabulary(device, _trains(every))
        raw = arguments(op, domain, op_type, [_value_on(device, x) for x in inputs])
        below = {n: _lowered(v, device) if isinstance(v, Subgraph) else v for n, v in attributes.items()}
        made = op.call(op_type, raw, below, outputs, domain)
        values = [*raw, *(_value_on(device, v) for v in captured)]
        ys = self._recorded(made, every, values, below, device, partial(_declaration, domain, op_type, self.opset))
        shape = op.shape(raw[0]) if op_type == "Reshape" and isinstance(inputs[1], (list, tuple)) else None
        provenance.record(ys, op_type, _replay_of(op_type, attributes, outputs, domain, len(inputs), shape), [*inputs, *captured])
        return ys

    def _recorded(
        self,
        made: Sequence[Any],
        xs: Sequence[Any],
        values: Sequence[Any],
        attributes: dict[str, Any],
        device: Device,
        declared: Callable[[], Declaration],
        version: int | None = None,
    ) -> list[Any]:
        """Return the results of a call as Tensors; a node is their creator if a gradient may flow through it."""
        if not device.backend.is_host:
            made = _placed(made, device)
        training, recording = tape.training, trace.current() is not None
        hidden = made.hidden if isinstance(made, TrainingOutputs) else ()
        if training and not recording:
            made = [_separate(v, xs, device) for v in made]
        if not training or not any(x is not None and x.requires_grad for x in xs):
            ys = _wrapped(made, device, xs)
            if training and tape.without_graph(xs):
                tape.mark_without_graph(ys, not no_gradient_reason(declared()))
            return ys
        declaration = declared()
        node = Node(declaration.name, declaration.domain, declaration, attributes, self.opset, version)
        ys = list(node.record(xs, made, device, not no_gradient_reason(declaration)))
        if node.requires_grad:
            node.keep(values, made, () if recording else (*xs, *ys))
            node.hidden = hidden
            for y in ys:
                if y is not None:
                    y.requires_grad = tape._is_float(y._data, device)
        return ys

    @property
    def runs_old_versions(self) -> bool:
        return True

    @property
    def is_symbolic(self) -> bool:
        return trace.current() is not None

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        device = _common_device(inputs, operator.declaration.name, operator.declaration.domain, self.opset)
        values = [_value_on(device, x) for x in inputs]
        made = vocabulary(device, _trains(inputs)).call_version(operator, values, attributes, wanted)
        ys = self._recorded(made, inputs, values, attributes, device, lambda: operator.declaration, operator.version)
        provenance.record(
            ys, operator.declaration.name, lambda xs, _: self.call_version(operator, xs, attributes, wanted), inputs
        )
        return ys

    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> Any:
        tensor = of(np.asarray(value, dtype), default_device, False)
        tensor._is_constant = tensor._follows_device = True
        return tensor

    def is_value(self, x: Any) -> bool:
        return _is_tensor(x)

    def dtype(self, x: T) -> np.dtype[Any]:
        return vocabulary(required(x).device).dtype(trace.value(x))

    def is_sequence(self, x: T) -> bool:
        return vocabulary(required(x).device).is_sequence(trace.value(x))

    def shape(self, x: T) -> tuple[int | str | None, ...] | None:
        return vocabulary(required(x).device).shape(trace.value(x))

    def constant_value(self, x: T) -> np.ndarray | None:
        """The value that the graph of a recorded step knows; None otherwise, because values may change from call to call."""
        current = trace.current()
        return None if current is None else current.writer.constant_value(current.value(x))

    def example(self, x: T) -> Any:
        return vocabulary(x.device).example(trace.value(x))

    def learn(self, x: T) -> None:
        vocabulary(x.device).learn(trace.value(x))

    def with_type(self, x: T, type: TypeProto | None) -> T:
        vocabulary(x.device).with_type(trace.value(x), type)
        return x

    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        return (_anywhere if trace.current() is None else vocabulary()).graph(make, types, examples)


def _trains(xs: Sequence[Variable | None]) -> bool:
    """Whether a call on these tensors is recorded on the tape."""
    return tape.training and any(x is not None and x.requires_grad for x in xs)


def _placed(made: Sequence[Any], device: Device) -> list[Any]:
    """The results on the device of the tensors: operators leave shapes on the host."""
    return [device.backend.put(v) if isinstance(v, np.ndarray) else v for v in made]


def _replay_of(op_type: str, attributes: dict[str, Any], outputs: int, domain: str, count: int, shape: Any) -> provenance.Replay:
    """Return a function that replays the call; BatchNormalization follows the requested mode, whatever the recorded one was.

    Args:
        op_type: The operator.
        attributes: Its attributes.
        outputs: The number of its outputs.
        domain: Its domain.
        count: The number of inputs; the arguments after them are the values that the subgraphs capture.
        shape: The shape of the input of a Reshape with constant sizes: sizes that came from a size that is dynamic now become
            dynamic too. None for other operators.
    """

    def replay(xs: list[Any], train: bool) -> Sequence[Any]:
        if op_type == "BatchNormalization" and not domain and train != bool(attributes.get("training_mode")):
            how: dict[str, Any] = {"epsilon": attributes.get("epsilon", 1e-5)}
            if train:
                ys: tuple[Any, ...] = op.BatchNormalization(*xs, **how, training_mode=1, outputs=3)
                return ys
            return [op.BatchNormalization(*xs, **how), *xs[3:5]]
        own, rest = dict(attributes), iter(xs[count:])
        for name, value in attributes.items():
            if isinstance(value, Subgraph):
                own[name] = rebuild_subgraph(op, value, [next(rest) for _ in value.captured])
        if shape is not None:
            xs = [xs[0], _following(list(xs[1]), shape, op.shape(xs[0]) or ()), *xs[2:]]
        return op.call(op_type, xs[:count], own, outputs, domain)

    return replay


def _following(sizes: list[int], was: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """Sizes for Reshape: 0 (keep) if a size that is dynamic now was at the same axis, -1 for one that is a multiple of it."""
    opened = [i for i, d in enumerate(now) if not isinstance(d, int) and i < len(was) and isinstance(was[i], int)]
    made = list(sizes)
    for i in opened:
        if i < len(made) and made[i] == was[i]:
            made[i] = 0
        elif -1 not in made:
            into = next((k for k, n in enumerate(made) if n and was[i] and n % was[i] == 0), None)
            if into is not None:
                made[into] = -1
    return made


def _separate(value: Any, xs: Sequence[Variable | None], device: Device) -> Any:
    """A result that does not share the storage of a leaf: the leaf may be filled before the gradient that reads the result."""
    owner = _owner(value)
    shares = owner is not None and any(
        x is not None and not x._is_constant and tape.is_leaf(x) and _owner(x._data) is owner for x in xs
    )
    return device.backend.copy(value, "K") if shares else value  # the layout of the view: products then round alike


def _owner(value: Any) -> Any:
    """The object whose memory an array uses; None for a sequence and for no value."""
    base = getattr(value, "base", None)
    return base if base is not None else value if hasattr(value, "dtype") else None


def _wrapped(values: Sequence[Any], device: Device, xs: Sequence[Variable | None]) -> list[Any]:
    """Wrap values in tensors without a creator; None stays None. The results of constants follow the device, as constants do."""
    follows = trace.current() is None and all(x is None or x._follows_device for x in xs)
    tensors = [v if v is None else of(v, device, False) for v in values]
    for t in tensors if follows else ():
        if t is not None:
            t._follows_device = True
    return tensors


def _common_device(xs: Sequence[Variable | None], op_type: str, domain: str, opset: int) -> Device:
    """The device of the tensors; that of the constants if all are constants.

    Inputs that an operator reads on the host, such as a shape, may be on any device. Raises InvalidInput if others are on two.
    """
    placed = [(i, x.device) for i, x in enumerate(xs) if x is not None and not x._follows_device]
    if not placed:
        return next((x.device for x in xs if x is not None and x.device is not default_device), default_device)
    device = placed[0][1]
    if trace.current() is not None or all(d is device for _, d in placed):
        return device
    declaration = _declaration(domain, op_type, opset)
    read = {i for i, declared in enumerate(declaration.inputs) if declared.host is not None}
    rest = [d for i, d in placed if i not in read] or [d for _, d in placed]
    if not declaration.host:
        for d in rest:
            _same_device(rest[0], d, op_type)
    return rest[0]


def _lowered(body: Subgraph, device: Device) -> Subgraph:
    return body.with_captured([_value_on(device, v) for v in body.captured])


@lru_cache(maxsize=4096)
def _declaration(domain: str, op_type: str, opset: int) -> Declaration:
    version = version_at(domain, op_type, opset)
    assert version is not None
    return declarations[domain, op_type][version]


op: TensorInterpreter[Any] = TensorInterpreter()
"""ONNX's operators on tensors, at the newest opset: `op.Mul(x, y)`; `tensor.py` exports it with the type of its results."""
