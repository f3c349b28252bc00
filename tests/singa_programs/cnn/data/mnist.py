"""The compressed idx files of MNIST."""

import gzip
import os

import numpy as np


def _read(path, offset):
    with gzip.open(path, "rb") as f:
        return np.frombuffer(f.read(), np.uint8, offset=offset)


def load(dir_path):
    found = []
    for part in ("train", "t10k"):
        x = _read(os.path.join(dir_path, f"{part}-images-idx3-ubyte.gz"), 16).reshape((-1, 1, 28, 28))
        y = _read(os.path.join(dir_path, f"{part}-labels-idx1-ubyte.gz"), 8)
        found += [x.astype(np.float32) / 255, y.astype(np.int32)]
    return found
