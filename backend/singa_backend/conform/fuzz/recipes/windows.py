"""Recipes of operators with windows over an image: convolutions, pools, resizing, sampling."""

from __future__ import annotations

import numpy as np

from ..strategies import Draw, Skip
from .numbers import drawn_scale, drawn_zero
from .registry import recipe


class Window:
    """Draw kernel, strides, dilations and pads that fit some image, and set them as attributes."""

    def __init__(self, d: Draw, *, low: int = 1, high: int = 3, pads: bool = True, kernel: bool = True) -> None:
        n = self.rank = d.pick([low, 2, 2, high]) if low <= 2 <= high else d.whole(low, high)
        self.kernel = d.wholes(1, 3, n)
        if kernel:
            d.attributes["kernel_shape"] = self.kernel
        else:
            d.attr("kernel_shape", [self.kernel], None)
        auto = d.attr("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"], "NOTSET") if d.chance(0.4) else "NOTSET"
        self.auto = auto
        self.strides = d.attr("strides", lambda: d.wholes(1, 3, n), [1] * n)
        same = auto.startswith("SAME")
        self.dilations = [1] * n if same else d.attr("dilations", lambda: d.wholes(1, 2, n), [1] * n)
        self.pads = [0] * (2 * n)
        if pads and auto == "NOTSET":
            self.pads = d.attr("pads", lambda: [d.whole(0, k - 1) for k in self.kernel * 2], [0] * (2 * n))
        reach = [(k - 1) * s + 1 for k, s in zip(self.kernel, self.dilations, strict=True)]
        self.image = tuple(d.whole(max(1, r), r + 4) for r in reach)


def _batch(d: Draw, most: int = 2) -> int:
    return 0 if d.chance(0.02) else d.whole(1, most)


