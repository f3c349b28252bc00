"""Operators that compute element by element, most of them one ONNX operator; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from singa_backend import dtypes

from .._core.conversions import dtype_of
from .._core.tensor import Tensor
from .formula import TensorOp, formula, true

__all__: list[str] = ["add_all"]

# --- one operator without attributes ----------------------------------------------------------------------------------

_FLOAT = "Tensor of a float dtype, any shape"
_NUMBER = "Tensor of a numeric dtype, any shape"
_ANY = "Tensor of any dtype and shape"
_NO_GRADIENT = "  It has no gradient."

# class: (function, ONNX operator, what the function computes, its input)
_UNARY = {
    "ReLU": ("relu", "Relu", "The rectified linear unit, max(0, x).", _NUMBER),
    "Sigmoid": ("sigmoid", "Sigmoid", "The logistic function, 1 / (1 + exp(-x)).", _FLOAT),
    "Tanh": ("tanh", "Tanh", "The hyperbolic tangent of x.", _FLOAT),
    "Sin": ("sin", "Sin", "The sine of x, which is in radians.", _FLOAT),
    "Sinh": ("sinh", "Sinh", "The hyperbolic sine of x.", _FLOAT),
    "Cos": ("cos", "Cos", "The cosine of x, which is in radians.", _FLOAT),
    "Cosh": ("cosh", "Cosh", "The hyperbolic cosine of x.", _FLOAT),
    "Tan": ("tan", "Tan", "The tangent of x, which is in radians.", _FLOAT),
    "Asin": ("asin", "Asin", "The inverse sine of x, in radians; NaN outside [-1, 1].", _FLOAT),
    "Asinh": ("asinh", "Asinh", "The inverse hyperbolic sine of x.", _FLOAT),
    "Acos": ("acos", "Acos", "The inverse cosine of x, in radians; NaN outside [-1, 1].", _FLOAT),
    "Acosh": ("acosh", "Acosh", "The inverse hyperbolic cosine of x; NaN below 1.", _FLOAT),
    "Atan": ("atan", "Atan", "The inverse tangent of x, in radians.", _FLOAT),
    "Atanh": ("atanh", "Atanh", "The inverse hyperbolic tangent of x; NaN outside [-1, 1].", _FLOAT),
    "Abs": ("abs", "Abs", "The absolute value of x.", _NUMBER),
    "Exp": ("exp", "Exp", "The exponential function, e to the power of x.", _FLOAT),
    "Log": ("log", "Log", "The natural logarithm of x; NaN below 0.", _FLOAT),
    "Sqrt": ("sqrt", "Sqrt", "The square root of x; NaN below 0.", _FLOAT),
    "Sign": ("sign", "Sign", "The sign of x: -1, 0 or 1." + _NO_GRADIENT, _NUMBER),
    "Ceil": ("ceil", "Ceil", "The smallest integer not below x." + _NO_GRADIENT, _FLOAT),
    "Floor": ("floor", "Floor", "The largest integer not above x." + _NO_GRADIENT, _FLOAT),
    "Reciprocal": ("reciprocal", "Reciprocal", "The reciprocal, 1 / x.", _FLOAT),
    "Negative": ("negative", "Neg", "The negative, -x.", _NUMBER),
    "Erf": ("erf", "Erf", "The error function of x.", _FLOAT),
    "SoftPlus": ("softplus", "Softplus", "The softplus function, log(1 + exp(x)).", _FLOAT),
    "SoftSign": ("softsign", "Softsign", "The softsign function, x / (1 + |x|).", _FLOAT),
    "Identity": ("identity", "Identity", "The input itself, x.", _ANY),
    "Rounde": ("rounde", "Round", "The integer nearest to x, halves to the even one." + _NO_GRADIENT, _FLOAT),
}
_BINARY = {
    "Add": ("add", "Add", "The sum, a + b.", _NUMBER),
    "Sub": ("sub", "Sub", "The difference, a - b.", _NUMBER),
    "Mul": ("mul", "Mul", "The product, a b.", _NUMBER),
    "Div": ("div", "Div", "The quotient, a / b; integers are truncated toward zero.", _NUMBER),
    "Pow": ("pow", "Pow", "The power, a to the power of b.", _NUMBER),
}
_COMPARISON = {
    "Less": ("less", "Less", "Whether a < b." + _NO_GRADIENT, _NUMBER),
    "Greater": ("greater", "Greater", "Whether a > b." + _NO_GRADIENT, _NUMBER),
    "Equal": ("equal", "Equal", "Whether a = b." + _NO_GRADIENT, _ANY),
}
_LOGICAL = {
    "And": ("_and", "And", "Whether a and b hold." + _NO_GRADIENT, _ANY),
    "Or": ("_or", "Or", "Whether a or b or both hold." + _NO_GRADIENT, _ANY),
    "Xor": ("_xor", "Xor", "Whether exactly one of a and b holds." + _NO_GRADIENT, _ANY),
}


def _declare_plain() -> None:
    """Declare the operators of the tables."""
    for name, (function, onnx, what, x) in _UNARY.items():
        _plain(name, function, onnx, what, {"x": f"{x}."}, "Tensor of the shape and dtype of x", _unary(onnx))
    for name, (function, onnx, what, x) in _BINARY.items():
        second = "a numeric dtype" if onnx == "Pow" else "the dtype of a"
        inputs = {"a": f"{x}.", "b": f"Tensor of {second}; the shapes broadcast."}
        _plain(name, function, onnx, what, inputs, "Tensor of the broadcast shape, of the dtype of a", _binary(onnx))
    for name, (function, onnx, what, x) in _COMPARISON.items():
        inputs = {"a": f"{x}.", "b": "Tensor of the dtype of a; the shapes broadcast."}
        _plain(name, function, onnx, what, inputs, "bool Tensor of the broadcast shape", _binary(onnx))
    for name, (function, onnx, what, _) in _LOGICAL.items():
        inputs = {
            "a": "Tensor of bool, or of numbers, of which those other than 0 count as true; any shape.",
            "b": "Tensor as a; the shapes broadcast.",
        }
        _plain(name, function, onnx, what, inputs, "bool Tensor of the broadcast shape", _logical(onnx))


def _unary(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, x: Any) -> Tensor:
        return op.call(onnx, (x,), {}, 1)[0]

    return body


def _binary(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, a: Any, b: Any) -> Tensor:
        return op.call(onnx, (a, b), {}, 1)[0]

    return body


def _logical(onnx: str) -> Callable[..., Tensor]:
    def body(op: TensorOp, a: Any, b: Any) -> Tensor:
        return op.call(onnx, (true(op, a), true(op, b)), {}, 1)[0]

    return body


def _plain(
    name: str, function: str, onnx: str, what: str, inputs: dict[str, str], output: str, body: Callable[..., Tensor]
) -> None:
    summary, _, rest = what.partition("  ")
    args = "".join(f"    {n}: {text}\n" for n, text in inputs.items())
    raises = "Raises:\n    ValueError: The shapes cannot be broadcast.\n" if "b" in inputs else ""
    body.__name__ = function
    body.__doc__ = (
        f"{summary}\n\nElement by element.{'  ' * bool(rest)}{rest}  Source: ONNX {onnx}.\n\n"
        f"Args:\n{args}\nReturns:\n    {output}.\n\n{raises}"
    )
    globals()[function] = formula(name)(body)


_declare_plain()


@formula("Not")
def _not(op: TensorOp, x: Any) -> Tensor:
    """Compute the logical negation of x.

    Element by element. It has no gradient. Source: ONNX Not.

    Args:
        x: Tensor of bool, or of numbers, of which those other than 0 count as true; any shape.

    Returns:
        bool Tensor of the shape of x.
    """
    return op.Not(true(op, x))


@formula("Round")
def round(op: TensorOp, x: Any) -> Tensor:
    """Round x to the nearest integer, halves away from zero.

    Element by element. It has no gradient.  `rounde` rounds halves to the even integer. Source: sign(x) floor(|x| + 0.5).

    Args:
        x: Tensor of a float dtype, any shape.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Mul(op.Sign(x), op.Floor(op.Add(op.Abs(x), 0.5)))


