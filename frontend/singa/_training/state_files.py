"""Files with the states of a model, as SINGA writes them: `tensor_dict.npz`, described by `states_attr.json`."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, SonnxError
from singa_backend.io.archives import Archive, Arrays, open_archive
from singa_backend.io.documents import DOCUMENT, Document, parse_document
from singa_backend.io.files import write_npz, writing

from .._core.conversions import code_of, dtype_of
from .._core.tensor import Tensor

STATES_FILE = "states_attr.json"
"""The member that describes the states."""


def write_states(path: Path, states: Mapping[str, Any], aux: Mapping[str, Any]) -> None:
    """Write the states of a model, and further tensors; raises InvalidInput (SX319) for other values and equal names."""
    both = sorted(set(states) & set(aux))
    if both:
        raise InvalidInput(
            f"the names in aux_states must differ from those of the model's states, got {', '.join(both)}", code="SX319"
        )
    arrays: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for kind, group in enumerate((states, aux)):
        for name, t in group.items():
            if not isinstance(t, Tensor):
                raise InvalidInput(f"the state {name!r} must be a Tensor, got a {type(t).__name__}", code="SX319")
            arrays[name] = t.device.backend.get(t.data)
            if isinstance(arrays[name], list) or arrays[name].dtype == dtypes.STRING:
                raise InvalidInput(f"the state {name!r} must be numeric", code="SX319")
            code = code_of(arrays[name].dtype)
            code = code if isinstance(code, int) else 100 + dtypes.onnx_code(code)  # dtypes that SINGA does not have
            attributes[name] = {"state_type": kind, "shape": list(arrays[name].shape), "dtype": code}
    try:
        with writing(path, new=True) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as pack:
            buffer = io.BytesIO()
            write_npz(buffer, {n: _storable(a) for n, a in arrays.items()})
            pack.writestr("tensor_dict.npz", buffer.getvalue())
            pack.writestr(STATES_FILE, json.dumps(attributes))
    except FileExistsError:  # since the caller has looked
        raise AssertionError(f"{path} exists already") from None


def read_states(
    path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Read the states of a model, whose names and shapes must be these, and the further tensors."""
    with open_archive(path, "SX340") as pack:
        described = _described(pack)
        _check_shapes({n: s.shape for n, s in described.items() if not s.auxiliary}, shapes)
        stored = Arrays(pack.inner("tensor_dict.npz", sum(s.room(n) for n, s in described.items()) + _ROOM))
        arrays = _states(stored, described)
    own = {n: a for n, a in arrays.items() if not described[n].auxiliary}
    return own, {n: a for n, a in arrays.items() if described[n].auxiliary}


def _check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidInput (SX341) unless the file has the names and shapes of the states of the model."""
    lacking, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if lacking or unknown:
        parts = [f"it lacks {', '.join(lacking)}"] * bool(lacking) + [f"it also has {', '.join(unknown)}"] * bool(unknown)
        raise InvalidInput(
            f"the file must have the states of this model: {'; '.join(parts)}",
            code="SX341",
            hint="pass a file of this model; a model of layers has its parameters after it was compiled",
        )
    for name, shape in found.items():
        if shape != wanted[name]:
            raise InvalidInput(f"the state {name!r} must have shape {wanted[name]}, got {shape}", code="SX341")


def _storable(array: Any) -> Any:
    """Return the array for NumPy's file format without pickling; dtypes that are not NumPy's are stored as bits."""
    return array.view(f"u{array.dtype.itemsize}") if _is_foreign(array.dtype) else array


def _is_foreign(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__ != "numpy"


@dataclass
class _Described:
    """What states_attr.json states of a tensor."""

    auxiliary: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    def room(self, name: str) -> int:
        """The maximum bytes that it takes in tensor_dict.npz."""
        return math.prod(self.shape) * self.stored.itemsize + 4 * len(name.encode()) + _ROOM


MOST_DIMENSIONS = 64
"""NumPy's maximum."""

_ROOM = 4096
"""The maximum bytes of the headers of a member."""


def _described(pack: Archive) -> dict[str, _Described]:
    """Read what a file states of its tensors."""
    return {name: _describe(facts) for name, facts in read_described(pack).items()}


def read_described(pack: Archive) -> Document:
    """The document in a file of states that describes them."""
    return parse_document(pack.read(STATES_FILE, DOCUMENT), f"{pack.where}, {STATES_FILE}", pack.code)


def _describe(facts: Document) -> _Described:
    kind, code = facts["state_type"].integer(0, 1), facts["dtype"].integer()
    shape = tuple(n.integer(0, 1 << 62) for n in facts["shape"].parts(0, MOST_DIMENSIONS))
    try:
        dtype = dtypes.numpy_dtype(code - 100) if code >= 100 else dtype_of(code)
    except SonnxError:
        dtype = dtypes.STRING
    if dtype == dtypes.STRING:
        raise facts["dtype"].wrong("the number of a numeric dtype")
    return _Described(kind == 1, shape, dtype, np.dtype(f"u{dtype.itemsize}") if _is_foreign(dtype) else dtype)


def _states(stored: Arrays, described: dict[str, _Described]) -> dict[str, Any]:
    """Read the tensors; raises InvalidInput unless they are as described."""
    if set(stored.names) != set(described):
        names = ", ".join(map(repr, sorted(set(stored.names) ^ set(described))[:8]))
        raise InvalidInput(f"{stored.where} must have the states in states_attr.json; they differ in {names}", code="SX340")
    for name, facts in described.items():
        shape, dtype = stored.header(name)
        if shape != facts.shape or dtype != facts.stored:
            want, got = f"{facts.stored}{list(facts.shape)}", f"{dtype}{list(shape)}"
            raise InvalidInput(f"{stored.where}: the state {name!r} must be {want} by states_attr.json, got {got}", code="SX340")
    return {name: stored[name].view(facts.dtype) for name, facts in described.items()}