@recipe("Conv")
def conv(d: Draw) -> None:
    w = Window(d, kernel=False)
    group = d.attr("group", [1, 2, 3], 1)
    c, m = group * d.whole(1, 2), group * d.whole(1, 2)
    d.put(d.array(0, (_batch(d), c, *w.image), "tame"), d.array(1, (m, c // group, *w.kernel), "tame"))
    if d.chance():
        d.put(d.array(2, (m,), "tame"))


@recipe("ConvInteger")
def conv_integer(d: Draw) -> None:
    w = Window(d, low=2, high=2, kernel=False)
    group = d.attr("group", [1, 2], 1)
    c, m = group * d.whole(1, 2), group * d.whole(1, 2)
    d.put(d.array(0, (_batch(d), c, *w.image)), d.array(1, (m, c // group, *w.kernel)))
    if d.chance(0.7):
        d.put(d.array(0, ()))
        if d.chance():
            d.put(d.array(1, ()))


@recipe("QLinearConv")
def q_linear_conv(d: Draw) -> None:
    w = Window(d, low=2, high=2, kernel=False)
    group = d.attr("group", [1, 2], 1)
    c, m = group * d.whole(1, 2), group * d.whole(1, 2)
    d.put(d.array(0, (_batch(d), c, *w.image), "tame"), drawn_scale(d, 1, ()), drawn_zero(d, d.dtype(0), ()))
    each = (m,) if d.chance(0.3) else ()
    zero = np.zeros(each, d.dtype(3)) if each else drawn_zero(d, d.dtype(3), ())
    d.put(d.array(3, (m, c // group, *w.kernel), "tame"), drawn_scale(d, 4, each), zero)
    d.put(drawn_scale(d, 6, ()), drawn_zero(d, d.dtype(7), ()))
    if d.chance():
        d.put(d.array(8, (m,), "tame"))


@recipe("ConvTranspose")
def conv_transpose(d: Draw) -> None:
    w = Window(d, kernel=False)
    group = d.attr("group", [1, 2], 1)
    c, m = group * d.whole(1, 2), d.whole(1, 2)
    if w.auto == "NOTSET":
        d.attr("output_padding", lambda: [d.whole(0, max(s, t) - 1) for s, t in zip(w.strides, w.dilations, strict=True)], None)
    image = tuple(d.whole(2, 4) for _ in w.kernel)
    d.put(d.array(0, (_batch(d), c, *image), "tame"), d.array(1, (c, m, *w.kernel), "tame"))
    if d.chance():
        d.put(d.array(2, (m * group,), "tame"))


@recipe("DeformConv")
def deform_conv(d: Draw) -> None:
    w = Window(d, low=2, high=2, kernel=False)
    group, parts = d.attr("group", [1, 2], 1), d.attr("offset_group", [1, 2], 1)
    c, m, n = 2 * d.whole(1, 2), 2 * d.whole(1, 2), d.whole(1, 2)
    outs = [
        (i + a + b - ((k - 1) * t + 1)) // s + 1
        for i, k, s, t, a, b in zip(w.image, w.kernel, w.strides, w.dilations, w.pads[:2], w.pads[2:], strict=True)
    ]
    cells = int(np.prod(w.kernel))
    d.put(d.array(0, (n, c, *w.image), "tame"), d.array(1, (m, c // group, *w.kernel), "tame"))
    d.put(d.array(2, (n, parts * 2 * cells, *outs), "around"))
    if d.chance():
        d.put(d.array(3, (m,), "tame") if d.chance() else None, d.array(4, (n, parts * cells, *outs), "unit"))


@recipe("MaxPool AveragePool LpPool")
def pool(d: Draw) -> None:
    lp = d.schema.name == "LpPool"
    w = Window(d)
    d.put(d.array(0, (_batch(d), d.whole(1, 3), *w.image), "small" if d.schema.name == "MaxPool" else "tame"))
    ceil = d.attr("ceil_mode", [0, 1], 0)
    if ceil and w.auto.startswith("SAME"):
        d.attributes["ceil_mode"] = 0
    if lp:
        d.attr("p", [1, 2, 3] if d.v > 1 else [1.0, 2.0, 3.0], None)
    d.attr("count_include_pad", [0, 1], 0)
    if d.schema.name == "MaxPool" and d.v >= 8:
        d.attr("storage_order", [0, 1], 0)
        if d.chance():
            d.outputs.append("indices")


@recipe("GlobalAveragePool GlobalMaxPool GlobalLpPool")
def global_pool(d: Draw) -> None:
    d.put(d.array(0, (_batch(d, 3), d.whole(1, 3), *d.shape(1, 3, empty=0)), "tame"))
    d.attr("p", [1, 2, 3] if d.v > 1 else [1.0, 2.0], None)


@recipe("LRN")
def lrn(d: Draw) -> None:
    d.put(d.array(0, (_batch(d), d.whole(1, 6), *d.shape(0, 2, empty=0)), "tame"))
    d.attributes["size"] = d.whole(1, 5)
    d.attr("alpha", lambda: d.real(0, 0.5), None)
    d.attr("beta", lambda: d.real(0.2, 1), None)
    d.attr("bias", lambda: d.real(0.5, 2), None)


@recipe("MaxUnpool")
def max_unpool(d: Draw) -> None:
    n, c, h, w = d.whole(1, 2), d.whole(1, 2), d.whole(1, 3), d.whole(1, 3)
    k = d.wholes(1, 3, 2)
    strides = d.attr("strides", [k], [1, 1])
    out = [(i - 1) * s + a for i, s, a in zip((h, w), strides, k, strict=True)]
    total = n * c * out[0] * out[1]
    d.attributes["kernel_shape"] = k
    if total < n * c * h * w:
        raise Skip
    plane = out[0] * out[1]
    at = np.concatenate([d.rng.permutation(plane)[: h * w] + i * plane for i in range(n * c)]).reshape(n, c, h, w)
    d.put(d.array(0, (n, c, h, w), "tame"), at.astype(np.int64))


@recipe("MaxRoiPool")
def max_roi_pool(d: Draw) -> None:
    n, c, h, w = d.whole(1, 2), d.whole(1, 2), d.whole(3, 6), d.whole(3, 6)
    rois = [[d.whole(0, n - 1), *sorted(d.wholes(0, w - 1, 2)), *sorted(d.wholes(0, h - 1, 2))] for _ in range(d.whole(1, 3))]
    rois = [[b, x0, y0, x1, y1] for b, x0, x1, y0, y1 in rois]
    d.put(d.array(0, (n, c, h, w), "tame"), np.array(rois).astype(d.dtype(1)))
    d.attributes["pooled_shape"] = d.wholes(1, 3, 2)
    d.attr("spatial_scale", [0.5, 1.0], 1.0)


@recipe("RoiAlign")
def roi_align(d: Draw) -> None:
    n, c, h, w = d.whole(1, 2), d.whole(1, 2), d.whole(3, 6), d.whole(3, 6)
    k = d.whole(1, 3)
    rois = [[d.real(0, w / 2), d.real(0, h / 2), d.real(w / 2, w), d.real(h / 2, h)] for _ in range(k)]
    d.put(d.array(0, (n, c, h, w), "tame"), np.array(rois).astype(d.dtype(1)), d.ints(d.wholes(0, n - 1, k)))
    d.attr("mode", ["avg", "max"], "avg")
    d.attr("output_height", [1, 2, 3], 1)
    d.attr("output_width", [1, 2, 3], 1)
    d.attr("sampling_ratio", [0, 1, 2, 3], 0)
    d.attr("spatial_scale", [0.5, 1.0], 1.0)
    d.attr("coordinate_transformation_mode", ["half_pixel", "output_half_pixel"], None)


@recipe("Col2Im")
def col2im(d: Draw) -> None:
    w = Window(d, low=1, high=3)
    d.attributes.pop("kernel_shape")
    blocks = [
        (i + a + b - ((k - 1) * t + 1)) // s + 1
        for i, k, s, t, a, b in zip(w.image, w.kernel, w.strides, w.dilations, w.pads, w.pads[w.rank :], strict=False)
    ]
    shape = (d.whole(1, 2), d.whole(1, 2) * int(np.prod(w.kernel)), int(np.prod(blocks)))
    d.put(d.array(0, shape, "tame"), d.ints(w.image), d.ints(w.kernel))


@recipe("AffineGrid")
def affine_grid(d: Draw) -> None:
    n, rank = d.whole(1, 2), d.whole(2, 3)
    d.put(d.array(0, (n, rank, rank + 1), "tame"), d.ints([n, d.whole(1, 2), *(d.whole(1, 4) for _ in range(rank))]))
    d.attr("align_corners", [0, 1], 0)


@recipe("GridSample")
def grid_sample(d: Draw) -> None:
    rank = d.whole(1, 3) if d.v >= 20 else 2
    old = d.v < 20
    modes = ["bilinear", "nearest", "bicubic"] if old else ["linear", "nearest"] + (["cubic"] if rank == 2 else [])
    mode = d.attr("mode", modes, modes[0])
    if d.dtype(0).kind == "O":
        mode, d.attributes["mode"], d.attributes["padding_mode"] = "nearest", "nearest", "border"
    else:
        d.attr("padding_mode", ["zeros", "border", "reflection"], "zeros")
    d.attr("align_corners", [0, 1], 0)
    n = d.whole(1, 2)
    image, out = [d.whole(1 if d.chance(0.1) else 2, 5) for _ in range(rank)], [d.whole(1, 4) for _ in range(rank)]
    grid = d.rng.uniform(-1.3, 1.3, (n, *out, rank))
    if mode == "nearest":  # not at midpoints, where rounding decides
        grid = np.round(grid * 64) / 64 + 1 / 256
    d.put(d.array(0, (n, d.whole(1, 2), *image), "tame"), grid.astype(d.dtype(1)))


# --- resizing ---------------------------------------------------------------------------------------------------------


@recipe("Resize")
def resize(d: Draw) -> None:
    rank = d.pick([1, 2, 3, 4, 4])
    mode = d.attr("mode", ["nearest", "linear", "cubic"] if d.v >= 11 else ["nearest", "linear"], "nearest")
    if mode != "nearest" and d.dtype(0).kind == "O":
        raise Skip
    rank = rank if mode == "nearest" else max(rank, 2)
    shape = [d.whole(1, 5) for _ in range(rank)]
    spatial = list(range(rank)) if mode == "nearest" else list(range(rank - d.whole(1, 2), rank))
    d.put(d.array(0, shape, "tame"))
    axes = None
    if d.has("axes") and d.chance(0.4):
        axes = sorted(spatial)
        d.attributes["axes"] = [a - rank if d.chance(0.3) else a for a in axes]
    over = list(range(rank)) if axes is None else axes
    place = _coordinates(d, mode)
    roi = _region(d, over, spatial) if place == "tf_crop_and_resize" else None
    factors = [d.pick([0.5, 0.75, 1.5, 2.0, 3.0, 1.0]) if a in spatial else 1.0 for a in over]
    factors = [max(f, 1 / shape[a]) for f, a in zip(factors, over, strict=True)]
    scales = np.array(factors, np.float32)
    if d.v == 10:
        d.put(scales)
        return
    by_size = d.chance(0.4)
    empty = np.zeros(0, np.float32)
    if d.v == 11:
        d.put(roi if roi is not None else empty.astype(d.dtype(1)), empty if by_size else scales)
    else:
        d.put(roi, None if by_size else scales)
    if by_size:
        d.put(d.ints([max(1, int(shape[a] * f)) if a in spatial else shape[a] for a, f in zip(over, factors, strict=True)]))
        if roi is None:
            d.attr("keep_aspect_ratio_policy", ["stretch", "not_larger", "not_smaller"], "stretch")
    if d.inputs[-1] is None:
        raise Skip


def _coordinates(d: Draw, mode: str) -> str:
    """Draw where the elements are and how they are weighted; return the coordinate transformation."""
    modes = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
    modes += ["tf_half_pixel_for_nn"] if d.v == 11 else []
    modes += ["half_pixel_symmetric"] if d.v >= 19 else []
    crop = d.v >= 11 and d.chance(0.15) and d.dtype(0).kind != "O"  # strings have no extrapolation_value
    place: str = d.attr("coordinate_transformation_mode", ["tf_crop_and_resize"] if crop else modes, "half_pixel")
    d.attr("nearest_mode", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"], "round_prefer_floor")
    if mode == "cubic":
        d.attr("cubic_coeff_a", [-0.5, -0.75], -0.75)
        d.attr("exclude_outside", [0, 1], 0)
    if mode != "nearest" and place != "tf_crop_and_resize":
        d.attr("antialias", [0, 1], 0)
    return place


def _region(d: Draw, over: list[int], spatial: list[int]) -> np.ndarray:
    d.attr("extrapolation_value", d.real, 0.0)
    begin = [d.real(0, 0.4) if a in spatial else 0.0 for a in over]
    end = [d.real(0.6, 1.2) if a in spatial else 1.0 for a in over]
    return np.array([*begin, *end]).astype(d.dtype(1))


@recipe("Upsample")
def upsample(d: Draw) -> None:
    shape = [d.whole(1, 4) for _ in range(4)]
    d.put(d.array(0, shape, "tame"))
    d.attr("mode", ["nearest", "linear" if d.v > 1 else "bilinear"] if d.dtype(0).kind == "f" else ["nearest"], "nearest")
    h, w = d.pick([1.0, 2.0, 3.0]), d.pick([1.0, 2.0, 3.0])
    if d.v == 1:
        d.attributes |= {"height_scale": h, "width_scale": w}
    elif d.v == 7:
        d.attributes["scales"] = [1.0, 1.0, h, w]
    else:
        d.put(np.array([1, 1, h, w], np.float32))
