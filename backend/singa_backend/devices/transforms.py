"""Fourier transforms whose plans of cuFFT belong to a record of a run: CuPy's own cache may delete those that a graph uses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .graphs import Tables, refuse_capture

Array = Any  # of CuPy


class Transforms:
    """The functions of `cupy.fft` along one axis, by plans that `tables` keeps.

    Args:
        module: CuPy.
        tables: of the run that is recorded or captured.
    """

    def __init__(self, module: Any, tables: Tables) -> None:
        self._module, self._tables = module, tables

    def fft(self, x: Array, n: int | None = None, axis: int = -1) -> Array:
        """As CuPy's."""
        return self._along("fft", "C2C", x, n, axis)

    def ifft(self, x: Array, n: int | None = None, axis: int = -1) -> Array:
        """As CuPy's."""
        return self._along("ifft", "C2C", x, n, axis)

    def rfft(self, x: Array, n: int | None = None, axis: int = -1) -> Array:
        """As CuPy's."""
        return self._along("rfft", "R2C", x, n, axis)

    def irfft(self, x: Array, n: int | None = None, axis: int = -1) -> Array:
        """As CuPy's."""
        return self._along("irfft", "C2R", x, n, axis)

    def __getattr__(self, name: str) -> Any:
        refuse_capture(f"calls {name}, whose plan of cuFFT is not kept")
        return getattr(self._module.fft, name)

    def _along(self, name: str, kind: str, x: Array, n: int | None, axis: int) -> Array:
        transform = getattr(self._module.fft, name)
        length = (2 * (x.shape[axis] - 1) if kind == "C2R" else x.shape[axis]) if n is None else n
        batch = math.prod(x.shape) // max(x.shape[axis], 1)
        if length < 1 or not batch:
            return transform(x, n, axis=axis)
        cufft = self._module.cuda.cufft
        double = x.dtype in (np.float64, np.complex128)
        number = {"C2C": (cufft.CUFFT_C2C, cufft.CUFFT_Z2Z), "R2C": (cufft.CUFFT_R2C, cufft.CUFFT_D2Z)}.get(
            kind, (cufft.CUFFT_C2R, cufft.CUFFT_Z2D)
        )[double]
        with self._tables.plan((length, number, batch), lambda: cufft.Plan1d(length, number, batch)):
            return transform(x, n, axis=axis)
