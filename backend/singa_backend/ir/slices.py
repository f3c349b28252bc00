"""The elements that a Slice selects on one axis."""

from __future__ import annotations


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def slice_of(start: int, end: int, step: int, size: int) -> slice | None:
    """Convert ONNX's start, end and step on an axis of this size to a Python slice; None if the step is 0.

    Unlike in Python, a start far below 0 still selects the first element if the step is negative.
    """
    if step == 0:
        return None
    start, end = (v + size if v < 0 else v for v in (start, end))
    step = _clamp(step, -size - 1, size + 1)
    if step > 0:
        return slice(_clamp(start, 0, size), _clamp(end, 0, size), step)
    if size == 0:
        return slice(0, 0)
    start, end = _clamp(start, 0, size - 1), _clamp(end, -1, size - 1)
    return slice(start, None if end < 0 else end, step)
