"""Categories of ai.onnx.ml: tables of keys, one-hot vectors, and maps of scores by label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from ..dtypes import STRING
from .scores import ML
from .strings import is_texts, shape_of, texts_of
from .table import Invalid, Site, kernel
from .values import FINITE, NAN, Bound, OpaqueValue, Value

_WIDE = 1 << 14
"""The largest span of integer keys whose values are in a table with a place for each integer."""

_EXACT = 1 << 53
_EYE = 1 << 18


class Places:
    """The place of each key, the last one of equal keys; the number of keys for what is not a key."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self.known = dict(zip(keys, range(len(keys)), strict=True))
        self._others = repeat(len(keys))

    def of(self, values: list[Any]) -> np.ndarray:
        """The places of values, int64."""
        return np.fromiter(map(self.known.get, values, self._others), np.int64, len(values))


class Lookup:
    """The place of each element's key; the number of keys for elements that are not keys.

    Attributes:
        count: the number of keys.
    """

    def __init__(self, keys: Sequence[Any]) -> None:
        """Arrange keys: all strings, or all numbers, of which one may be NaN."""
        self.count = len(keys)
        self.texts = bool(keys) and isinstance(keys[0], str)
        self.places = Places([None if isinstance(k, float) and math.isnan(k) else k for k in keys])
        known = self.places.known
        self.nan = known.get(None, self.count)
        self._dense: np.ndarray | None = None
        if self.texts:
            return
        plain = [k for k in known if k is not None]
        low, high = min(plain, default=0), max(plain, default=0)
        if all(isinstance(k, int) for k in plain) and high - low < _WIDE:
            self._low = np.array([low])
            self._dense = np.full(high - low + 2, self.count)
            for k in plain:
                self._dense[k - low] = known[k]
            self._end = np.array([len(self._dense) - 1], np.uint64)
        ordered = sorted(plain)
        self.exact = all(math.isinf(k) or abs(k) < _EXACT for k in ordered)
        self._sorted = np.array(ordered or [np.inf], np.float64)
        self._order = np.array([known[k] for k in ordered] or [self.count])

    def calls(self, x: Any, shape: tuple[int, ...], places: Value) -> Bound:
        """The calls that set `places`, int64 of this shape."""
        if isinstance(x, OpaqueValue):
            return [(self._texts, (x, shape, places.array.reshape(-1)))]
        if self._dense is not None and x.dtype == np.int64:
            t = places.array
            u = t.view(np.uint64)
            return [(np.subtract, (x.array, self._low, t)), (_least, (u, self._end)), (_take, (self._dense, t))]
        return [(self._numbers, (x.array, places.array))]

    def _texts(self, x: OpaqueValue, shape: tuple[int, ...], places: np.ndarray) -> None:
        texts = texts_of(x, shape)
        if len(texts) == 1:
            places[0] = self.places.known.get(texts[0], self.count)
        else:
            places[...] = self.places.of(texts)

    def _numbers(self, x: np.ndarray, places: np.ndarray) -> None:
        wide = x.astype(np.float64)
        i = np.minimum(self._sorted.searchsorted(wide), len(self._sorted) - 1)
        places[...] = np.where(self._sorted[i] == wide, self._order[i], self.count)
        if self.nan != self.count:
            places[np.isnan(wide)] = self.nan


def _least(u: np.ndarray, end: np.ndarray) -> None:
    np.minimum(u, end, out=u)


def _take(table: np.ndarray, t: np.ndarray) -> None:
    table.take(t, None, t, "clip")


def _shape(site: Site, x: Any) -> tuple[int, ...]:
    """The shape of strings or numbers; declines others."""
    if isinstance(x, OpaqueValue):
        site.require(is_texts(x), "the input is not an array of strings")
        return shape_of(x)
    site.require(x.dtype.kind in "iu" or x.dtype in (np.float32, np.float64), "elements of other types")
    return tuple(x.shape)


def _named(site: Site, x: Any, keys: Sequence[Any], values: Sequence[Any], default: Any, dtype: Any) -> Value | OpaqueValue:
    shape = _shape(site, x)
    site.require(len(keys) == len(values) > 0 and math.prod(shape), "there are no keys, or not as many as values")
    site.require(isinstance(keys[0], str) == isinstance(x, OpaqueValue), "the keys are of another kind")
    found = site.once("keys", lambda: Lookup(keys))
    site.require(found.texts or found.exact, "a key is too large")
    site.require(isinstance(x, OpaqueValue) or x.dtype.kind == "f" or x.dtype.itemsize < 8 or found._dense is not None,
                 "large integers")  # fmt: skip

    def table() -> np.ndarray:
        made = np.empty(len(values) + 1, dtype)
        made[:] = [*values, default]
        return made

    names = site.once("names", table)
    places = site.new(shape, np.int64, finiteness=FINITE)
    y: Value | OpaqueValue = OpaqueValue(fresh=True) if names.dtype == object else site.new(shape, names.dtype, finiteness=NAN)

    def bind() -> Bound:
        calls = found.calls(x, shape, places)
        if isinstance(y, OpaqueValue):
            return [*calls, (_set, (y, names, places.array))]
        return [*calls, (names.take, (places.array, None, y.array, "clip"))]

    writes = (places, y) if isinstance(y, Value) else (places,)
    reads = () if isinstance(x, OpaqueValue) else (x,)
    site.emit(bind, reads=reads, writes=writes, kernel="numpy.categories", keeps=(found, names, x, y))
    return y


def _set(y: OpaqueValue, names: np.ndarray, places: np.ndarray) -> None:
    y.value = names.take(places)