# --- activations ------------------------------------------------------------------------------------------------------


@formula("Elu")
def elu(op: TensorOp, x: Any, *, alpha: float = 1.0) -> Tensor:
    """The exponential linear unit: x if x > 0, otherwise alpha (exp(x) - 1).

    Element by element. Source: ONNX Elu.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The factor of the negative part.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Elu(x, alpha=alpha)


@formula("SeLU")
def selu(op: TensorOp, x: Any, *, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    """The scaled exponential linear unit: gamma x if x > 0, otherwise gamma alpha (exp(x) - 1).

    Element by element. Source: ONNX Selu.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The factor of the negative part.
        gamma: The factor of the result.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Selu(x, alpha=alpha, gamma=gamma)


@formula("LeakyRelu")
def leakyrelu(op: TensorOp, x: Any, *, a: float = 0.01) -> Tensor:
    """The leaky rectified linear unit: x if x >= 0, otherwise a x.

    Element by element. Source: ONNX LeakyRelu.

    Args:
        x: Tensor of a float dtype, any shape.
        a: The slope of the negative part, ONNX's alpha.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.LeakyRelu(x, alpha=a)


@formula("HardSigmoid")
def hardsigmoid(op: TensorOp, x: Any, *, alpha: float = 0.2, gamma: float = 0.5) -> Tensor:
    """The hard sigmoid: max(0, min(1, alpha x + gamma)).

    Element by element. Source: ONNX HardSigmoid.

    Args:
        x: Tensor of a float dtype, any shape.
        alpha: The slope.
        gamma: The value at 0, ONNX's beta.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.HardSigmoid(x, alpha=alpha, beta=gamma)


