"""Draws shapes, values, axes and attributes of one node from one generator; recipes use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from onnx import defs

from ... import dtypes
from ...ir.declaration import REQUIRED

A = TypeVar("A")
WORDS = ("", "a", "b", "ab", "Abc", "ABC", "b c", " a ", "ß", "日本", "1", "a-b", "aab", "zz")
SPECIAL_TENSORS, SPECIAL_ELEMENTS, EMPTY, UNIT_AXIS, OMITTED, CONSTANT = 0.35, 0.15, 0.08, 0.2, 0.35, 0.3
"""The probabilities that: a tensor has special values; one of its elements is special; a shape has an axis of 0; an axis is 1;
an attribute keeps its default; an input after the first is an initializer."""


class Skip(Exception):
    """These types or this version cannot be drawn together; another draw may be valid."""


class Draw:
    """The node that a recipe draws.

    Attributes:
        v: The schema version.
        types: The dtype of each type parameter (of the elements, for sequences).
        inputs: One value per input, None for an absent one.
        attributes: The attributes that the node sets, by name.
        outputs: The outputs' names, "" for one that is left out.
        fixed: The indices of inputs that must be initializers.
    """

    def __init__(self, rng: np.random.Generator, schema: defs.OpSchema, opset: int, types: dict[str, np.dtype[Any]]) -> None:
        self.rng = rng
        self.schema = schema
        self.opset = opset
        self.v = schema.since_version
        self.types = types
        self.inputs: list[Any] = []
        self.attributes: dict[str, Any] = {}
        self.outputs: list[str] = ["y"]
        self.fixed: set[int] = set()

    # --- random choices

    def chance(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, options: Sequence[A]) -> A:
        return options[int(self.rng.integers(len(options)))]

    def whole(self, low: int, high: int) -> int:
        """Draw an integer of [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def wholes(self, low: int, high: int, n: int) -> list[int]:
        return [self.whole(low, high) for _ in range(n)]

    def real(self, low: float = -2.0, high: float = 2.0) -> float:
        """Draw a number that float32, the type of attributes, represents exactly."""
        return float(np.float32(self.rng.uniform(low, high)))

    # --- shapes

    def size(self, most: int = 5) -> int:
        return 1 if self.chance(UNIT_AXIS) else self.whole(1, most)

    def shape(self, low: int = 0, high: int = 4, most: int = 5, empty: float = EMPTY) -> tuple[int, ...]:
        rank = self.whole(low, high)
        if high > 4 and self.chance(0.7):
            rank = min(rank, max(low, 4))
        shape = [self.size(most if rank < 4 else 3) for _ in range(rank)]
        if shape and self.chance(empty):
            shape[self.whole(0, rank - 1)] = 0
        return tuple(shape)

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Draw a shape that broadcasts to this one: a suffix of it, with some axes 1."""
        start = self.whole(0, len(shape)) if self.chance(0.5) else 0
        return tuple(1 if self.chance(0.3) else n for n in shape[start:])

    def pair(self, low: int = 0, high: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw two shapes that broadcast against each other, one way or both ways."""
        a = self.shape(low, high)
        b = self.broadcast(a) if self.chance(0.7) else a
        if len(b) == len(a) and self.chance(0.3):
            a = tuple(1 if self.chance(0.3) and m != 1 else n for n, m in zip(a, b, strict=True))
        return (a, b) if self.chance(0.6) else (b, a)

    def axis(self, rank: int, negative_from: int = 11) -> int:
        """Draw an axis; it may be negative if this version allows that."""
        if rank == 0:
            raise Skip
        axis = self.whole(0, rank - 1)
        return axis - rank if self.v >= negative_from and self.chance(0.4) else axis

    def axes(self, rank: int, low: int = 1, negative_from: int = 11) -> list[int]:
        """Draw some of the axes, in any order."""
        chosen = self.rng.permutation(rank)[: self.whole(min(low, rank), rank)].tolist()
        return [int(a) - rank if self.v >= negative_from and self.chance(0.3) else int(a) for a in chosen]

    # --- values

    def dtype(self, which: str | int) -> np.dtype[Any]:
        """Return the dtype of a type parameter, or of the formal input with this index."""
        if isinstance(which, int):
            which = self.schema.inputs[min(which, len(self.schema.inputs) - 1)].type_str
        found = self.types.get(which)
        if found is None:
            found = dtypes.from_type_string(which)
        if found is None:
            raise Skip
        return found

    def array(self, which: Any, shape: Sequence[int], kind: str = "any") -> np.ndarray:
        """Draw values of a dtype (or type parameter, or formal input).

        kind: "any" may have special values and extremes, "small" only NaN, infinities and -0, "tame" none; "positive", "unit"
        ([0, 1]), "around" ([-1, 1]), "nonzero" and "half" (steps of 1/2) have none either.
        """
        dtype = self.dtype(which) if isinstance(which, (str, int)) else np.dtype(which)
        shape = tuple(shape)
        if dtype == dtypes.STRING:
            return np.array([self.pick(WORDS) for _ in range(int(np.prod(shape)))], object).reshape(shape)
        if dtype == np.bool_:
            return np.asarray(self.rng.random(shape) < 0.5)
        if dtype.kind == "c":
            return np.asarray(self.rng.standard_normal(shape) + 1j * self.rng.standard_normal(shape)).astype(dtype)
        if dtypes.is_float(dtype):
            return self._floats(dtype, shape, kind)
        return self._integers(dtype, shape, kind)

    def _integers(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        low, high = bounds(dtype)
        wide = self.rng.random() < 0.5 and kind == "any"
        a, b = (low, high) if wide else (max(low, -9), min(high, 9))
        if kind in ("positive", "unit"):
            a = 1 if kind == "positive" else 0
        x = np.asarray(self.rng.integers(a, b, shape, dtype=np.uint64 if high >= 2**63 else np.int64, endpoint=True))
        if kind == "any" and self.chance(SPECIAL_TENSORS):
            extreme = np.array([low, high, -1 if low else 1, 0], x.dtype)
            x = np.where(self.rng.random(shape) < SPECIAL_ELEMENTS, self.rng.choice(extreme, shape), x)
        if kind == "nonzero":
            x = np.where(x == 0, x.dtype.type(1), x)
        return np.asarray(x).astype(dtype)

    def _floats(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        if kind in ("positive", "unit"):
            x = self.rng.uniform(0.1 if kind == "positive" else 0, 3 if kind == "positive" else 1, shape)
        elif kind == "around":
            x = self.rng.uniform(-1, 1, shape)
        elif kind == "half":
            x = self.rng.integers(-8, 9, shape) / 2
        else:
            x = self.rng.standard_normal(shape) * (10 ** self.rng.uniform(-2, 2) if kind == "any" else 2.0)
        x = np.asarray(x, np.float64)
        if kind == "nonzero":
            x = np.where(np.abs(x) < 0.1, 0.5, x)
        if dtype.name == "float8_e8m0fnu":
            return np.asarray(np.exp2(np.round(np.log2(np.maximum(np.abs(x), 2.0**-20)))).astype(dtype))
        y = np.asarray(x.astype(dtype))
        if kind in ("any", "small") and self.chance(SPECIAL_TENSORS):
            info = float_info(dtype)
            special = [0.0, -0.0]
            with np.errstate(all="ignore"):
                special += [v for v in (np.nan, np.inf, -np.inf) if _holds(dtype, v)]
                if kind == "any":
                    special += [float(info.max), float(info.min), float(info.tiny), float(info.smallest_subnormal), 1.0, -1.0]
            chosen = np.asarray(self.rng.choice(np.array(special), shape)).astype(dtype)
            y = np.where(self.rng.random(shape) < SPECIAL_ELEMENTS, chosen, y)
        return np.asarray(y, dtype)

    # --- the node

    def put(self, *values: Any, fixed: bool = False) -> None:
        """Append inputs; None is an absent one.  fixed: they must be initializers."""
        for value in values:
            if fixed and value is not None:
                self.fixed.add(len(self.inputs))
            self.inputs.append(value)

    def ints(self, values: Any, dtype: dtypes.DTypeLike = np.int64) -> np.ndarray:
        return np.array(values, dtype)

    def has(self, name: str) -> bool:
        """Whether this version has the attribute."""
        return name in self.schema.attributes

    def attr(self, name: str, options: Sequence[A] | Callable[[], A], default: Any = REQUIRED) -> Any:
        """Draw an attribute, or keep its default; returns the effective value.

        A version without this attribute uses the default too.  Without a default the attribute is always set.
        """
        if not self.has(name):
            return None if default is REQUIRED else default
        if default is not REQUIRED and self.chance(OMITTED):
            return default
        value = options() if callable(options) else self.pick(options)
        if value is not None:
            self.attributes[name] = value
        return default if value is None else value


def bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the lowest and the highest value of an integer dtype."""
    info: Any = dtypes.integer_info(dtype) if dtype in dtypes.SUB_BYTE_INTS else np.iinfo(dtype)
    return int(info.min), int(info.max)


def float_info(dtype: np.dtype[Any]) -> Any:
    """Return the finfo of any float dtype."""
    return np.finfo(dtype) if dtype.type.__module__ == "numpy" else dtypes.float_info(dtype)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    back = np.float64(np.asarray(value).astype(dtype))
    return bool(back == value or (np.isnan(back) and np.isnan(value)))
