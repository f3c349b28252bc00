"""Recipes of operators that move values: shapes, slices, pads, joins."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from ....dtypes import STRING, is_float
from ..strategies import Draw, Skip
from .registry import recipe


@recipe("Identity Shape Size NonZero")
def plain(d: Draw) -> None:
    d.put(d.array(0, d.shape(0, 6)))
    rank = d.inputs[0].ndim
    d.attr("start", lambda: d.whole(-rank - 1, rank + 1), 0)
    d.attr("end", lambda: d.whole(-rank - 1, rank + 1), None)


@recipe("Concat")
def concat(d: Draw) -> None:
    shape = list(d.shape(1))
    axis = d.axis(len(shape))
    if d.v == 1:
        axis = d.attr("axis", [axis], 1 if len(shape) > 1 else axis)
        if len(shape) == 1:
            d.attributes["axis"] = axis
    else:
        d.attributes["axis"] = axis
    for _ in range(d.whole(1, 4)):
        shape[axis] = d.whole(0, 3)
        d.put(d.array(0, shape))


@recipe("Reshape")
def reshape(d: Draw) -> None:
    x = d.array(0, d.shape(0, 5))
    total = x.size
    allow = d.attr("allowzero", [0, 1], 0)
    if d.chance(0.4):
        target = [int(n) for n in d.rng.permutation(x.shape)] if x.ndim else []
    else:
        target, left = [], total
        for _ in range(d.whole(0, 3)):
            n = d.pick([k for k in range(1, left + 1) if left % k == 0]) if left else d.whole(1, 3)
            target.append(n)
            left //= n
        target.append(left)
        if total == 1 and d.chance(0.2):
            target = []
    zeros = target.count(0)
    if zeros and not allow:
        if any(n == 0 and (i >= x.ndim or x.shape[i] != 0) for i, n in enumerate(target)):
            raise Skip
    elif target and zeros == 0 and d.chance(0.4) and (total or all(target)):
        at = d.whole(0, len(target) - 1)
        target[at] = -1
    if not allow and d.chance(0.3):
        for i in range(min(len(target), x.ndim)):
            if target[i] == x.shape[i] and d.chance():
                target[i] = 0
    d.put(x)
    if d.v == 1:
        d.attributes["shape"] = target
        if not target:
            raise Skip
        d.attr("consumed_inputs", lambda: [0], None)
    else:
        d.put(d.ints(target))


@recipe("Flatten")
def flatten(d: Draw) -> None:
    shape = d.shape(1 if d.v < 9 else 0, 5)
    d.put(d.array(0, shape))
    if not shape:
        d.attributes["axis"] = 0
        return
    axis = d.whole(-len(shape) if d.v >= 11 else 0, len(shape))
    d.attr("axis", [axis], 1)


@recipe("Squeeze")
def squeeze(d: Draw) -> None:
    shape = tuple(1 if d.chance(0.4) else n for n in d.shape(0, 5))
    ones = [i for i, n in enumerate(shape) if n == 1]
    d.put(d.array(0, shape))
    if not ones or d.chance(0.3):
        return
    chosen = [ones[i] - (len(shape) if d.v >= 11 and d.chance(0.3) else 0) for i in d.axes(len(ones), 1, 99)]
    if d.has("axes"):
        d.attributes["axes"] = chosen
    else:
        d.put(d.ints(chosen))


@recipe("Unsqueeze")
def unsqueeze(d: Draw) -> None:
    shape = d.shape(0, 4)
    n = d.whole(1, 3)
    rank = len(shape) + n
    axes = [int(a) for a in d.rng.permutation(rank)[:n]]
    if d.v < 13:
        axes = sorted(axes)
    axes = [a - rank if d.v >= 11 and d.chance(0.3) else a for a in axes]
    d.put(d.array(0, shape))
    if d.has("axes"):
        d.attributes["axes"] = axes
    else:
        d.put(d.ints(axes))


@recipe("Transpose")
def transpose(d: Draw) -> None:
    shape = d.shape(0, 6)
    d.put(d.array(0, shape))
    if shape:
        d.attr("perm", lambda: [int(i) for i in d.rng.permutation(len(shape))], None)


@recipe("Expand")
def expand(d: Draw) -> None:
    a, b = d.pair()
    d.put(d.array(0, a), d.ints(b))


@recipe("Tile")
def tile(d: Draw) -> None:
    shape = d.shape(0 if d.v > 1 else 1)
    d.put(d.array(0, shape))
    if d.v > 1:
        d.put(d.ints([d.whole(0 if d.chance(0.1) else 1, 3) for _ in shape]))
    else:
        d.put(np.array(d.whole(1, 3)).astype(d.dtype(0)), np.array(d.whole(0, len(shape) - 1)).astype(d.dtype(0)))
        if not (is_float(d.dtype(0)) or d.dtype(0).kind in "iu"):
            raise Skip


@recipe("Split SplitToSequence")
def split(d: Draw) -> None:
    shape = list(d.shape(1, empty=0.03))
    axis = d.axis(len(shape))
    n, parts = shape[axis], d.whole(1, 4)
    if d.schema.name == "SplitToSequence":
        d.put(d.array(0, shape))
        axis = d.attr("axis", [axis], 0)
        n = shape[axis]
        if d.chance(0.6):
            whole = d.dtype(1)
            if d.chance() or n == 0:
                d.put(np.array(d.whole(1, 3)).astype(whole))
            else:
                d.put(np.array(_cut(d, n, parts)).astype(whole))
        else:
            d.attr("keepdims", [0, 1], 1)
        return
    axis = d.attr("axis", [axis], 0) if d.v > 1 else axis
    if d.v == 1:
        d.attributes["axis"] = axis
    even = d.chance(0.5)
    uneven_last = even and d.v >= 18 and d.chance(0.4) and n
    sizes = [parts] * parts if even else _cut(d, d.whole(0, 6), parts)
    if uneven_last:
        step = -(-(n + 1) // parts)
        sizes = [max(0, min(step, n - i * step)) for i in range(parts)]
        if 0 in sizes:
            raise Skip
    shape[axis] = sum(sizes)
    d.put(d.array(0, shape))
    d.outputs = [f"y{i}" for i in range(parts)]
    if even and d.has("num_outputs"):
        d.attributes["num_outputs"] = parts
    elif not even or d.chance():
        if d.v == 1 and d.chance():
            d.put(np.array(sizes).astype(d.dtype(0)))
        elif d.has("split"):
            d.attributes["split"] = sizes
        else:
            d.put(d.ints(sizes))


def _cut(d: Draw, n: int, parts: int) -> list[int]:
    cuts = sorted(d.wholes(0, n, parts - 1))
    return [int(s) for s in np.diff([0, *cuts, n])]


@recipe("Slice")
def slice_(d: Draw) -> None:
    shape = d.shape(1)
    axes = d.axes(len(shape))
    top = 2**31 - 1 if d.v == 1 or d.types.get("Tind", np.dtype(np.int64)) == np.int32 else 2**63 - 1

    def places(backwards: list[bool]) -> tuple[list[int], list[int]]:
        starts, ends = [], []
        for back in backwards:
            starts.append(d.pick([d.whole(-7, 7), d.whole(-7, 7), d.whole(-7, 7), top]))
            ends.append(d.pick([d.whole(-7, 7), d.whole(-7, 7), -top if back else top]))
        return starts, ends

    d.put(d.array(0, shape))
    if d.v == 1:
        starts, ends = places([False] * len(axes))
        d.attributes |= {"starts": starts, "ends": ends, "axes": axes}
        return
    steps = [d.pick([1, 1, 2, 3, -1, -2]) for _ in axes]
    starts, ends = places([s < 0 for s in steps])
    whole = d.dtype("Tind")
    given = [np.array(v).astype(whole) for v in (starts, ends, axes, steps)]
    if d.chance(0.3):
        starts, ends = places([False] * len(shape))
        given = [np.array(v).astype(whole) for v in (starts, ends)]
    d.put(*given)


@recipe("Pad")
def pad(d: Draw) -> None:
    shape = d.shape(1, empty=0.03)
    modes = ["constant", "reflect", "edge"] + (["wrap"] if d.v >= 19 else [])
    mode = d.attr("mode", modes, "constant")
    rank = len(shape)
    axes = d.axes(rank, negative_from=18) if d.v >= 18 and d.chance() else None
    count = rank if axes is None else len(axes)
    sizes = shape if axes is None else [shape[a] for a in axes]
    pads = [[0, 0] for _ in range(count)]
    for pair, n in zip(pads, sizes, strict=True):
        for side in range(2):
            most = {"constant": 3, "edge": 3 if n else 0, "reflect": max(n - 1, 0), "wrap": n}[mode]
            pair[side] = d.whole(0, min(most, 3))
            if mode == "constant" and d.chance(0.15) and n and d.v > 1:
                pair[side] = -1
        if sum(pair) + n < 0:
            pair[:] = [0, 0]
    flat = [p[side] for side in range(2) for p in pads]
    d.put(d.array(0, shape))
    if d.v == 1:
        d.attributes["paddings"] = flat
        d.attr("value", d.real, 0.0)
    elif d.v == 2:
        d.attributes["pads"] = flat
        d.attr("value", d.real, 0.0)
    else:
        d.put(d.ints(flat), d.array(0, (), "tame") if d.chance() else None)
        if axes is not None:
            d.put(np.array(axes).astype(d.dtype("Tind")))


@recipe("DepthToSpace SpaceToDepth")
def depth(d: Draw) -> None:
    block = d.whole(1, 3)
    n, c, h, w = (d.whole(1, 3) for _ in range(4))
    deep = d.schema.name == "DepthToSpace"
    d.put(d.array(0, (n, c * block * block, h, w) if deep else (n, c, h * block, w * block)))
    d.attributes["blocksize"] = block
    d.attr("mode", ["DCR", "CRD"], "DCR")


@recipe("CenterCropPad")
def center_crop_pad(d: Draw) -> None:
    shape = d.shape(1, empty=0.03)
    axes = d.attr("axes", lambda: d.axes(len(shape)), None)
    d.put(d.array(0, shape), np.array([d.whole(1, 6) for _ in (axes or shape)]).astype(d.dtype("Tind")))


@recipe("ReverseSequence")
def reverse_sequence(d: Draw) -> None:
    shape = d.shape(2, empty=0)
    batch = d.attr("batch_axis", [0, 1], 1)
    time = 1 - batch
    if batch == 0 or d.chance():
        d.attributes["time_axis"] = time
    d.put(d.array(0, shape), d.ints([d.whole(1, shape[time]) for _ in range(shape[batch])]))


@recipe("Trilu")
def trilu(d: Draw) -> None:
    shape = d.shape(2)
    d.put(d.array(0, shape))
    d.attr("upper", [0, 1], 1)
    if d.chance(0.6):
        d.put(np.array(d.whole(-5, 5)))


@recipe("EyeLike")
def eye_like(d: Draw) -> None:
    from ....dtypes import onnx_code

    d.put(d.array(0, d.shape(2, 2)))
    d.attr("k", lambda: d.whole(-4, 4), 0)
    if d.dtype("T2") != d.dtype(0) or d.chance():
        d.attributes["dtype"] = onnx_code(d.dtype("T2"))


@recipe("Constant")
def constant(d: Draw) -> None:
    value = d.array("T", d.shape())
    short = d.has("value_float") and d.chance()
    if short and value.dtype == np.float32 and value.ndim <= 1:
        name = "value_floats" if value.ndim else "value_float"
        d.attributes[name] = [float(v) for v in value] if value.ndim else float(value)
        if value.ndim and not value.size:
            raise Skip
    elif short and value.dtype == np.int64 and value.ndim <= 1 and value.size:
        d.attributes["value_ints" if value.ndim else "value_int"] = value.tolist()
    elif short and value.dtype == STRING and value.ndim <= 1 and value.size:
        d.attributes["value_strings" if value.ndim else "value_string"] = value.tolist()
    else:
        d.attributes["value"] = numpy_helper.from_array(value, "value")


@recipe("ConstantOfShape")
def constant_of_shape(d: Draw) -> None:
    d.put(d.ints(d.shape(0, 4)))
    if d.dtype("T2") != np.float32 or d.chance():
        d.attributes["value"] = numpy_helper.from_array(d.array("T2", (1,)), "value")
