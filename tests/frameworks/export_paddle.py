"""Makes tests/frameworks/paddle: 25 kinds of nets at reduced width and depth, exported from PaddlePaddle by paddle2onnx.

    tox -e frameworks-paddle         # tests/frameworks/paddle; PaddlePaddle is needed here and nowhere else
    tox -e frameworks-paddle26       # tests/frameworks/paddle26: PaddlePaddle 2.6, for what the newer pair writes wrong

The nets, with seeded random weights, are those of nets_paddle.py.  All files are NET-paddle2onnx-12.onnx.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["POLYGRAPHY_AUTOINSTALL_DEPS"] = "0"  # the package that folds constants for paddle2onnx would install packages

import numpy as np
import onnx
import paddle
from common import export_all, images, keep, keep_data
from nets_paddle import NETS, net

SCALES = "(Unimplemented) the 0th elementwise MUST be ir::FloatAttribute"
UNWRITTEN = {
    "darknet": "LeakyRelu gets the alpha 0", "unet_nearest": SCALES, "unet_halves": SCALES, "unet_asymmetric": SCALES,
    "unet_corners": SCALES, "unet_bicubic": SCALES,
}  # fmt: skip
"""Nets that paddle2onnx 2.1.0 writes wrong or not at all, and why; 1.3.1 with PaddlePaddle 2.6 writes them."""
BOTH = ("vit", "shufflenetv2", "unet_transposed")
"""Nets that both write, in different forms: the older one turns weights into constants, and computes shapes in another way."""


def export(name: str, folder: Path) -> Iterator[Path]:
    """Write the data of a net and its file."""
    size = NETS[name][1]
    batches = images(size)
    with paddle.no_grad():
        found = [net(name)(paddle.to_tensor(x)) for x in batches]
    outputs = [[y.numpy() for y in (ys if isinstance(ys, (list, tuple)) else [ys])] for ys in found]
    data = folder / f"{name}.npz"
    keep_data(data, [[x] for x in batches], outputs)
    yield data
    path = folder / f"{name}-paddle2onnx-12.onnx"
    model, other = _written(name, False), _written(name, True)
    keep(path, model, other)
    yield path


def _written(name: str, changed: bool) -> onnx.ModelProto:
    """The file of a net; changed: with other values of its parameters, and the same buffers."""
    size = NETS[name][1]
    with tempfile.TemporaryDirectory() as scratch, paddle.utils.unique_name.guard():
        made = net(name)
        rng = np.random.default_rng(2)
        for p in made.parameters() if changed else ():  # the running statistics of batch norms are buffers
            if not p.stop_gradient:
                p.set_value((p.numpy() + rng.uniform(0.01, 0.02, p.shape)).astype(np.float32))
        spec = paddle.static.InputSpec([None, 3, size, size], "float32", "image")
        paddle.onnx.export(made, f"{scratch}/net", input_spec=[spec], opset_version=12)
        return onnx.load(f"{scratch}/net.onnx")


if __name__ == "__main__":
    if paddle.__version__.startswith("2."):
        export_all(__doc__, "paddle26", [*UNWRITTEN, *BOTH], export)
    else:
        export_all(__doc__, "paddle", [n for n in NETS if n not in UNWRITTEN], export)
