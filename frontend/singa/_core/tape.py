"""A tape of ONNX operators: play it backward to train, print it to export.

`op.Mul(x, y)` on Tensors computes, and where gradients may be asked for it leaves a `Node` behind as the creator of the result.
While a step is being recorded as a graph (trace.py) the same calls write nodes instead of computing.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TypeProto, helper

from singa_backend import dtypes
from singa_backend.builder import Builder
from singa_backend.differentiate import again as body_again
from singa_backend.differentiate import gradients as rule_gradients
from singa_backend.differentiate import why_not
from singa_backend.errors import InvalidInput
from singa_backend.messages import reads
from singa_backend.operator import Declaration, Meaning, declarations, load_all, schema_version
from singa_backend.vocabulary import Body, Eager, Vocabulary, arguments

from ..device import Device, default_device
from . import provenance, trace

if TYPE_CHECKING:
    from ..tensor import Tensor

_serial = itertools.count()

training = False
"""Whether operators leave a tape; `autograd.training` is this flag."""


@contextlib.contextmanager
def no_tape() -> Iterator[None]:
    """The context in which operators leave no tape: updates of parameters, statistics, metrics."""
    global training
    before, training = training, False
    try:
        with provenance.quiet:
            yield
    finally:
        training = before


class _Anywhere(Eager):
    """What lies around a graph: values of any device, which is that of the tensors that the graph will meet."""

    def is_value(self, x: Any) -> bool:
        if isinstance(x, list):
            return super().is_value(x)
        return hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic)


_anywhere = _Anywhere()


@lru_cache(maxsize=64)
def _eager(device: Device) -> Eager:
    return Eager(device.backend)


def vocabulary(device: Device | None = None) -> Vocabulary[Any]:
    """What computes the values of tensors now: the device, or the graph that is being recorded."""
    current = trace.current()
    return current.writer if current is not None else _eager(device or default_device)


# --- operators --------------------------------------------------------------------------------------------------------


class Operator:
    """One step of a tape.  Users derive from it and write `forward(*raw)` and `backward(*raw)` on the values of tensors.

    Calling it on tensors gives a tuple of tensors.
    src: for each input its creator, the tensor's id, the tensor where it stores its gradient (else None), and whether it does.
    """

    op_count = 0

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            name = f"{type(self).__name__}#{Operator.op_count}"
            Operator.op_count += 1
        self.name = name
        self.serial = 0
        self.src: list[tuple[Operator, int, Tensor | None, bool]] = []
        self.y_id2idx: dict[int, int] = {}
        self.requires_grad = False
        self.inputs: list[Tensor | None] = []
        self.creators: list[Operator | None] = []
        """What made each input; a tensor that is filled anew later is another one's."""

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Compute on tensors; raises InvalidInput for what is no tensor."""
        if trace.current() is not None:
            raise trace.NotTraceable(f"the operator {self.name} is written in Python: it cannot become part of a graph")
        for x in xs:
            if not _is_tensor(x):
                raise InvalidInput(f"{self.name} takes tensors; it was given a {type(x).__name__}", code="SX311")
        device = next((x.device for x in xs if not x._loose), default_device)
        for x in xs:
            _same_device(device, device if x._loose else x.device, self.name)
        results = self.forward(*(_value_on(device, x) for x in xs))
        values = results if isinstance(results, tuple) else (results,)
        ys = self.record(list(xs), values, device)
        types = tuple((getattr(v, "dtype", None), getattr(v, "shape", None)) for v in values)
        provenance.remember(ys, type(self).__name__, lambda args, _: self(*args), xs, self, types)
        return ys

    def forward(self, *xs: Any) -> Any:
        """The outputs for these values: an array, or a tuple of arrays."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, *dys: Any) -> Any:
        """The gradients of the inputs, given those of the outputs."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def record(
        self, xs: Sequence[Tensor | None], values: Sequence[Any], device: Device, flows: bool = True
    ) -> tuple[Tensor, ...]:
        """Wrap the outputs; where gradients may be asked for, this operator becomes their creator."""
        from ..tensor import Tensor

        self.serial = next(_serial)  # of the call: an operator may have been made before its inputs were
        self.requires_grad = flows and training and any(x is not None and x.requires_grad for x in xs)
        if self.requires_grad and any(x is not None and x._creator is self for x in xs):
            raise InvalidInput(f"{self.name} is given what it made itself, and knows its last call only", code="SX371",
                               hint="make an operator for each call")  # fmt: skip
        ys: Any = tuple(None if v is None else Tensor._of(v, device, self.requires_grad) for v in values)
        if self.requires_grad:
            self.inputs = [x if x is not None and x.requires_grad else None for x in xs]
            self.creators = [None if x is None else x.creator for x in self.inputs]
            self.y_id2idx = {}
            self.src = [(x.creator, id(x), x if x.stores_grad else None, x.stores_grad) for x in xs if x is not None]
            for i, y in enumerate(ys):
                if y is not None:
                    y.creator = self
                self.y_id2idx[id(y)] = i
        return ys  # type: ignore[no-any-return]

    def place(self, y: Tensor) -> int:
        """Which of the outputs `y` is; raises InvalidInput where this operator has made others since."""
        if id(y) not in self.y_id2idx:
            raise InvalidInput(f"{self.name} was called again, and knows its last call only", code="SX371",
                               hint="make an operator for each call")  # fmt: skip
        return self.y_id2idx[id(y)]

    def output_name(self, idx: int) -> str:
        return f"{self.name}:{idx}"

    def grad_name(self, idx: int) -> str:
        return f"{self.name}_g:{idx}"

    def get_params(self) -> dict[str, Any]:
        """What the operator holds besides its inputs; operators of users may say more."""
        return {}

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        zeros = [np.float32(0) if dy is None else dy for dy in dys]
        result = self.backward(*zeros)
        grads = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(grads) != len(needs):
            raise InvalidInput(f"the backward of {self.name} gave {len(grads)} gradients for {len(needs)} inputs", code="SX312")
        return grads


Operation = Operator


class Dummy(Operator):
    """The creator of a leaf: a tensor that no operator made."""

    def __init__(self, tensor: Tensor, name: str | None = None) -> None:
        super().__init__(name or f"Dummy#{Operator.op_count}")
        if name is None:
            Operator.op_count += 1
        self.y_id2idx = {id(tensor): 0}  # not the tensor: the two would keep each other alive

    def output_name(self, idx: int) -> str:
        return self.name


class Node(Operator):
    """An ONNX operator on the tape; its gradient is the rule under its declaration.

    Only the values that the rule names are kept.
    """

    def __init__(self, op_type: str, domain: str, declaration: Declaration, attributes: dict[str, Any], opset: int,
                 version: int | None = None) -> None:  # fmt: skip
        super().__init__(f"{op_type}#{Operator.op_count}")
        Operator.op_count += 1
        self.op_type, self.domain, self.opset, self.version = op_type, domain, opset, version
        self.declaration = declaration
        self.attributes = attributes
        self._values: list[Any] = []
        self._outputs: list[Any] = []
        self._read: list[tuple[weakref.ref[Tensor], int] | None] = []

    def keep(self, values: Sequence[Any], outputs: Sequence[Any], tensors: Sequence[Tensor | None] = ()) -> None:
        """Keep of the inputs and outputs what the rule asks for.

        tensors: those that hold the inputs and then the outputs; they must not change until the gradient is taken.
        """
        self._choose(values, outputs)
        kept = zip(tensors, (*self._values, *self._outputs), strict=False)
        self._read = [None if t is None or v is None or v is _Dropped else (weakref.ref(t), t._version) for t, v in kept]

    def _choose(self, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        rule = self.declaration.rule
        if rule is None:
            self._values, self._outputs = list(values), [None] * len(outputs)
            return
        named = [d.name for d in self.declaration.inputs]
        names = set(rule.names)
        last = len(named) - 1
        everything = "captured" in names or any(d.variadic for d in self.declaration.inputs)
        self._values = [
            v if everything or named[min(i, last)] in names else (v if v is None else _Dropped) for i, v in enumerate(values)
        ]
        keeps = bool({"y", "ys"} & names) or len(outputs) > 1
        self._outputs = list(outputs) if keeps else [None] * len(outputs)

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        changed = {i: t for i, r in enumerate(self._read) if r and (t := r[0]()) is not None and t._version != r[1]}
        for i in sorted(changed.keys() & self._asks_for(dys, needs)) if changed else ():
            what = f"{changed[i].name or changed[i].creator.name} was changed after {self.name} had read it"
            raise InvalidInput(f"{what}, whose gradient asks for its value", code="SX370",
                               hint="take the gradients of every loss before the update, or compute the loss anew")  # fmt: skip
        op = vocabulary(device)
        return rule_gradients(op, self.declaration, self._values, self._outputs, self.attributes, dys, needs,
                              self.version)  # fmt: skip

    def _asks_for(self, dys: list[Any], needs: list[bool]) -> set[int]:
        """Which of the inputs and outputs the gradient computes with: of the others it asks for the shape alone."""
        values = [*self._values, *self._outputs]
        every = set(range(len(values)))
        if any(isinstance(v, Body) for v in self.attributes.values()) or any(isinstance(v, list) for v in values):
            return every
        builder = Builder(self.opset)

        def symbol(v: Any) -> Any:
            if v is None or v is _Dropped:
                return v
            return builder.input("x", helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), v.shape))

        symbols, count = [symbol(v) for v in values], len(self._values)
        made = rule_gradients(builder, self.declaration, symbols[:count], symbols[count:], self.attributes,
                              [symbol(d) for d in dys], needs, self.version)  # fmt: skip
        graph = builder.proto("gradient", builder.finish([g for g in made if g is not None]))
        used = {n for node in graph.node for n in reads(node)}
        return {i for i in every if getattr(symbols[i], "name", None) in used}


_Dropped: Any = type("Dropped", (), {"__repr__": lambda self: "a value that the rule does not name"})()


# --- the vocabulary on tensors ----------------------------------------------------------------------------------------


class Recorder(Vocabulary["Tensor"]):
    """ONNX's operators on Tensors."""

    def __init__(self) -> None:
        self.opset = _eager(default_device).opset

    def call(
        self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = ""
    ) -> list[Tensor]:
        bodies = [v for v in attributes.values() if isinstance(v, Body)]
        captured = [v for b in bodies for v in b.captured.values()]
        tensors = [x if _is_tensor(x) else None for x in inputs]
        every = [*tensors, *(v if _is_tensor(v) else None for v in captured)]
        device = _meeting(every, op_type, domain, self.opset)
        op = vocabulary(device)
        raw = arguments(op, domain, op_type, [_value_on(device, x) for x in inputs])
        below = {n: _lowered(v, device) if isinstance(v, Body) else v for n, v in attributes.items()}
        made = op.call(op_type, raw, below, outputs, domain)
        values = [*raw, *(_value_on(device, v) for v in captured)]
        if not training or not any(x is not None and x.requires_grad for x in every):
            ys = _wrapped(made, device, every)
        else:
            node = Node(op_type, domain, _declaration(domain, op_type, self.opset), below, self.opset)
            ys = self._leave(node, every, values, made, device)
        shape = op.shape(raw[0]) if op_type == "Reshape" and isinstance(inputs[1], (list, tuple)) else None
        provenance.remember(
            ys, op_type, _again_as(op_type, attributes, outputs, domain, len(inputs), shape), [*inputs, *captured]
        )
        return ys

    def _leave(self, node: Node, xs: Sequence[Any], values: Sequence[Any], made: Sequence[Any], device: Device) -> list[Tensor]:
        """The results, with the node as their creator."""
        ys = node.record(xs, made, device, not why_not(node.declaration))
        if node.requires_grad:
            node.keep(values, made, () if trace.current() is not None else (*xs, *ys))
            for y in ys:
                if y is not None:
                    y.requires_grad = _floats(y)
        return list(ys)

    @property
    def keeps_versions(self) -> bool:
        return True

    @property
    def builds(self) -> bool:
        return trace.current() is not None

    def call_version(
        self, meaning: Meaning, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Tensor]:
        device = _meeting(inputs, meaning.declaration.name, meaning.declaration.domain, self.opset)
        values = [_value_on(device, x) for x in inputs]
        made = vocabulary(device).call_version(meaning, values, attributes, wanted)
        if not training or not any(x is not None and x.requires_grad for x in inputs):
            ys = _wrapped(made, device, inputs)
        else:
            declaration = meaning.declaration
            node = Node(declaration.name, declaration.domain, declaration, attributes, self.opset, meaning.version)
            ys = self._leave(node, inputs, values, made, device)
        provenance.remember(
            ys, meaning.declaration.name, lambda xs, _: self.call_version(meaning, xs, attributes, wanted), inputs
        )
        return ys

    def constant(self, value: Any, dtype: Any = None) -> Tensor:
        from ..tensor import Tensor

        tensor = Tensor._of(np.asarray(value, dtype), default_device, False)
        tensor._fixed = tensor._loose = True
        return tensor

    def is_value(self, x: Any) -> bool:
        return _is_tensor(x)

    def dtype(self, x: Tensor) -> np.dtype[Any]:
        return vocabulary(x.device).dtype(trace.value(x))

    def is_sequence(self, x: Tensor) -> bool:
        return vocabulary(x.device).is_sequence(trace.value(x))

    def shape(self, x: Tensor) -> tuple[int | str | None, ...] | None:
        return vocabulary(x.device).shape(trace.value(x))

    def known(self, x: Tensor) -> np.ndarray | None:
        """While a step is recorded, what its graph knows; without one, every value may change from call to call."""
        current = trace.current()
        return None if current is None else current.writer.known(current.value(x))

    def graph(self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None]) -> Body:
        return (_anywhere if trace.current() is None else vocabulary()).graph(make, types)


