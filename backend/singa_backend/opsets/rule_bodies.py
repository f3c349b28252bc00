"""The gradient of a call as one call, and its body: what the operator's rule writes.

Which gradients a rule returns depends on ranks and dtypes only.  So once a form of a call is known, the body for other sizes is
written when somebody needs it, and not at all if a kernel computes the gradient.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from onnx import FunctionProto, GraphProto, helper

from .. import dtypes
from ..autodiff.tape import gradients_by_rule
from ..interpreters.base import DifferentiatedCall, Interpreter
from ..interpreters.builder import GraphBuilder, Symbol, attribute_proto
from ..ir.gradient import FORM, GRADIENT, Gradient
from ..ir.graph import Graph
from ..ir.reader import read
from ..ir.versioned import VersionedOperator
from .call_functions import OVERLOADS, body_nodes

FORMS = 4096
"""The number of forms of calls that are remembered."""

CONSTANT = 4096
"""The number of elements up to which a constant is a part of a body."""

ByKernel: TypeAlias = Callable[[DifferentiatedCall], bool]
"""Whether a kernel may compute the gradients of a call."""

_places: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
"""For each form of a call, the inputs whose gradients the rule returns."""


@dataclass(frozen=True)
class Argument:
    """What a rule sees of a tensor.

    Attributes:
        code: its element type.
        shape: its sizes: numbers, names, None.
        contents: those of a small constant; None for any other value.
    """

    code: int
    shape: tuple[int | str | None, ...]
    contents: bytes | None = None

    @classmethod
    def of(cls, op: Interpreter[Any], value: Any) -> Argument | None:
        """A symbol as an argument; None for one that is not a tensor of known rank."""
        type, shape = (op.type_of(value), op.shape(value)) if isinstance(value, Symbol) else (None, None)
        if type is None or shape is None or not type.tensor_type.elem_type:
            return None
        constant = value.value
        small = constant is not None and constant.size <= CONSTANT and not constant.dtype.hasobject
        return cls(type.tensor_type.elem_type, shape, constant.tobytes() if small else None)

    @property
    def form(self) -> Hashable:
        """What it has in common with arguments of other sizes."""
        return self.code, len(self.shape), self.contents is not None

    @property
    def array(self) -> np.ndarray:
        """The contents."""
        assert self.contents is not None
        return np.frombuffer(self.contents, dtypes.numpy_dtype(self.code)).reshape([int(d or 0) for d in self.shape])


@dataclass(frozen=True)
class _Call:
    """A call that is differentiated, in so far as its gradient depends on it."""

    operator: VersionedOperator
    attributes: Mapping[str, Any]
    needs: tuple[bool, ...]
    outputs: int
    arguments: tuple[Argument | None, ...]

    def key(self, arguments: Sequence[Hashable]) -> Hashable:
        declaration, attributes = self.operator.declaration, tuple((n, repr(v)) for n, v in sorted(self.attributes.items()))
        return declaration.domain, declaration.name, self.operator.version, attributes, self.needs, self.outputs, *arguments


def name_of(call: DifferentiatedCall) -> str:
    """The first result of a call that has a name, or the first input."""
    return next((v.name for v in (*call.outputs, *call.inputs) if isinstance(v, Symbol) and v.name), "")


class RuleBodies:
    """The gradients of a graph that are one call each, and their bodies, which equal calls share.

    Args:
        writer: returns an empty writer, for a body.
        keeps: whether the gradient of a call is one call; the rule writes the nodes of any other.
    """

    def __init__(self, writer: Callable[[], Any], keeps: ByKernel) -> None:
        self._writer, self.keeps = writer, keeps
        self._graphs: dict[Hashable, Graph] = {}

    def gradient(self, op: Interpreter[Any], call: DifferentiatedCall) -> Gradient | None:
        """The gradient of a call as one call; None if a value of it is not a tensor of known rank.

        Args:
            op: the writer of the values.
            call: the call.
        """
        values = (*call.dys, *call.inputs, *call.outputs)
        arguments = tuple(None if v is None else Argument.of(op, v) for v in values)
        if any(a is None and v is not None for a, v in zip(arguments, values, strict=True)):
            return None
        attributes = {n: v for n, v in call.attributes.items() if v is not None}
        one = _Call(call.operator, attributes, tuple(call.needs), len(call.outputs), arguments)
        form = one.key([a and a.form for a in arguments])
        places = _places.get(form)
        if places is None:
            _, places = self._written(one)
            _places[form] = places
            if len(_places) > FORMS:
                _places.popitem(last=False)
        return Gradient(call.operator, name_of(call), len(call.outputs), places, lambda: self._written(one)[0])

    def _written(self, call: _Call) -> tuple[Graph, tuple[int, ...]]:
        """The body of a gradient, and the inputs whose gradients it returns."""
        key = call.key(call.arguments)
        if key not in self._graphs:
            self._graphs[key] = self._write(call)
        graph = self._graphs[key]
        return graph, tuple(int(v.name.removeprefix("dx")) for v in graph.outputs)

    def _write(self, call: _Call) -> Graph:
        writer = self._writer()
        writer.bodies = self
        builder = writer.builder
        inputs = len(call.arguments) - 2 * call.outputs
        names = [f"dy{i}" for i in range(call.outputs)] + [f"x{i}" for i in range(inputs)]
        values: list[Any] = []
        for name, a in zip([*names, *(f"y{i}" for i in range(call.outputs))], call.arguments, strict=True):
            symbol = builder.input(name, a and helper.make_tensor_type_proto(a.code, a.shape))
            values.append(None if a is None else symbol if a.contents is None else builder.constant(a.array))
        split = Gradient(call.operator, "", call.outputs).split(values)
        found = gradients_by_rule(
            writer, DifferentiatedCall(call.operator, call.attributes, split[1], split[2], split[0], call.needs)
        )
        returned = {f"dx{i}": g for i, g in enumerate(found) if g is not None}
        proto = builder.proto(call.operator.declaration.name, builder.finish(list(returned.values()), list(returned)))
        model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", builder.opset)], ir_version=10)
        graph = read(model, gradients=builder.gradients)
        graph.proto = proto
        return graph


def gradient_functions(graph: GraphProto, builder: GraphBuilder) -> list[FunctionProto]:
    """Let the gradients in a graph call functions, one for each body; return these.

    Args:
        graph: the graph, which is changed.
        builder: what has written it.
    """
    overloads = helper.find_min_ir_version_for([helper.make_opsetid("", builder.opset)]) >= OVERLOADS
    functions: dict[Graph, FunctionProto] = {}
    counts: Counter[str] = Counter()
    pending = [(node, *builder.gradients[node.name]) for node in graph.node if node.domain == GRADIENT]
    for node, gradient, attributes in pending:
        assert gradient.write is not None
        body, name = gradient.write(), f"{gradient.operator.declaration.name}_{gradient.operator.version}"
        if body not in functions:
            counts[name] += 1
            functions[body] = helper.make_function(
                GRADIENT, name if overloads else f"{name}{FORM}{counts[name]}", [v.name for v in body.inputs],
                [v.name for v in body.outputs], body_nodes(body.proto), [helper.make_opsetid("", builder.opset)],
                attributes=sorted(attributes), overload=f"form{counts[name]}" if overloads else "",
            )  # fmt: skip
            inner = {n.name: n for n in body.nodes}
            for one in functions[body].node:
                if one.domain == GRADIENT and (called := inner[one.name]).gradient is not None:
                    pending.append((one, called.gradient, {n: called.attributes[n] for n in called.given}))
        node.op_type, node.overload = functions[body].name, functions[body].overload
        declaration, version = gradient.operator.declaration, gradient.operator.version
        node.attribute.extend(
            attribute_proto(declaration.domain, declaration.name, version, n, v) for n, v in sorted(attributes.items())
        )
    return list(functions.values())
