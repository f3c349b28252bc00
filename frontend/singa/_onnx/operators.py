"""Operators that a program adds, which are also functions of Tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from singa_backend.errors import InvalidInput, did_you_mean
from singa_backend.ir.custom import CustomOperator, definition
from singa_backend.ir.versioned import VersionedOperator

from .._core.tensor import Tensor, op
from .graph_operators import call_custom
from .graph_values import Value


class Operator(CustomOperator):
    """An operator that a program has added; call it with Tensors.

    Attributes:
        name: the operator type.
        domain: its domain in files.
        version: its schema version.
        declaration: what it computes; its domain is private unless the operator is registered.
    """

    def __call__(self, *xs: Tensor | None, **attributes: Any) -> Any:
        """Compute the operator on Tensors, recorded in training mode and in exports as any other.

        With values of a graph that is being written (`sonnx.graph`), it adds a node to that graph.

        Args:
            *xs: the inputs, None for an absent one.
            **attributes: the attributes; the others have their defaults.

        Returns:
            The result, a Tensor, or a tuple of the results.

        Raises:
            InvalidInput: an input is not a Tensor (SX311), the number of inputs is wrong (SX301), or an attribute is unknown or
                missing (SX333).
            OperatorError: the operator cannot compute with its inputs.
        """
        if any(isinstance(x, Value) for x in xs):
            written = call_custom(self, xs, attributes)
            return written[0] if len(written) == 1 else tuple(written)
        operator = VersionedOperator(self.declaration, self.version)
        schema, declared = operator.schema, self.declaration.attributes
        if not schema.min_input <= len(xs) <= schema.max_input:
            names = ", ".join(i.name for i in self.declaration.inputs)
            raise InvalidInput(f"{self.name} takes the inputs {names}, got {len(xs)}", code="SX301")
        for x in xs:
            if x is not None and not isinstance(x, Tensor):
                raise InvalidInput(f"the inputs of {self.name} must be tensors, got a {type(x).__name__}", code="SX311")
        for name in attributes:
            if name not in declared:
                text = f"an attribute of {self.name} must be one of {', '.join(declared) or 'none'}, got {name!r}"
                raise InvalidInput(text + did_you_mean(name, declared), code="SX333")
        for name, attribute in schema.attributes.items():
            if attribute.required and attributes.get(name) is None:
                raise InvalidInput(f"{self.name} requires the attribute {name!r}", code="SX333")
        made = op.call_version(operator, list(xs), attributes, (True,) * len(schema.outputs))
        return made[0] if len(made) == 1 else tuple(made)


def define_operator(
    name: str = "",
    *,
    domain: str,
    version: int = 1,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    gradient: Callable[..., Any] | None = None,
    function: Callable[..., Any] | None = None,
    traits: Sequence[str] = (),
    doc: str = "",
) -> Callable[[Callable[..., Any]], Operator]:
    """Define an operator for the models that request it: `prepare(model, operators=[it])`.

    Args:
        name: the operator type; by default the name of the function.
        domain: its domain, which is not one of ONNX's.
        version: its schema version.
        inputs: "x: T" for each input, "x?: T" for an optional one; None for the annotations of the function.
        outputs: "y: T" for each output; None for the annotation of the result.
        types: the element types that each type parameter allows; T allows the floats.
        gradient: the gradient, as for `Operator.gradient`.
        function: the function body, as for `Operator.function`.
        traits: facts of the operator, such as "unary" for one value for each value of the first input.
        doc: the documentation; by default that of the function.

    Returns:
        A decorator of the function that computes the operator. Its parameters are `xp` (NumPy, CuPy), the inputs, and after a
        star the attributes with their defaults. It receives arrays of narrow floats as float32.

    Raises:
        InvalidInput: the domain is one of ONNX's, or the signature is not that of an operator (SX389).

    Example:
        @sonnx.define_operator(domain="com.example")
        def Squareplus(xp, x: "float", *, b: float = 4.0) -> "float":
            return (x + xp.sqrt(x * x + b)) / 2

        rep = sonnx.prepare("net.onnx", operators=[Squareplus])
    """
    return definition(Operator, False, name, domain, version, inputs, outputs, types, gradient, function, traits, doc)


def register_operator(
    name: str = "",
    *,
    domain: str,
    version: int = 1,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    gradient: Callable[..., Any] | None = None,
    function: Callable[..., Any] | None = None,
    traits: Sequence[str] = (),
    doc: str = "",
) -> Callable[[Callable[..., Any]], Operator]:
    """Define an operator for every model of this process.

    Args:
        name: the operator type; by default the name of the function.
        domain: its domain, which is not one of ONNX's.
        version: its schema version.
        inputs: "x: T" for each input, "x?: T" for an optional one; None for the annotations of the function.
        outputs: "y: T" for each output; None for the annotation of the result.
        types: the element types that each type parameter allows; T allows the floats.
        gradient: the gradient, as for `Operator.gradient`.
        function: the function body, as for `Operator.function`.
        traits: facts of the operator, such as "unary" for one value for each value of the first input.
        doc: the documentation; by default that of the function.

    Returns:
        A decorator of the function that computes the operator, as for `define_operator`.

    Raises:
        InvalidInput: the operator is registered already, the domain is one of ONNX's, or the signature is not that of an
            operator (SX389).

    Example:
        @sonnx.register_operator(domain="com.example")
        def Squareplus(xp, x: "float", *, b: float = 4.0) -> "float":
            return (x + xp.sqrt(x * x + b)) / 2
    """
    return definition(Operator, True, name, domain, version, inputs, outputs, types, gradient, function, traits, doc)
