"""Store values of every kind as arrays by name, as an .npz file holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidInput


def named_arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return every array in values by name.

    Args:
        values: tensors, sequences, maps and optionals by name.

    Returns:
        A tensor under its name; the elements of a sequence under ``name/0``, ``name/1``, ...; of a map its keys and values, in
        the same order, under ``name/keys`` and ``name/values``.  An empty optional and an empty sequence have no array.

    Raises:
        InvalidInput: two arrays have the same name: a sequence ``a`` and a tensor ``a/0`` (SX351).
    """
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        for key, array in _arrays(name, value):
            if key in found:
                raise InvalidInput(f"two of the values would be stored as the array {key!r}", code="SX351")
            found[key] = array
    return found


def _arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, Mapping):
        yield f"{name}/keys", np.asarray(list(value))
        yield f"{name}/values", np.asarray(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for i, element in enumerate(value):
            yield from _arrays(f"{name}/{i}", element)
    elif value is not None:
        yield name, np.asarray(value)
