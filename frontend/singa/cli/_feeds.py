"""Inputs for a model: arrays out of files, out of test_data_set folders, or random by the declared shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from singa_backend import InvalidInput, Value, limits
from singa_backend.dtypes import STRING, is_float, onnx_name


def from_file(path: Path) -> Any:
    """The array in a .npy file, a .npz file of one array, or a .pb file (TensorProto); raises InvalidInput."""
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".pb":
            return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))
        if path.suffix == ".npz":
            arrays = from_npz(path)
            if len(arrays) == 1:
                return next(iter(arrays.values()))
            raise InvalidInput(f"{path} holds {len(arrays)} arrays: {', '.join(arrays)}", hint="give it with --inputs instead")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}", code="SX307") from None
    raise InvalidInput(f"{path}: not one of .npy, .npz, .pb", code="SX307")


def from_npz(path: Path) -> dict[str, Any]:
    """The arrays of a .npz file by name; raises InvalidInput."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}", code="SX307") from None


def random_inputs(values: Sequence[Value], seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Random arrays for each of these inputs: floats are normal, integers small and not negative, bools fair, strings short.

    sizes: what the symbolic sizes are; 1 where it does not say.  Raises InvalidInput for inputs that are no tensors.
    """
    generator = np.random.default_rng(seed)
    return {v.name: _random(v, generator, sizes) for v in values}


def _random(value: Value, generator: np.random.Generator, sizes: dict[str, int]) -> Any:
    if value.kind != "tensor" or value.dtype is None or value.shape is None:
        raise InvalidInput(
            f"input {value} has no declared dtype and shape to draw from", code="SX308", hint="give it with --input"
        )
    shape = [d if isinstance(d, int) else sizes.get(d or "", 1) for d in value.shape]
    limits.admit(shape, np.float64)  # a model may declare any size
    if value.dtype == STRING:
        return np.array([f"s{i}" for i in generator.integers(0, 100, shape).reshape(-1)], object).reshape(shape)
    if is_float(value.dtype) or value.dtype.kind == "c":
        return generator.standard_normal(shape).astype(value.dtype)
    return generator.integers(0, 2, shape).astype(value.dtype)


def sizes_of(pairs: Sequence[str]) -> dict[str, int]:
    """{"batch": 4} from ["batch=4"]; raises InvalidInput."""
    out = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not name or not size.isdigit():
            raise InvalidInput(f"{pair!r} is not NAME=SIZE", code="SX308")
        out[name] = int(size)
    return out


def summary(name: str, value: Any) -> dict[str, Any]:
    """What to print of an output: its dtype, shape, range and first values."""
    if not isinstance(value, np.ndarray):
        kind = "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else "none"
        return {"name": name, "kind": kind, "length": len(value) if value is not None else 0}
    out: dict[str, Any] = {"name": name, "kind": "tensor", "dtype": onnx_name(value.dtype), "shape": list(value.shape)}
    flat = value.reshape(-1)
    out["first"] = [str(v) for v in flat[:6]]
    if value.size and value.dtype != STRING and value.dtype.kind != "c":
        wide = flat.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        out["min"], out["max"] = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        out["nan"], out["inf"] = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    return out
