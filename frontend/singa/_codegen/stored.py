"""The arrays of a program, by keys that are valid in an .npz file, and the expressions that read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import UnsupportedModel
from singa_backend.ir.graph import Node
from singa_backend.proto.messages import FreshNames

from .text import Expr, call, cleaned, quoted

_LONGEST = 90
"""Maximum characters of a name in a line of a program."""


@dataclass
class StoredArrays:
    """The arrays of a program.

    Attributes:
        arrays: by key.
        narrow: dtypes that NumPy's format does not support, by key; these arrays are stored as bits.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    narrow: dict[str, str] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    def reserve(self, names: list[str]) -> None:
        """Use these names of values as keys, if they are valid."""
        self._keys |= {n: n for n in names if _usable(n)}

    def tensor(self, name: str, array: np.ndarray, trains: bool) -> Expr:
        """The expression that reads a parameter, or a statistic."""
        return call("w.param" if trains else "w.state", [quoted(self._put(name, array))])

    def array(self, name: str, array: np.ndarray) -> str:
        """The expression that reads a constant."""
        return f"w.arrays[{quoted(self._put(name, array))}]"

    def attribute(self, node: Node, name: str, array: np.ndarray) -> str:
        """The expression that reads an attribute."""
        key = self._free(f"{node.output_names[0]}.{name}")
        self._keys["\0" + key] = key  # taken by an attribute, not by a value
        self.arrays[key] = self._storable(key, array)
        return f"w.arrays[{quoted(key)}]"

    def _put(self, name: str, array: np.ndarray) -> str:
        if name not in self._keys:
            self._keys[name] = self._free(name)
        key = self._keys[name]
        if key not in self.arrays:
            self.arrays[key] = self._storable(key, array)
        return key

    def _free(self, name: str) -> str:
        """A key that is not in use."""
        return FreshNames(self._keys.values(), first=2).new(name if _usable(name) else cleaned(name, "value"))

    def _storable(self, key: str, array: np.ndarray) -> np.ndarray:
        """Convert an array to a form that NumPy's file format supports without pickling."""
        if array.dtype == dtypes.STRING:
            texts = np.array(array.tolist(), str)  # of one width; a NUL at the end is lost
            if array.size and texts.tolist() != array.tolist():
                raise refused(f"the strings of {key!r} end in NUL characters, which .npz files do not keep")
            return texts.reshape(array.shape)
        if array.dtype.type.__module__ == "numpy":
            return array
        self.narrow[key] = array.dtype.name
        return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def refused(why: str, node: Node | None = None) -> UnsupportedModel:
    """Create the error for a part of a model that cannot be written."""
    return UnsupportedModel(
        f"the program cannot be written: {why}",
        code="SX207",
        node=node.name if node else "",
        operator=node.op_type if node else "",
    )


def _usable(name: str) -> bool:
    """Whether a name can be a key of an .npz file: `a.npy` and `a` would be the same key, and a NUL ends a name."""
    return bool(name) and len(quoted(name)) <= _LONGEST and name.isprintable() and "\\" not in name and not name.endswith(".npy")
