"""The boxes of NonMaxSuppression by machine code, which the definition calls, so that every run profits; see gemm/boxes.py."""

from __future__ import annotations

import os
import struct
from functools import cache
from itertools import accumulate

import numpy as np

from .. import limits
from ..elementwise.builder import LANES
from ..elementwise.compile import CEILING, VARIABLE, Compiled, NotCompiled
from ..gemm.boxes import DIGITS, F32, selecting
from .values import address_of

TOGETHER = 1 << 16
"""The scores between two checks of the deadline, or those of one class."""


FRAME = 22
"""The words with which the function is called."""

_FLOATS, _BITS = struct.Struct("=2f"), struct.Struct("=2i")


@cache
def _code(*_variables: str | None) -> Compiled | None:
    """The function for these values of the environment's variables; None if there is no machine code."""
    try:
        return selecting().compiled()
    except NotCompiled:
        return None


def selected_boxes(
    boxes: np.ndarray, scores: np.ndarray, most: int, iou: float, least: float | None, centers: int
) -> np.ndarray | None:
    """The rows (batch entry, class, box) of the selected boxes; None without machine code.

    Args:
        boxes: float32, (N, boxes, 4).
        scores: float32, (N, classes, boxes).
        most: of so many boxes at most are selected for a class.
        iou: of two boxes that overlap by more, one is selected.
        least: the lowest score of a box that is selected; None for all.
        centers: 1 if the boxes are centers and sizes.
    """
    code = _code(*map(os.environ.get, (VARIABLE, *CEILING)))
    if code is None:
        return None
    entries, classes, count = scores.shape
    units, most = entries * classes, min(most, count)
    if not units or most <= 0:
        return np.empty((0, 3), np.int64)
    boxes, scores = np.ascontiguousarray(boxes, F32), np.ascontiguousarray(scores, F32)
    step, room = min(units, max(1, TOGETHER // count)), -(-most // LANES) * LANES
    lengths = (FRAME, count + LANES, count, DIGITS, 5 * room // 2, 1, 3 * most * step)
    _, *places, last, y, end = accumulate(lengths, initial=0)
    words = np.empty(end, np.int64)
    start = address_of(words)
    bits = _BITS.unpack(_FLOATS.pack(0 if least is None else least, iou))
    numbers = (step, 0, 0, classes, count, most, least is not None, *bits, centers, room)
    addresses = [start + 8 * n for n in (*places, last, y)]
    words[:FRAME] = (0, 1, 0, *numbers, address_of(boxes), address_of(scores), *addresses)
    parts = []
    for first in limits.blocks(units, step):
        words[4], words[5], words[last] = min(step, units - first), first, 0
        code.call(start)
        parts.append(words[y : y + 3 * int(words[last])].reshape(-1, 3).copy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
