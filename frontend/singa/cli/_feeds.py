"""Inputs for a model: arrays from files, or random arrays by the declared shapes; and summaries of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from singa_backend import InvalidInput, Value, limits
from singa_backend.dtypes import STRING, is_float, onnx_name


def from_file(path: Path) -> Any:
    """Read a .npy file, a .npz file of one array, or a .pb file (TensorProto); raises InvalidInput."""
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".pb":
            return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))
        if path.suffix == ".npz":
            arrays = from_npz(path)
            if len(arrays) == 1:
                return next(iter(arrays.values()))
            raise InvalidInput(f"{path} must contain one array, got {len(arrays)}: {', '.join(arrays)}", hint="use --inputs")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}", code="SX307") from None
    raise InvalidInput(f"an input file must be .npy, .npz or .pb, got {path}", code="SX307")


def from_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of a .npz file by name; raises InvalidInput."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}", code="SX307") from None


def random_inputs(values: Sequence[Value], seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Draw an array for each input: floats are normal, integers and bools are 0 or 1, strings are short.

    Args:
        values: The inputs.
        seed: The seed.
        sizes: The symbolic sizes by name; others are 1.

    Raises:
        InvalidInput: An input is not a tensor, or its dtype or shape is not declared.
    """
    generator = np.random.default_rng(seed)
    return {v.name: _random(v, generator, sizes) for v in values}


def _random(value: Value, generator: np.random.Generator, sizes: dict[str, int]) -> Any:
    if value.kind != "tensor" or value.dtype is None or value.shape is None:
        raise InvalidInput(
            f"input {value} has no declared dtype and shape for random values", code="SX308", hint="pass it with --input"
        )
    shape = [d if isinstance(d, int) else sizes.get(d or "", 1) for d in value.shape]
    limits.admit(shape, np.float64)  # a model may declare any size
    if value.dtype == STRING:
        return np.array([f"s{i}" for i in generator.integers(0, 100, shape).reshape(-1)], object).reshape(shape)
    if is_float(value.dtype) or value.dtype.kind == "c":
        return generator.standard_normal(shape).astype(value.dtype)
    return generator.integers(0, 2, shape).astype(value.dtype)


def sizes_of(pairs: Sequence[str]) -> dict[str, int]:
    """Parse ["batch=4"] to {"batch": 4}; raises InvalidInput."""
    out = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not name or not size.isdigit():
            raise InvalidInput(f"a size must be NAME=SIZE, got {pair!r}", code="SX308")
        out[name] = int(size)
    return out


def summary(name: str, value: Any) -> dict[str, Any]:
    """Return what is printed of an output: its dtype, shape, range and first values."""
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
