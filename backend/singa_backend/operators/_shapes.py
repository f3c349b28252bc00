"""Rules of shapes and sizes that several operators share: of results before a graph runs (see ir/shapes.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import OperatorError
from ..ir.shapes import Dim, Known, KnownShapes, Shape, ShapesRule, SizesRule, broadcast_shapes
from ..ir.windows import windows

FIRST = (0, -1)
"""The axis of a vector."""
LIMIT = 1 << 31
"""The magnitude of sizes that are computed here: larger ones may be taken modulo 2^n."""


def same_shape(known: KnownShapes[Any], call: Any) -> Shape | None:
    """The shape of the first input."""
    return known.shape(call.inputs[0])


def same_sizes(known: KnownShapes[Any], call: Any) -> Known | None:
    """The sizes of the first input."""
    return known.sizes(call.inputs[0])


def reshaped(known: KnownShapes[Any], shape: Shape | None, target: Known | None, zero: bool = False) -> Shape | None:
    """The shape of a Reshape to these sizes; None if its rank is not known."""
    if not isinstance(target, tuple):
        return None
    made: list[Dim] = []
    for i, size in enumerate(target):
        if size == 0 and not zero:
            made.append(shape[i] if shape is not None and i < len(shape) else known.fresh())
        else:
            made.append(size)
    if -1 in made:
        at = made.index(-1)
        made[at] = _rest(known, shape, [*made[:at], *made[at + 1 :]])
    return tuple(made)


def _rest(known: KnownShapes[Any], shape: Shape | None, others: Sequence[Dim]) -> Dim:
    """The size that -1 stands for: the number of elements divided by the other sizes."""
    if shape is None:
        return known.fresh()
    (count, left), (divisor, names) = _factors(shape), _factors(others)
    for name in names:
        if name not in left:
            return known.fresh()
        left.remove(name)
    if not divisor or count % divisor:
        return known.fresh()
    if left:
        return left[0] if len(left) == 1 and count == divisor else known.fresh()
    return count // divisor


def _factors(shape: Sequence[Dim]) -> tuple[int, list[str]]:
    """The number of elements: the known factor, and the unknown ones in order."""
    return math.prod(d for d in shape if isinstance(d, int)), sorted(d for d in shape if isinstance(d, str))


def multiplied(weight: int = 1) -> ShapesRule:
    """A product of matrices.  weight: the index of the second factor."""

    def rule(known: KnownShapes[Any], call: Any) -> Shape | None:
        a, b = known.shape(call.inputs[0]), known.shape(call.inputs[weight])
        if a is None or b is None or not a or not b:
            return None
        lead = broadcast_shapes(known, [a[:-2], b[:-2]]) or ()
        return (*lead, *a[-2:-1][: len(a) - 1], *(b[-1:] if len(b) > 1 else ()))

    return rule


def windowed(
    known: KnownShapes[Any], call: Any, channels: Dim | None, kernel: Sequence[Dim], *, partial: bool, inverse: bool = False
) -> Shape:
    """The shape of a convolution or a pooling; sizes that are not computed here have a new name.

    Args:
        known: what is known of the inputs.
        call: the call.
        channels: the second size of the result; None if it is not known.
        kernel: the size of a window.
        partial: a window may be partly outside, as those of poolings with ceil_mode.
        inverse: whether the windows are those of the result, as a ConvTranspose has them: their number is not computed.
    """
    shape, n = known.shape(call.inputs[0]), len(kernel)
    made: list[Dim] = [shape[0] if shape else known.fresh(), channels if channels is not None else known.fresh()]
    auto = known.attribute(call, "auto_pad") or "NOTSET"
    auto = auto.decode() if isinstance(auto, bytes) else auto
    named = [tuple(known.attribute(call, k) or ()) for k in ("strides", "dilations", "pads")]
    fits = not inverse and all(len(v) in (0, m) for v, m in zip(named, (n, n, 2 * n), strict=True))
    ceil = known.attribute(call, "ceil_mode", 0)
    for i, window in enumerate(kernel):
        size = shape[i + 2] if shape is not None and len(shape) == n + 2 else None
        found: Dim | None = None
        if fits and isinstance(size, int) and isinstance(window, int):
            strides, dilations, pads = (v[i::n] for v in named)
            with suppress(OperatorError):
                found = windows([size], [window], strides, pads, dilations, auto, ceil, partial).counts[0]
        made.append(known.fresh() if found is None else found)
    return tuple(made)


def convolved(weight: int = 1) -> ShapesRule:
    """A convolution.  weight: the index of the filters."""

    def rule(known: KnownShapes[Any], call: Any) -> Shape | None:
        filters = known.shape(call.inputs[weight])
        if filters is None or len(filters) < 3:
            return None
        return windowed(known, call, filters[0], filters[2:], partial=False)

    return rule


def pooled_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """A pooling: all of its results have one shape."""
    shape, kernel = known.shape(call.inputs[0]), known.attribute(call, "kernel_shape")
    if shape is None or len(shape) < 3 or len(kernel) != len(shape) - 2:
        return None
    return [windowed(known, call, shape[1], kernel, partial=True)] * len(call.outputs)


def pooled_to_one(known: KnownShapes[Any], call: Any) -> Shape | None:
    """A global pooling: one value for each channel."""
    shape = known.shape(call.inputs[0])
    return None if shape is None or len(shape) < 3 else (*shape[:2], *[1] * (len(shape) - 2))


def recurrent_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """A recurrent layer: the states of all steps, the last one, and the last cell of an LSTM."""
    x, weight = known.shape(call.inputs[0]), known.shape(call.inputs[2])
    if x is None or weight is None or len(x) != 3 or len(weight) != 3 or known.attribute(call, "layout"):
        return None
    last = (weight[0], x[1], weight[2])
    return [(x[0], weight[0], x[1], weight[2]), last, last]


def computed(compute: Callable[[int, int], int | None]) -> SizesRule:
    """Arithmetic on two sizes; `compute` returns None for a size that is not computed here."""

    def rule(known: KnownShapes[Any], call: Any) -> Known | None:
        a, b = (known.sizes(i) for i in call.inputs)
        if a is None or b is None or known.shape(call.outputs[0]) is None:
            return None
        count = max(len(k) if isinstance(k, tuple) else 1 for k in (a, b))
        left, right = ((k * count if len(k) == 1 else k) if isinstance(k, tuple) else (k,) * count for k in (a, b))
        made: list[Dim] = []
        for x, y in zip(left, right, strict=False):
            found = compute(x, y) if isinstance(x, int) and isinstance(y, int) else None
            made.append(known.fresh() if found is None or abs(found) >= LIMIT else found)
        return tuple(made) if isinstance(a, tuple) or isinstance(b, tuple) else made[0]

    return rule
