"""The boxes of NonMaxSuppression by machine code, which the definition calls, so that every run profits; see gemm/boxes.py."""

from __future__ import annotations

import os
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
    *places, end = accumulate([count + LANES, count, DIGITS, 5 * room // 2, 1, 3 * most * step], initial=0)
    words = np.empty(end, np.int64)
    total, y = words[places[-2] :], words[places[-1] :]
    bits = np.array([0 if least is None else least, iou], F32).view(np.int32).tolist()
    numbers = [step, 0, 0, classes, count, most, least is not None, *bits, centers, room]
    places = [address_of(boxes), address_of(scores), *(address_of(words) + 8 * n for n in places)]
    frame = np.array([0, 1, 0, *numbers, *places], np.int64)
    parts = []
    for first in limits.blocks(units, step):
        frame[4], frame[5], total[0] = min(step, units - first), first, 0
        code.call(address_of(frame))
        parts.append(y[: 3 * total[0]].reshape(-1, 3).copy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
