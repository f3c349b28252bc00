"""What nearest neighbours need: distances from fixed points, the first few of many values, and their columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.graph import Graph
from ..proto.schemas import MICROSOFT
from .products import contiguous
from .scores import ML
from .table import Invalid, Site, kernel
from .values import FINITE, Bound, OpaqueValue, Value
from .vectors import Distances, block_of
from .views import axes_in, ints

_NEAR = 1e-12
"""A squared distance below this part of the square of the lengths is computed again from differences."""


@kernel("CDist", 1, on="numpy", domain=MICROSOFT)
def cdist(site: Site, a: Value, b: Value) -> Value:
    metric = site.attributes["metric"]
    site.require(metric in ("euclidean", "sqeuclidean"), "the metric is unknown")
    return _distances(site, a, b, metric == "euclidean")


def _distances(site: Site, a: Value, b: Value, root: bool) -> Value:
    site.require(a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1] and a.size and b.size, "not matrices with equal rows")
    site.require(a.dtype in (np.float32, np.float64) and a.dtype == b.dtype and b.constant, "the points are not constant")
    site.require_finite(a, b)
    points: Points = site.derived(b, "points", lambda: Points(b.array))
    rows, (count, features) = a.shape[0], b.shape
    z = site.new((rows, count), a.dtype, finiteness=FINITE)
    block = block_of(rows, count)
    room, d = site.new((block, features + 2), np.float64), site.new((block, count), np.float64)

    def bind() -> Bound:
        if block == rows:
            return points.calls(a.array, room.array, d.array, root, z.array)
        return [(points.distances, (a.array, room.array, d.array, root, z.array))]

    site.emit(bind, reads=(a,), writes=(z, room, d), kernel="numpy.distances", keeps=(points,))
    return z


@kernel("Scan", 9, 11, 16, 19, 21, 23, 24, 25, on="numpy")
def scan(site: Site, x: Value, *points: Value) -> tuple[Value, Value]:
    """The loop over points whose body computes the squared distances of all rows of x from one of them."""
    given = site.attributes
    site.require(len(points) == 1 and given["num_scan_inputs"] == 1 and _is_distance(given["body"]), "the body is not a distance")
    site.require(not any(v and any(v) for n, v in given.items() if n.startswith("scan_")), "other axes or directions")
    z = _distances(site, x, points[0], False)
    return x, z.view(z.shape[::-1], z.strides[::-1])


def _is_distance(body: Graph) -> bool:
    """Whether a body of inputs x and p returns x, and the sums of squares of the rows of x - p."""
    if len(body.inputs) != 2 or len(body.outputs) != 2 or body.captured:
        return False
    x, p = body.inputs
    total = _origin(body.outputs[1]).producer
    if _origin(body.outputs[0]) is not x or total is None or total.op_type != "ReduceSumSquare" or total.attributes["keepdims"]:
        return False
    apart = _origin(total.inputs[0]).producer
    if total.domain or apart is None or (apart.domain, apart.op_type) != ("", "Sub") or set(map(_origin, apart.inputs)) != {x, p}:
        return False
    axes = total.attributes.get("axes")
    if len(total.inputs) > 1:
        known = total.inputs[1].constant if total.inputs[1] is not None else None
        axes = None if known is None else known.tolist()
    return axes is not None and list(axes) in ([1], [-1])


def _origin(value: Any) -> Any:
    """The value of which Identity nodes return a copy."""
    while value.producer is not None and (value.producer.domain, value.producer.op_type) == ("", "Identity"):
        value = value.producer.inputs[0]
    return value


class Points:
    """Fixed points."""

    def __init__(self, points: np.ndarray) -> None:
        self.points = points
        self._products = Distances(points)
        self._longest = float(self._products.right[-2].max())

    def distances(self, x: np.ndarray, room: np.ndarray, d: np.ndarray, root: bool, z: np.ndarray) -> None:
        """Set z to the distances or squared distances of the rows of x, in blocks as `room` and `d` have rows."""
        block = len(room)
        for start in range(0, len(x), block):
            part = x[start : start + block]
            for function, arguments in self.calls(part, room[: len(part)], d[: len(part)], root, z[start : start + block]):
                function(*arguments)

    def calls(self, x: np.ndarray, room: np.ndarray, d: np.ndarray, root: bool, z: np.ndarray) -> Bound:
        """The calls that set z to the distances of the rows of x; `room` and `d` have a row for each."""
        made: list[Any] = [
            *self._products.calls(x, room, d),
            (self._compute_near, (x, room[:, -1], d)),
            (np.copyto, (z, d, "same_kind")),
        ]
        return [*made, (np.sqrt, (z, z))] if root else made

    def _compute_near(self, x: np.ndarray, squares: np.ndarray, d: np.ndarray) -> None:
        """Compute squared distances of nearly equal points from differences: equal points have the distance 0."""
        near = _NEAR * (self._longest + squares.max())
        if d.min() < near:
            i, j = np.nonzero(d < near)
            apart = x[i].astype(np.float64) - self.points[j]
            d[i, j] = np.vecdot(apart, apart)


# --- the first few of many


@kernel("TopK", 10, 11, 24, on="numpy")
def top_k(site: Site, x: Value, k: Value) -> tuple[Value, Value]:
    count = ints(site, k, "k")
    site.require(len(count) == 1, "k is not one number")
    return _top(site, x, count[0])


@kernel("TopK", 1, on="numpy")
def top_k_1(site: Site, x: Value) -> tuple[Value, Value]:
    return _top(site, x, site.attributes["k"])


def _top(site: Site, x: Value, k: int) -> tuple[Value, Value]:
    """A few of the last axis."""
    site.require(x.ndim and axes_in(site, (site.attributes["axis"],), x.ndim)[0] == x.ndim - 1, "not the last axis")
    site.require(x.dtype in (np.float32, np.float64), "elements of other types")
    n = x.shape[-1]
    site.require(x.size and 0 < k <= n // 8, "not a few of many")
    x = x if x.contiguous else contiguous(site, x)
    rows, largest = x.size // n, bool(site.attributes.get("largest", 1))
    y, i = site.new((*x.shape[:-1], k), x.dtype), site.new((*x.shape[:-1], k), np.int64, finiteness=FINITE)
    block = block_of(rows, n)

    def bind() -> Bound:
        return [(_first, (x.array.reshape(rows, n), k, largest, block, y.array.reshape(rows, k), i.array.reshape(rows, k)))]

    site.emit(bind, reads=(x,), writes=(y, i), kernel="numpy.first of many")
    return y, i


def _first(x: np.ndarray, k: int, largest: bool, block: int, y: np.ndarray, at: np.ndarray) -> None:
    if len(x) == 1:
        places = _chosen_of_row(x[0], k, largest)
        at[0] = places
        y[0] = x[0].take(places)
        return
    for start in range(0, len(x), block):
        part = x[start : start + block]
        places = _chosen(part, k, largest)
        at[start : start + block] = places
        y[start : start + block] = np.take_along_axis(part, places, 1)


def _chosen_of_row(x: np.ndarray, k: int, largest: bool) -> np.ndarray:
    """`_chosen` for one row."""
    parts = max(k, min(len(x), 8 * k))
    size = len(x) // parts
    best = (np.maximum if largest else np.minimum).reduce(x[: size * parts].reshape(size, parts), 0)
    best.sort()
    rest = x[size * parts :]
    if best[-1] != best[-1] or (len(rest) and np.isnan(rest).any()):  # a NaN is last
        return _sorted(x[None], largest)[0, :k]
    places = (x >= best[-k] if largest else x <= best[k - 1]).nonzero()[0]
    values = x.take(places)
    order = (np.negative(values, values) if largest else values).argsort(kind="stable")
    chosen: np.ndarray = places.take(order[:k])
    return chosen


def _chosen(x: np.ndarray, k: int, largest: bool) -> np.ndarray:
    """The places of the first k of each row: of equal values the first place comes first, and NaN is the largest.

    The k-th best of the best of parts of a row is a bound: at least k elements are as good.  Only these are sorted.
    """
    rows, n = x.shape
    chosen: np.ndarray
    parts = max(k, min(n, 128))
    size = n // parts
    better = np.maximum if largest else np.minimum
    # part j has the elements j, j + parts, ...: the elements of all parts that are compared are next to each other
    best = x[:, :parts].copy()
    for start in range(parts, size * parts, parts):
        better(best, x[:, start : start + parts], out=best)
    if largest:
        bound = np.partition(best, parts - k, 1)[:, parts - k, None]
        good = x >= bound
    else:
        bound = np.partition(best, k - 1, 1)[:, k - 1, None]
        good = x <= bound
    if np.isnan(best).any() or np.isnan(x[:, size * parts :]).any():
        return _sorted(x, largest)[:, :k]
    flat = np.flatnonzero(good)
    values = x.reshape(-1).take(flat)
    row, place = np.divmod(flat, n)
    order = np.lexsort((np.negative(values) if largest else values, row))
    starts = np.searchsorted(row, np.arange(rows))
    chosen = place[order[starts[:, None] + np.arange(k)]]
    return chosen


def _sorted(x: np.ndarray, largest: bool) -> np.ndarray:
    if not largest:
        return np.argsort(x, axis=1, kind="stable")
    backward: np.ndarray = np.argsort(x[:, ::-1], axis=1, kind="stable")[:, ::-1]
    backward *= -1
    backward += x.shape[1] - 1
    return backward


# --- columns


@kernel("ArrayFeatureExtractor", 1, on="numpy", domain=ML, takes="opaque")
def array_feature_extractor(site: Site, x: Any, y: Any) -> Any:
    site.require(isinstance(y, Value) and y.dtype == np.int64 and y.size, "the indices are not int64")
    if isinstance(x, OpaqueValue):
        site.require(isinstance(x.value, np.ndarray) and x.value.ndim in (1, 2) and x.value.size, "x is not a matrix of strings")
        shape: tuple[int, ...] = x.value.shape
    else:
        shape = x.shape
        site.require(x.ndim and x.size, "x is a scalar, or empty")
    y = y if y.contiguous else contiguous(site, y)
    n, places = shape[-1], y.size
    if isinstance(x, OpaqueValue):
        z = OpaqueValue()
        site.emit(
            lambda: [(_texts, (x, shape, y.array.reshape(-1), z))], reads=(y,), writes=(), kernel="numpy.take", keeps=(x, z)
        )
        return z
    made = site.new((1, places) if x.ndim == 1 else (*shape[:-1], places), x.dtype, finiteness=x.finiteness)

    def bind() -> Bound:
        i = y.array.reshape(-1)
        take = x.array.take if x.ndim > 1 else x.array.reshape(1, n).take
        if y.constant:
            _check(i.view(np.uint64), n)
            return [(take, (i, -1, made.array, "clip"))]
        return [(_check, (i.view(np.uint64), n)), (take, (i, -1, made.array, "clip"))]

    site.require(not y.constant or (y.array.min() >= 0 and y.array.max() < n), "an index is out of range")
    site.emit(bind, reads=(x, y), writes=(made,), kernel="numpy.take")
    return made


def _check(plain: np.ndarray, n: int) -> None:
    """`plain` has the bits of the indices without sign: a negative one is above every size."""
    if np.maximum.reduce(plain, None) >= n:
        raise Invalid("an index is out of range")


def _texts(x: OpaqueValue, shape: tuple[int, ...], i: np.ndarray, z: OpaqueValue) -> None:
    if x.value.shape != shape:
        raise Invalid("an array of strings has another shape")
    _check(i.view(np.uint64), shape[-1])
    z.value = x.value.reshape(1, -1).take(i, -1) if len(shape) == 1 else x.value.take(i, -1)
