"""Files with the states of a model, as SINGA writes them: what `states_attr.json` states of each tensor in `tensor_dict.npz`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, SonnxError
from singa_backend.io.archives import Archive, Arrays

from .._core.conversions import dtype_of


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
        """The most bytes that it takes in tensor_dict.npz."""
        return math.prod(self.shape) * self.stored.itemsize + 4 * len(name.encode()) + _ROOM


_ROOM = 4096
"""The most bytes of the headers of a member."""


def _described(pack: Archive) -> dict[str, _Described]:
    """Read what a file states of its tensors."""
    attributes = pack.json("states_attr.json")
    try:
        return {name: _describe(facts) for name, facts in attributes.items()}
    except (LookupError, TypeError, AttributeError, ValueError, SonnxError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else getattr(error, "message", error)
        raise InvalidInput(f"{pack.where}: states_attr.json must describe each state: {what}", code="SX340") from None


def _describe(facts: dict[str, Any]) -> _Described:
    kind, shape, code = facts["state_type"], facts["shape"], facts["dtype"]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (kind, code, *shape)) or kind > 1:
        raise ValueError(f"its state_type, shape and dtype must be integers, got {str(facts)[:200]}")
    dtype = dtypes.numpy_dtype(code - 100) if code >= 100 else dtype_of(code)
    if dtype == dtypes.STRING:
        raise ValueError("a state must be numeric")
    return _Described(kind == 1, tuple(shape), dtype, np.dtype(f"u{dtype.itemsize}") if _is_foreign(dtype) else dtype)


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
