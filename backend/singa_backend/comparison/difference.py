"""Measure the difference of two values (absolute, relative, in ULP, of dtype and shape, in NaN and Inf) against a tolerance.

Long arrays are compared in blocks, so that the float64 copies stay small.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import dtypes
from . import verdict
from .tolerances import EQUAL, ErrorBound, in_model, narrowest, range_floor

BLOCK = 1 << 16
"""Elements that are compared at a time."""

_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Tolerance:
    """The tolerance |mine - theirs| <= atol + rtol * |theirs|.

    Attributes:
        rtol: the relative tolerance; None for that of the registry (docs/tolerances.md) for the dtype and the operators.
        atol: the absolute tolerance; None for rtol times the median magnitude of the finite non-zero elements, so that an element
            near zero is not compared more strictly than the others, but at least the floor of operators whose results have a
            bounded range.  For integers None is 0.
        operators: names of the operators from which the value has errors, those of other domains with their domain.
        dtype: the narrowest float dtype to which a value was rounded before, whose tolerance it has; None for its own.
        mixed: compare floats of different dtypes in the wider one, with the tolerance of the narrower one; otherwise the verdict
            of such values is "dtype".
    """

    rtol: float | None = None
    atol: float | None = None
    operators: frozenset[str] = frozenset()
    dtype: np.dtype[Any] | None = None
    mixed: bool = False

    def of(self, theirs: np.ndarray) -> tuple[float, float]:
        """Return the tolerances for a value.

        Args:
            theirs: the value that the other one is compared with, of any dtype and shape.

        Returns:
            The relative and the absolute tolerance.
        """
        bound = self.bound(theirs)
        return bound.rtol, bound.atol or 0.0

    def bound(self, theirs: np.ndarray, mine: np.dtype[Any] | None = None) -> ErrorBound:
        """Return the tolerances for a value, and where they come from.

        Args:
            theirs: the value that the other one is compared with, of any dtype and shape.
            mine: the dtype of the other value; None for that of `theirs`.

        Returns:
            The relative and the absolute tolerance, and the reason: the registry's, or that they were given.
        """
        dtype = theirs.dtype
        if dtypes.is_float(dtype):
            dtype = narrowest(d for d in (mine, self.dtype, dtype) if d is not None)
        if not (dtypes.is_float(dtype) or dtype.kind == "c"):
            return EQUAL if self.atol is None else ErrorBound(0.0, f"atol was given; otherwise {EQUAL.reason}", self.atol)
        known = in_model(dtype, self.operators)
        rtol = self.rtol if self.rtol is not None else known.rtol
        given = [name for name, value in (("rtol", self.rtol), ("atol", self.atol)) if value is not None]
        reason = known.reason
        if given:
            reason = f"{' and '.join(given)} {'were' if len(given) > 1 else 'was'} given; otherwise rtol {known.rtol:g}: {reason}"
        if self.atol is not None:
            return ErrorBound(rtol, reason, self.atol)
        return ErrorBound(rtol, reason, max(rtol * _magnitude(theirs), range_floor(dtype, self.operators)))


@dataclass(frozen=True)
class Difference:
    """The difference of two values; pairs have the first value's property first.

    Attributes:
        verdict: "agrees", "differs", "dtype", "shape" or "kind" (a sequence against a tensor, different lengths).
        dtypes: ONNX's names of the dtypes.
        shapes: the shapes; None for maps and None.
        max_abs: the maximum absolute difference of elements that are finite in both values; None if not defined.
        max_rel: the maximum relative difference of such elements; None if not defined.
        ulps: the maximum difference of such elements in units in the last place; None if not defined.
        rms: the root of the mean square of the errors of such elements, divided by that of the second value; None if not defined.
        excess: the maximum error as a multiple of the tolerance; infinite if NaN or Inf occurs in one value only.
        outside: the number of elements outside the tolerance.
        size: the number of elements.
        nan: the numbers of NaNs.
        inf: the numbers of infinite elements.
        at: the index of the element with the largest excess.
        mine: that element of the first value, as text.
        theirs: that element of the second value, as text.
        tolerance: the tolerance that applied, and its reason; None if no elements were compared.
    """

    verdict: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    max_abs: float | None = None
    max_rel: float | None = None
    ulps: float | None = None
    rms: float | None = None
    excess: float = 0.0
    outside: int = 0
    size: int = 0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    at: tuple[int, ...] = ()
    mine: str = ""
    theirs: str = ""
    tolerance: ErrorBound | None = None

    @property
    def agrees(self) -> bool:
        """Whether the values are equal within the tolerance."""
        return self.verdict == "agrees"

    @property
    def mixed(self) -> bool:
        """Whether floats of different dtypes were compared."""
        return self.dtypes[0] != self.dtypes[1] and self.tolerance is not None

    def __str__(self) -> str:
        if self.verdict in ("dtype", "shape", "kind"):
            sides = [d if s is None else f"{d}{list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True)]
            return f"{sides[0]} against {sides[1]}"
        if self.agrees:
            return "agrees"
        count = f"{self.outside} of {self.size} elements are outside the tolerance"
        return f"{self.mine} against {self.theirs} at {list(self.at)}; {count}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data.

        Returns:
            The fields by name; an infinite number is None, because JSON has none.
        """
        data = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


