"""Stores values by name: in memory up to a budget, then in a temporary folder that is deleted on close."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtypes
from ..comparison.difference import bytes_of
from ..io.files import remove


class SpillStore:
    """Stores values that are needed later.  budget: the maximum bytes in memory."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self._values: dict[str, Any] = {}
        self._files: dict[str, tuple[Path, np.dtype[Any], tuple[int, ...]]] = {}
        self._written = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._values.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._files

    def put(self, name: str, value: Any) -> None:
        size = bytes_of(value)
        if self.held + size <= self.budget or not isinstance(value, np.ndarray) or value.dtype == dtypes.STRING:
            self._values[name] = value
            self.held += size
            return
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="sonnx-")
        self._written += 1
        path = Path(self._folder.name) / str(self._written)
        np.ascontiguousarray(value).reshape(-1).view(np.uint8).tofile(path)
        self._files[name] = (path, value.dtype, value.shape)

    def get(self, name: str) -> Any:
        """The value; a file is read again each time.  Raises KeyError."""
        if name in self._values:
            return self._values[name]
        path, dtype, shape = self._files[name]
        return np.fromfile(path, np.uint8).view(dtype).reshape(shape)

    def take(self, name: str) -> Any:
        """Remove a value and return it; raises KeyError."""
        value = self.get(name)
        if name in self._values:
            self.held -= bytes_of(self._values.pop(name))
        else:
            remove(self._files.pop(name)[0], b"")
        return value
