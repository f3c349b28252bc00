"""Exporters of operators that are written in Python: they write a custom `autograd.Operator` to an ONNX file.

@sonnx.exporter(Swish, opset=7)
def swish_exporter(op, swish, x):        # as ONNX operators, in their newest form
    return op.Mul(x, op.Sigmoid(op.Mul(x, swish.beta)))

@sonnx.exporter(Swish, opset=13, domain="my.domain")                 # as a node of a custom domain
@sonnx.exporter(Swish, opset=18, domain="my.domain", function=True)  # as such a node with a function body
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import FunctionProto

from singa_backend.errors import InvalidInput
from singa_backend.ir.writer import function_message
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.messages import FreshNames

from .._core import trace
from .._core.tape import Operator
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from ..device import default_device


@dataclass(frozen=True)
class Exporter:
    """Writes an operator at an opset or later.

    body: (op, operator, *tensors) -> a tensor or several; for a node of a custom domain without function, a dict of attributes.
    """

    operator: type[Operator]
    opset: int
    body: Callable[..., Any]
    domain: str = ""
    function: bool = False
    name: str = ""

    def write(self, operator: Operator, args: Sequence[Any], writer: OpsetWriter, functions: list[FunctionProto]) -> list[Tensor]:
        """Write the operator to the graph that is being recorded; returns its outputs."""
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
                f"the function {name} must read only its inputs, but it also reads {more}",
                code="SX356",
                hint="make every tensor that it reads an input of the operator",
            )
        outputs = [f"y{i}" for i in range(len(symbols))]
        function = function_message(builder.finish(symbols, outputs, name), self.domain, opset)
        return function, [s.type for s in symbols]


_exporters: dict[type[Operator], dict[int, Exporter]] = {}


def exporter(
    operator: type[Operator], *, opset: int = 7, domain: str = "", function: bool = False, name: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how a custom operator is exported at an opset or later; use it as a decorator.

    The decorated function takes `op` (ONNX's operators on Tensors, in their newest form), the operator with its attributes, and
    its inputs.  It returns the outputs: a Tensor, or a list of them.  With a domain and without `function` it returns a dict of
    the node's attributes, or (attributes, [TypeProto for each output]); by default there is one output, of the type of the first
    input.  An export uses the newest exporter that its opset permits; a derived class inherits the exporters of its base.

    Args:
        operator: the class of the operator, a subclass of `autograd.Operator`.
        opset: the minimum opset of ai.onnx for this exporter.
        domain: the custom domain of the node; "" to write ONNX operators in its place.
        function: whether to write the operators of the body as a function of the model, which any runtime can run; it needs
            a domain.
        name: the operator type of the node; by default the name of the class.

    Returns:
        A decorator, which registers the function and returns it unchanged.

    Raises:
        InvalidInput: `operator` is not an operator class, `function` is set without a domain, or the class has an exporter
            for this opset (SX357).

    Example:
        >>> @sonnx.exporter(Swish, opset=7)
        ... def swish_exporter(op, swish, x):
        ...     return op.Mul(x, op.Sigmoid(op.Mul(x, swish.beta)))
    """
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise InvalidInput(f"operator must be a subclass of autograd.Operator, got {operator!r}", code="SX357")
    if function and not domain:
        raise InvalidInput("function=True requires a domain", code="SX357")

    def declare(body: Callable[..., Any]) -> Callable[..., Any]:
        versions = _exporters.setdefault(operator, {})
        if opset in versions:
            raise InvalidInput(f"{operator.__name__} already has an exporter for opset {opset}", code="SX357")
        versions[opset] = Exporter(operator, opset, body, domain, function, name)
        return body

    return declare


def find(operator: type[Operator], opset: int) -> Exporter | None:
    """The newest exporter for an opset, of the class or of one of its bases."""
    for kind in operator.__mro__:
        versions = _exporters.get(kind, {})
        best = max((v for v in tuple(versions) if v <= opset), default=None)
        if best is not None:
            return versions[best]
    return None


def minimum_opset(operator: type[Operator]) -> int | None:
    """The lowest opset for which an operator has an exporter; None if it has none."""
    return min((v for kind in operator.__mro__ for v in tuple(_exporters.get(kind, ()))), default=None)


def _several(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _same(a: FunctionProto, b: FunctionProto) -> bool:
    """Whether two functions are equal except for their names."""
    x, y = FunctionProto(), FunctionProto()
    x.CopyFrom(a)
    y.CopyFrom(b)
    x.name = y.name = ""
    return x.SerializeToString(deterministic=True) == y.SerializeToString(deterministic=True)