DEFAULT = Tolerance()


def difference(mine: Any, theirs: Any, tolerance: Tolerance = DEFAULT) -> Difference:
    """Compare two values of any kind.

    Args:
        mine: an array, a list, a map or None.
        theirs: the value that `mine` is compared with.
        tolerance: the tolerance for floats.

    Returns:
        The difference, also if dtypes, shapes or kinds differ.
    """
    if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
        return _arrays(mine, theirs, tolerance)
    names, shapes = (_kind(mine), _kind(theirs)), (_length(mine), _length(theirs))
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        parts = [difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)]
        return _together(parts, names, shapes)
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        parts = [difference(verdict.element(mine[k]), verdict.element(theirs[k]), tolerance) for k in mine]
        return _together(parts, names, shapes)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return Difference("kind", (verdict.brief(mine), verdict.brief(theirs)), (None, None), excess=math.inf)
    same = mine is None and theirs is None
    return Difference("agrees" if same else "kind", names, shapes, excess=0.0 if same else math.inf)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return dtypes.onnx_name(value.dtype)
    return "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else "none"


def _length(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, np.ndarray):
        shape: tuple[int, ...] = value.shape
        return shape
    return (len(value),) if isinstance(value, (list, dict)) else None


def _together(parts: list[Difference], names: tuple[str, str], shapes: Any) -> Difference:
    """The differences of a sequence's elements as one: the maximum of each figure."""
    if not parts:
        return Difference("agrees", names, shapes)
    worst = max(parts, key=lambda p: (not p.agrees, p.excess))
    if worst.verdict in ("dtype", "shape", "kind"):
        names, shapes = worst.dtypes, worst.shapes
    figures: dict[str, Any] = {}
    for f in ("max_abs", "max_rel", "ulps", "rms"):
        figures[f] = max((v for p in parts if (v := getattr(p, f)) is not None), default=None)
    counts: dict[str, Any] = {f: sum(getattr(p, f) for p in parts) for f in ("outside", "size")}
    counts |= {f: (sum(getattr(p, f)[0] for p in parts), sum(getattr(p, f)[1] for p in parts)) for f in ("nan", "inf")}
    return Difference(
        worst.verdict,
        names,
        shapes,
        **figures,
        **counts,
        excess=worst.excess,
        at=(parts.index(worst), *worst.at),
        mine=worst.mine,
        theirs=worst.theirs,
        tolerance=worst.tolerance,
    )


def _arrays(mine: np.ndarray, theirs: np.ndarray, tolerance: Tolerance) -> Difference:
    names = (dtypes.onnx_name(mine.dtype), dtypes.onnx_name(theirs.dtype))
    shapes = (mine.shape, theirs.shape)
    mixed = names[0] != names[1]
    if (mixed and not (tolerance.mixed and same_kind(mine.dtype, theirs.dtype))) or shapes[0] != shapes[1]:
        return Difference("dtype" if mixed else "shape", names, shapes, excess=math.inf)
    a, b = mine.reshape(-1), theirs.reshape(-1)
    bound = tolerance.bound(theirs, mine.dtype)
    rtol, atol = bound.rtol, bound.atol or 0.0
    floating = dtypes.is_float(mine.dtype) or mine.dtype.kind == "c"
    numeric = mine.dtype != dtypes.STRING
    total = _Total()
    with np.errstate(all="ignore"):
        for start in range(0, a.size, BLOCK):
            x, y = a[start : start + BLOCK], b[start : start + BLOCK]
            total.add(start, x, y, floating, numeric, rtol, atol)
    at = tuple(int(i) for i in np.unravel_index(total.at, mine.shape)) if mine.ndim and mine.size else ()
    shown = (str(a[total.at]), str(b[total.at])) if mine.size else ("", "")
    has = numeric and mine.size > 0
    return Difference(
        "differs" if total.outside else "agrees",
        names,
        shapes,
        max_abs=total.max_abs if has else None,
        max_rel=total.max_rel if has else None,
        ulps=None if mixed else total.ulps,
        rms=total.rms if has and (floating or mine.dtype.kind != "b") else None,
        excess=total.excess,
        outside=total.outside,
        size=mine.size,
        nan=(total.nan[0], total.nan[1]),
        inf=(total.inf[0], total.inf[1]),
        at=at,
        mine=shown[0],
        theirs=shown[1],
        tolerance=bound,
    )


