"""Recipes of operators that gather, scatter, select and sort."""

from __future__ import annotations

import numpy as np

from ....dtypes import is_float
from ..strategies import Draw, Skip
from .registry import recipe


def indices(d: Draw, which: str | int, size: int, shape: tuple[int, ...] | list[int], negative: bool = True) -> np.ndarray:
    if size == 0 and np.prod(shape):
        raise Skip
    low = -size if negative and d.chance(0.5) else 0
    return np.asarray(d.rng.integers(low, max(size, 1), tuple(shape))).astype(d.dtype(which))


@recipe("Gather")
def gather(d: Draw) -> None:
    shape = d.shape(1, empty=0.04)
    axis = d.attr("axis", [d.axis(len(shape), 1)], 0)
    d.put(d.array(0, shape), indices(d, 1, shape[axis], d.shape(0, 3, 3), d.v >= 11))


@recipe("GatherElements")
def gather_elements(d: Draw) -> None:
    shape = d.shape(1, empty=0.04)
    axis = d.attr("axis", [d.axis(len(shape))], 0)
    chosen = [d.whole(min(1, n), n) for n in shape]
    chosen[axis] = d.whole(0 if d.chance(0.1) else 1, 5)
    d.put(d.array(0, shape), indices(d, 1, shape[axis], chosen))


@recipe("GatherND")
def gather_nd(d: Draw) -> None:
    shape = d.shape(1, 4, empty=0)
    batch = d.attr("batch_dims", lambda: d.whole(0, len(shape) - 1), 0)
    depth = d.whole(1, len(shape) - batch)
    outer = shape[:batch] + d.shape(0 if batch else 1, 2, 3)
    d.put(d.array(0, shape), _tuples(d, shape[batch : batch + depth], outer))


def _tuples(d: Draw, sizes: tuple[int, ...], outer: tuple[int, ...]) -> np.ndarray:
    low = [-n if d.v >= 11 and d.chance(0.3) else 0 for n in sizes]
    parts = [d.rng.integers(a, n, outer) for a, n in zip(low, sizes, strict=True)]
    return np.stack(parts, -1).astype(np.int64)


@recipe("Scatter ScatterElements")
def scatter_elements(d: Draw) -> None:
    shape = d.shape(1, empty=0.04)
    axis = d.attr("axis", [d.axis(len(shape))], 0)
    reduction = _reduction(d)
    chosen = [d.whole(min(1, n), n) for n in shape]
    if reduction == "none":  # no element is written twice
        order = np.argsort(d.rng.random(shape), axis=axis)[tuple(slice(0, n) for n in chosen)]
        at = np.where(np.asarray(d.rng.random(order.shape) < 0.3) & (d.v >= 11), order - shape[axis], order).astype(d.dtype(1))
    else:
        chosen[axis] = d.whole(1, 5)
        at = indices(d, 1, shape[axis], chosen)
    kind = "any" if reduction == "none" else "tame"
    d.put(d.array(0, shape, kind), at, d.array(2, at.shape, kind))


def _reduction(d: Draw) -> str:
    options = ["none", "add", "mul"] + (["min", "max"] if d.v >= 18 else [])
    plain = not (is_float(d.dtype(0)) or d.dtype(0).kind in "iu")
    return str(d.attr("reduction", ["none"] if plain else options, "none"))


@recipe("ScatterND")
def scatter_nd(d: Draw) -> None:
    shape = d.shape(1, empty=0)
    depth = d.whole(1, len(shape))
    outer = d.shape(1, 2, 3, empty=0.05)
    at = _tuples(d, shape[:depth], outer)
    reduction = _reduction(d)
    if reduction == "none":
        flat = at.reshape(-1, depth) % np.array(shape[:depth])
        if len({tuple(t) for t in flat.tolist()}) < len(flat):
            raise Skip
    kind = "any" if reduction == "none" else "tame"
    d.put(d.array(0, shape, kind), at, d.array(2, outer + shape[depth:], kind))


