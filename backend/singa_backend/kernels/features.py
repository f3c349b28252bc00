"""Features of ai.onnx.ml: scaling, normalization, imputation, thresholds, and vectors of several inputs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .copies import put
from .scores import ML
from .table import Site, kernel
from .values import FINITE, NAN, Bound, Value
from .vectors import product, repeated

_LONG, _FEW = 1 << 12, 16
"""The largest numbers of features of one row whose norm is a product, or a sum of numbers of Python."""

_HUGE = 1e38
"""The L1 norm from which it is computed in the dtype of the row, in which it may be infinite."""


def _numbers(site: Site, x: Value) -> int:
    """The number of features of x, whose last axis they are."""
    site.require(x.size and (x.dtype.kind in "iu" or x.dtype in (np.float32, np.float64)), "x is empty, or of another type")
    return x.shape[-1] if x.ndim else 1


def _each(site: Site, name: str, features: int, dtype: Any) -> np.ndarray | None:
    """An attribute with one value for all features, or one for each; None if it is absent or empty."""
    given = site.attributes.get(name)
    if not given:
        return None
    site.require(len(given) in (1, features), f"{name} has another length")
    return np.array(given, dtype)


@kernel("Scaler", 1, on="numpy", domain=ML)
def scaler(site: Site, x: Value) -> Value:
    features = _numbers(site, x)
    wide = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    offset, scale = (_each(site, name, features, wide) for name in ("offset", "scale"))
    site.require(offset is None or scale is None or len(offset) == len(scale), "offset and scale have different lengths")
    if x.ndim == 2:
        offset, scale = (None if v is None else repeated(np.broadcast_to(v, features), x.shape[0]) for v in (offset, scale))
    y = site.new(x.shape, np.float32, finiteness=NAN)
    z = y if wide == np.float32 else site.new(x.shape, wide, finiteness=NAN)

    def bind() -> Bound:
        now, calls = x.array, list[Any]()
        for function, values in ((np.subtract, offset), (np.multiply, scale)):
            if values is not None:
                calls.append((function, (now, values, z.array)))
                now = z.array
        return calls if now is y.array or (now is z.array and z is y) else [*calls, put(y.array, now)]

    site.emit(bind, reads=(x,), writes=(y,) if z is y else (y, z), kernel="numpy.scaler", keeps=(offset, scale))
    return y


@kernel("Normalizer", 1, on="numpy", domain=ML)
def normalizer(site: Site, x: Value) -> Value:
    features, norm = _numbers(site, x), site.attributes.get("norm") or "MAX"
    site.require(x.ndim in (1, 2) and norm in ("MAX", "L1", "L2"), "x is not a matrix, or the norm is unknown")
    rows = x.size // features
    wide = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    y = site.new(x.shape, np.float32, finiteness=NAN)
    given = x if wide == x.dtype else site.new(x.shape, wide, finiteness=NAN)
    d, zero = site.new((rows, 1), wide, finiteness=NAN), site.new((rows, 1), bool, finiteness=FINITE)
    parts = site.new((rows, features), wide, finiteness=NAN) if norm == "L1" else None
    ones, nothing = np.ones((features, 1), wide), np.zeros(1, wide)
    single = rows == 1 and features <= _LONG and norm != "MAX"

    def bind() -> Bound:
        a, n = given.array.reshape(rows, features), d.array
        calls: list[Any] = [] if given is x else [(np.copyto, (given.array, x.array))]
        if single and norm == "L1" and features <= _FEW:
            return [*calls, (_normalize_few, (a[0], y.array.reshape(features)))]
        if single:
            calls += [(_length, (a[0], n[0]))] if parts is None else [(np.abs, (a, parts.array)), (_sum, (parts.array[0], n[0]))]
            return [*calls, (np.divide, (a[0], n.reshape(()), y.array.reshape(features)))]
        if norm == "MAX":
            calls.append((np.maximum.reduce, (a, 1, None, n, True)))
        elif parts is not None:
            calls += [(np.abs, (a, parts.array)), *product(parts.array, ones, n)]
        else:
            calls += [(np.vecdot, (a, a, n[:, 0])), (np.sqrt, (n, n))]
        fill = [(np.equal, (n, nothing, zero.array)), (np.add, (n, zero.array, n))]
        return [*calls, *fill, (np.divide, (a, n, y.array.reshape(rows, features)))]

    writes = [v for v in (y, d, zero, parts, None if given is x else given) if v is not None]
    site.emit(bind, reads=(x,), writes=writes, kernel="numpy.normalizer", keeps=(ones, nothing))
    return y


def _length(a: np.ndarray, n: np.ndarray) -> None:
    """Set n to the L2 norm of a row, or to 1 if it is 0."""
    n[0] = math.sqrt(a.dot(a)) or 1


def _sum(a: np.ndarray, n: np.ndarray) -> None:
    """Set n to the sum of a row, or to 1 if it is 0."""
    n[0] = a.sum() or 1


def _normalize_few(a: np.ndarray, y: np.ndarray) -> None:
    """Divide a row by its L1 norm, in numbers of Python."""
    values = a.tolist()
    total = sum(map(abs, values)) or 1
    if total > _HUGE:
        total = float(np.abs(a).sum())
    for i, v in enumerate(values):
        y[i] = v / total


@kernel("Imputer", 1, on="numpy", domain=ML)
def imputer(site: Site, x: Value) -> Value:
    features, floats = _numbers(site, x), x.dtype.kind == "f"
    name = "imputed_value_floats" if floats else "imputed_value_int64s"
    if not floats:
        info = np.iinfo(x.dtype)
        values = site.attributes.get(name) or ()
        site.require(all(info.min <= v <= info.max for v in values), "an imputed value is out of range")
    filled = _each(site, name, features, x.dtype)
    site.require(filled is not None, "there are no values")
    replaced = site.attributes["replaced_value_float" if floats else "replaced_value_int64"]
    site.require(floats or x.dtype == np.int64, "integers of other types")
    nan = floats and math.isnan(replaced)
    limit = np.array([replaced], x.dtype)
    y, mask = site.new(x.shape, x.dtype, finiteness=NAN), site.new(x.shape, bool, finiteness=FINITE)

    def bind() -> Bound:
        test: Any = (np.isnan, (x.array, mask.array)) if nan else (np.equal, (x.array, limit, mask.array))
        return [test, (np.copyto, (y.array, x.array)), (np.copyto, (y.array, filled, "same_kind", mask.array))]

    site.emit(bind, reads=(x,), writes=(y, mask), kernel="numpy.imputer", keeps=(filled, limit))
    return y


@kernel("Binarizer", 1, on="numpy", domain=ML)
def binarizer(site: Site, x: Value) -> Value:
    _numbers(site, x)
    threshold = site.attributes["threshold"]
    if x.dtype.kind != "f":
        site.require(math.isfinite(threshold), "the threshold is not finite")
        threshold = math.floor(threshold)
        info = np.iinfo(x.dtype)
        site.require(info.min <= threshold < info.max, "the threshold is out of range")
    limit = np.array([threshold], x.dtype)
    y = site.new(x.shape, x.dtype, finiteness=FINITE)
    compare = partial(np.greater, casting="unsafe")
    site.emit(lambda: [(compare, (x.array, limit, y.array))], reads=(x,), writes=(y,), kernel="numpy.binarizer")
    return y


@kernel("FeatureVectorizer", 1, on="numpy", domain=ML)
def feature_vectorizer(site: Site, *x: Value) -> Value:
    for v in x:
        _numbers(site, v)
    site.require(x and all(v.ndim in (1, 2) for v in x), "an input is not a matrix")
    shapes = [v.shape if v.ndim == 2 else (1, v.shape[0]) for v in x]
    rows = shapes[0][0]
    sizes = site.attributes.get("inputdimensions") or tuple(s[1] for s in shapes)
    site.require(all(s[0] == rows for s in shapes) and len(sizes) == len(x) and min(sizes) >= 0 and sum(sizes),
                 "the numbers of rows differ, or a size is not valid")  # fmt: skip
    y = site.new((rows, sum(sizes)), np.float32, finiteness=NAN)

    def bind() -> Bound:
        out, at, calls = y.array, 0, list[Any]()
        for v, shape, size in zip(x, shapes, sizes, strict=True):
            width = min(size, shape[1])
            calls.append(put(out[:, at : at + width], v.array.reshape(shape)[:, :width]))
            if width < size:
                calls.append((out[:, at + width : at + size].fill, (0,)))
            at += size
        return calls

    site.emit(bind, reads=x, writes=(y,), kernel="numpy.concatenate")
    return y
