"""The gradient of a call as one call, and its body: what the operator's rule writes.

Which gradients a rule returns depends on ranks and dtypes only.  So once a form of a call is known, the body for other sizes is
written when somebody needs it, and not at all if a kernel computes the gradient.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

from onnx import FunctionProto, helper

from .. import dtypes
from ..autodiff.tape import gradients_by_rule
from ..interpreters.base import DifferentiatedCall, Interpreter
from ..interpreters.builder import Symbol
from ..interpreters.given import Given
from ..ir.gradient import GRADIENT, Gradient
from ..ir.graph import Graph
from ..ir.reader import resolve
from ..ir.writer import form_name, function_message

FORMS = 4096
"""The number of forms of calls that are remembered."""

CONSTANT = 4096
"""The number of elements up to which a constant is a part of a body."""

ByKernel: TypeAlias = Callable[[DifferentiatedCall], bool]
"""Whether a kernel may compute the gradients of a call."""

_places: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
"""For each form of a call, the inputs whose gradients the rule returns."""


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
        arguments = [None if v is None else _given(op, v) for v in values]
        if any(g is None and v is not None for g, v in zip(arguments, values, strict=True)):
            return None
        attributes = {n: v for n, v in call.attributes.items() if v is not None}
        gradient = Gradient(call.operator, name_of(call), attributes, len(call.outputs))
        declaration, key = call.operator.declaration, tuple((n, repr(v)) for n, v in sorted(attributes.items()))
        form = (declaration.domain, declaration.name, call.operator.version, key, tuple(call.needs), len(call.outputs))
        gradient.write = partial(self._body, (*form, *arguments), gradient, arguments, call.needs)
        ranks = (op.target, *form, *(None if g is None else (g.dtype, len(g.shape or ()), g.setting is None) for g in arguments))
        places = _places.get(ranks)
        if places is None:
            places = _places[ranks] = tuple(int(v.name.removeprefix("dx")) for v in gradient.write().outputs)
            while len(_places) > FORMS:
                _places.popitem(last=False)
        gradient.places = places
        return gradient

    def _body(self, key: Hashable, gradient: Gradient, given: Sequence[Given | None], needs: Sequence[bool]) -> Graph:
        """The body of a gradient, which equal calls share."""
        if key not in self._graphs:
            self._graphs[key] = self._written(gradient, given, needs)
        return self._graphs[key]

    def _written(self, gradient: Gradient, given: Sequence[Given | None], needs: Sequence[bool]) -> Graph:
        writer, operator = self._writer(), gradient.operator
        builder = writer.builder
        groups = zip(("dy", "x", "y"), gradient.split(range(len(given))), strict=True)
        names = [f"{kind}{i}" for kind, group in groups for i in range(len(group))]
        values: list[Any] = []
        for name, g in zip(names, given, strict=True):
            symbol = builder.input(name, g and helper.make_tensor_type_proto(dtypes.onnx_code(g.dtype), g.shape))
            values.append(None if g is None else symbol if g.setting is None else builder.constant(g.array))
        dys, inputs, outputs = gradient.split(values)
        gradients = gradients_by_rule(writer, DifferentiatedCall(operator, gradient.attributes, inputs, outputs, dys, needs))
        returned = {f"dx{i}": g for i, g in enumerate(gradients) if g is not None}
        return resolve(builder.finish(list(returned.values()), list(returned)))


def _given(op: Interpreter[Any], value: Any) -> Given | None:
    """What a rule sees of a tensor of known rank: also small constants, as in a step; None for another value."""
    type, shape = (op.type_of(value), op.shape(value)) if isinstance(value, Symbol) else (None, None)
    if type is None or shape is None or not type.tensor_type.elem_type:
        return None
    constant = value.value
    small = constant is not None and constant.size <= CONSTANT and not constant.dtype.hasobject
    return Given(dtypes.numpy_dtype(type.tensor_type.elem_type), shape, constant.tobytes() if small else None)


def gradient_functions(graph: Graph) -> list[FunctionProto]:
    """Let the gradients in a graph call functions, one for each body; return these."""
    functions: dict[Graph, FunctionProto] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        gradient, body = node.gradient, node.body() if node.domain == GRADIENT else None
        if gradient is None or body is None:
            continue
        if body not in functions:
            name = gradient.function_name
            counts[name] += 1
            body.name, overload = form_name(name, counts[name], graph.opsets[""])
            functions[body] = function_message(
                body, GRADIENT, body.opsets[""], attributes=sorted(gradient.attributes), overload=overload
            )
        node.change(op_type=functions[body].name, overload=functions[body].overload)
    return list(functions.values())
