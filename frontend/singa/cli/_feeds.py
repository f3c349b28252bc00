"""Inputs for a model: arrays from files, or random arrays by the declared shapes; and summaries of outputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from singa_backend.errors import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from singa_backend import Value


def from_file(path: Path, declared: Value) -> Any:
    """Read a .npy file, a .npz file of one array, or a .pb file of the declared type; raises InvalidInput."""
    from onnx import TypeProto

    from singa_backend import InvalidInput
    from singa_backend.io.archives import open_arrays, read_array
    from singa_backend.proto import test_data
    from singa_backend.runtime.feeds import check_header

    if path.suffix == ".npy":
        return read_array(path, "SX307")
    if path.suffix == ".pb":
        return test_data.read_value(path, declared.type or TypeProto())
    if path.suffix != ".npz":
        raise InvalidInput(f"an input file must be .npy, .npz or .pb, got {path}", code="SX307")
    with open_arrays(path, "SX307") as arrays:
        if len(arrays.names) != 1:
            names = ", ".join(arrays.names)
            raise InvalidInput(
                f"{path} must contain one array, got {len(arrays.names)}: {names}", code="SX307", hint="use --inputs"
            )
        check_header(declared, *arrays.header(arrays.names[0]))
        return arrays[arrays.names[0]]


def from_npz(path: Path, declared: Mapping[str, Value] | None = None) -> dict[str, Any]:
    """Read the arrays of a .npz file by name.

    Args:
        path: The file.
        declared: The inputs by name; None for any.

    Raises:
        InvalidInput: The file is damaged, or an array is not a declared input or does not fit its type.
    """
    from singa_backend.io.archives import open_arrays
    from singa_backend.runtime.feeds import check_header

    with open_arrays(path, "SX307") as arrays:
        wanted = {n: known(n, declared) for n in arrays.names} if declared is not None else {}
        for name, value in wanted.items():
            check_header(value, *arrays.header(name, value.dtype))
        return {name: arrays.array(name, wanted[name].dtype if wanted else None) for name in arrays.names}


def known(name: str, declared: Mapping[str, Value]) -> Value:
    """Return the input of a name; raises InvalidInput if the model has none."""
    from singa_backend import InvalidInput

    if name not in declared:
        names = ", ".join(map(str, declared.values())) or "none"
        raise InvalidInput(f"the inputs must be {names}; unknown: {name!r}{did_you_mean(name, declared)}", code="SX301")
    return declared[name]


_LADDER = (1, 2, 4, 8, 32, 64, 224)
"""Sizes of open axes other than a batch, tried in this order until a model accepts them."""


def accepted_inputs(
    values: Sequence[Value],
    seed: int,
    sizes: dict[str, int],
    refusal: Callable[[dict[str, Any]], str],
    other: Callable[[dict[str, Any]], str] | None = None,
) -> tuple[dict[str, Any], str]:
    """Draw inputs as `random_inputs`, with the first open sizes that a model accepts.

    Args:
        values: The inputs.
        seed: The seed.
        sizes: The symbolic sizes that the user chose.
        refusal: Runs the model; returns why it refuses inputs, or "".
        other: The same by the engine to compare with, if any.

    Returns:
        The inputs, and a line about sizes other than 1 or the refusal of all; "" if 1 was accepted, or no size is open.

    Raises:
        InvalidInput: An input is not a tensor, or its dtype or shape is not declared.
    """
    axes = [(_size_name(v, i), i == 0 and len(v.shape or ()) > 1)
            for v in values for i, d in enumerate(v.shape or ()) if not isinstance(d, int)]  # fmt: skip
    batches = {d for d, leads in axes if leads} - {d for d, leads in axes if not leads}
    inner = [d for d in dict.fromkeys(d for d, _ in axes) if d is not None and d not in sizes and d not in batches]
    first, why, theirs = random_inputs(values, seed, sizes), "", ""
    ours: tuple[int, dict[str, Any]] | None = None
    for size in _LADDER if inner else ():
        feeds = first if size == 1 else random_inputs(values, seed, sizes | dict.fromkeys(inner, size))
        reason = refusal(feeds)
        if not reason and other is not None:
            ours, before, theirs = ours or (size, feeds), theirs, other(feeds)
            if theirs and theirs == before:
                break  # it does not depend on the size
            reason = theirs
        if not reason:
            return feeds, "" if size == 1 else f"open sizes: {_named(inner, size)} (the model refuses 1: {why})"
        why = why or reason
    if ours is not None:
        return ours[1], f"open sizes: {_named(inner, ours[0])}, which the other side refuses, as others: {theirs}; pass --size"
    return first, f"open sizes: 1; the model refuses this and all others up to {_LADDER[-1]}: {why}; pass --size" if inner else ""


def _size_name(value: Value, axis: int) -> str | None:
    """The name of an open size; "" for an unnamed one, and None if that may be a batch."""
    assert value.shape is not None
    size = value.shape[axis]
    return size if isinstance(size, str) else None if axis == 0 and len(value.shape) > 1 else ""


def _named(names: Sequence[str], size: int) -> str:
    return ", ".join(f"{name or 'unnamed axes'}={size}" for name in names)


def random_inputs(values: Sequence[Value], seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Draw an array for each input: floats are normal, integers and bools are 0 or 1, strings are short.

    Args:
        values: The inputs.
        seed: The seed.
        sizes: The symbolic sizes by name, with that of unnamed axes as ""; others, and an unnamed batch, are 1.

    Raises:
        InvalidInput: An input is not a tensor, or its dtype or shape is not declared.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    return {v.name: _random(v, generator, sizes) for v in values}


def _random(value: Value, generator: np.random.Generator, sizes: dict[str, int]) -> Any:
    import numpy as np

    from singa_backend import InvalidInput, limits
    from singa_backend.dtypes import STRING, is_float

    if value.kind != "tensor" or value.dtype is None or value.shape is None:
        raise InvalidInput(
            f"input {value} has no declared dtype and shape for random values", code="SX308", hint="pass it with --input"
        )
    names = [d if isinstance(d, int) else _size_name(value, i) for i, d in enumerate(value.shape)]
    shape = [d if isinstance(d, int) else 1 if d is None else sizes.get(d, 1) for d in names]
    limits.admit(shape, np.float64)  # a model may declare any size
    if value.dtype == STRING:
        return np.array([f"s{i}" for i in generator.integers(0, 100, shape).reshape(-1)], object).reshape(shape)
    if is_float(value.dtype) or value.dtype.kind == "c":
        return generator.standard_normal(shape).astype(value.dtype)
    return generator.integers(0, 2, shape).astype(value.dtype)


def sizes_of(pairs: Sequence[str], values: Sequence[Value]) -> dict[str, int]:
    """Parse ["batch=4"] to {"batch": 4}; raises InvalidInput unless each name is a symbolic size of these inputs."""
    from singa_backend import InvalidInput

    symbols = dict.fromkeys(d for v in values for d in v.shape or () if isinstance(d, str))
    out: dict[str, int] = {}
    for pair in pairs:
        name, _, size = pair.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,18}", size):
            raise InvalidInput(f"a size must be NAME=SIZE, got {pair!r}", code="SX308")
        if name not in symbols:
            names = ", ".join(symbols) or "none"
            hint = did_you_mean(name, symbols)
            raise InvalidInput(f"the symbolic sizes of the inputs are: {names}; got {name!r}{hint}", code="SX308")
        if name in out:
            raise InvalidInput(f"the size {name!r} occurs twice", code="SX308")
        out[name] = int(size)
    return out


def summary(name: str, value: Any) -> dict[str, Any]:
    """Return what is printed of an output: its dtype, shape, range and first values."""
    import numpy as np

    from singa_backend.dtypes import STRING, onnx_name

    if not isinstance(value, np.ndarray):
        kind = "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else "none"
        out: dict[str, Any] = {"name": name, "kind": kind, "length": len(value) if value is not None else 0}
        if value:
            out["first"] = _first(value)
            out |= _range(np.concatenate([np.zeros(0), *_floats(value)]))
        return out
    out = {"name": name, "kind": "tensor", "dtype": onnx_name(value.dtype), "shape": list(value.shape)}
    flat = value.reshape(-1)
    out["first"] = [str(v) for v in flat[:6]]
    return out | (_range(flat) if value.dtype != STRING and value.dtype.kind != "c" else {})


def _range(flat: np.ndarray) -> dict[str, Any]:
    """The minimum and maximum of finite values, and the numbers of NaN and infinities; nothing if there are no values."""
    import numpy as np

    if not flat.size:
        return {}
    wide = flat.astype(np.float64)
    finite = flat if flat.dtype.kind in "iu" else wide[np.isfinite(wide)]  # float64 rounds large integers
    low, high = (finite.min().item(), finite.max().item()) if finite.size else (None, None)
    return {"min": low, "max": high, "nan": int(np.isnan(wide).sum()), "inf": int(np.isinf(wide).sum())}


def _floats(value: Any) -> Iterator[np.ndarray]:
    """The floats in a sequence or a map, as vectors of float64; keys and values of other types are left out."""
    import numpy as np

    from singa_backend.dtypes import is_float

    if isinstance(value, dict):
        yield np.array([v for v in value.values() if isinstance(v, (float, np.floating))], np.float64)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _floats(one)
    elif isinstance(value, np.ndarray) and is_float(value.dtype):
        yield value.reshape(-1).astype(np.float64)


def _first(value: Any) -> list[str]:
    """The beginning of a sequence or a map: pairs of a map, types of tensors, and the first map of a sequence."""
    import numpy as np

    from singa_backend.dtypes import onnx_name

    if isinstance(value, dict):
        return [f"{k}: {_number(v)}" for k, v in itertools.islice(value.items(), 6)]
    if isinstance(value[0], dict):
        more = ", ..." if len(value[0]) > 6 else ""
        return [f"{{{', '.join(_first(value[0]))}{more}}}"]
    return [f"{onnx_name(v.dtype)}{list(v.shape)}" if isinstance(v, np.ndarray) else str(v) for v in value[:6]]


def _number(value: Any) -> str:
    import numpy as np

    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value)
