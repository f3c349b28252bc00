"""LayerNormalization and RMSNormalization out of their primitive forms, GroupNormalization out of InstanceNormalization."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...ir.graph import ABSENT
from ...rewriting.view import Shape
from ..region import Call
from .facts import operator
from .view import RegionView


@dataclass
class _Deviation:
    """sqrt(mean(square) + epsilon), the square of x or of x - mean(x).

    Attributes:
        x: the value.
        mean: the mean of x; None if it is not subtracted.
        axes: the axes of the mean.
        epsilon: what is added to the mean of the squares.
        moved: the one axis of the mean, if it is not the last one.
        calls: the calls that compute it.
    """

    x: int
    mean: int | None
    axes: tuple[int, ...]
    epsilon: float
    calls: list[Call] = field(default_factory=list)
    moved: int | None = None


def layer_norms(edit: RegionView) -> int:
    """For any calls of the form d / sqrt(mean(d * d) + epsilon) * scale + shift, replace the last one by a normalization.

    d is x - mean(x), for LayerNormalization, or x, for RMSNormalization.  The means are over the last axes, or over one other,
    which moves to the end, and keep them.  The square is a product or a Pow, the division also a product with the
    reciprocal.  The scale and the shift are optional, and taken if they are constants with the sizes of these axes.  In another
    form, the scale multiplies the reciprocal first: x * r + (shift - mean(x) * r), where r is the scale divided by the
    deviation.  With a scale for each channel, and means over all axes but the first two, the result is an
    InstanceNormalization.  Values in the middle must not be used elsewhere.
    """
    count = 0
    for root in edit.named("Sqrt", "Pow"):
        if edit.alive(root):
            count += _layer_norm(edit, root)
    return count


def _layer_norm(edit: RegionView, root: Call) -> int:
    power = 0.5
    if root.name == "Pow":
        exponent = edit.number(root, root.inputs[1])
        if exponent not in (0.5, -0.5):
            return 0
        power = exponent
    found = _deviation(edit, root.inputs[0])
    if found is None:
        return 0
    found.calls.append(root)
    axis = _first_axis(edit, found)
    if axis is None:
        return 0
    inverse, value = power < 0, root.outputs[0]
    if not inverse:
        user = edit.only_user(value)
        if user is not None and (
            operator(user) == "Reciprocal" or (operator(user) == "Div" and edit.number(user, user.inputs[0]) == 1)
        ):
            found.calls.append(user)
            inverse, value = True, user.outputs[0]
    done = _folded(edit, found, axis, value) if inverse and found.mean is not None else None
    if done is None:
        done = _divided(edit, found, axis, value, inverse)
    return int(done)


def _deviation(edit: RegionView, value: int) -> _Deviation | None:
    add = edit.made_by(value, "Add")
    if add is None:
        return None
    at = next((i for i in (0, 1) if edit.number(add, add.inputs[1 - i]) is not None), None)
    if at is None:
        return None
    epsilon = edit.number(add, add.inputs[1 - at])
    mean = _mean(edit, add.inputs[at])
    square = edit.producer(mean.inputs[0]) if mean is not None else None
    if epsilon is None or mean is None or square is None:
        return None
    if operator(square) == "Pow":
        exponent = edit.constant(square.inputs[1])
        if exponent is None or exponent.size != 1 or exponent.reshape(-1)[0] != 2:
            return None
        if exponent.ndim and not edit.facts.rank_at_least(square.inputs[0], exponent.ndim):
            return None
        d = square.inputs[0]
    elif operator(square) == "Mul" and _same(edit, *square.inputs):
        d = square.inputs[0]
    else:
        return None
    axes = edit.axes(mean)
    if axes is None:
        return None
    calls = [square, mean, add]
    centred = _centred(edit, d)
    if centred is not None and edit.axes(centred[1]) == axes:
        sub, mu = centred
        twins = [t for t in (edit.producer(i) for i in square.inputs) if t is not None and operator(t) == "Sub"]
        return _Deviation(sub.inputs[0], mu.outputs[0], axes, epsilon, [mu, *dict.fromkeys((sub, *twins)), *calls])
    return _Deviation(d, None, axes, epsilon, calls)


def _mean(edit: RegionView, value: int) -> Call | None:
    """The ReduceMean that returns a value and keeps the axes."""
    mean = edit.made_by(value, "ReduceMean")
    return mean if mean is not None and mean.attributes.get("keepdims", 1) else None


def _centred(edit: RegionView, value: int) -> tuple[Call, Call] | None:
    """The calls of x - mean(x): Sub and ReduceMean."""
    sub = edit.made_by(value, "Sub")
    mu = _mean(edit, sub.inputs[1]) if sub is not None else None
    return (sub, mu) if sub is not None and mu is not None and mu.inputs[0] == sub.inputs[0] else None


def _same(edit: RegionView, a: int, b: int) -> bool:
    """Whether two values are one, or differences of the same values."""
    if a == b:
        return True
    left, right = edit.made_by(a, "Sub"), edit.made_by(b, "Sub")
    return left is not None and right is not None and left.inputs == right.inputs


def _first_axis(edit: RegionView, found: _Deviation) -> int | None:
    """The first of the axes, from the end, if they are the last ones of float32 values; None otherwise."""
    rank = edit.facts.rank(found.x)
    axes = sorted(a if a < 0 else a - rank if rank is not None else 0 for a in found.axes)
    if not axes or not edit.is_float32(found.x):
        return None
    if rank is not None and len(axes) == 1 and -rank <= axes[0] < -1:
        found.moved = axes[0] + rank
        return -1
    return axes[0] if axes == list(range(-len(axes), 0)) else None


def _divided(edit: RegionView, found: _Deviation, axis: int, value: int, inverse: bool) -> bool:
    """The form d / deviation, or d * (1 / deviation)."""
    if not edit.once(value):
        return False
    root = edit.only_user(value)
    if root is None or operator(root) != ("Mul" if inverse else "Div") or (not inverse and root.inputs[1] != value):
        return False
    d = root.inputs[0] if root.inputs[1] == value else root.inputs[1]
    if found.mean is None:
        if d != found.x:
            return False
    else:
        sub = edit.made_by(d, "Sub")
        if sub is None or sub.inputs != (found.x, found.mean):
            return False
        if sub not in found.calls:
            found.calls.append(sub)
    if not edit.inside([c.outputs[0] for c in found.calls], [*found.calls, root]):
        return False
    calls = [*found.calls, root]
    if found.mean is not None and _instance_norm(edit, found, axis, calls):
        return True
    scale, last = _parameter(edit, root, "Mul", found, axis)
    shift = None
    if last is not root:
        calls.append(last)
    if found.mean is not None:
        shift, end = _parameter(edit, last, "Add", found, axis)
        if end is not last:
            calls.append(end)
            last = end
    _normalize(edit, found, axis, scale, shift, calls)
    return True


def _instance_norm(edit: RegionView, found: _Deviation, axis: int, calls: list[Call]) -> bool:
    """The form with a constant scale for each channel, over all axes but the first two."""
    shape = edit.facts.shape(found.x)
    if shape is None or found.moved is not None or len(shape) < 3 or axis != 2 - len(shape) or not isinstance(shape[1], int):
        return False
    parameters = [np.ones(shape[1], np.float32), np.zeros(shape[1], np.float32)]
    calls, before = list(calls), len(calls)
    for at, name in enumerate(("Mul", "Add")):
        last = calls[-1]
        user = edit.only_user(last.outputs[0]) if edit.once(last.outputs[0]) else None
        if user is None or operator(user) != name:
            continue
        array = edit.constant(user.inputs[0] if user.inputs[1] == last.outputs[0] else user.inputs[1])
        if array is None or array.dtype != np.float32 or array.ndim > len(shape) or array.size != shape[1]:
            continue
        if array.ndim < len(shape) - 1 or array.shape[1 - len(shape)] != shape[1]:
            continue
        parameters[at] = array.reshape(-1)
        calls.append(user)
    if len(calls) == before:
        return False
    inputs = (found.x, *(edit.region.constant(p) for p in parameters))
    edit.put(calls[-1], edit.call("InstanceNormalization", inputs, calls, calls[-1].outputs, epsilon=found.epsilon))
    return True


def _parameter(edit: RegionView, last: Call, name: str, found: _Deviation, axis: int) -> tuple[int | None, Call]:
    """The constant operand of a following Mul or Add, as a scale or shift of the normalized axes, and the call that has it."""
    user = edit.only_user(last.outputs[0]) if edit.once(last.outputs[0]) else None
    if user is None or operator(user) != name:
        return None, last
    other = user.inputs[0] if user.inputs[1] == last.outputs[0] else user.inputs[1]
    made = _as_parameter(edit, other, found, axis)
    return (None, last) if made is None else (made, user)


def _as_parameter(edit: RegionView, value: int, found: _Deviation, axis: int) -> int | None:
    """A constant with the shape of the normalized axes; None if it would broadcast otherwise."""
    array, shape = edit.constant(value), edit.facts.shape(found.x)
    if array is None or array.dtype != np.float32 or shape is None or array.ndim > len(shape):
        return None
    if found.moved is not None:
        return _moved_parameter(edit, array, shape, found.moved)
    extra = array.ndim + axis
    if extra > 0:
        if any(d != 1 for d in array.shape[:extra]):
            return None
        array = array.reshape(array.shape[extra:])
    if any(a != b for a, b in zip(array.shape[::-1], shape[::-1], strict=False)):
        if array.size != 1:
            return None
        array = array.reshape(())
    sizes = shape[axis:]
    if array.shape != tuple(sizes):
        if any(isinstance(d, str) for d in sizes):
            return None
        array = np.ascontiguousarray(np.broadcast_to(array, tuple(int(d) for d in sizes)))
    return (
        value
        if array.shape == edit.region.constants[value].shape
        else edit.region.constant(array, edit.region.names.get(value, ""))
    )


def _moved_parameter(edit: RegionView, array: np.ndarray, shape: Shape, axis: int) -> int | None:
    """A constant with a value for each place of one axis, or for all, as a vector."""
    size, at = shape[axis], axis - len(shape) + array.ndim
    if not isinstance(size, int) or array.size not in (1, size) or (array.size > 1 and (at < 0 or array.shape[at] != size)):
        return None
    return edit.region.constant(np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (size,))))


def _normalize(edit: RegionView, found: _Deviation, axis: int, scale: int | None, shift: int | None, calls: list[Call]) -> None:
    """Replace the last of the calls."""
    shape, rank = edit.facts.shape(found.x), edit.facts.rank(found.x) or 0
    if scale is None:
        sizes = [
            d for d in ((shape or ())[axis:] if found.moved is None else (shape or ())[found.moved :][:1]) if isinstance(d, int)
        ]
        scale = edit.region.constant(np.ones(sizes if len(sizes) == -axis else 1, np.float32))
    name = "RMSNormalization" if found.mean is None else "LayerNormalization"
    parameters = (scale,) if shift is None else (scale, shift)
    root = calls[-1]
    if found.moved is None:
        edit.put(root, edit.call(name, (found.x, *parameters), calls, root.outputs, axis=axis, epsilon=found.epsilon))
        return
    perm = [*(i for i in range(rank) if i != found.moved), found.moved]
    last = edit.call("Transpose", (found.x,), calls, perm=perm)
    norm = edit.call(name, (last.outputs[0], *parameters), calls, axis=-1, epsilon=found.epsilon)
    back = edit.call("Transpose", norm.outputs, calls, root.outputs, perm=[perm.index(i) for i in range(rank)])
    edit.put(root, last, norm, back)


def _folded(edit: RegionView, found: _Deviation, axis: int, value: int) -> bool | None:
    """The form x * r + (shift - mean * r), in which r is value * scale; None for another form."""
    calls, scale = list(found.calls), None
    user = edit.only_user(value)
    if user is not None and operator(user) == "Mul" and edit.once(value):
        other = user.inputs[0] if user.inputs[1] == value else user.inputs[1]
        scale = _as_parameter(edit, other, found, axis)
        if scale is None:
            return None
        calls.append(user)
        value = user.outputs[0]
    products = {c for c in edit.users(value) if operator(c) == "Mul"}
    of_x = next((c for c in products if found.x in c.inputs), None)
    of_mean = next((c for c in products if found.mean in c.inputs), None)
    if of_x is None or of_mean is None or of_x is of_mean:
        return None
    sub = edit.only_user(of_mean.outputs[0])
    root = edit.only_user(of_x.outputs[0])
    if sub is None or operator(sub) != "Sub" or sub.inputs[1] != of_mean.outputs[0] or operator(root) != "Add" or root is None:
        return None
    shift = _as_parameter(edit, sub.inputs[0], found, axis)
    if shift is None or set(root.inputs) != {of_x.outputs[0], sub.outputs[0]}:
        return None
    calls += [of_x, of_mean, sub, root]
    if not edit.inside([c.outputs[0] for c in calls[:-1]], calls):
        return None
    _normalize(edit, found, axis, scale, shift, calls)
    return True


def group_norms(edit: RegionView) -> int:
    """For any calls of the form Reshape(InstanceNormalization(Reshape(x))) * scale + shift, use GroupNormalization.

    The first Reshape joins the channels of each group, the second one restores the shape of x; the InstanceNormalization scales
    all groups by 1 and shifts them by 0; scale and shift are constants with one value for each channel.
    """
    count = 0
    for norm in edit.named("InstanceNormalization"):
        first = edit.made_by(norm.inputs[0], "Reshape")
        second = edit.only_user(norm.outputs[0])
        if first is None or second is None or operator(second) != "Reshape" or not edit.once(first.outputs[0]):
            continue
        x, (ones, zeros) = first.inputs[0], (edit.constant(i) for i in norm.inputs[1:3])
        shape, groups = edit.facts.shape(x), edit.facts.shape(first.outputs[0])
        if shape is None or groups is None or len(shape) < 3 or len(groups) < 3 or edit.facts.shape(second.outputs[0]) != shape:
            continue
        number, channels = groups[1], shape[1]
        if (
            groups[0] != shape[0]
            or not isinstance(number, int)
            or not isinstance(channels, int)
            or number < 1
            or channels % number
        ):
            continue
        if ones is None or zeros is None or ones.dtype != np.float32 or (ones != 1).any() or zeros.any():
            continue
        calls, last = [first, norm, second], second
        parameters = [np.ones(channels, np.float32), np.zeros(channels, np.float32)]
        for at, name in enumerate(("Mul", "Add")):
            user = edit.only_user(last.outputs[0]) if edit.once(last.outputs[0]) else None
            if user is None or operator(user) != name:
                continue
            array = edit.constant(user.inputs[0] if user.inputs[1] == last.outputs[0] else user.inputs[1])
            wide = (channels, *(1,) * (len(shape) - 2))
            if array is None or array.dtype != np.float32 or array.shape not in (wide, (1, *wide)):
                continue
            parameters[at] = array.reshape(-1)
            last = user
            calls.append(user)
        inputs = (x, *(edit.region.constant(p) for p in parameters))
        epsilon = norm.attributes.get("epsilon", 1e-5)
        edit.put(last, edit.call("GroupNormalization", inputs, calls, last.outputs, num_groups=number, epsilon=epsilon))
        count += 1
    return count


def global_pools(edit: RegionView) -> int:
    """For any calls of the form ReduceMean(x) over all axes but the first two, which keep them, replace it by GlobalAveragePool.

    x must be known to be float32 and of rank 3 or more.
    """
    count = 0
    for call in edit.named("ReduceMean"):
        rank, axes = edit.facts.rank(call.inputs[0]), edit.axes(call)
        if rank is None or rank < 3 or not axes or not call.attributes.get("keepdims", 1) or call.inputs[0] == ABSENT:
            continue
        if sorted(a % rank for a in axes) == list(range(2, rank)) and edit.facts.dtype(call.inputs[0]) == np.float32:
            edit.put(call, edit.call("GlobalAveragePool", call.inputs[:1], [call], call.outputs))
            count += 1
    return count
