"""The programs on images: their options, their sets, and the size of the images of a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import common
import data
import nets
import onnx


def options(description: str | None) -> argparse.ArgumentParser:
    parser = common.options(description)
    parser.add_argument("--size", type=int, help="the size of the images; by default that of the file, otherwise 32")
    parser.add_argument("--width", type=float, default=1 / 8, help="the width of a random net, as a share of the published one")
    return parser


def run(args: argparse.Namespace, make: Callable[[], nets.Model]) -> None:
    """Train the file, or the random net that `make` returns."""
    proto = common.loaded(args.model) if args.model else None
    size = args.size or (proto and _size(proto)) or 32
    if proto is None:
        proto = nets.exported(make(), nets.image(size), args.seed)
    common.run(args, proto, data.images(args.data, size, args.samples))


def _size(proto: onnx.ModelProto) -> int | None:
    """The size of the images that a file declares; None if it is open."""
    known = {t.name for t in proto.graph.initializer}
    shapes = [v.type.tensor_type.shape.dim for v in proto.graph.input if v.name not in known]
    if len(shapes) != 1 or len(shapes[0]) != 4 or shapes[0][1].dim_value not in (0, 3):
        raise SystemExit("the file must have one input, images of shape (N, 3, H, W)")
    return shapes[0][2].dim_value or None
