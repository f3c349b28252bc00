"""Feature operators of ai.onnx.ml: selection, scaling, normalization, imputation and encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, operator
from ._api import Array
from .gather import given_back
from .ml_linear import ML, Floats, Strings


@operator("ArrayFeatureExtractor", 1, domain=ML, widen=False)
def array_feature_extractor(xp: Xp, x: Array, y: Array) -> Array:
    """Select the columns of x with the indices in y, in their order; a vector is a matrix of one row."""
    if x.ndim == 0:
        raise OperatorError("x must have at least one axis, got a scalar", code="SX404")
    x = x.reshape(1, -1) if x.ndim == 1 else x
    if y.dtype.kind not in "iu":
        raise OperatorError(f"indices must be integers, got {y.dtype}", code="SX406")
    return xp.take(x, xp.indices(y.reshape(-1), x.shape[-1], negative=False), axis=-1)


@array_feature_extractor.gradient
def array_feature_extractor_gradient(op: Op, dy: V, x: V, y: V) -> V:
    """Add dy to the selected columns; for a vector, ONNX's output is one row."""
    wide = op.Reshape(dy, op.Concat(op.Shape(x, end=op.rank(x) - 1), op.Shape(dy, start=op.rank(dy) - 1), axis=0), allowzero=1)
    return given_back(op, op.cast(wide, x), x, op.Reshape(y, [-1]), -1)


@operator("Binarizer", 1, domain=ML, traits=("shape_of_first",))
def binarizer(xp: Xp, x: Array, *, threshold: float = 0.0) -> Array:
    if x.dtype.kind != "f" and math.isfinite(threshold):
        threshold = math.floor(threshold)  # for integers x > t equals x > floor(t), which does not need floats
        info = np.iinfo(x.dtype)
        if not info.min <= threshold < info.max:
            return xp.full_like(x, threshold < info.min)
    return (x > threshold).astype(x.dtype)


binarizer.no_gradient("zero")


@operator("FeatureVectorizer", 1, domain=ML)
def feature_vectorizer(xp: Xp, *x: Array, inputdimensions: Ints | None = None) -> Array:
    """Concatenate the first columns of each input, inputdimensions[i] of input i, padded with zeros."""
    matrices = [a.reshape(1, -1) if a.ndim == 1 else a for a in x]
    if any(m.ndim != 2 for m in matrices) or len({m.shape[0] for m in matrices}) > 1:
        raise OperatorError(
            f"inputs must be matrices with equal numbers of rows, got shapes {[a.shape for a in x]}", code="SX404"
        )
    sizes = inputdimensions or [m.shape[1] for m in matrices]
    if len(sizes) != len(x) or min(sizes, default=0) < 0:
        raise OperatorError(f"inputdimensions must have {len(x)} non-negative values, got {tuple(sizes)}", code="SX404")
    dtype = x[0].dtype if x[0].dtype.kind == "f" else np.dtype(np.float32)
    y = xp.zeros((matrices[0].shape[0], sum(sizes)), dtype)
    at = 0
    for m, size in zip(matrices, sizes, strict=True):
        width = min(size, m.shape[1])
        y[:, at : at + width] = m[:, :width]
        at += size
    return y


@feature_vectorizer.gradient
def feature_vectorizer_gradient(op: Op, dy: V, x: list[V], inputdimensions: Ints | None) -> tuple[V, ...]:
    """The gradient of each input has its columns of dy, and zeros for columns that were cut off."""
    found, at = [], op.constant([0], np.int64)
    for i, v in enumerate(x):
        rank = op.rank(v)
        own = op.Shape(v, start=rank - 1)
        size = own if inputdimensions is None else op.constant([inputdimensions[i]], np.int64)
        end = op.Add(at, size)
        mine = op.Slice(dy, at, op.Add(at, op.Min(size, own)), [1])
        mine = op.Pad(mine, op.Concat([0, 0, 0], op.Max(op.Sub(own, size), 0), axis=0))
        found.append(op.cast(mine if rank == 2 else op.Squeeze(mine, [0]), v))
        at = end
    return tuple(found)


def _per_feature(xp: Xp, name: str, values: Sequence[float], x: Array, dtype: Any) -> Array:
    features = x.shape[-1] if x.ndim else 1
    if len(values) not in (1, features):
        raise OperatorError(f"{name} must have 1 or {features} values for x of shape {x.shape}, got {len(values)}", code="SX404")
    return xp.asarray(np.array(values, dtype))


