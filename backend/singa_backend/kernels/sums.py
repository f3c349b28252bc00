"""Sums over axes as calls of NumPy, which a plan makes on the memory of its arena: in stages if they are long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices import sums
from .table import Site
from .values import Bound, Buffer


class Sum:
    """A sum over axes of an array.

    Args:
        shape: of the array.
        strides: in bytes.
        dtype: its dtype.
        axes: those that are summed, from the front.

    Attributes:
        kept: the axes that are not summed, in the order in which the sums should be in memory.
        nbytes: the bytes of the sums of blocks.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any], axes: Sequence[int]) -> None:
        self._axes, self._dtype = tuple(axes), dtype
        self._stages = (
            sums.stages(tuple(shape), tuple(strides), dtype.itemsize, self._axes) if dtype.name in sums.FLOATS else None
        )
        self.kept = tuple(a for a in range(len(shape)) if a not in self._axes) if self._stages is None else self._stages.kept
        self.nbytes = 0 if self._stages is None else sum(self._stages.sizes) * dtype.itemsize

    def scratch(self, site: Site, further: int = 0) -> Buffer | None:
        """The memory that the step needs, `further` bytes before it included; None if it needs none."""
        return site.scratch(further + self.nbytes) if further + self.nbytes else None

    def calls(self, x: np.ndarray, out: np.ndarray, scratch: Buffer | None, begin: int = 0) -> Bound:
        """The calls that write the sums.

        Args:
            x: the array.
            out: the sums; its axes are those of x that are not summed, and in memory they are in the order `kept`.
            scratch: the memory of the step.
            begin: where the sums of blocks begin in it, in bytes.
        """
        if self._stages is None:
            return [(np.add.reduce, (x, self._axes, self._dtype, out))]
        arrays = [x.transpose(self._stages.order), out.transpose(np.argsort(np.argsort(self.kept)))]
        for elements in self._stages.sizes:
            assert scratch is not None
            arrays.append(np.ndarray((elements,), self._dtype, scratch.memory, begin))
            begin += elements * self._dtype.itemsize
        return [(np.add.reduce, (source, axis, self._dtype, target)) for source, axis, target in self._stages.run(arrays)]
