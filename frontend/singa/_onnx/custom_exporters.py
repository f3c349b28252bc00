"""Exporters of operators that are written in Python: how a user's `autograd.Operator` stands in an ONNX file.

@sonnx.exporter(Swish, opset=7)
def _(op, swish, x):                     # in ONNX's operators, in their newest form
    return op.Mul(x, op.Sigmoid(op.Mul(x, swish.beta)))

@sonnx.exporter(Swish, opset=13, domain="my.domain")                 # a node of a domain of one's own
@sonnx.exporter(Swish, opset=18, domain="my.domain", function=True)  # and what it means beside it, as a function
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import FunctionProto, helper

from singa_backend.errors import InvalidInput
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.messages import FreshNames

from .._core import trace
from .._core.tape import Operator
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from ..device import default_device


@dataclass(frozen=True)
class Exporter:
    """How an operator is written from an opset on.

    body: (op, operator, *tensors) -> a tensor or several; for a node of a domain without function, its attributes as a dict.
    """

    operator: type[Operator]
    opset: int
    body: Callable[..., Any]
    domain: str = ""
    function: bool = False
    name: str = ""

    def write(self, operator: Operator, args: Sequence[Any], writer: OpsetWriter, functions: list[FunctionProto]) -> list[Tensor]:
        """The results for these tensors, in the graph that is being recorded."""
        if not self.domain:
            return _several(self.body(op, operator, *args))
        attributes: dict[str, Any] = {}
        name = self.name or self.operator.__name__
        if self.function:
            given = [writer.type_of(trace.value(a)) for a in args]
            function, types = self._function(operator, given, writer.target, FreshNames(f.name for f in functions).new(name))
            known = next((f for f in functions if _same(f, function)), None)
            if known is None:
                functions.append(function)
            name = (known or function).name
        else:
            described = self.body(op, operator, *args)
            attributes, types = described if isinstance(described, tuple) else (described, [writer.type_of(trace.value(args[0]))])
        made = writer.builder.call(name, [trace.value(a) for a in args], attributes, len(types), self.domain)
        for symbol, type in zip(made, types, strict=True):
            symbol.type = type
        return [Tensor._of(s, default_device, False) for s in made]

    def _function(self, operator: Operator, given: Sequence[Any], opset: int, name: str) -> tuple[FunctionProto, list[Any]]:
        record = Trace(opset)
        builder = record.writer.builder
        with trace.recording(record):
            own = [builder.input(f"x{i}", t) for i, t in enumerate(given)]
            made = _several(self.body(op, operator, *(Tensor._of(s, default_device, False) for s in own)))
            symbols = [trace.value(t) for t in made]
        if len(builder.inputs) > len(own):
            more = ", ".join(s.name for s in builder.inputs[len(own) :])
            raise InvalidInput(
                f"a function reads its inputs only; {name} reads {more} besides",
                code="SX356",
                hint="make what it reads an input of the operator",
            )
        outputs = [f"y{i}" for i in range(len(symbols))]
        graph = builder.proto(name, builder.finish(symbols, outputs))
        constants = [helper.make_node("Constant", [], [t.name], name=t.name, value=t) for t in graph.initializer]
        imports = [helper.make_opsetid("", opset)]
        nodes = [*constants, *graph.node]
        function = helper.make_function(self.domain, name, [s.name for s in own], outputs, nodes, imports)
        return function, [s.type for s in symbols]


_exporters: dict[type[Operator], dict[int, Exporter]] = {}


def exporter(
    operator: type[Operator], *, opset: int = 7, domain: str = "", function: bool = False, name: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how an operator of one's own is written in files of this opset and later.

    body: takes `op` (ONNX's operators on tensors, in their newest form), the operator (its attributes are at hand), and its
        inputs; gives its outputs. With a domain and no function: a dict of the node's attributes, or (attributes, [TypeProto]).
    domain: of a node of one's own.  function: write the body beside it, as a function of the file.  name: of the node.
    Raises InvalidInput for what is no operator class, and for a second exporter at the same opset.
    """
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise InvalidInput(f"an exporter is declared for a subclass of autograd.Operator, not for {operator!r}", code="SX357")
    if function and not domain:
        raise InvalidInput("a function needs a domain of its own", code="SX357")

    def declare(body: Callable[..., Any]) -> Callable[..., Any]:
        versions = _exporters.setdefault(operator, {})
        if opset in versions:
            raise InvalidInput(f"{operator.__name__} has an exporter for opset {opset} already", code="SX357")
        versions[opset] = Exporter(operator, opset, body, domain, function, name)
        return body

    return declare


def find(operator: type[Operator], opset: int) -> Exporter | None:
    """The newest exporter for an opset, of the class or of one that it derives from."""
    for kind in operator.__mro__:
        versions = _exporters.get(kind, {})
        best = max((v for v in tuple(versions) if v <= opset), default=None)
        if best is not None:
            return versions[best]
    return None


def least(operator: type[Operator]) -> int | None:
    """The least opset that some exporter of an operator writes."""
    return min((v for kind in operator.__mro__ for v in tuple(_exporters.get(kind, ()))), default=None)


def _several(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _same(a: FunctionProto, b: FunctionProto) -> bool:
    """Whether two functions do the same, by whatever name."""
    x, y = FunctionProto(), FunctionProto()
    x.CopyFrom(a)
    y.CopyFrom(b)
    x.name = y.name = ""
    return x.SerializeToString(deterministic=True) == y.SerializeToString(deterministic=True)
