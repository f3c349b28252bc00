"""Strings of a plan: arrays of strings, and lists of them that become an array only if something reads one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dtypes import STRING
from .table import Invalid, Site, kernel
from .values import OpaqueValue, Value
from .views import ints


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


def _reshaped(site: Site, x: OpaqueValue, shape: tuple[int, ...]) -> OpaqueValue:
    """Emit the step that reshapes strings, to a shape with at most one -1."""
    site.require(is_texts(x), "the input is not an array of strings")
    y, count = Texts(), len(texts_of(x))
    known = math.prod(d for d in shape if d >= 0)
    site.require(shape.count(-1) <= 1 and known and not count % known, "the sizes do not fit")
    site.require(-1 in shape or known == count, "the sizes do not fit")
    site.emit(lambda: [(_reshape, (x, y, shape, known))], reads=(), writes=(), kernel="numpy.reshape", keeps=(x, y))
    return y


def _reshape(x: OpaqueValue, y: Texts, shape: tuple[int, ...], known: int) -> None:
    texts = texts_of(x)
    count, left = divmod(len(texts), known)
    if left or (count != 1 and -1 not in shape):
        raise Invalid("an array of strings has another size")
    y.set(texts, tuple([count if d < 0 else d for d in shape]))


@kernel("Reshape", 5, 13, 14, 19, 21, 23, 24, 25, on="numpy", takes="opaque")
def reshape(site: Site, x: Any, shape: Any) -> OpaqueValue:
    site.require(isinstance(x, OpaqueValue) and isinstance(shape, Value), "not strings")
    sizes = ints(site, shape, "the shape")
    site.require(min(sizes, default=1) >= -1 and 0 not in sizes, "a size is copied, or 0")
    return _reshaped(site, x, sizes)


@kernel("Flatten", 9, 11, 13, 21, 23, 24, 25, on="numpy", takes="opaque")
def flatten(site: Site, x: Any) -> OpaqueValue:
    site.require(is_texts(x) and site.attributes["axis"] == 1 and len(shape_of(x)) > 1, "not strings of several axes")
    return _reshaped(site, x, (shape_of(x)[0], -1))
