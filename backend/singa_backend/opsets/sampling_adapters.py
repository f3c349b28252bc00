"""Rules, as in adapters.py, that write operators which sample an image as older versions: Resize, RoiAlign, GridSample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..interpreters.base import V
from .target_schema import Unwritable
from .writer import OpsetWriter, adapter


def _scales(op: OpsetWriter, x: V, scales: V, sizes: V, axes: Any) -> V:
    """The scales of Resize-10, which has no sizes: float32 scales that result in exactly the sizes, if these are given."""
    if axes is not None:
        raise Unwritable("Resize has no axes before opset 18")
    if sizes is None:
        return scales
    old, new = op.shape(x), op.value(sizes, "sizes of Resize")
    if old is None or not all(isinstance(d, int) and d for d in old):
        raise Unwritable("the sizes of the input must be known to convert sizes to scales")
    ratio = [float(np.float32(n) / np.float32(d)) for n, d in zip(new.tolist(), old, strict=True) if isinstance(d, int)]
    if any(math.floor(np.float32(d) * np.float32(r)) != n for n, d, r in zip(new.tolist(), old, ratio, strict=True)):
        raise Unwritable("no float32 scale results in these sizes")
    return op.constant(ratio, np.float32)


_PLAIN = {"antialias": 0, "exclude_outside": 0, "keep_aspect_ratio_policy": "stretch", "extrapolation_value": 0.0}


def _plain(version: int, coordinates: str, mode: str, nearest_mode: str, others: dict[str, Any]) -> None:
    """Raise Unwritable for options that Resize and Upsample did not have before opset 11."""
    if mode not in ("nearest", "linear") or coordinates != "asymmetric" or (mode == "nearest" and nearest_mode != "floor"):
        raise Unwritable(f"version {version} has asymmetric coordinates, mode linear, and mode nearest with floor only")
    for name, value in others.items():
        if value != _PLAIN[name]:
            raise Unwritable(f"version {version} has no {name}")


@adapter("Resize", 10)
def resize_10(
    op: OpsetWriter,
    x: V,
    scales: V,
    sizes: V,
    antialias: int,
    axes: Any,
    coordinate_transformation_mode: str,
    exclude_outside: int,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
) -> Any:
    others = {"antialias": antialias, "exclude_outside": exclude_outside, "keep_aspect_ratio_policy": keep_aspect_ratio_policy}
    _plain(10, coordinate_transformation_mode, mode, nearest_mode, others)
    return op.at_target("Resize", [x, _scales(op, x, scales, sizes, axes)], {"mode": mode})


@adapter("Resize", 11, 13, 18)
def resize_18(
    op: OpsetWriter,
    x: V,
    roi: V,
    scales: V,
    sizes: V,
    antialias: int,
    axes: Any,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    extrapolation_value: float,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
) -> Any:
    """Version 11 requires a region and scales, empty if unused."""
    if coordinate_transformation_mode == "half_pixel_symmetric":
        raise Unwritable("half_pixel_symmetric came with opset 19")
    attributes = {
        "coordinate_transformation_mode": coordinate_transformation_mode, "cubic_coeff_a": cubic_coeff_a, "mode": mode,
        "exclude_outside": exclude_outside, "extrapolation_value": extrapolation_value, "nearest_mode": nearest_mode,
    }  # fmt: skip
    if op.target < 18:
        if antialias or axes is not None or keep_aspect_ratio_policy != "stretch":
            raise Unwritable("antialias, axes and keep_aspect_ratio_policy came with opset 18")
        if op.target < 13:
            nothing = op.constant(np.zeros(0, np.float32))
            roi, scales = roi if roi is not None else nothing, scales if scales is not None else nothing
    else:
        attributes |= {"antialias": antialias, "axes": axes, "keep_aspect_ratio_policy": keep_aspect_ratio_policy}
    return op.at_target("Resize", [x, roi, scales, sizes], attributes)


@adapter("RoiAlign", 10)
def roi_align_10(
    op: OpsetWriter,
    x: V,
    rois: V,
    batch_indices: V,
    coordinate_transformation_mode: str,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> Any:
    if coordinate_transformation_mode != "output_half_pixel":
        raise Unwritable("before opset 16 RoiAlign has the mode output_half_pixel only")
    attributes = {"mode": mode, "output_height": output_height, "output_width": output_width, "sampling_ratio": sampling_ratio,
                  "spatial_scale": spatial_scale}  # fmt: skip
    return op.at_target("RoiAlign", [x, rois, batch_indices], attributes)


@adapter("GridSample", 16)
def grid_sample_16(op: OpsetWriter, x: V, grid: V, align_corners: int, mode: str, padding_mode: str) -> Any:
    if op.rank_of(x, "GridSample's input") != 4:
        raise Unwritable("GridSample-16 takes inputs of rank 4 only")
    named = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return op.at_target("GridSample", [x, grid], {"align_corners": align_corners, "mode": named, "padding_mode": padding_mode})