@formula("PRelu")
def prelu(op: TensorOp, x: Any, slope: Any) -> Tensor:
    """The parametric rectified linear unit: x if x >= 0, otherwise slope x.

    Element by element. Source: ONNX PRelu.

    Args:
        x: Tensor of a float dtype, any shape.
        slope: Tensor of the dtype of x; the shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    wide, narrow = op.shape(x), op.shape(slope)
    if wide is not None and narrow is not None and not _broadcasts_to(narrow, wide):  # ONNX broadcasts the slope only
        x = op.Expand(x, op.Shape(slope))
    return op.PRelu(x, slope)


def _broadcasts_to(shape: Sequence[Any], wide: Sequence[Any]) -> bool:
    pairs = zip(reversed(shape), reversed(wide), strict=False)
    return len(shape) <= len(wide) and all(a in (1, b) for a, b in pairs)


@formula("Clip")
def clip(op: TensorOp, x: Any, *, min: float | None = None, max: float | None = None) -> Tensor:
    """Limit x to [min, max].

    Element by element. Source: ONNX Clip.

    Args:
        x: Tensor of a numeric dtype, any shape.
        min: The lower bound; None for no bound.
        max: The upper bound; None for no bound.

    Returns:
        Tensor of the shape and dtype of x.
    """
    return op.Clip(x, min, max)


# --- several tensors --------------------------------------------------------------------------------------------------


@formula("Sum")
def sum(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The sum of tensors, element by element.

    Source: ONNX Sum.

    Args:
        *l: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Sum(*l)


def add_all(*xs: Tensor) -> Tensor:
    """The sum of tensors, element by element; the same as `sum`.

    Source: ONNX Sum.

    Args:
        *xs: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        InvalidInput: An input is not a Tensor, or the inputs are on different devices.
        OperatorError: The dtypes of the inputs differ.
        TypeError: There are no inputs.
        ValueError: The shapes cannot be broadcast.
    """
    return sum(*xs)


@formula("Mean")
def mean(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The mean of tensors, element by element.

    Source: ONNX Mean.

    Args:
        *l: One or more Tensors of one float dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Mean(*l)


@formula("Max")
def max(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The maximum of tensors, element by element.

    Inputs that are equal share the gradient. Source: ONNX Max.

    Args:
        *l: One or more Tensors of one numeric dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Max(*l)


@formula("Min")
def min(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The minimum of tensors, element by element.

    Inputs that are equal share the gradient. Source: ONNX Min.

    Args:
        *l: One or more Tensors of one numeric dtype; their shapes broadcast.

    Returns:
        Tensor of the broadcast shape, of the dtype of the inputs.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Min(*l)


@formula("Where", "x", "y", "condition")
def where(op: TensorOp, x: Any, y: Any, *, condition: Any) -> Tensor:
    """Select x where a condition holds, otherwise y.

    Element by element. Source: ONNX Where. No gradient flows to `condition`.

    Args:
        x: Tensor of any dtype and shape.
        y: Tensor of the dtype of x; the three shapes broadcast.
        condition: Tensor or array of bool, or of numbers, of which those other than 0 count as true.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    condition = condition if op.is_value(condition) else op.constant(condition)
    return op.Where(true(op, condition), x, y)


@formula("Cast")
def cast(op: TensorOp, x: Any, *, to: Any) -> Tensor:
    """Cast x to another dtype.

    Between float dtypes the gradient is cast back; other casts have no gradient. Source: ONNX Cast.

    Args:
        x: Tensor of any dtype and shape.
        to: A constant of `tensor` such as `tensor.float32`, "int" (int32), "float" (float32), or a NumPy dtype.

    Returns:
        Tensor of the shape of x, of the dtype `to`.

    Raises:
        InvalidInput: `to` is not a dtype, or ONNX does not have it.
    """
    return op.Cast(x, to=dtypes.onnx_code(dtype_of(to)))
