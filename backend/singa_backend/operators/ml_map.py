"""Map operators of ai.onnx.ml: CastMap, DictVectorizer, ZipMap."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..ir.declaration import Ints, operator
from ._api import Array
from .cast import parse_int
from .ml_linear import ML, Strings

Map = dict[Any, Any]


def _value(kind: str, value: Any) -> Any:
    if kind == "TO_STRING":
        return value if isinstance(value, str) else f"{value:.6f}"
    if kind == "TO_FLOAT":
        return float(value)
    return parse_int(value) if isinstance(value, str) else int(value)


@operator("CastMap", 1, domain=ML, host=True)
def cast_map(xp: Xp, x: Map, *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> Array:
    """Return one row of the map's values in the order of their keys or, if sparse, each at the index of its key."""
    # As in onnxruntime: a number becomes a string with six decimals, and "0.f" fills gaps among strings.
    kinds: dict[str, tuple[Any, Any]] = {"TO_FLOAT": (np.float32, 0), "TO_STRING": (object, "0.f"), "TO_INT64": (np.int64, 0)}
    if cast_to not in kinds or map_form not in ("DENSE", "SPARSE"):
        raise OperatorError(
            f"cast_to must be one of {', '.join(kinds)} and map_form DENSE or SPARSE, got {cast_to!r} and {map_form!r}",
            code="SX404",
        )
    dtype, gap = kinds[cast_to]
    values = {k: _value(cast_to, x[k]) for k in sorted(x)}
    if map_form == "DENSE":
        y = np.empty((1, len(values)), dtype)
        y[0, :] = list(values.values())
        return y
    if max_map < 0:
        raise OperatorError(f"max_map must be at least 0, got {max_map}", code="SX404")
    limits.admit((1, max_map), dtype)
    y = np.full((1, max_map), gap, dtype)
    for k, value in values.items():
        if not 0 <= k < max_map:
            raise OperatorError(f"a key of a sparse map must be in [0, {max_map}), got {k}", code="SX401")
        y[0, k] = value
    return y


cast_map.no_gradient("undefined: a map is not a tensor")


@operator("DictVectorizer", 1, domain=ML, host=True)
def dict_vectorizer(xp: Xp, x: Map, *, int64_vocabulary: Ints | None = None, string_vocabulary: Strings | None = None) -> Array:
    """Return the map's values in the order of the vocabulary; 0 or an empty string for a missing key."""
    vocabulary: tuple[Any, ...] = int64_vocabulary or string_vocabulary or ()
    unknown = x.keys() - set(vocabulary)
    if unknown:
        raise OperatorError(f"each key must be in the vocabulary, got {min(unknown)!r}", code="SX401")
    dtype = _dtype(list(x.values()))
    y = np.full(len(vocabulary), "" if dtype == dtypes.STRING else 0, dtype)
    for i, k in enumerate(vocabulary):
        if k in x:
            y[i] = x[k]
    return y


dict_vectorizer.no_gradient("undefined: a map is not a tensor")


def _dtype(values: list[Any]) -> Any:
    """Return the dtype of values; a Python float becomes float32, as ZipMap returns and usual models take."""
    if any(isinstance(v, str) for v in values):
        return dtypes.STRING
    plain = [isinstance(v, float) and not isinstance(v, np.floating) for v in values]
    kinds = [np.dtype(np.float32) if p else np.asarray(v).dtype for p, v in zip(plain, values, strict=True)]
    return np.result_type(*kinds) if kinds else np.dtype(np.float32)


@operator("ZipMap", 1, domain=ML, host=True)
def zip_map(xp: Xp, x: Array, *, classlabels_int64s: Ints | None = None, classlabels_strings: Strings | None = None) -> list[Map]:
    keys: tuple[Any, ...] = classlabels_int64s or classlabels_strings or ()
    if x.ndim not in (1, 2) or x.shape[-1] != len(keys):
        raise OperatorError(f"x must have shape [N, {len(keys)}], one column for each key, got {x.shape}", code="SX404")
    limits.admit_bytes(x.size * 100, f"{len(x)} maps of {len(keys)} entries")
    return [dict(zip(keys, row, strict=True)) for row in x.reshape(-1, len(keys)).tolist()]


zip_map.no_gradient("undefined: a map is not a tensor")
