"""LayerNormalization and RMSNormalization out of their primitive forms, GroupNormalization out of InstanceNormalization."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.graph import Value
from ..ir.shapes import Shape, valid_axes
from .match import Anything, ConstantValue, Match, Number, Pattern, Rule, Rules, inverse_root, op, over_root, squared
from .rewriter import Rewriter

X, SCALE, SHIFT, EPSILON = Anything(), ConstantValue(), ConstantValue(), Number()


def _mean(x: Pattern) -> Pattern:
    return op.ReduceMean(x, ..., keepdims=1)


def _affine(x: Pattern) -> tuple[Pattern, ...]:
    """A value with a scale and a shift, either of them, or none: the longest form first."""
    return x * SCALE + SHIFT, x + SHIFT, x * SCALE, x


MEAN = _mean(X)
CENTRED = X - MEAN
VARIANCE = _mean(squared(CENTRED))
SQUARE = _mean(squared(X))
SCALED = inverse_root(VARIANCE + EPSILON) * SCALE | inverse_root(VARIANCE + EPSILON)

LAYER_NORMS = _affine(over_root(CENTRED, VARIANCE + EPSILON))
RMS_NORM = over_root(X, SQUARE + EPSILON)
KERAS_NORM = (SHIFT - MEAN * SCALED) + X * SCALED


def layer_norms(edit: Rewriter) -> int:
    """For any calls of the form d / sqrt(mean(d * d) + epsilon) * scale + shift, replace the last one by a normalization.

    d is x - mean(x), for LayerNormalization, or x, for RMSNormalization.  The means are over the last axes, or over one other,
    which moves to the end, and keep them.  The scale and the shift are optional, and taken if they are constants of the sizes of
    these axes.  In another form, the scale multiplies the reciprocal first: x * r + (shift - mean(x) * r), where r is the scale
    divided by the deviation.  With a scale for each channel, and means over all axes but the first two, the result is an
    InstanceNormalization.  Values in the middle must not be used elsewhere.
    """
    return NORMS.run(edit)


def _layer_norm(edit: Rewriter, match: Match) -> bool:
    if _axes(edit, match[MEAN]) != _axes(edit, match[VARIANCE]):
        return False
    return _normalize(edit, match, "LayerNormalization", match[VARIANCE])


def _rms_norm(edit: Rewriter, match: Match) -> bool:
    return _normalize(edit, match, "RMSNormalization", match[SQUARE])


def _normalize(edit: Rewriter, match: Match, name: str, mean: Any) -> bool:
    """Replace a match by a normalization over the axes of a mean, if they are the last ones, or one other, of float32 values."""
    x, axes = match[X], _axes(edit, mean)
    shape = edit.shape(x)
    if not axes or edit.dtype(x) not in (None, np.float32) or not edit.offers(name):
        return False
    axes, moved = _from_end(axes, shape), None
    if shape is not None and len(axes) == 1 and -len(shape) <= axes[0] < -1:
        moved, axes = axes[0] + len(shape), (-1,)
    if axes != tuple(range(-len(axes), 0)):
        return False
    given = [match[p] for p in (SCALE, SHIFT) if p in match]
    arrays = [_parameter(edit, value, shape, axes[0], moved) for value in given]
    if any(a is None for a in arrays):
        return False
    parameters = [_constant(edit, value, a) for value, a in zip(given, arrays, strict=True)]
    if SCALE not in match:
        normalized = (shape or ())[axes[0] :] if moved is None else (shape or ())[moved : moved + 1]
        sizes = [d for d in normalized if isinstance(d, int)]
        parameters.insert(0, edit.add_constant(np.ones(sizes if len(sizes) == len(axes) else 1, np.float32)))
    origins, outputs, epsilon = match.origins, match.root.outputs, match[EPSILON]
    if moved is None:
        return edit.put(match.root, edit.call(name, (x, *parameters), origins, outputs, axis=axes[0], epsilon=epsilon))
    perm = [*(i for i in range(len(shape or ())) if i != moved), moved]
    last = edit.call("Transpose", (x,), origins, perm=perm)
    norm = edit.call(name, (last.outputs[0], *parameters), origins, axis=-1, epsilon=epsilon)
    back = edit.call("Transpose", norm.outputs, origins, outputs, perm=[perm.index(i) for i in range(len(perm))])
    return edit.put(match.root, last, norm, back)


def _axes(edit: Rewriter, mean: Any) -> tuple[int, ...] | None:
    """The axes of the reduction that returns a value; None if they are not known."""
    return edit.listed(mean.producer, "axes", 1)[1]


def _from_end(axes: tuple[int, ...], shape: Shape | None) -> tuple[int, ...]:
    """The axes in order, counted from the end; 0 for one whose place is not known."""
    return tuple(sorted(a if a < 0 else a - len(shape) if shape is not None else 0 for a in axes))


def _parameter(edit: Rewriter, value: Value, shape: Shape | None, axis: int, moved: int | None) -> np.ndarray | None:
    """A constant with the shape of the normalized axes; None if it would broadcast otherwise, or train as several numbers."""
    array = edit.constant(value)
    made = _spread(array, shape, axis, moved)
    return None if array is None or made is None or (made.size != array.size and edit.trains(value)) else made


def _spread(array: np.ndarray | None, shape: Shape | None, axis: int, moved: int | None) -> np.ndarray | None:
    if array is None or array.dtype != np.float32 or shape is None or array.ndim > len(shape):
        return None
    if moved is not None:
        size, at = shape[moved], moved - len(shape) + array.ndim
        if not isinstance(size, int) or array.size not in (1, size) or (array.size > 1 and (at < 0 or array.shape[at] != size)):
            return None
        return np.broadcast_to(array.reshape(-1), (size,))
    extra = array.ndim + axis
    if extra > 0:
        if any(d != 1 for d in array.shape[:extra]):
            return None
        array = array.reshape(array.shape[extra:])
    if any(a != b for a, b in zip(array.shape[::-1], shape[::-1], strict=False)):
        if array.size != 1:
            return None
        array = array.reshape(())
    if array.shape == shape[axis:]:
        return array
    return None if any(isinstance(d, str) for d in shape[axis:]) else np.broadcast_to(array, [int(d) for d in shape[axis:]])


def _constant(edit: Rewriter, value: Value, array: np.ndarray | None) -> Any:
    """A constant, or one of its elements in another shape."""
    assert array is not None
    return value if edit.shape(value) == array.shape else edit.add_constant(np.ascontiguousarray(array), value)


def _instance_norm(edit: Rewriter, match: Match) -> bool:
    """Replace the form with a constant scale or shift for each channel, over all axes but the first two."""
    shape, axes = edit.shape(match[X]), _axes(edit, match[VARIANCE])
    if shape is None or len(shape) < 3 or not isinstance(shape[1], int) or axes is None or _axes(edit, match[MEAN]) != axes:
        return False
    if _from_end(axes, shape) != tuple(range(2 - len(shape), 0)) or edit.dtype(match[X]) not in (None, np.float32):
        return False
    return _by_channels(edit, match, "InstanceNormalization", shape, epsilon=match[EPSILON])


def _by_channels(edit: Rewriter, match: Match, name: str, shape: Shape, **attributes: Any) -> bool:
    """Replace a match by a normalization with a scale and a shift for each channel; those of the match are constants."""
    if not edit.offers(name):
        return False
    parameters = []
    for part, default in ((SCALE, 1), (SHIFT, 0)):
        if part not in match:
            parameters.append(edit.add_constant(np.full(int(shape[1]), default, np.float32)))
            continue
        array = edit.constant(match[part])
        wide = (shape[1], *(1,) * (len(shape) - 2))
        if array is None or array.dtype != np.float32 or array.shape not in (wide, (1, *wide)):
            return False
        parameters.append(edit.add_constant(array.reshape(-1), match[part]))
    made = edit.call(name, (match[X], *parameters), match.origins, match.root.outputs, **attributes)
    return edit.put(match.root, made)


NORMS = (
    Rules(Rule(KERAS_NORM, _layer_norm))
    + Rules(*(Rule(p, _instance_norm) for p in LAYER_NORMS[:-1]))
    + Rules(*(Rule(p, _layer_norm) for p in LAYER_NORMS))
    + Rules(Rule(RMS_NORM * SCALE, _rms_norm), Rule(RMS_NORM, _rms_norm))
)

ONE, ZERO = ConstantValue(), ConstantValue()
JOINED = op.Reshape(X, ...)
GROUPS = op.InstanceNormalization(JOINED, ONE, ZERO)
RESTORED = op.Reshape(GROUPS, ...)


def group_norms(edit: Rewriter) -> int:
    """For any calls of the form Reshape(InstanceNormalization(Reshape(x))) * scale + shift, use GroupNormalization.

    The first Reshape joins the channels of each group, the second one restores the shape of x; the InstanceNormalization scales
    all groups by 1 and shifts them by 0; scale and shift are constants with one value for each channel.
    """
    return GROUP_NORMS.run(edit)


def _group_norm(edit: Rewriter, match: Match) -> bool:
    shape, groups = edit.shape(match[X]), edit.shape(match[JOINED])
    if shape is None or groups is None or len(shape) < 3 or len(groups) < 3 or edit.shape(match[RESTORED]) != shape:
        return False
    number, channels = groups[1], shape[1]
    if groups[0] != shape[0] or not isinstance(number, int) or not isinstance(channels, int) or number < 1 or channels % number:
        return False
    ones, zeros = edit.constant(match[ONE]), edit.constant(match[ZERO])
    if ones is None or zeros is None or edit.trains(match[ONE]) or edit.trains(match[ZERO]):
        return False
    if ones.dtype != np.float32 or (ones != 1).any() or zeros.any():
        return False
    epsilon = edit.attribute(match[GROUPS].producer, "epsilon", 1e-5)
    return _by_channels(edit, match, "GroupNormalization", shape, num_groups=number, epsilon=epsilon)


GROUP_NORMS = Rules(*(Rule(p, _group_norm) for p in _affine(RESTORED)))


def global_pools(edit: Rewriter) -> int:
    """For any calls of the form ReduceMean(x) over all axes but the first two, which keep them, replace it by GlobalAveragePool.

    x must be known to be float32 and of rank 3 or more.
    """
    return GLOBAL_POOLS.run(edit)


def _global_pool(edit: Rewriter, match: Match) -> bool:
    shape, axes = edit.shape(match[X]), _axes(edit, match.root.outputs[0])
    if shape is None or len(shape) < 3 or not axes or edit.dtype(match[X]) != np.float32:
        return False
    if sorted(valid_axes(axes, len(shape)) or ()) != list(range(2, len(shape))):
        return False
    return edit.put(match.root, edit.call("GlobalAveragePool", (match[X],), match.origins, match.root.outputs))


GLOBAL_POOLS = Rules(Rule(MEAN, _global_pool))
