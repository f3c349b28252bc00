"""Operators that a program adds, which are also functions of Tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from singa_backend.errors import InvalidInput
from singa_backend.ir import custom
from singa_backend.ir.custom import CustomOperator, adopted
from singa_backend.ir.versioned import VersionedOperator

from .._core.tensor import Tensor, op
from .graph_operators import call_custom, check_count, given_attributes
from .graph_values import Value

P = ParamSpec("P")
Function = Callable[..., Any]


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
        schema = operator.schema
        check_count(schema, self.name, len(xs))
        for x in xs:
            if x is not None and not isinstance(x, Tensor):
                raise InvalidInput(f"the inputs of {self.name} must be tensors, got a {type(x).__name__}", code="SX311")
        given = given_attributes(schema, self.name, attributes)
        made = op.call_version(operator, list(xs), given, (True,) * len(schema.outputs))
        return made[0] if len(made) == 1 else tuple(made)


def _of_tensors(decorator: Callable[P, Callable[[Function], CustomOperator]]) -> Callable[P, Callable[[Function], Operator]]:
    """A decorator of the backend with the same arguments, which returns an `Operator`."""

    @wraps(decorator)
    def define(*args: P.args, **kwargs: P.kwargs) -> Callable[[Function], Operator]:
        declare = decorator(*args, **kwargs)
        return lambda body: adopted(declare(body), Operator)

    define.__module__ = __name__
    return define


define_operator = _of_tensors(custom.define_operator)
register_operator = _of_tensors(custom.register_operator)