@kernel("CategoryMapper", 1, on="numpy", domain=ML, takes="opaque")
def category_mapper(site: Site, x: Any) -> Any:
    given = site.attributes
    ints, strings = given.get("cats_int64s") or (), given.get("cats_strings") or ()
    if isinstance(x, OpaqueValue):
        return _named(site, x, strings, ints, given["default_int64"], np.int64)
    return _named(site, x, ints, strings, given["default_string"], object)


@kernel("LabelEncoder", 1, on="numpy", domain=ML, takes="opaque")
def label_encoder_1(site: Site, x: Any) -> Any:
    given = site.attributes
    classes = given.get("classes_strings") or ()
    numbers = range(len(classes))
    if isinstance(x, OpaqueValue):
        return _named(site, x, classes[::-1], numbers[::-1], given["default_int64"], np.int64)
    return _named(site, x, numbers, classes, given["default_string"], object)


@kernel("LabelEncoder", 2, 4, on="numpy", domain=ML, takes="opaque")
def label_encoder(site: Site, x: Any) -> Any:
    given = site.attributes
    tensors = [given.get(f"{n}_tensor") for n in ("keys", "values", "default")]
    keys = given.get("keys_floats") or given.get("keys_int64s") or given.get("keys_strings")
    if not keys:
        keys = () if tensors[0] is None else tensors[0].reshape(-1).tolist()
    text, number, whole = given["default_string"], given["default_float"], given["default_int64"]
    kinds: list[tuple[Sequence[Any], Any, Any]] = [
        (given.get("values_floats") or (), number, np.dtype(np.float32)),
        (given.get("values_int64s") or (), whole, np.dtype(np.int64)),
        (given.get("values_strings") or (), text, np.dtype(object)),
    ]  # fmt: skip
    if tensors[1] is not None:
        dtype = tensors[1].dtype
        default = text if dtype == STRING else number if dtype.kind == "f" else whole
        kinds.insert(0, (tensors[1].reshape(-1).tolist(), default, dtype))
    values, default, dtype = next((k for k in kinds if len(k[0])), kinds[0])
    if tensors[2] is not None:
        site.require(tensors[2].size == 1 and tensors[2].dtype == dtype, "default_tensor is of another type")
        default = tensors[2].reshape(-1)[0]
    return _named(site, x, keys, values, default, dtype)


@kernel("OneHotEncoder", 1, on="numpy", domain=ML, takes="opaque")
def one_hot_encoder(site: Site, x: Any) -> Value:
    shape = _shape(site, x)
    cats = site.attributes.get("cats_strings" if isinstance(x, OpaqueValue) else "cats_int64s") or ()
    site.require(len(cats) and math.prod(shape), "there are no categories, or x is empty")
    found = site.once("keys", lambda: Lookup(cats))
    site.require(found.texts or (found.exact and (x.dtype.kind == "f" or found._dense is not None)), "a category is too large")
    count, strict = len(cats), not site.attributes["zeros"]
    places, y = site.new(shape, np.int64, finiteness=FINITE), site.new((*shape, count), np.float32, finiteness=FINITE)
    eye = site.once("eye", lambda: np.eye(count + 1, count, dtype=np.float32)) if count * count <= _EYE else None
    whole = x if isinstance(x, OpaqueValue) or x.dtype.kind != "f" else site.new(shape, x.dtype, finiteness=NAN)

    def bind() -> Bound:
        calls: list[Any] = [] if whole is x else [(np.trunc, (x.array, whole.array))]
        calls += found.calls(whole, shape, places)
        if strict:
            calls.append((_all_known, (places.array, count)))
        flat = y.array.reshape(-1, count)
        if eye is not None:
            return [*calls, (eye.take, (places.array.reshape(-1), 0, flat, "clip"))]
        return [*calls, (_scatter, (places.array.reshape(-1), flat))]

    reads = () if isinstance(x, OpaqueValue) else (x,)
    writes = (places, y) if whole is x else (places, y, whole)
    site.emit(bind, reads=reads, writes=writes, kernel="numpy.one hot", keeps=(found, eye, x))
    return y


def _all_known(places: np.ndarray, count: int) -> None:
    if places.max() >= count:
        raise Invalid("a value is not a category")


def _scatter(places: np.ndarray, y: np.ndarray) -> None:
    y.fill(0)
    count = y.shape[1]
    there = np.flatnonzero(places < count)
    y.reshape(-1)[there * count + places[there]] = 1


@kernel("ZipMap", 1, on="numpy", domain=ML)
def zip_map(site: Site, x: Value) -> OpaqueValue:
    keys = site.attributes.get("classlabels_int64s") or site.attributes.get("classlabels_strings") or ()
    site.require(keys and x.ndim in (1, 2) and x.size and x.shape[-1] == len(keys), "the number of columns is another")
    y = OpaqueValue(fresh=True)
    site.emit(
        lambda: [(_maps, (y, keys, x.array.reshape(-1, len(keys))))], reads=(x,), writes=(), kernel="numpy.maps", keeps=(y,)
    )
    return y


def _maps(y: OpaqueValue, keys: tuple[Any, ...], x: np.ndarray) -> None:
    columns = x.T.tolist()
    if len(keys) == 2:
        first, second = keys
        y.value = [{first: a, second: b} for a, b in zip(*columns, strict=True)]
    elif len(keys) == 3:
        first, second, third = keys
        y.value = [{first: a, second: b, third: c} for a, b, c in zip(*columns, strict=True)]
    else:
        y.value = list(map(dict, map(zip, repeat(keys), zip(*columns, strict=True))))
