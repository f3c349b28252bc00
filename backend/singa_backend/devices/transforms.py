"""Fourier transforms whose plans of cuFFT belong to a record of a run: CuPy's own cache may delete those that a graph uses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .graphs import Tables, refuse_capture

Array = Any  # of CuPy

_TYPES = {
    "fft": ("CUFFT_C2C", "CUFFT_Z2Z"),
    "ifft": ("CUFFT_C2C", "CUFFT_Z2Z"),
    "rfft": ("CUFFT_R2C", "CUFFT_D2Z"),
    "irfft": ("CUFFT_C2R", "CUFFT_Z2D"),
}
"""The types of the plans of the functions along one axis, of single and of double precision."""


class Transforms:
    """The functions of `cupy.fft` along one axis, by plans that `tables` keeps.

    Args:
        module: CuPy.
        tables: of the run that is recorded or captured.
    """

    def __init__(self, module: Any, tables: Tables) -> None:
        self._module, self._tables = module, tables

    def __getattr__(self, name: str) -> Any:
        if name in _TYPES:
            return partial(self._along, name)
        refuse_capture(f"calls {name}, whose plan of cuFFT is not kept")
        return getattr(self._module.fft, name)

    def _along(self, name: str, x: Array, n: int | None = None, axis: int = -1) -> Array:
        """A transform along one axis, as CuPy's."""
        transform = getattr(self._module.fft, name)
        length = (2 * (x.shape[axis] - 1) if name == "irfft" else x.shape[axis]) if n is None else n
        batch = math.prod(x.shape) // max(x.shape[axis], 1)
        if length < 1 or not batch:
            return transform(x, n, axis=axis)
        cufft = self._module.cuda.cufft
        number = getattr(cufft, _TYPES[name][x.dtype in (np.float64, np.complex128)])
        with self._tables.plan((length, number, batch), lambda: cufft.Plan1d(length, number, batch)):
            return transform(x, n, axis=axis)
