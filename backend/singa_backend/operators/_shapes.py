"""Rules of shapes and sizes that several operators share: of results before a graph runs (see ir/shapes.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..ir.shapes import (
    Dim,
    Known,
    KnownShapes,
    Shape,
    ShapesRule,
    SizesRule,
    Unsure,
    agree,
    broadcast_shapes,
    is_known,
    open_shape,
)
from ..ir.windows import SAME, explicit, pads_of, per_axis, transposed, windows

FIRST = (0, -1)
"""The axis of a vector."""
LIMIT = 1 << 31
"""The magnitude of sizes that are computed here: larger ones may be taken modulo 2^n."""


def same_rank(known: KnownShapes[Any], call: Any) -> Shape | None:
    """A result with the rank of the first input."""
    shape = known.shape(call.inputs[0])
    return None if shape is None else open_shape(known, len(shape))


def same_sizes(known: KnownShapes[Any], call: Any) -> Known | None:
    """The sizes of the first input."""
    return known.sizes(call.inputs[0])


def reshaped(known: KnownShapes[Any], shape: Shape | None, target: Known | None, zero: bool = False) -> Shape | None:
    """The shape of a Reshape to these sizes; None if its rank is not known."""
    if not isinstance(target, tuple):
        return None
    if target.count(-1) > 1 or any(isinstance(d, int) and d < -1 for d in target):
        raise Unsure
    made: list[Dim] = []
    for i, size in enumerate(target):
        if size == 0 and not zero:
            made.append(known.fresh() if shape is None else shape[i])
        else:
            made.append(size)
    if -1 in made:
        at = made.index(-1)
        made[at] = _rest(known, shape, [*made[:at], *made[at + 1 :]])
    elif shape is not None and is_known((*shape, *made)) and math.prod(map(int, shape)) != math.prod(map(int, made)):
        raise Unsure
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
        if left:
            return known.fresh()
        raise Unsure
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
        if a is None or b is None:
            return None
        if not a or not b or not agree(a[-1:], b[-2:][:1]):
            raise Unsure
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
        inverse: whether the windows are those of the result, as a ConvTranspose has them.
    """
    shape, n = known.shape(call.inputs[0]), len(kernel)
    if shape is not None and len(shape) != n + 2:
        raise Unsure
    auto = known.attribute(call, "auto_pad") or "NOTSET"
    auto = auto.decode() if isinstance(auto, bytes) else auto
    pads = known.attribute(call, "pads")
    strides, dilations = (per_axis(k, known.attribute(call, k), n) for k in ("strides", "dilations"))
    begins, ends = pads_of(pads, n)
    extra = per_axis("output_padding", known.attribute(call, "output_padding") if inverse else None, n, low=0)
    numbers = [k for k in kernel if isinstance(k, int)]
    if min(numbers, default=1) < 1 or max(*numbers, *strides, *dilations, *begins, *ends, *extra) >= LIMIT:
        raise Unsure
    ignored = pads is not None and not explicit(auto) and (auto in SAME or any(pads))  # onnx's inference ignores auto_pad instead
    ceil = not inverse and known.attribute(call, "ceil_mode", 0)
    made: list[Dim] = [shape[0] if shape else known.fresh(), known.fresh() if channels is None else channels]
    for i, window in enumerate(kernel):
        size = None if shape is None else shape[i + 2]
        if ignored or not isinstance(size, int) or not isinstance(window, int):
            made.append(known.fresh())
            continue
        how = (strides[i],), (begins[i], ends[i]), (dilations[i],), auto
        reach = (window - 1) * dilations[i] + 1
        if inverse:
            count = transposed((size,), (window,), *how, (extra[i],), None).sizes[0]
            differs = auto in SAME and reach + extra[i] < strides[i]  # onnx's inference omits cells that no window reaches
        else:
            count = windows((size,), (window,), *how, ceil, partial).counts[0]
            room = size + begins[i] + ends[i] - reach
            differs = ceil and explicit(auto) and count <= -(-room // strides[i])  # and counts a window that is only padding
        made.append(known.fresh() if differs else count)
    return tuple(made)


def _kernel(known: KnownShapes[Any], call: Any, filters: Shape) -> Sequence[Dim]:
    """The window of a convolution: the attribute, which the filters must have, or that of the filters."""
    given = known.attribute(call, "kernel_shape") or filters[2:]
    if not agree(given, filters[2:]) or len(filters) < 3:
        raise Unsure
    return tuple(given)


def convolved(weight: int = 1) -> ShapesRule:
    """A convolution.  weight: the index of the filters."""

    def rule(known: KnownShapes[Any], call: Any) -> Shape | None:
        x, filters = known.shape(call.inputs[0]), known.shape(call.inputs[weight])
        if filters is None:
            return None
        if x is not None and len(x) > 1:
            check_groups(x[1], filters[1], known.attribute(call, "group", 1))
        return windowed(known, call, filters[0], _kernel(known, call, filters), partial=False)

    return rule


def conv_transpose_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    """A transposed convolution."""
    x, filters, group = known.shape(call.inputs[0]), known.shape(call.inputs[1]), known.attribute(call, "group", 1)
    if filters is None:
        return None
    if x is not None and len(x) > 1:
        check_groups(x[1], None, group)
        if not agree(x[1:2], filters[:1]):
            raise Unsure
    channels = filters[1] * group if isinstance(filters[1], int) else filters[1] if group == 1 else None
    shape = windowed(known, call, channels, _kernel(known, call, filters), partial=False, inverse=True)
    fixed = tuple((known.attribute(call, "output_shape") or ())[2 - len(shape) :])
    if not fixed:
        return shape
    if x is None or any(not isinstance(d, int) or d > f for d, f in zip(x[2:], fixed, strict=True)):
        raise Unsure  # a file must state the false rank that onnx infers for sizes below those of the input
    return *shape[:2], *fixed


def check_groups(channels: Dim, each: Dim | None, group: int) -> None:
    """Raise Unsure if the channels of a convolution cannot be split into its groups, with `each` in one of them."""
    wrong = isinstance(channels, int) and (channels % group or (isinstance(each, int) and channels != each * group))
    if not 0 < group < LIMIT or wrong:
        raise Unsure


def pooled_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """A pooling: all of its results have one shape."""
    shape, kernel = known.shape(call.inputs[0]), known.attribute(call, "kernel_shape")
    if shape is None:
        return None
    return [windowed(known, call, shape[1], kernel, partial=True)] * len(call.outputs)


def pooled_to_one(known: KnownShapes[Any], call: Any) -> Shape | None:
    """A global pooling: one value for each channel."""
    shape = known.shape(call.inputs[0])
    if shape is not None and len(shape) < 3:
        raise Unsure
    return None if shape is None else (*shape[:2], *[1] * (len(shape) - 2))


def recurrent_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """A recurrent layer: the states of all steps, the last one, and the last cell of an LSTM."""
    x, weight, hidden = known.shape(call.inputs[0]), known.shape(call.inputs[2]), known.attribute(call, "hidden_size")
    directions = {"forward": 1, "reverse": 1, "bidirectional": 2}[known.attribute(call, "direction", "forward")]
    if hidden is None:
        hidden = known.fresh() if weight is None else weight[2]
    if known.attribute(call, "layout") or not (isinstance(hidden, str) or 0 < hidden < LIMIT):
        raise Unsure
    steps, batch, _ = (known.fresh() for _ in range(3)) if x is None else x
    last = (directions, batch, hidden)
    return [(steps, directions, batch, hidden), last, last]


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