def _again_as(op_type: str, attributes: dict[str, Any], outputs: int, domain: str, count: int, shape: Any) -> provenance.Again:
    """The call once more; BatchNormalization by the mode that is asked for, whatever it was.

    count: of the inputs; behind them stands what the graphs among the attributes capture.
    shape: of what a Reshape by given sizes was of: where a size is open now, the sizes that came from it are too.
    """

    def again(xs: list[Any], train: bool) -> Sequence[Any]:
        if op_type == "BatchNormalization" and not domain and train != bool(attributes.get("training_mode")):
            how = {"epsilon": attributes.get("epsilon", 1e-5)}
            if train:
                return op.BatchNormalization(*xs, **how, training_mode=1, outputs=3)  # type: ignore[no-any-return]
            return [op.BatchNormalization(*xs, **how), *xs[3:5]]
        own, rest = dict(attributes), iter(xs[count:])
        for name, value in attributes.items():
            if isinstance(value, Body):
                own[name] = body_again(op, value, [next(rest) for _ in value.captured])
        if shape is not None:
            xs = [xs[0], _following(list(xs[1]), shape, op.shape(xs[0]) or ()), *xs[2:]]
        return op.call(op_type, xs[:count], own, outputs, domain)

    return again


def _following(sizes: list[int], was: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """Sizes for Reshape: 0 (keep) where a size that is open now stood at its own place, -1 for one that it had gone into."""
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


def _wrapped(values: Sequence[Any], device: Device, xs: Sequence[Tensor | None]) -> list[Any]:
    """Values as tensors that no operator made; None stays None.  What is computed of constants alone is as loose as they."""
    from ..tensor import Tensor

    loose = trace.current() is None and all(x is None or x._loose for x in xs)
    tensors = [v if v is None else Tensor._of(v, device, False) for v in values]
    for t in tensors if loose else ():
        if t is not None:
            t._loose = True
    return tensors


# --- devices: an operator computes where its tensors lie, and constants follow them


def _meeting(xs: Sequence[Tensor | None], op_type: str, domain: str, opset: int) -> Device:
    """The device of the tensors; that of the constants among them where there are only such.

    What an operator reads on the host, such as a shape, may lie anywhere.  Raises InvalidInput where others lie on two devices.
    """
    lie = [(i, x.device) for i, x in enumerate(xs) if x is not None and not x._loose]
    if not lie:
        return next((x.device for x in xs if x is not None and x.device is not default_device), default_device)
    device = lie[0][1]
    if trace.current() is not None or all(d is device for _, d in lie):
        return device
    declaration = _declaration(domain, op_type, opset)
    read = {i for i, declared in enumerate(declaration.inputs) if declared.host is not None}
    rest = [d for i, d in lie if i not in read] or [d for _, d in lie]
    if not declaration.host:
        for d in rest:
            _same_device(rest[0], d, op_type)
    return rest[0]


def _same_device(a: Device, b: Device, where: str) -> None:
    if a is not b and str(a.backend) != str(b.backend):
        raise InvalidInput(f"{where} was given tensors on {a.backend} and on {b.backend}", code="SX344",
                           hint="move one: x.to_device(dev)")  # fmt: skip


def _value_on(device: Device, x: Any) -> Any:
    """What to compute with; constants, and arrays of the host, come along to the device."""
    if not _is_tensor(x):
        return device.backend.put(x) if isinstance(x, np.ndarray) and trace.current() is None else x
    if x._loose and x.device is not device and trace.current() is None:
        return device.backend.put(x.device.backend.get(x._data))
    return trace.value(x)


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "stores_grad")


def _floats(y: Tensor) -> bool:
    try:
        return dtypes.is_float(op.dtype(y))
    except ValueError:
        return False


def _lowered(body: Body, device: Device) -> Body:
    return Body(body.proto, body.opset, {n: _value_on(device, v) for n, v in body.captured.items()})


@lru_cache(maxsize=4096)
def _declaration(domain: str, op_type: str, opset: int) -> Declaration:
    load_all()
    version = schema_version(domain, op_type, opset if domain == "" else 1 << 30)
    assert version is not None
    return declarations[domain, op_type][version]


op = Recorder()
"""ONNX's operators on tensors, at the newest opset: `op.Mul(x, y)`."""
