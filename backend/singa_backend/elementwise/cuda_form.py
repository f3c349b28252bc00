"""The statements of CUDA C++ that compute the terms of an expression, with the bits of CuPy's functions.

The text of a primitive is that of CuPy's function of the same name, so a kernel of several primitives has the bits of one kernel
for each.  It must be compiled with `--fmad=false`: a product and a sum are rounded apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .expression import Term, is_aligned, order

_TYPES = {
    np.dtype(kind): name
    for kind, name in (
        ("?", "bool"), ("b", "signed char"), ("h", "short"), ("i", "int"), ("q", "long long"), ("B", "unsigned char"),
        ("H", "unsigned short"), ("I", "unsigned"), ("Q", "unsigned long long"), ("f", "float"), ("d", "double"),
    )
}  # fmt: skip

_ANY = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "max": "max({0}, {1})", "min": "min({0}, {1})", "fmax": "max({0}, {1})", "fmin": "min({0}, {1})",
    "where": "{0} ? {1} : {2}", "cast": "{0}",
}  # fmt: skip
_NUMBERS = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "-{0}"}
_WHOLE = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "floor": "{0}", "ceil": "{0}", "trunc": "{0}",
          "isnan": "false", "isinf": "false", "isfinite": "true"}  # fmt: skip
_FUNCTIONS = (
    "floor ceil rint trunc sqrt exp expm1 log log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh isnan isinf "
    "isfinite signbit erf erfc"
)
_RAISED = "({0} >= {1} || {0} != {0} ? {0} : {1})"
_OF_KIND: dict[str, dict[str, str]] = {
    "f": {
        **_ANY, **_NUMBERS, **{name: f"{name}({{0}})" for name in _FUNCTIONS.split()},
        **{name: f"{name}({{0}}, {{1}})" for name in ("fmax", "fmin", "copysign")},
        **{name: f"(isnan({{0}}) | isnan({{1}})) ? {{T}}(NAN) : {{T}}({name}({{0}}, {{1}}))" for name in ("max", "min")},
        "div": "{0} / {1}", "abs": "fabs{f}({0})", "pow": "pow{f}({0}, {1})", "fmod": "fmod{f}({0}, {1})",
        "sign": "{0} < 0 || {0} > 0 ? copysign({T}(1), {0}) : {0} - {0}",
        "clip": f"{_RAISED} <= {{2}} || {_RAISED} != {_RAISED} ? {_RAISED} : {{2}}",
    },
    "i": {**_ANY, **_NUMBERS, **_WHOLE, "not": "~{0}", "abs": "{0} > 0 ? {0} : -{0}", "sign": "({0} > 0) - ({0} < 0)"},
    "b": {**_ANY, **_WHOLE, "add": "{0} | {1}", "mul": "{0} & {1}", "not": "!{0}", "abs": "{0}"},
}  # fmt: skip
_OF_KIND["u"] = _OF_KIND["i"]
"""The text of each primitive by the kind of its last operand; T is the type of the result, f the suffix of float32 functions."""


class NotWritten(Exception):
    """An expression has no text for CUDA; the message names the reason."""


@dataclass(frozen=True)
class CudaForm:
    """Statements that compute y0, y1, ... from a0, a1, ...

    Attributes:
        text: the statements.
        leaves: what a0, a1, ... are: inputs, inputs in another shape, and numbers that the compiler must not know.
    """

    text: str
    leaves: tuple[Term, ...]


def cuda_form(results: Sequence[Term]) -> CudaForm:
    """The statements for the elements of terms.

    Raises:
        NotWritten: a primitive or a dtype has no text.
    """
    names: dict[int, str] = {}
    leaves: list[Term] = []
    lines: list[str] = []
    unknown = {id(t.args[1]) for t in order(results) if _folds(t)}
    for t in order(results, operands=lambda t: () if _is_view(t) else t.args):
        if t.dtype not in _TYPES:
            raise NotWritten(f"elements of {t.dtype}")
        if t.op == "input" or id(t) in unknown or _is_view(t):
            names[id(t)] = f"a{len(leaves)}"
            leaves.append(t)
        elif t.op == "const":
            names[id(t)] = _literal(t.number, t.dtype)
        elif t.op == "expand" or (t.op == "reshape" and _is_aligned(t)):
            names[id(t)] = names[id(t.args[0])]
        else:
            names[id(t)] = f"t{len(lines)}"
            lines.append(f"const {_TYPES[t.dtype]} t{len(lines)} = {_text(t, [names[id(a)] for a in t.args])};")
    lines += [f"y{i} = {names[id(r)]};" for i, r in enumerate(results)]
    return CudaForm("\n".join(lines), tuple(leaves))


def _is_view(t: Term) -> bool:
    return t.op == "reshape" and t.args[0].op == "input" and not _is_aligned(t)


def _is_aligned(t: Term) -> bool:
    """Whether a reshaped value broadcasts as its operand does."""
    return is_aligned(t, max(len(t.shape), len(t.args[0].shape)))


def _text(t: Term, args: Sequence[str]) -> str:
    """What a primitive computes."""
    if t.op == "poly":
        *lower, text = (_literal(c, t.dtype) for c in t.extra)
        for c in lower[:0:-1]:
            text = f"({text} * {args[0]} + {c})"
        return f"{text} * {args[0]} + {lower[0]}"
    kind = t.args[-1].dtype.kind if t.args else ""
    text = _OF_KIND.get(kind, {}).get(t.op, "")
    if not text or (t.op == "cast" and kind == "f" and t.dtype.kind in "iu"):  # CUDA saturates where NumPy wraps
        raise NotWritten(f"{t.op} of {t.args[-1].dtype if t.args else t.dtype} as {t.dtype}")
    return text.format(*args, T=_TYPES[t.dtype], f="f" if t.dtype == np.float32 else "")


def _folds(t: Term) -> bool:
    """Whether a compiler may replace a function of x and a number: x * 1 makes a subnormal float32 zero, x does not."""
    if len(t.args) != 2 or t.args[1].op != "const" or t.dtype.kind != "f":
        return False
    n = t.args[1].number
    return t.op == "pow" or (t.op in ("mul", "div") and abs(n) == 1) or (t.op in ("add", "sub") and n == 0)


def _literal(number: Any, dtype: np.dtype[Any]) -> str:
    if dtype.kind != "f":
        return f"({_TYPES[dtype]}){int(number) % 2**64}ULL" if dtype.kind != "b" else str(bool(number)).lower()
    value = float(np.asarray(number, dtype))
    text = repr(value) if math.isfinite(value) else f"__longlong_as_double({np.float64(value).view(np.int64)})"
    return f"{_TYPES[dtype]}({text})"
