"""Recipes of operators that move, number or repeat values."""

from __future__ import annotations

import numpy as np

from .....dtypes import is_float
from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..indexing import gather_nd
from ..registry import recipe
from ..shaping import trilu
from ..windows import grid_sample

recipe("Trilu", MICROSOFT)(trilu)


@recipe("GridSample", MICROSOFT)
def ms_grid_sample(d: Draw) -> None:
    d.types["T1"] = d.types["T2"]
    grid_sample(d)


@recipe("GatherND", MICROSOFT)
def ms_gather_nd(d: Draw) -> None:
    gather_nd(d)
    d.inputs[1] = d.inputs[1].astype(d.dtype(1))


@recipe("SampleOp", MICROSOFT)
def sample_op(d: Draw) -> None:
    d.put(d.array(0, d.shape()))


@recipe("Pad", MICROSOFT)
def pad(d: Draw) -> None:
    shape = d.shape(1, empty=0.03)
    mode = d.attr("mode", ["constant", "reflect", "edge", "wrap"], "constant")
    pads: list[list[int]] = [[], []]
    for n in shape:
        most = {"constant": 3, "edge": 3 if n else 0, "reflect": max(n - 1, 0), "wrap": n}[mode]
        pair = [d.whole(0, min(most, 3)) for _ in range(2)]
        if mode == "constant" and n and d.chance(0.15):
            pair[d.whole(0, 1)] = -1
        for side in range(2):
            pads[side].append(pair[side] if sum(pair) + n >= 0 else 0)
    flat = np.array(pads[0] + pads[1], np.int64)
    d.put(d.array(0, shape), flat[None] if d.chance(0.2) else flat)
    if d.chance():
        d.put(d.array(0, (1,) if d.chance() else (), "tame"))


@recipe("Range", MICROSOFT)
def range_(d: Draw) -> None:
    dtype = d.dtype(0)
    if is_float(dtype):
        values = [d.whole(-20, 20) / 4, d.whole(-20, 20) / 4, d.pick([0.25, 0.5, 1.5, -0.5, -1.0])]
    else:
        values = [d.whole(-9, 9), d.whole(-9, 9), d.pick([1, 2, 3, -1, -2])]
    if d.chance(0.3):
        values.pop()
    d.put(*(np.full((1,) if d.chance(0.3) else (), v).astype(dtype) for v in values))


@recipe("ExpandDims", MICROSOFT)
def expand_dims(d: Draw) -> None:
    shape = d.shape()
    d.put(d.array(0, shape), np.full((1,) if d.chance(0.3) else (), d.whole(-len(shape) - 1, len(shape))).astype(np.int32))


@recipe("UnfoldTensor", MICROSOFT)
def unfold_tensor(d: Draw) -> None:
    shape = d.shape(1, empty=0)
    axis = d.attr("dim", lambda: d.whole(-len(shape), len(shape) - 1), -1)
    d.attributes["size"] = d.whole(1, shape[axis])
    d.attr("step", [1, 2, 3], 1)
    d.put(d.array(0, shape))


@recipe("Unique", MICROSOFT)
def unique(d: Draw) -> None:
    values = d.array(0, (d.whole(1, 4),), "small")
    d.put(values[d.rng.integers(0, len(values), d.whole(0, 9))])
    d.outputs += ["idx", "counts"]


@recipe("TorchEmbedding", MICROSOFT)
def torch_embedding(d: Draw) -> None:
    rows = d.whole(1, 5)
    d.put(d.array(0, (rows, d.size())), d.rng.integers(0, rows, d.shape(0, 2)).astype(np.int64))
    d.put(d.ints(d.whole(0, rows - 1)) if d.chance() else None)
    if d.chance():
        d.put(np.array(d.chance()))


@recipe("IsAllFinite", MICROSOFT)
def is_all_finite(d: Draw) -> None:
    for _ in range(d.whole(1, 3)):
        d.put(d.array(0, d.shape(), d.pick(["small", "tame"])))
    d.attr(d.pick(["isinf_only", "isnan_only"]), [0, 1], 0)


@recipe("CropAndResize", MICROSOFT)
def crop_and_resize(d: Draw) -> None:
    """Corners in steps of 1/16, and nearest pixels that are not in the middle of two."""
    mode = d.attr("mode", ["bilinear", "nearest"], "bilinear")
    n, regions = d.whole(1, 2), d.whole(1, 3)
    rois = np.round(d.rng.uniform(-0.2, 1.2, (regions, 4)) * 16) / 16 + (1 / 256 if mode == "nearest" else 0)
    d.put(d.array(0, (n, d.whole(1, 3), d.whole(2, 6), d.whole(2, 6)), "tame"), rois.astype(d.dtype(0)))
    d.put(d.rng.integers(0, n, regions).astype(np.int32), np.array(d.wholes(1, 4, 2), np.int32))
    d.attr("extrapolation_value", d.real, 0.0)


@recipe("MaxpoolWithMask", MICROSOFT)
def maxpool_with_mask(d: Draw) -> None:
    n = d.whole(1, 3)
    kernel = d.attributes["kernel_shape"] = d.wholes(1, 3, n)
    d.attr("strides", lambda: d.wholes(1, 3, n), None)
    auto = d.attr("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"], "NOTSET") if d.chance(0.4) else "NOTSET"
    if auto == "NOTSET":
        d.attr("pads", lambda: [d.whole(0, k - 1) for k in kernel * 2], None)
    image = tuple(d.whole(k, k + 4) for k in kernel)
    d.put(d.array(0, (d.whole(1, 2), d.whole(1, 3), *image), "tame"))
    d.put((d.rng.random((1, 1, *image)) < 0.7).astype(np.int32))
