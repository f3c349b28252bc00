"""An elementwise expression: a graph of primitives, which a definition leaves when it is called with recorded arrays.

    traced = ExpressionTrace()
    x = traced.input(np.float32, (3, 4))
    y = gelu.body(traced.xp, x, approximate="none")     # y.term is the expression

NumPy's functions find a `Recorded` array by `__array_ufunc__`, so a definition that calls them, or the functions of `xp`, is
recorded as it is.  Equal terms are one term.  The primitives are NumPy's functions, with their rounding, and:

    input  const  cast  bits (a view as another dtype)  where  reshape, expand (axes of 1 only)  poly  reduce  size  position
    erf  erfc  clip (of a trace for a device, which has these functions; otherwise their definitions are traced)

A size is a term, never a constant, so that one kernel serves all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from ..devices.namespaces import Namespace
from ..dtypes import DTypeLike
from ..errors import OperatorError
from ..ir.sizes import broadcast_sizes

_SAME_NAME = (
    "floor ceil rint trunc sqrt exp expm1 log log1p sin cos tan sinh cosh tanh fmax fmin fmod sign copysign signbit isnan"
)

FUNCTIONS: dict[str, np.ufunc] = {name: getattr(np, name) for name in (*_SAME_NAME.split(), "isinf", "isfinite")} | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide, "mod": np.remainder,
    "pow": np.power, "neg": np.negative, "abs": np.absolute, "max": np.maximum, "min": np.minimum, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "not": np.invert,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
"""The function of NumPy that is each primitive."""

REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "any": np.logical_or,
}  # fmt: skip
"""The function of NumPy whose `reduce` is each reduction."""

_PRIMITIVES = {f.__name__: name for name, f in FUNCTIONS.items()} | {f"logical_{n}": n for n in ("and", "or", "xor", "not")}
_REDUCED_BY = {f.__name__: name for name, f in REDUCTIONS.items()}
FREE = frozenset(["input", "const", "expand", "reshape", "size"])
"""Terms that compute nothing: a view, a number, or a size."""

_ARGS: Callable[[Any], tuple[Any, ...]] = attrgetter("args")
_COMMUTES = frozenset(["add", "mul", "eq", "ne", "and", "or", "xor"])
_SPLITS = frozenset(["logical_and", "logical_or", "logical_xor", "logical_not"])


class NotTraced(Exception):
    """A definition asks for something that is not elementwise; the message names it."""


@dataclass(eq=False, slots=True)
class Term:
    """A primitive of an expression.

    Attributes:
        op: its name.
        args: the operands.
        dtype: of the result.
        shape: of the result in the trace.
        extra: the bytes of a constant; the place of an input; the coefficients of a polynomial from the lowest power to the
            highest; the kind and the axes of a reduction; the axes of a size; the axis
            of a position.
    """

    op: str
    args: tuple[Term, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    extra: Any = None

    @property
    def number(self) -> Any:
        """The value of a constant."""
        return np.frombuffer(self.extra, self.dtype)[0]

    @property
    def size(self) -> int:
        """The number of elements in the trace."""
        return math.prod(self.shape)


class Recorded(np.lib.mixins.NDArrayOperatorsMixin):
    """What a definition has in place of an array: an operation in place binds it to another term."""

    def __init__(self, trace: ExpressionTrace, term: Term) -> None:
        self.trace, self.term = trace, term

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        return self.term.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array in the trace."""
        return self.term.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.term.shape)

    @property
    def size(self) -> int:
        """The number of elements in the trace."""
        return self.term.size

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.term.dtype.itemsize

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method == "reduce" and ufunc.__name__ in _REDUCED_BY:
            kind = _REDUCED_BY[ufunc.__name__]
            return self.trace.reduce(kind, inputs[0], options.get("axis"), options.get("keepdims", False))
        if method != "__call__" or options or ufunc.__name__ not in _PRIMITIVES:
            raise NotTraced(f"{ufunc.__name__}.{method} {sorted(options)}")
        result = self.trace.ufunc(ufunc, *inputs)
        if out is None:
            return result
        out[0].term = self.trace.cast(result, out[0].dtype).term  # x += y, and out=x
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return getattr(self.trace.xp, function.__name__)(*args, **options)

    def astype(self, dtype: DTypeLike, copy: bool = True) -> Recorded:
        """As of an array."""
        return self.trace.cast(self, np.dtype(dtype))

    def copy(self) -> Recorded:
        """As of an array: what is done to the copy in place leaves the original."""
        return Recorded(self.trace, self.term)

    def view(self, dtype: DTypeLike) -> Recorded:
        """As of an array, for dtypes of equal size."""
        dtype = np.dtype(dtype)
        if dtype.itemsize != self.itemsize:
            raise NotTraced(f"view of {self.dtype} as {dtype}")
        return self.trace.term("bits", (self,), dtype, self.shape)

    def reshape(self, *shape: Any) -> Recorded:
        """As of an array, if axes of 1 are inserted or removed only."""
        return self.trace.reshape(self, shape[0] if len(shape) == 1 and np.iterable(shape[0]) else shape)

    def squeeze(self, axis: int) -> Recorded:
        """As of an array."""
        return self.trace.reshape(self, [n for i, n in enumerate(self.shape) if i != axis % self.ndim])

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        return self.trace.reduce("sum", self if dtype is None else self.astype(dtype), axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        return self.trace.reduce("max", self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        return self.trace.reduce("min", self, axis, keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        return self.trace.reduce("prod", self if dtype is None else self.astype(dtype), axis, keepdims)

    def any(self, axis: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        return self.trace.reduce("any", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Recorded:
        """As of an array."""
        made: Recorded = self.sum(axis, keepdims=keepdims) / self.trace.count(self, axis)
        return made

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else NotTraced(f"x.{name}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise NotTraced("an index")

    def __bool__(self) -> NoReturn:
        raise NotTraced("a branch on a value")

    def __iter__(self) -> NoReturn:
        raise NotTraced("an iteration")

    def __len__(self) -> NoReturn:
        raise NotTraced("a length")

    def __float__(self) -> NoReturn:
        raise NotTraced("a value on the host")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotTraced("a value on the host")


class ExpressionTrace:
    """The terms of an expression.

    Args:
        device: whether the expression is for CUDA, whose bits it must keep: erf, erfc and clip are functions of the device, of
            which the definitions have other bits, and x * 1 is not x: it makes a subnormal float32 zero.

    Attributes:
        xp: the namespace for definitions.
        checks: the terms that must be false everywhere, each with a function that returns the error.
        inputs: the terms of the inputs.
    """

    def __init__(self, device: bool = False) -> None:
        self.device = device
        self.checks: list[tuple[Term, Callable[[], OperatorError]]] = []
        self.inputs: list[Term] = []
        self.xp = RecordingNamespace(self)
        self._known: dict[Any, Term] = {}
        self._kept: list[Term] = []  # the keys have the addresses of terms

    def input(self, dtype: DTypeLike, shape: Iterable[int]) -> Recorded:
        """A further input."""
        self.inputs.append(Term("input", (), np.dtype(dtype), tuple(shape), len(self.inputs)))
        return Recorded(self, self.inputs[-1])

    def constant(self, number: Any, dtype: DTypeLike) -> Recorded:
        """A number."""
        with np.errstate(all="ignore"):
            return self.term("const", (), np.dtype(dtype), (), np.asarray(number).astype(dtype).tobytes())

    def count(self, x: Recorded, axis: Any) -> Recorded:
        """The number of elements along axes, in the dtype of an array of floats."""
        return self.term("size", (x,), x.dtype, (), _axes(x, axis))

    def term(self, op: str, args: Sequence[Recorded], dtype: np.dtype[Any], shape: Iterable[int], extra: Any = None) -> Recorded:
        """A term, or an equal one that was made before; constants are folded and identities removed."""
        terms = tuple(a.term for a in args)
        if op in _COMMUTES and terms[0].op == "const":  # constants second
            terms = terms[::-1]
        key = (op, tuple(map(id, terms)), dtype, shape := tuple(shape), extra)
        found = self._known.get(key)
        if found is None:
            new = Term(op, terms, dtype, shape, extra)
            self._kept.append(new)
            found = self._known[key] = self._simplified(new)
        return Recorded(self, found)

    def _simplified(self, t: Term) -> Term:
        """What has the same bits: a folded constant, or an operand; x + 0 and x * 0 are neither x nor 0 for every x."""
        if not t.args:
            return t
        first, last = t.args[0], t.args[-1]
        if t.shape == () and t.op in FUNCTIONS and all(a.op == "const" for a in t.args):
            with np.errstate(all="ignore"):
                return self.constant(FUNCTIONS[t.op](*(a.number for a in t.args)), t.dtype).term
        if len(t.args) == 2 and last.op == "const" and not self.device and (first.shape, first.dtype) == (t.shape, t.dtype):
            n = last.number
            if (t.op in ("mul", "div", "pow") and n == 1) or (t.op == "sub" and n == 0 and not np.signbit(n)):
                return first
        if t.op in ("neg", "not") and first.op == t.op:
            return first.args[0]
        if t.op == "where" and (t.args[1] is last or first.op == "const"):
            chosen = t.args[1] if first.op == "const" and first.number else last
            return chosen if chosen.shape == t.shape else t
        return t

    def operand(self, x: Any, dtype: np.dtype[Any]) -> Recorded:
        """An operand of a primitive: a recorded array, or a number."""
        if isinstance(x, Recorded):
            return self.cast(x, dtype)
        if np.size(x) != 1:
            raise NotTraced("an array that is no input")
        return self.constant(np.reshape(x, ()), dtype)

    def ufunc(self, function: np.ufunc, *inputs: Any) -> Recorded:
        """A function of NumPy; Python's numbers take the dtype of the arrays, as in NumPy."""
        kinds = [v.dtype if hasattr(v, "dtype") else np.dtype(bool) if type(v) is bool else type(v) for v in inputs]
        if function.__name__ in _SPLITS:
            wanted, result = [np.dtype(bool)] * len(inputs), np.dtype(bool)
        else:
            *wanted, result = function.resolve_dtypes((*kinds, None))
        args = [self.operand(v, d) for v, d in zip(inputs, wanted, strict=True)]
        return self.term(_PRIMITIVES[function.__name__], args, result, _broadcast(*inputs))

    def cast(self, x: Recorded, dtype: np.dtype[Any]) -> Recorded:
        """The values in another dtype, as `astype`."""
        if dtype == x.dtype:
            return x
        if x.term.op == "const" and x.shape == ():
            return self.constant(x.term.number, dtype)
        return self.term("cast", (x,), dtype, x.shape)

    def reshape(self, x: Recorded, shape: Iterable[int]) -> Recorded:
        """The array with axes of 1 inserted or removed."""
        wanted = tuple(shape)
        rest = math.prod(n for n in wanted if n != -1)
        wanted = tuple(x.size // max(rest, 1) if n == -1 else n for n in wanted)
        if wanted == x.shape:
            return x
        if [n for n in wanted if n != 1] != [n for n in x.shape if n != 1]:
            raise NotTraced("a reshape that joins or splits axes")
        source = x.term.args[0] if x.term.op == "reshape" else x.term
        return (
            Recorded(self, source) if source.shape == wanted else self.term("reshape", (Recorded(self, source),), x.dtype, wanted)
        )

    def reduce(self, kind: str, x: Recorded, axis: Any, keepdims: bool) -> Recorded:
        """A reduction along axes, all by default."""
        axes = _axes(x, axis)
        kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        dtype = np.dtype(bool) if kind == "any" else x.dtype
        reduced = self.term("reduce", (x,), dtype, kept, (kind, axes)) if axes else x
        return reduced if keepdims else self.reshape(reduced, [n for i, n in enumerate(x.shape) if i not in axes])


class RecordingNamespace(Namespace):
    """The namespace of a trace: NumPy's functions record themselves, and these functions record what is a primitive."""

    records = True

    def __init__(self, trace: ExpressionTrace) -> None:
        self.trace, self.module, self.lib, self.ndarray = trace, np, np.lib, Recorded

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name, None)
        if isinstance(found, np.ufunc) or name in ("result_type", "broadcast_shapes", "iinfo", "finfo"):
            return found
        raise NotTraced(f"xp.{name}")

    def where(self, condition: Any, x: Any, y: Any) -> Recorded:
        dtype = np.result_type(*(v.dtype if hasattr(v, "dtype") else v for v in (x, y)))
        args = [self.trace.operand(v, d) for v, d in ((condition, np.dtype(bool)), (x, dtype), (y, dtype))]
        return self.trace.term("where", args, dtype, _broadcast(condition, x, y))

    def erf(self, x: Recorded) -> Any:
        return self._function("erf", x) if self.trace.device else super().erf(x)

    def erfc(self, x: Recorded) -> Any:
        return self._function("erfc", x) if self.trace.device else super().erfc(x)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        if self.trace.device and low is not None and high is not None:
            return self._function("clip", x, low, high)
        raised = x if low is None else np.maximum(x, low)
        return raised if high is None else np.minimum(raised, high)

    def _function(self, name: str, x: Recorded, *others: Any) -> Recorded:
        """A function of the device, of floats of one dtype and numbers."""
        alike = x.dtype.kind == "f" and all(isinstance(v, (int, float)) or v.dtype == x.dtype for v in others)
        if not alike:
            raise NotTraced(f"{name} of several dtypes, or of {x.dtype}")
        return self.trace.term(name, [self.trace.operand(v, x.dtype) for v in (x, *others)], x.dtype, _broadcast(x, *others))

    def asarray(self, x: Any, dtype: DTypeLike | None = None) -> Recorded:
        if isinstance(x, Recorded):
            return x if dtype is None else x.astype(dtype)
        if np.size(x) != 1:
            raise NotTraced("an array that is no input")
        return self.trace.constant(np.reshape(x, ()), np.asarray(x).dtype if dtype is None else dtype)

    def full(self, shape: Any, value: Any, dtype: DTypeLike | None = None) -> Recorded:
        number = self.asarray(value, dtype)
        return self.trace.term("expand", (number,), number.dtype, shape)

    def zeros(self, shape: Any, dtype: DTypeLike = float) -> Recorded:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: DTypeLike = float) -> Recorded:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Recorded) -> Recorded:
        return self.full(x.shape, 0, x.dtype)

    def ones_like(self, x: Recorded) -> Recorded:
        return self.full(x.shape, 1, x.dtype)

    def expand_dims(self, x: Recorded, axis: int) -> Recorded:
        shape = list(x.shape)
        shape.insert(axis % (x.ndim + 1), 1)
        return x.reshape(shape)

    def broadcast_to(self, x: Recorded, shape: Any) -> Recorded:
        return x if x.shape == tuple(shape) else self.trace.term("expand", (x,), x.dtype, shape)

    def polynomial(self, x: Recorded, coefficients: Sequence[float]) -> Recorded:
        return self.trace.term("poly", (x,), x.dtype, x.shape, tuple(map(float, coefficients)))

    def sum_over(self, x: Recorded, axes: tuple[int, ...], keepdims: bool = False) -> Recorded:
        return x.sum(axes, keepdims=keepdims)

    def count(self, x: Recorded, axes: tuple[int, ...]) -> Recorded:
        return self.trace.count(x, axes)

    def place_of(self, x: Recorded, pick: str, axis: int, last: bool) -> Recorded:
        """The first or the last place of what is equal to the maximum or the minimum, or NaN."""
        kind = np.dtype(np.int32 if x.shape[axis] < 1 << 31 else np.int64)
        there = x == getattr(x, pick)(axis, keepdims=True)
        there = there | np.isnan(x) if x.dtype.kind == "f" else there
        shape = [n if i == axis else 1 for i, n in enumerate(x.shape)]
        position = self.trace.term("position", (), kind, shape, axis)
        places = self.where(there, position, self.trace.constant(-1 if last else (1 << 8 * kind.itemsize - 1) - 1, kind))
        return (places.max if last else places.min)(axis).astype(np.int64)

    def refuse(self, bad: Any, error: Callable[[], OperatorError]) -> None:
        if isinstance(bad, Recorded):
            self.trace.checks.append((bad.term, error))
        elif np.any(bad):
            raise error()

    def isarray(self, x: Any) -> bool:
        return isinstance(x, Recorded)

    def from_host(self, a: np.ndarray) -> NoReturn:
        raise NotTraced("values of the host")

    def to_host(self, x: Any) -> np.ndarray:
        raise NotTraced("a value on the host")

    def scatter(self, out: Any, index: Any, values: Any, reduction: str = "none") -> None:
        raise NotTraced("xp.scatter")


def order(
    results: Iterable[Term], known: Container[int] = (), operands: Callable[[Term], tuple[Term, ...]] = _ARGS
) -> Sequence[Term]:
    """The terms on which results depend, operands first, without those whose ids are known."""
    return _order(tuple(results)) if not known and operands is _ARGS else _ordered(results, known, operands)


@lru_cache(maxsize=4096)
def _order(results: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(_ordered(results, (), _ARGS))


def _ordered(results: Iterable[Term], known: Container[int], operands: Callable[[Term], tuple[Term, ...]]) -> list[Term]:
    seen: dict[int, Term] = {}
    pending = [r for r in results if id(r) not in known][::-1]
    while pending:
        t = pending[-1]
        missing = [a for a in operands(t) if id(a) not in seen and id(a) not in known] if id(t) not in seen else []
        if missing:
            pending += missing[::-1]
        else:
            seen.setdefault(id(t), pending.pop())
    return list(seen.values())


def is_aligned(t: Term, rank: int) -> bool:
    """Whether a reshaped value broadcasts to a rank as its operand does."""
    source = t.args[0].shape
    return t.size == 1 or (1,) * (rank - len(source)) + source == (1,) * (rank - len(t.shape)) + t.shape


def _broadcast(*values: Any) -> tuple[int, ...]:
    return broadcast_sizes(*(getattr(v, "shape", ()) for v in values))


def _axes(x: Recorded, axis: Any) -> tuple[int, ...]:
    """The axes of a reduction, counted from the front, in order."""
    return tuple(range(x.ndim)) if axis is None else tuple(sorted(int(a) % x.ndim for a in np.atleast_1d(axis)))
