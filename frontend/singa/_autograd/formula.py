"""What an operator of the API is: a formula in ONNX's operators, as a class and as a function.

    @formula("Cube")
    def cube(op, x, *, by=1.0):          tensors before the star, options behind it
        return op.Mul(op.Mul(op.Mul(x, x), x), by)

makes `Cube(by)(x)[0]` and `cube(x, by)`, on the tape as the ONNX nodes that it consists of.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter
from singa_backend.interpreters.eager import Eager

from .._core.tape import Operator
from .._core.tensor import Tensor
from .._core.tensor import op as recorder

R = TypeVar("R")

TensorOp: TypeAlias = Interpreter[Tensor]
"""ONNX's operators as a formula takes them."""


class Formula(Operator):
    """An operator that is written in ONNX's operators: calling it on tensors leaves their nodes on the tape."""

    formula: Callable[..., Any]
    options: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if len(args) > len(self.options):
            raise TypeError(
                f"{type(self).__name__} takes {len(self.options)} arguments ({', '.join(self.options)}); {len(args)} were given"
            )
        given = dict(zip(self.options, args, strict=False))
        unknown = [n for n in kwargs if n not in self.options or n in given]
        if unknown:
            raise TypeError(
                f"{type(self).__name__} does not take {unknown[0]!r}; it takes {', '.join(self.options) or 'nothing'}"
            )
        self.given = {**given, **kwargs}
        self._tape: Any = None

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        """The results for these tensors, as a tuple; raises InvalidInput for what is no tensor."""
        for x in xs:
            if not isinstance(x, Tensor) and x is not None:
                raise InvalidInput(f"{type(self).__name__} takes tensors; it was given a {type(x).__name__}", code="SX311")
        made = type(self).formula(recorder, *xs, **self.given)
        return made if isinstance(made, tuple) else (made,)

    def forward(self, *xs: Any) -> Any:
        """On arrays: the result, or a tuple of results."""
        device = next((d for d in map(device_of, xs) if not d.is_host), None)
        record = Tape(Eager(device))
        variables = [record.variable(x if hasattr(x, "dtype") else np.asarray(x)) for x in xs]
        made = type(self).formula(record, *variables, **self.given)
        ys = made if isinstance(made, tuple) else (made,)
        self._tape = (record, variables, ys)
        return ys[0].raw if len(ys) == 1 else tuple(y.raw for y in ys)

    def backward(self, *dys: Any) -> Any:
        """On arrays, after `forward`: the gradients of its inputs, one or a tuple."""
        record, variables, ys = self._tape
        here = device_of(ys[0].raw)
        given = [
            d.astype(y.raw.dtype) if here.xp.isarray(d) else here.put(np.asarray(d, y.raw.dtype))
            for d, y in zip(dys or (1.0,), ys, strict=False)
        ]
        found = record.gradients(ys, given, variables)
        return found[0] if len(found) == 1 else tuple(found)


def formula(name: str, *order: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Declare an operator: `f(op, <tensors>, *, <options>)` makes the class `name` and gives the public function.

    The function takes the tensors and then the options, or its arguments in the `order` given.
    """

    def declare(function: Callable[..., R]) -> Callable[..., R]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        variadic = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        tensors = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        options = tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        names = list(order) or [*tensors, *options]
        made = type(
            name,
            (Formula,),
            {"formula": staticmethod(function), "options": options, "__doc__": function.__doc__, "__module__": "singa.autograd"},
        )
        home: Any = sys.modules[function.__module__]
        setattr(home, name, made)

        def public(*args: Any, **kwargs: Any) -> Any:
            if variadic:
                return _one(made(**kwargs)(*args))
            if len(args) > len(names):
                raise TypeError(f"{function.__name__} takes {', '.join(names)}; {len(args)} arguments were given")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            chosen = {n: v for n, v in given.items() if n not in tensors}
            return _one(made(**chosen)(*(given[n] for n in tensors if n in given)))

        public.__name__ = public.__qualname__ = function.__name__
        public.__doc__ = function.__doc__
        home.__all__.extend([name, function.__name__])
        return public

    return declare


def _one(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


# --- what several of them need ----------------------------------------------------------------------------------------


def true(op: TensorOp, x: Any) -> Tensor:
    """Truth values, of numbers whether they are not zero."""
    return x if op.dtype(x) == np.bool_ else op.Cast(x, to=dtypes.onnx_code(np.bool_))


def known_shape(op: TensorOp, x: Any) -> tuple[Any, ...]:
    """The shape of a tensor whose rank is known."""
    shape = op.shape(x)
    assert shape is not None
    return shape


def whole(op: TensorOp, x: Any) -> Tensor:
    """Indices as int64: SINGA's programs have them as floats too."""
    if not op.is_value(x):
        return op.constant(x, np.int64)
    return x if op.dtype(x) in (np.int32, np.int64) else op.Cast(x, to=dtypes.onnx_code(np.int64))
