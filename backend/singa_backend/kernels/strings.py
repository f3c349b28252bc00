"""Strings of a plan: arrays of strings, and lists of them that become an array only if something reads one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import STRING
from .table import Invalid
from .values import OpaqueValue


class Texts(OpaqueValue):
    """An array of strings that each run sets as a list: kernels pass lists on, and only others read the array.

    Attributes:
        items: the strings in C order; nothing changes the list.
        shape: the shape of the array.
    """

    def __init__(self) -> None:
        self.fresh = True
        self.set([], (0,))

    def set(self, items: list[str], shape: tuple[int, ...]) -> None:
        """Replace the strings."""
        self.items, self.shape = items, shape
        self._array: np.ndarray | None = None

    @property
    def value(self) -> Any:
        """The array."""
        if self._array is None:
            made = np.empty(len(self.items), object)
            made[:] = self.items
            self._array = made.reshape(self.shape)
        return self._array

    @value.setter
    def value(self, value: np.ndarray) -> None:
        self.set(value.reshape(-1).tolist(), value.shape)


def is_texts(x: Any) -> bool:
    """Whether an input is an array of strings."""
    return isinstance(x, Texts) or (isinstance(x, OpaqueValue) and isinstance(x.value, np.ndarray) and x.value.dtype == STRING)


def shape_of(x: OpaqueValue) -> tuple[int, ...]:
    """The shape of the array of this run."""
    return x.shape if isinstance(x, Texts) else x.value.shape


def texts_of(x: OpaqueValue, shape: tuple[int, ...] | None = None) -> list[str]:
    """The strings of a run in C order; raises Invalid if they are not of the shape for which the plan was made.

    Args:
        x: the array.
        shape: the shape; None for any.
    """
    if shape is not None and shape_of(x) != shape:
        raise Invalid("an array of strings has another shape")
    found: list[str] = x.items if isinstance(x, Texts) else x.value.reshape(-1).tolist()
    return found
