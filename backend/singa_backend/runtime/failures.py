"""Typed errors for exceptions that the code of an operator raises: its body, an adapter, a decomposition, a gradient rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import dtypes, limits
from ..errors import OperatorError, ResourceExhausted, SonnxError

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (IndexError, "SX401"), (ZeroDivisionError, "SX403"), (OverflowError, "SX405"), (TypeError, "SX406"), (ValueError, "SX404"),
)  # fmt: skip


def typed_error(error: Exception, op_type: str) -> SonnxError:
    """The error of this package for an exception that the code of an operator raised.

    Args:
        error: the exception.
        op_type: the operator.

    Returns:
        The exception itself if it is a SonnxError; ResourceExhausted for a shortage of memory or stack, or a rank that the array
        module does not support; otherwise OperatorError, whose code depends on the class of the exception.
    """
    if isinstance(error, SonnxError):
        return error
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"out of memory: {error}", code="SX601")
    if isinstance(error, RecursionError):
        return ResourceExhausted("graphs nest too deeply for Python's stack", code="SX602")
    if "maximum supported dimension" in str(error):
        return limits.too_many_dimensions(str(error))
    code = next((c for kind, c in _CODES if isinstance(error, kind)), "SX400")
    return OperatorError(f"{op_type} cannot compute with its inputs: {error}", code=code)


@contextmanager
def rule_errors(op_type: str, **where: Any) -> Iterator[None]:
    """A context in which every exception of a rule becomes a typed error, located as the executor's are.

    Args:
        op_type: the operator of the rule.
        **where: fields of the error, as for `SonnxError.locate`.
    """
    try:
        yield
    except SonnxError:
        raise
    except Exception as error:
        raise typed_error(error, op_type).locate(operator=op_type, **where) from error


def types_of(inputs: Sequence[Any]) -> dict[str, Any]:
    """The fields of an error that describe the inputs of a node."""
    known = [v for v in inputs if v is not None]
    return {"dtypes": tuple(_dtype(v) for v in known), "shapes": tuple(getattr(v, "shape", None) for v in known)}


def _dtype(value: Any) -> str:
    if hasattr(value, "dtype"):
        return dtypes.onnx_name(value.dtype)
    return "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else type(value).__name__