class _Total:
    """The totals of the blocks compared so far."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = self.excess = 0.0
        self.ulps: float | None = None
        self.outside = self.at = 0
        self.nan, self.inf = [0, 0], [0, 0]
        self.squares = [0.0, 0.0]

    @property
    def rms(self) -> float | None:
        """The root of the mean square of the errors, divided by that of the second value."""
        error, size = self.squares
        return math.sqrt(error / size) if size > 0 and math.isfinite(error) else 0.0 if error == 0 else None

    def add(self, start: int, x: np.ndarray, y: np.ndarray, floating: bool, numeric: bool, rtol: float, atol: float) -> None:
        """Add a block that begins at `start`."""
        if not numeric:
            self.note(start, np.asarray(x != y).astype(np.float64) * math.inf)
            return
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        if x.dtype.kind != "c" and verdict.same_bits(x, y):
            self._same(x, floating)
            self.square(1, np.abs(y.astype(wide)))
            return
        p, q = x.astype(wide), y.astype(wide)
        error, size = np.abs(p - q), np.abs(q)
        if not floating:  # float64 does not represent integers beyond 2**53, but their differences to the same precision
            error = verdict.apart(x, y).astype(np.float64)
        bound = atol + rtol * size
        excess = np.divide(error, bound, out=np.zeros_like(error), where=error != 0)
        finite = np.isfinite(error)
        if not finite.all():
            finite &= np.isfinite(p) & np.isfinite(q)
            both = (np.isnan(p) & np.isnan(q)) | (p == q)
            excess[~finite] = np.where(both, 0.0, math.inf)[~finite]
            for side, v in enumerate((p, q)):
                self.nan[side] += int(np.isnan(v).sum())
                self.inf[side] += int(np.isinf(v).sum())
            error[~finite] = size[~finite] = 0.0
        self.square(0, error)
        self.square(1, size)
        self.max_abs = max(self.max_abs, float(error.max(initial=0.0)))
        relative = np.divide(error, size, out=np.zeros_like(error), where=(size > 0) & finite)
        self.max_rel = max(self.max_rel, float(relative.max(initial=0.0)))
        steps = verdict.steps(x, y, finite) if x.dtype == y.dtype else None
        if steps is not None:
            self.ulps = max(self.ulps or 0.0, steps)
        self.note(start, excess)

    def square(self, which: int, sizes: np.ndarray) -> None:
        """Add the squares of magnitudes, of the errors or of the second value."""
        self.squares[which] += float(np.square(sizes[np.isfinite(sizes)]).sum())

    def _same(self, x: np.ndarray, floating: bool) -> None:
        """Add a block whose bits are the same in both values: only elements that are not finite are counted."""
        if not floating:
            return
        if x.dtype.itemsize > 1:
            self.ulps = self.ulps or 0.0
        v = x if x.dtype.kind == "f" else x.astype(np.float32)
        if not np.isfinite(v).all():
            nan, inf = int(np.isnan(v).sum()), int(np.isinf(v).sum())
            self.nan = [n + nan for n in self.nan]
            self.inf = [n + inf for n in self.inf]

    def note(self, start: int, excess: np.ndarray) -> None:
        """Add the excesses of the elements of a block that begins at `start`."""
        if excess.size:
            i = int(excess.argmax())
            if float(excess[i]) > self.excess:
                self.excess, self.at = float(excess[i]), start + i
            self.outside += int((excess > 1).sum())


def _magnitude(x: np.ndarray) -> float:
    """The median magnitude of the finite non-zero elements, from at most 65,536 of them."""
    flat = x.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLE)]
    with np.errstate(all="ignore"):
        sizes = np.abs(sample.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    return float(np.median(sizes)) if sizes.size else 0.0


def same_kind(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Whether two dtypes are equal, or both real floats of 16 bits or more, or both complex; narrower floats are codes."""
    floats = all(dtypes.is_float(d) and d.itemsize > 1 for d in (a, b))
    return a == b or floats or a.kind == b.kind == "c"


def as_float(value: Any, dtype: np.dtype[Any] | None) -> Any:
    """A value in this dtype, if both are floats; otherwise as it is."""
    if dtype is None or not isinstance(value, np.ndarray) or value.dtype == dtype or not same_kind(value.dtype, dtype):
        return value
    with np.errstate(all="ignore"):
        return value.astype(dtype)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit."""
    return a is b or verdict.same_bits(a, b)


def bytes_of(value: Any) -> int:
    """The approximate memory of a value in bytes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes) * (8 if value.dtype == dtypes.STRING else 1)
    return sum(map(bytes_of, value)) if isinstance(value, list) else 64 * len(value) if isinstance(value, dict) else 64


__all__ = ["BLOCK", "Difference", "Tolerance", "as_float", "bytes_of", "difference", "same_bits", "same_kind"]
