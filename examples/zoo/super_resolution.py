"""Sub-pixel super-resolution (opset 10): a picture at three times its width and height.

    python examples/zoo/super_resolution.py small.png --model super-resolution-10.onnx --output large.png

The brightness (Y of YCbCr, 0 to 1) runs through the model; the colours (Cb, Cr) are resized bicubically.  The published model
takes 224 x 224 pixels.  Larger pictures run in tiles, which overlap by more than the model's convolutions reach, so that the
result is that of the whole picture; smaller ones are continued by their edges.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from images import Image, planes, read, save
from published import load, options, start

MARGIN = 8
"""The pixels at the inner edges of a tile that are not used; the four convolutions reach 2 + 1 + 1 + 1."""


def tiles(length: int, tile: int) -> list[tuple[int, int, int]]:
    """Return, along an axis, the start of each tile and the part (from, to) of the picture that is taken from it."""
    starts = [*range(0, length - tile, tile - 2 * MARGIN), max(length - tile, 0)]
    cuts = [0, *((a + tile + b) // 2 for a, b in pairwise(starts)), length]
    return [(start, *cut) for start, cut in zip(starts, pairwise(cuts), strict=True)]


def enlarged(rep: Any, y: np.ndarray) -> np.ndarray:
    """Return the model's result for a plane of any size, float32[H, W] in 0 to 1."""
    declared = (rep.inputs[0].shape or ())[2:] or (None, None)
    high, wide = (d if isinstance(d, int) else n for d, n in zip(declared, y.shape, strict=True))
    padded = np.pad(y, [(0, max(high - y.shape[0], 0)), (0, max(wide - y.shape[1], 0))], mode="edge")
    bands = []
    for top, row0, row1 in tiles(y.shape[0], high):
        parts = []
        for left, column0, column1 in tiles(y.shape[1], wide):
            part = rep.run([padded[None, None, top : top + high, left : left + wide].copy()])[0][0, 0]
            factor = part.shape[0] // high
            rows, columns = np.array([row0 - top, row1 - top]) * factor, np.array([column0 - left, column1 - left]) * factor
            parts.append(part[slice(*rows), slice(*columns)])
        bands.append(np.concatenate(parts, 1))
    return np.concatenate(bands, 0)  # type: ignore[no-any-return]


def main() -> None:
    parser = options(__doc__, "super-resolution-10.onnx")
    parser.add_argument("picture", nargs="?", type=Path)
    parser.add_argument("--output", type=Path, default=Path("large.png"), help="the picture that is written (%(default)s)")
    args = parser.parse_args()
    rep = load(args)
    if args.picture:
        y, cb, cr = read(args.picture).convert("YCbCr").split()
        made = enlarged(rep, planes(y)[0, 0] / np.float32(255))
        light = Image.fromarray(np.rint(made * 255).clip(0, 255).astype(np.uint8))
        parts = [light, *(c.resize(light.size, Image.Resampling.BICUBIC) for c in (cb, cr))]
        print(f"{args.picture}: {y.width} x {y.height} to {light.width} x {light.height}")
        save(Image.merge("YCbCr", parts).convert("RGB"), args.output)


if __name__ == "__main__":
    start(main)
