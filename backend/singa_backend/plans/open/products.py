"""Products of matrices whose number of columns, or whose inner size, differs between the runs of an open plan."""

from __future__ import annotations

import numpy as np

from ...kernels import onednn as dnn
from ...kernels.lowering import F32
from ...kernels.onednn import MemoryDesc, OneDnnError, Primitive
from ...kernels.values import ALIGNMENT, aligned

SMALL = 1 << 18
"""Elements of the right operand from which a product is computed by oneDNN; NumPy has less to prepare."""


class OpenProduct:
    """Computes products of two batches of float32 matrices, one of whose sizes is not known before the run.

    The scores of attention have as many columns as there are keys, and their product with the values has that inner size.
    NumPy computes one matrix of the batch after the other, and its library may use other threads than oneDNN's, which wait on
    their cores for more work.
    """

    def __init__(self) -> None:
        self._primitives: dict[tuple[object, ...], Primitive | None] = {}

    def __call__(self, a: object, b: object) -> np.ndarray | None:
        """Compute a product.

        Args:
            a: (..., m, k).
            b: (..., k, n): the columns or the rows are dense in memory, without gaps between those of one matrix.

        Returns:
            The product, (..., m, n); None if another way is faster, or the only one.
        """
        if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or not a.dtype == b.dtype == F32:
            return None
        if a.ndim != b.ndim or b.ndim < 3 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2] or b.size < SMALL:
            return None
        if not a.size or min(b.strides) <= 0 or any(s % 4 for s in b.strides) or b.ctypes.data % 4:
            return None
        columns = b.strides[-2] == 4 and b.strides[-1] > 4  # the keys, transposed
        if not columns and b.strides[-1] != 4:
            return None
        (m, k), n = a.shape[-2:], b.shape[-1]
        step = max(b.strides[-2:]) // 4
        key = (a.shape[:-2], m, k if columns else n, columns, step, dnn.threads())
        if key not in self._primitives:
            self._primitives[key] = self._create(a.shape[:-2], m, k, n, columns, step)
        primitive = self._primitives[key]
        if primitive is None:
            return None
        a, y = np.ascontiguousarray(a), np.empty((*a.shape[:-1], n), F32)
        arguments = {
            dnn.args.SRC: (MemoryDesc.of(F32, a.shape), a.ctypes.data),
            dnn.args.DST: (MemoryDesc.of(F32, y.shape), y.ctypes.data),
            dnn.args.WEIGHTS: (MemoryDesc.of(F32, b.shape, [s // 4 for s in b.strides]), b.ctypes.data),
        }
        scratch = aligned(max(primitive.scratchpad_nbytes, ALIGNMENT))
        if primitive.scratchpad_nbytes:
            arguments[dnn.args.SCRATCHPAD] = (primitive.query("scratchpad"), scratch.ctypes.data)
        dnn.bind(primitive, arguments).run()
        return y

    @staticmethod
    def _create(batch: tuple[int, ...], m: int, k: int, n: int, columns: bool, step: int) -> Primitive | None:
        outer = [dnn.RUNTIME_DIM] * len(batch)
        if columns:
            left, right = MemoryDesc.of(F32, (*batch, m, k)), MemoryDesc.of(F32, (*batch, k, dnn.RUNTIME_DIM), (*outer, 1, step))
            into = MemoryDesc.of(F32, (*batch, m, dnn.RUNTIME_DIM), (*outer, dnn.RUNTIME_DIM, 1))
        else:
            left = MemoryDesc.of(F32, (*batch, m, dnn.RUNTIME_DIM), (*outer, dnn.RUNTIME_DIM, 1))
            right, into = MemoryDesc.of(F32, (*batch, dnn.RUNTIME_DIM, n), (*outer, step, 1)), MemoryDesc.of(F32, (*batch, m, n))
        try:
            return dnn.matmul(left, right, None, into)
        except OneDnnError:
            return None


__all__ = ["OpenProduct"]