@operator("Imputer", 1, domain=ML, traits=("shape_of_first",))
def imputer(
    xp: Xp,
    x: Array,
    *,
    imputed_value_floats: Floats | None = None,
    imputed_value_int64s: Ints | None = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    floats = x.dtype.kind == "f"
    values = imputed_value_floats if floats else imputed_value_int64s
    if not values:
        raise OperatorError(
            f"imputed_value_{'floats' if floats else 'int64s'} must be present for x of type {x.dtype}", code="SX404"
        )
    if not floats and not all(np.iinfo(x.dtype).min <= v <= np.iinfo(x.dtype).max for v in values):
        raise OperatorError(f"imputed values must be in the range of {x.dtype}, got {values}", code="SX405")
    filled = _per_feature(xp, "imputed_value", values, x, x.dtype)
    if not floats:
        return xp.where(x.astype(np.int64) == replaced_value_int64, filled, x)
    return xp.where(xp.isnan(x) if math.isnan(replaced_value_float) else x == replaced_value_float, filled, x)


@imputer.gradient
def imputer_gradient(op: Op, dy: V, x: V, replaced_value_float: float) -> V:
    """Imputed values do not depend on x."""
    gone = op.IsNaN(x) if math.isnan(replaced_value_float) else op.Equal(x, replaced_value_float)
    return op.Where(gone, 0, op.cast(dy, x))


@operator("Normalizer", 1, domain=ML, traits=("shape_of_first",))
def normalizer(xp: Xp, x: Array, *, norm: str = "MAX") -> Array:
    """Divide rows by their maximum (with its sign), L1 norm or L2 norm, unless it is 0."""
    if x.ndim not in (1, 2):
        raise OperatorError(f"x must have shape [N, C] or [C], got {x.shape}", code="SX404")
    if norm not in ("MAX", "L1", "L2"):
        raise OperatorError(f"norm must be MAX, L1 or L2, got {norm!r}", code="SX404")
    if x.size == 0:
        return x
    x = x if x.dtype.kind == "f" else x.astype(np.float64)
    if norm == "MAX":
        d = x.max(axis=-1, keepdims=True)
    elif norm == "L1":
        d = xp.abs(x).sum(axis=-1, keepdims=True)
    else:
        d = xp.sqrt((x * x).sum(axis=-1, keepdims=True))
    return x / xp.where(d == 0, 1, d).astype(x.dtype)


@normalizer.decomposition
def normalizer_decomposition(op: Op, x: V, norm: str) -> V:
    """Equal maxima share the gradient."""
    x = x if op.dtype(x).kind == "f" else op.Cast(x, to=11)
    if norm == "MAX":
        d = op.ReduceMax(x, [-1], keepdims=1)
    else:
        d = (op.ReduceL1 if norm == "L1" else op.ReduceL2)(x, [-1], keepdims=1)
    return op.Cast(op.Div(x, op.Where(op.Equal(d, 0), 1, d)), to=1)


@operator("Scaler", 1, domain=ML, traits=("shape_of_first",))
def scaler(xp: Xp, x: Array, *, offset: Floats | None = None, scale: Floats | None = None) -> Array:
    if offset and scale and len(offset) != len(scale):
        raise OperatorError(f"offset and scale must have equal lengths, got {len(offset)} and {len(scale)}", code="SX404")
    x = x if x.dtype.kind == "f" else x.astype(np.float64)
    if offset:
        x = x - _per_feature(xp, "offset", offset, x, x.dtype)
    return x * _per_feature(xp, "scale", scale, x, x.dtype) if scale else x


@scaler.gradient
def scaler_gradient(op: Op, dy: V, x: V, scale: Floats | None) -> V:
    return op.Mul(op.cast(dy, x), op.constant(scale or (1.0,), op.dtype(x)))


# --- categories


def look_up(x: np.ndarray, keys: Sequence[Any], values: Sequence[Any], default: Any, dtype: Any) -> np.ndarray:
    """Return the value of each element's key, that of the last one of equal keys; NaN is a valid key."""
    if len(keys) != len(values):
        raise OperatorError(f"keys and values must have equal lengths, got {len(keys)} and {len(values)}", code="SX404")
    if keys and isinstance(keys[0], str) != (x.dtype == dtypes.STRING):
        raise OperatorError(
            f"x and the keys must be both strings or both numbers, got {dtypes.onnx_name(x.dtype)} and {type(keys[0]).__name__}",
            code="SX406",
        )
    table = {_key(k): v for k, v in zip(keys, values, strict=True)}
    found, place = x.reshape(-1), np.arange(x.size)
    if x.dtype != dtypes.STRING:  # sorting numbers is faster than a lookup of each
        found, place = np.unique(found, return_inverse=True)
    named = np.empty(len(found), dtype)
    named[:] = [table.get(_key(k), default) for k in found.tolist()]
    return named[place.reshape(-1)].reshape(x.shape)


def _key(k: Any) -> Any:
    return None if isinstance(k, float) and math.isnan(k) else k


@operator("CategoryMapper", 1, domain=ML, host=True)
def category_mapper(
    xp: Xp,
    x: Array,
    *,
    cats_int64s: Ints | None = None,
    cats_strings: Strings | None = None,
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> Array:
    ints, strings = cats_int64s or (), cats_strings or ()
    if x.dtype == dtypes.STRING:
        return look_up(x, strings, ints, default_int64, np.int64)
    return look_up(x, ints, strings, default_string, object)


@operator("LabelEncoder", 1, domain=ML, host=True)
def label_encoder_1(
    xp: Xp, x: Array, *, classes_strings: Strings | None = None, default_int64: int = -1, default_string: str = "_Unused"
) -> Array:
    """Map labels to their positions in classes_strings, and positions to labels."""
    classes = classes_strings or ()
    numbers = range(len(classes))
    if x.dtype == dtypes.STRING:
        return look_up(x, classes[::-1], numbers[::-1], default_int64, np.int64)
    return look_up(x, numbers, classes, default_string, object)


@operator("LabelEncoder", 2, 4, domain=ML, host=True)
def label_encoder(
    xp: Xp,
    x: Array,
    *,
    keys_floats: Floats | None = None,
    keys_int64s: Ints | None = None,
    keys_strings: Strings | None = None,
    values_floats: Floats | None = None,
    values_int64s: Ints | None = None,
    values_strings: Strings | None = None,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    keys_tensor: np.ndarray | None = None,
    values_tensor: np.ndarray | None = None,
    default_tensor: np.ndarray | None = None,
) -> Array:
    keys = keys_floats or keys_int64s or keys_strings or (() if keys_tensor is None else keys_tensor.reshape(-1).tolist())
    kinds: list[tuple[Sequence[Any], Any, Any]] = [
        (values_floats or (), default_float, np.float32), (values_int64s or (), default_int64, np.int64),
        (values_strings or (), default_string, object),
    ]  # fmt: skip
    if values_tensor is not None:
        dtype = values_tensor.dtype
        default = default_string if dtype == dtypes.STRING else default_float if dtype.kind == "f" else default_int64
        kinds.insert(0, (values_tensor.reshape(-1).tolist(), default, dtype))
    values, default, dtype = next((k for k in kinds if len(k[0])), kinds[0])
    if default_tensor is not None:
        if default_tensor.size != 1 or default_tensor.dtype != dtype:
            given = f"{default_tensor.dtype}{default_tensor.shape}"
            raise OperatorError(f"default_tensor must be one {np.dtype(dtype)}, got {given}", code="SX404")
        default = default_tensor.reshape(-1)[0]
    return look_up(x, keys, values, default, dtype)


label_encoder.no_gradient("zero")


@operator("OneHotEncoder", 1, domain=ML, host=True)
def one_hot_encoder(
    xp: Xp, x: Array, *, cats_int64s: Ints | None = None, cats_strings: Strings | None = None, zeros: int = 1
) -> Array:
    """Add an axis with a 1 at the category; numbers are truncated to integers first."""
    cats: Sequence[Any] = (cats_strings if x.dtype == dtypes.STRING else cats_int64s) or ()
    if not cats:
        raise OperatorError(f"categories must be present for x of type {dtypes.onnx_name(x.dtype)}", code="SX404")
    limits.admit((*x.shape, len(cats)), np.float32)
    whole = x
    if x.dtype.kind == "f":
        whole = np.where(np.isfinite(x), xp.cast(x, np.int64), 0)
    at = look_up(whole, cats, range(len(cats)), -1, np.int64)
    if x.dtype.kind == "f":
        at = np.where(np.isfinite(x), at, -1)
    if not zeros and (at < 0).any():
        raise OperatorError(f"with zeros=0, each value must be a category, got {x[at < 0].flat[0]!r}", code="SX404")
    return (at[..., None] == np.arange(len(cats))).astype(np.float32)


one_hot_encoder.no_gradient("zero")
