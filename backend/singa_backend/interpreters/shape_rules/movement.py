"""Rules of operators that move, count or select values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import TensorProto

from .call import Dim, Shape, Type, TypedCall, Unsure, broadcast, covers

LARGEST_RANK = 64
"""The highest rank of a result whose sizes are not known; above it the rank is not inferred either."""


def _of_rank(lengths: Shape) -> Shape:
    """A shape of open sizes, from the shape of the vector that holds the sizes; None if its length is not known, or large."""
    if lengths is None or len(lengths) != 1 or not isinstance(lengths[0], int) or lengths[0] > LARGEST_RANK:
        return None
    return (None,) * lengths[0]


def _axes(c: TypedCall) -> tuple[int, ...] | None:
    """The axes of a call, an attribute or an input; () if there are none, None if they are not known."""
    if "axes" in c.form.attributes:
        return c.integers("axes") or ()
    if not c.has(1):
        return ()
    return c.known(1)


def reduction(c: TypedCall) -> Sequence[Type]:
    code, keep, axes = c.codes[0], c.integer("keepdims", 1), _axes(c)
    if c.shapes[0] is None:
        return [(code, None)]
    shape = c.shapes[0]
    if axes is None:
        return [(code, None)]
    if not axes and c.integer("noop_with_empty_axes", 0):
        return [(code, shape)]
    gone = set(c.axes(axes, len(shape))) if axes else set(range(len(shape)))
    if keep not in (0, 1):
        raise Unsure
    return [(code, tuple(1 if i in gone else d for i, d in enumerate(shape) if keep or i not in gone))]


@covers("ArgMax", "ArgMin")
def _arg(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None:
        return [(TensorProto.INT64, None)]
    shape, keep = c.shapes[0], c.integer("keepdims", 1)
    at = c.axis(c.integer("axis", 0), len(shape))
    if keep not in (0, 1):
        raise Unsure
    return [(TensorProto.INT64, tuple(1 if i == at else d for i, d in enumerate(shape) if keep or i != at))]


@covers("Shape")
def _shape(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None:
        return [(TensorProto.INT64, (None,))]
    part = c.shapes[0][slice(c.integer("start", 0), c.integer("end", 1 << 30))]
    return [(TensorProto.INT64, (len(part),))]


@covers("Size")
def _size(c: TypedCall) -> Sequence[Type]:
    return [(TensorProto.INT64, ())]


@covers("NonZero")
def _nonzero(c: TypedCall) -> Sequence[Type]:
    return [(TensorProto.INT64, (None if c.shapes[0] is None else len(c.shapes[0]), None))]


@covers("Reshape")
def _reshape(c: TypedCall) -> Sequence[Type]:
    target = c.known(1)
    if target is None:
        lengths = c.shapes[1]
        if c.version < 14:
            return [(c.codes[0], None)]
        if lengths is None or len(lengths) != 1 or not isinstance(lengths[0], int):
            raise Unsure
        return [(c.codes[0], _of_rank(lengths))]
    shape = c.shapes[0]
    if target.count(-1) > 1 or min(target, default=0) < -1:
        raise Unsure
    zeros = not c.integer("allowzero", 0)
    made: list[Dim] = []
    for i, d in enumerate(target):
        if d == 0 and zeros:
            if shape is None or i >= len(shape):
                raise Unsure
            made.append(shape[i])
        else:
            made.append(None if d == -1 else d)
    if -1 in target:
        made[target.index(-1)] = _rest(shape, target, made, zeros)
    elif shape is not None and all(isinstance(d, int) for d in (*shape, *made)) and _product(shape) != _product(made):
        raise Unsure
    return [(c.codes[0], tuple(made))]


def _rest(shape: Shape, target: Sequence[int], made: Sequence[Dim], zeros: bool) -> Dim:
    """The size of the dimension -1 of Reshape; dimensions that are copied need not be known."""
    if shape is None:
        return None
    copied = {i for i, d in enumerate(target) if d == 0 and zeros and not isinstance(shape[i], int)}
    others = [d for i, d in enumerate(shape) if i not in copied]
    fixed = [d for i, d in enumerate(made) if i not in copied and target[i] != -1]
    if not all(isinstance(d, int) for d in others):
        return None
    have, want = _product(others), _product(fixed)
    if not want or have % want:
        raise Unsure
    return have // want


def _product(dims: Sequence[Dim]) -> int:
    return math.prod(d for d in dims if isinstance(d, int))


@covers("Squeeze")
def _squeeze(c: TypedCall) -> Sequence[Type]:
    axes = _axes(c)
    if axes is None or c.shapes[0] is None:
        return [(c.codes[0], None)]
    shape = c.shapes[0]
    if not axes:
        if ("axes" in c.attributes or c.has(1)) or not all(isinstance(d, int) for d in shape):
            raise Unsure
        return [(c.codes[0], tuple(d for d in shape if d != 1))]
    gone = set(c.axes(axes, len(shape)))
    if any(isinstance(shape[i], int) and shape[i] != 1 for i in gone) or (c.version < 11 and list(axes) != sorted(axes)):
        raise Unsure
    return [(c.codes[0], tuple(d for i, d in enumerate(shape) if i not in gone))]


@covers("Unsqueeze")
def _unsqueeze(c: TypedCall) -> Sequence[Type]:
    axes = _axes(c)
    if axes is None or c.shapes[0] is None:
        return [(c.codes[0], None)]
    rank = len(c.shapes[0]) + len(axes)
    made: list[Dim] = [None] * rank
    ones = c.axes(axes, rank)
    rest = iter(c.shapes[0])
    for i in range(rank):
        made[i] = 1 if i in ones else next(rest)
    return [(c.codes[0], tuple(made))]


@covers("Flatten")
def _flatten(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None:
        return [(c.codes[0], None)]
    shape = c.shapes[0]
    axis = c.integer("axis", 1)
    if not (-len(shape) if c.version >= 11 else 0) <= axis <= len(shape):
        raise Unsure
    axis += len(shape) if axis < 0 else 0
    return [(c.codes[0], (_multiplied(shape[:axis]), _multiplied(shape[axis:])))]


def _multiplied(dims: Sequence[Dim]) -> Dim:
    made: Dim = 1
    for d in dims:
        if isinstance(made, int) and isinstance(d, int):
            made *= d
        else:
            made = d if made == 1 else made if d == 1 else None
    return made


@covers("Concat")
def _concat(c: TypedCall) -> Sequence[Type]:
    if any(s is None for s in c.shapes):
        return [(c.codes[0], None)]
    shapes = [c.shape(i) for i in range(len(c.shapes))]
    rank = len(shapes[0])
    axis = c.axis(c.integer("axis", 0), rank)
    if any(len(s) != rank for s in shapes) or (c.version < 11 and c.integer("axis", 0) < 0):
        raise Unsure
    made: list[Dim] = []
    for i in range(rank):
        dims = [s[i] for s in shapes]
        if i == axis:
            known = [d for d in dims if isinstance(d, int)]
            made.append(dims[0] if len(dims) == 1 else sum(known) if len(known) == len(dims) else None)
            continue
        sizes = {d for d in dims if isinstance(d, int)}
        if len(sizes) > 1:
            raise Unsure
        made.append(sizes.pop() if sizes else next((d for d in dims if d), None))
    return [(c.codes[0], tuple(made))]


@covers("Split")
def _split(c: TypedCall) -> Sequence[Type]:
    code, count = c.codes[0], c.outputs
    if c.shapes[0] is None:
        return [(code, None)] * count
    shape = c.shapes[0]
    axis = c.axis(c.integer("axis", 0), len(shape))
    given = "split" in c.attributes or c.has(1)
    parts = c.known(1) if c.has(1) else c.integers("split")
    size = shape[axis]
    if "num_outputs" in c.attributes:
        if given or c.integer("num_outputs", 0) != count:
            raise Unsure
        if not isinstance(size, int) or size % count:
            raise Unsure
    if not isinstance(size, int):
        return [(code, (*shape[:axis], None, *shape[axis + 1 :]))] * count
    if given and parts is None:
        return [(code, None)] * count
    if parts is None:
        if not count or size % count:
            raise Unsure
        parts = (size // count,) * count
    if len(parts) != count or min(parts, default=0) < 0 or sum(parts) != size:
        raise Unsure
    return [(code, (*shape[:axis], p, *shape[axis + 1 :])) for p in parts]


@covers("Transpose")
def _transpose(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None:
        return [(c.codes[0], None)]
    shape = c.shape(0)
    perm = c.integers("perm")
    if not shape:
        raise Unsure
    if perm is None:
        return [(c.codes[0], shape[::-1])]
    if sorted(perm) != list(range(len(shape))):
        raise Unsure
    return [(c.codes[0], tuple(shape[p] for p in perm))]


@covers("Gather")
def _gather(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None or c.shapes[1] is None:
        return [(c.codes[0], None)]
    data, indices = c.shapes[0], c.shapes[1]
    axis = c.axis(c.integer("axis", 0), len(data))
    return [(c.codes[0], (*data[:axis], *indices, *data[axis + 1 :]))]


@covers("ScatterND", "ScatterElements")
def _scatter(c: TypedCall) -> Sequence[Type]:
    return [(c.codes[0], c.shapes[0])]


@covers("Slice")
def _slice(c: TypedCall) -> Sequence[Type]:
    if c.version < 10 or not all(c.has(i) for i in (1, 2)):
        raise Unsure
    starts, ends = c.known(1), c.known(2)
    axes = c.known(3) if c.has(3) else None
    steps = c.known(4) if c.has(4) else None
    shape = c.shape(0)
    if (c.has(3) and axes is None) or (c.has(4) and steps is None):
        raise Unsure
    if starts is None or ends is None:
        return [(c.codes[0], (None,) * len(shape))]
    at = c.axes(range(len(starts)) if axes is None else axes, len(shape))
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(at) == len(steps) or 0 in steps:
        raise Unsure
    made = list(shape)
    for a, start, end, step in zip(at, starts, ends, steps, strict=True):
        size = made[a]
        if not isinstance(size, int):
            if c.version < 11 and size is not None:
                raise Unsure
            made[a] = None
            continue
        made[a] = len(range(*slice(start, end, step).indices(size))) if step > 0 else _backwards(start, end, step, size)
    return [(c.codes[0], tuple(made))]


def _backwards(start: int, end: int, step: int, size: int) -> int:
    """The length of a slice with a negative step: an end before the first element is not counted from the end again."""
    start += size if start < 0 else 0
    end += size if end < 0 else 0
    return len(range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step))


@covers("Pad")
def _pad(c: TypedCall) -> Sequence[Type]:
    shape = c.shape(0)
    pads = c.integers("pads") if "pads" in c.form.attributes else c.known(1)
    axes = c.known(3) if c.has(3) else tuple(range(len(shape)))
    if axes is None or (pads is None and c.has(3)):
        raise Unsure
    if pads is None:
        return [(c.codes[0], (None,) * len(shape))]
    at = c.axes(axes, len(shape))
    if len(pads) != 2 * len(at) or (c.has(3) and not all(isinstance(d, int) for d in shape)):
        raise Unsure
    made = list(shape)
    for k, a in enumerate(at):
        size, more = made[a], pads[k] + pads[k + len(at)]
        if not isinstance(size, int):
            made[a] = size if not more else None
        elif size + more < 0:
            raise Unsure
        else:
            made[a] = size + more
    return [(c.codes[0], tuple(made))]


@covers("Expand")
def _expand(c: TypedCall) -> Sequence[Type]:
    target: Shape = c.known(1)
    if target is None:
        target = _of_rank(c.shapes[1])
    if target is None or c.shapes[0] is None:
        return [(c.codes[0], None)]
    if any(isinstance(d, int) and d < 0 for d in target):
        raise Unsure
    return [(c.codes[0], broadcast([c.shapes[0], target]))]


@covers("ConstantOfShape")
def _constant_of_shape(c: TypedCall) -> Sequence[Type]:
    code = c.attributes["value"].t.data_type if "value" in c.attributes else int(TensorProto.FLOAT)
    target = c.known(0)
    if target is not None and min(target, default=0) < 0:
        raise Unsure
    if target is None:
        lengths = c.shapes[0]
        if lengths is None or len(lengths) != 1 or not isinstance(lengths[0], int):
            raise Unsure
        return [(code, _of_rank(lengths))]
    return [(code, target)]


@covers("Range")
def _range(c: TypedCall) -> Sequence[Type]:
    if all(v is not None for v in c.values) or any(s != () for s in c.shapes):
        raise Unsure
    return [(c.codes[0], (None,))]


@covers("EyeLike")
def _eye_like(c: TypedCall) -> Sequence[Type]:
    shape = c.shapes[0]
    if shape is not None and len(shape) != 2:
        raise Unsure
    return [(c.integer("dtype", c.codes[0]), shape)]