@recipe("TensorScatter")
def tensor_scatter(d: Draw) -> None:
    rank = d.whole(3, 4)
    axis = d.attr("axis", [d.whole(1, rank - 1) - (rank if d.chance(0.4) else 0)], -2) % rank
    shape = [d.whole(1, 3) for _ in range(rank)]
    shape[axis] = d.whole(3, 6)
    update = list(shape)
    update[axis] = d.whole(1, 3)
    linear = d.attr("mode", ["linear", "circular"], "linear") == "linear"
    starts = d.wholes(0, shape[axis] - update[axis] if linear else shape[axis] - 1, shape[0])
    d.put(d.array(0, shape), d.array(1, update), d.ints(starts) if d.chance(0.7) else None)


@recipe("OneHot")
def one_hot(d: Draw) -> None:
    depth = d.whole(1, 5)
    shape = d.shape(0, 3)
    whole = d.dtype(0)
    low = -depth if d.v >= 11 and whole.kind not in "u" and d.chance() else 0
    chosen = np.asarray(d.rng.integers(low, depth + (2 if d.chance(0.3) else 0), shape)).astype(whole)
    d.put(chosen, np.array(depth if d.chance() else [depth]).astype(d.dtype(1)), d.array(2, (2,), "tame"))
    d.attr("axis", lambda: d.whole(-len(shape) - 1 if d.v >= 11 else 0, len(shape)), -1)


@recipe("Compress")
def compress(d: Draw) -> None:
    shape = d.shape(1)
    axis = d.attr("axis", [d.axis(len(shape))], None)
    n = int(np.prod(shape)) if axis is None else shape[axis]
    d.put(d.array(0, shape), d.array(1, (d.whole(0 if d.chance(0.1) else min(1, n), n),)))


@recipe("TopK")
def top_k(d: Draw) -> None:
    shape = d.shape(1)
    axis = d.attr("axis", [d.axis(len(shape))], -1)
    kind = d.pick(["half", "any", "small"])
    k = d.whole(0 if d.chance(0.1) else min(1, shape[axis]), shape[axis])
    d.put(d.array(0, shape, kind))
    if d.v == 1:
        d.attributes["k"] = max(k, 1)
        if not shape[axis]:
            raise Skip
    else:
        d.put(d.ints([k]))
    d.attr("largest", [0, 1], 1)
    if d.chance(0.1) and k == shape[axis]:
        d.attr("sorted", [1], 1)
    d.outputs = ["values", "indices"]


@recipe("ArgMax ArgMin")
def arg(d: Draw) -> None:
    shape = d.shape(1, empty=0)
    d.put(d.array(0, shape, d.pick(["half", "any"])))
    d.attr("axis", [d.axis(len(shape))], 0)
    d.attr("keepdims", [0, 1], 1)
    d.attr("select_last_index", [0, 1], 0)


@recipe("Unique")
def unique(d: Draw) -> None:
    shape = d.shape(1)
    axis = d.attr("axis", [d.axis(len(shape))], None)
    kind = d.pick(["half", "half", "any"])
    x = d.array(0, shape, kind)
    if x.dtype.kind in "iu":
        x = x % x.dtype.type(3)
    if axis is not None and shape[axis] > 1 and d.chance():
        x = np.take(x, d.rng.integers(0, shape[axis], shape[axis]), axis)
    d.put(x)
    d.attr("sorted", [0, 1], 1)
    d.outputs = ["y", "indices", "inverse", "counts"][: d.whole(1, 4)]


@recipe("NonMaxSuppression")
def non_max_suppression(d: Draw) -> None:
    batch, classes, n = d.whole(1, 2), d.whole(1, 2), d.whole(0 if d.chance(0.05) else 1, 6)
    corner = d.rng.uniform(0, 2, (batch, n, 2))
    size = d.rng.uniform(0.2, 2, (batch, n, 2))
    boxes = np.concatenate([corner, size if d.attr("center_point_box", [0, 1], 0) else corner + size], -1).astype(np.float32)
    d.put(boxes, d.array(np.float32, (batch, classes, n), "unit"))
    if d.chance(0.9):
        d.put(d.ints([d.whole(0, 4)]), np.array([d.real(0, 1)], np.float32) if d.chance(0.8) else None)
        if d.chance(0.6):
            d.put(np.array([d.real(0, 1)], np.float32))


@recipe("ArrayFeatureExtractor", "ai.onnx.ml")
def array_feature_extractor(d: Draw) -> None:
    shape = d.shape(1, 3, empty=0)
    d.put(d.array(0, shape), d.ints(d.wholes(0, shape[-1] - 1, d.whole(1, 4))))
