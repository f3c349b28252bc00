"""Operators of the API as formulas in ONNX operators, each available as a class and as a function.

    @formula("Cube")
    def cube(op, x, *, by=1.0):          tensors before the star, options after it
        return op.Mul(op.Mul(op.Mul(x, x), x), by)

makes `Cube(by)(x)[0]` and `cube(x, by)`.  Both record the ONNX nodes of the formula on the tape.  The docstring of the formula
documents the function; that of the class is derived from it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter
from singa_backend.interpreters.eager import Eager

from .._core import node
from .._core.tape import Operator
from .._core.tensor import Tensor
from .._core.tensor import op as recorder

R = TypeVar("R")

TensorOp: TypeAlias = Interpreter[Tensor]
"""The type of `op`, the first parameter of a formula."""

_RAISES = """\
    InvalidInput: An input is not a Tensor, or the inputs are on different devices.
    OperatorError: The shapes, dtypes or options are not valid for the ONNX operators.
    TypeError: An argument is missing or unknown.
"""
"""Errors of every operator; the docstring of a formula lists the others."""


class Formula(Operator):
    """An operator that is defined by a formula in ONNX operators; calling it records their nodes on the tape.

    The operator classes of `autograd`, such as `LeakyRelu`, derive from it.

    Args:
        *args: The options of the operator, in the order of its signature.
        **kwargs: Further options by name.

    Raises:
        TypeError: There are more arguments than options, or an option is unknown or passed twice.
    """

    _formula: Callable[..., Any]
    _options: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        name, options = type(self).__name__, ", ".join(self._options) or "nothing"
        if len(args) > len(self._options):
            raise TypeError(f"{name} takes at most {len(self._options)} arguments ({options}), got {len(args)}")
        chosen = dict(zip(self._options, args, strict=False))
        unknown = [n for n in kwargs if n not in self._options or n in chosen]
        if unknown:
            twice = unknown[0] in chosen
            raise TypeError(
                f"{name} got {unknown[0]!r} twice" if twice else f"{name} does not take {unknown[0]!r}; it takes {options}"
            )
        self._chosen = {**chosen, **kwargs}
        self._tape: Any = None

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        """Compute the results for these tensors.

        Args:
            *xs: The input Tensors; None for an optional input that is absent.

        Returns:
            The results, as a tuple of Tensors.

        Raises:
            InvalidInput: An input is not a Tensor, or the inputs are on different devices.
            OperatorError: The shapes, dtypes or options are not valid for the ONNX operators.
        """
        for x in xs:
            if not isinstance(x, Tensor) and x is not None:
                raise InvalidInput(f"every input of {type(self).__name__} must be a Tensor, got {type(x).__name__}", code="SX311")
        start = node.start_of_call()
        made = type(self)._formula(recorder, *xs, **self._chosen)
        ys = made if isinstance(made, tuple) else (made,)
        node.end_of_call(start, xs, ys)
        return ys

    def forward(self, *xs: Any) -> Any:
        """Compute the results on arrays and record them for `backward`.

        Args:
            *xs: The inputs: arrays, or what NumPy makes arrays of.

        Returns:
            The result, or a tuple of results, as arrays on the device of the inputs.

        Raises:
            OperatorError: The shapes, dtypes or options are not valid for the ONNX operators.
        """
        device = next((d for d in map(device_of, xs) if not d.is_host), None)
        record = Tape(Eager(device))
        variables = [record.variable(x if hasattr(x, "dtype") else np.asarray(x)) for x in xs]
        made = type(self)._formula(record, *variables, **self._chosen)
        ys = made if isinstance(made, tuple) else (made,)
        self._tape = (record, variables, ys)
        return ys[0].raw if len(ys) == 1 else tuple(y.raw for y in ys)

    def backward(self, *dys: Any) -> Any:
        """Compute the gradients of the inputs of the last `forward`, on arrays.

        Args:
            *dys: The gradient of each result, of its shape; 1.0 if there are none.

        Returns:
            The gradient of the input, or a tuple with one for each input; None for an input without a gradient.

        Raises:
            TypeError: `forward` was not called before.
        """
        record, variables, ys = self._tape
        here = device_of(ys[0].raw)
        given = [
            here.cast(d, y.raw.dtype) if here.xp.isarray(d) else here.put(np.asarray(d, y.raw.dtype))
            for d, y in zip(dys or (1.0,), ys, strict=False)
        ]
        found = record.gradients(ys, given, variables)
        return found[0] if len(found) == 1 else tuple(found)


def formula(name: str, *order: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Declare an operator: `f(op, <tensors>, *, <options>)` makes the class `name` and returns the public function.

    The parameters of the public function are the tensors and then the options, or those named in `order`.
    """

    def declare(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        variadic = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        tensors = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        options = tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        names = list(order) or [*tensors, *options]
        function_doc, class_doc = _docs(function, [p.name for p in parameters if p.name not in options], options)

        def init(self: Formula, *args: Any, **kwargs: Any) -> None:
            Formula.__init__(self, *args, **kwargs)

        documented: Any = init
        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        documented.__name__, documented.__qualname__ = "__init__", f"{name}.__init__"
        documented.__signature__ = inspect.Signature([owner, *_positional(signature, options)], return_annotation="None")
        members = {"_formula": staticmethod(function), "_options": options, "__init__": init, "__doc__": class_doc}
        made = type(name, (Formula,), {**members, "__module__": "singa.autograd"})
        home: Any = sys.modules[function.__module__]
        setattr(home, name, made)

        def public(*args: Any, **kwargs: Any) -> Any:
            if variadic:
                return _one(made(**kwargs)(*args))
            if len(args) > len(names):
                raise TypeError(f"{function.__name__} takes at most {len(names)} arguments ({', '.join(names)}), got {len(args)}")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            chosen = {n: v for n, v in given.items() if n not in tensors}
            return _one(made(**chosen)(*(given[n] for n in tensors if n in given)))

        documented = public
        documented.__name__ = documented.__qualname__ = function.__name__
        documented.__doc__, documented.__module__ = function_doc, "singa.autograd"
        documented.__signature__ = signature.replace(parameters=parameters if variadic else _positional(signature, names))
        home.__all__.extend([name, function.__name__])
        return public

    return declare


def _one(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _positional(signature: inspect.Signature, names: Sequence[str]) -> list[inspect.Parameter]:
    """Parameters that may be passed by position; one that precedes a required one is shown without its default."""
    chosen = [signature.parameters[n].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    required = [i for i, p in enumerate(chosen) if p.default is p.empty]
    return [p.replace(default=p.empty) if required and i < required[-1] else p for i, p in enumerate(chosen)]


def _docs(function: Callable[..., Any], tensors: Sequence[str], options: Sequence[str]) -> tuple[str, str]:
    """The docstrings of the public function and of the class; the class takes the options only."""
    text, *rest = re.split(r"^(Args|Returns|Raises):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    items = re.findall(r"^    \S.*(?:\n     .*)*", sections.get("Args", ""), re.MULTILINE)
    call = (
        f"Calling the operator on the tensors ({', '.join(tensors)}) returns the results of\n"
        f"`{function.__name__}` as a tuple, and raises what that function raises."
    )
    own = "\n".join(item for item in items if item.split(":")[0].strip() in options)
    refused = "    TypeError: An argument is unknown or passed twice."
    raises = f"{sections.get('Raises', '').rstrip()}\n{_RAISES}".lstrip("\n")
    return (
        _joined(text, Args=sections.get("Args", ""), Returns=sections.get("Returns", ""), Raises=raises),
        _joined(f"{text.rstrip()}\n\n{call}", Args=own, Raises=refused),
    )


def _joined(text: str, **sections: str) -> str:
    return "\n\n".join([text.rstrip(), *(f"{n}:\n{body.rstrip()}" for n, body in sections.items() if body.strip())])


# --- helpers of several formulas --------------------------------------------------------------------------------------


def true(op: TensorOp, x: Any) -> Tensor:
    """Convert x to bool: True where a number is not zero."""
    return x if op.dtype(x) == np.bool_ else op.Cast(x, to=dtypes.onnx_code(np.bool_))


def known_shape(op: TensorOp, x: Any) -> tuple[Any, ...]:
    """The shape of a tensor whose rank is known."""
    shape = op.shape(x)
    assert shape is not None
    return shape


def whole(op: TensorOp, x: Any) -> Tensor:
    """Indices as int64; programs written for SINGA may pass floats."""
    if not op.is_value(x):
        return op.constant(x, np.int64)
    return x if op.dtype(x) in (np.int32, np.int64) else op.Cast(x, to=dtypes.onnx_code(np.int64))
