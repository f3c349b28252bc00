"""Compare our outputs with those of a witness in ulps, by the rules of the registry of tolerances.

The allowed difference of two floats is `ulps` steps of the expected value, plus `norm` steps of the largest summand of the
result (for operators that sum: cancellation leaves an error of that size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import dtypes
from ...comparison import verdict
from ...comparison.tolerances import Allowance
from .strategies import float_info

HALVES = {"float16", "bfloat16"}


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison.  why: "" if they agree; kind: "length", "kind", "dtype", "shape" or "values"."""

    why: str = ""
    kind: str = ""
    ulps: float | None = None


def compare(
    actual: list[Any], expected: list[Any], rule: Allowance, scale: float, slack: float = 1.0, dtype: Any = None
) -> ComparisonResult:
    """Compare our outputs with a witness's.

    Args:
        actual: Our outputs.
        expected: The witness's outputs.
        rule: That of the operator.
        scale: The bound of the summands; see `magnitude`.
        slack: Multiplies the tolerance, for a ledger entry with a bound.
        dtype: The dtype that the witness computed in, if not the result's; its steps then count.
    """
    if len(actual) != len(expected):
        return ComparisonResult(f"{len(actual)} outputs, the witness has {len(expected)}", "length")
    worst: float | None = None
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        found = _one(a, e, rule, scale, slack, dtype, f"output {i}")
        if found.why:
            return found
        if found.ulps is not None:
            worst = max(worst or 0.0, found.ulps)
    return ComparisonResult(ulps=worst)


def _one(a: Any, e: Any, rule: Allowance, scale: float, slack: float, dtype: Any, where: str) -> ComparisonResult:
    if isinstance(e, (list, tuple)) or isinstance(a, (list, tuple)):
        if not isinstance(a, (list, tuple)) or not isinstance(e, (list, tuple)):
            return ComparisonResult(f"{where}: a {type(a).__name__}, the witness has a {type(e).__name__}", "kind")
        if len(a) != len(e):
            return ComparisonResult(f"{where}: length {len(a)}, the witness has {len(e)}", "length")
        found = [_one(x, y, rule, scale, slack, dtype, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, e, strict=True))]
        return next(
            (f for f in found if f.why), ComparisonResult(ulps=max((f.ulps for f in found if f.ulps is not None), default=None))
        )
    if isinstance(e, dict):
        if not isinstance(a, dict) or set(a) != set(e):
            return ComparisonResult(f"{where}: other keys", "kind")
        return _one(np.array([a[k] for k in e]), np.array(list(e.values())), rule, scale, slack, dtype, where)
    if a is None or e is None:
        return ComparisonResult() if a is e else ComparisonResult(f"{where}: one of them is absent", "kind")
    e = np.asarray(e)
    if e.dtype.kind in "US":
        e = e.astype(object)
    if a.dtype != e.dtype:
        return ComparisonResult(f"{where}: {a.dtype}, the witness has {e.dtype}", "dtype")
    if a.shape != e.shape:
        return ComparisonResult(f"{where}: shape {list(a.shape)}, the witness has {list(e.shape)}", "shape")
    close = _close(a, e, rule, scale, slack, dtype)
    ulps = verdict.ulps(a, e)
    if close.all():
        return ComparisonResult(ulps=ulps)
    at = tuple(int(i) for i in np.argwhere(~close)[0]) if close.ndim else ()
    where += str(list(at)) if at else ""
    return ComparisonResult(
        f"{where}: {a[at]!s}, the witness has {e[at]!s} ({int((~close).sum())} of {close.size})", "values", ulps
    )


def _close(a: np.ndarray, e: np.ndarray, rule: Allowance, scale: float, slack: float, dtype: Any) -> np.ndarray:
    if a.dtype == dtypes.STRING:
        return np.asarray(a == e)
    if a.dtype.kind == "c":
        parts = ((a.real, e.real), (a.imag, e.imag))
        return np.asarray(np.logical_and(*(_close(x, y, rule, scale, slack, dtype) for x, y in parts)))
    if not dtypes.is_float(a.dtype):
        if not rule.steps or a.dtype == np.bool_:
            return np.asarray(a == e)
        return np.asarray(verdict.apart(a, e) <= rule.steps)
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), e.astype(np.float64)
        eps, tiny, most = limits(a.dtype)
        step = max(eps, limits(np.dtype(dtype))[0] if dtype is not None else 0.0)
        step = max(step, limits(np.dtype(np.float32))[0]) if rule.single else step
        ulps = max(rule.ulps, 1.0 if dtype is not None else 0.0)  # converting back rounds, even a value that is only moved
        allowed = slack * step * (ulps * np.maximum(np.abs(y), tiny) + rule.norm * scale)
        if ulps:
            allowed = np.maximum(allowed, tiny * eps)  # a subnormal may be flushed or rounded to its neighbour
            allowed = np.maximum(allowed, eps * np.abs(y) * (1 if a.dtype.name in HALVES else 0))
        near = np.abs(x - y) <= allowed
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        # an overflow: infinity in one value, and a number near the largest one in the other
        over = (np.isinf(x) ^ np.isinf(y)) & (np.minimum(np.abs(x), np.abs(y)) >= most * (1 - 64 * step * slack)) & (x * y > 0)
        return np.asarray(same | near | (over & (ulps > 0)))


def limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """Return the relative step, the smallest normal number and the largest number of a float dtype."""
    info = float_info(dtype)
    return float(info.eps), float(info.tiny), float(info.max)


def magnitude(inputs: list[Any], power: int) -> float:
    """Return a bound of the summands of an operator that sums products: the product of its inputs' largest values."""
    total = 1.0
    for value in inputs:
        for x in value if isinstance(value, list) else [value]:
            if x is None or not (dtypes.is_float(x.dtype) or x.dtype.kind == "c"):
                continue
            with np.errstate(all="ignore"):
                wide = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
            finite = wide[np.isfinite(wide)]
            total *= max(1.0, float(finite.max(initial=0.0)) ** power)
    return min(total, 1e300)
