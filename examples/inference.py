"""Inference with an ONNX file: python examples/inference.py [MODEL.onnx] [--batches 20] [--device CPU].

If the file's folder contains `test_data_set_0`, its inputs are used, and the outputs must equal its outputs to four decimals.
Otherwise the inputs are random, in the declared shapes.  Without a file the example makes a small network.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from retrain import stand_in
from rich.progress import track

from singa import device, sonnx, tensor


class MyModel(sonnx.SONNXModel):
    """As in SINGA's documents: forward returns a list of outputs."""

    def forward(self, *x: Any, **kwargs: Any) -> Any:
        return super().forward(*x, **kwargs)


def drawn(m: sonnx.SONNXModel) -> list[np.ndarray]:
    """Return a random array for each input; unknown sizes are 1."""
    rng, arrays = np.random.default_rng(0), []
    for declared in m.imported.graph.inputs:
        shape = [d if isinstance(d, int) else 1 for d in declared.shape or ()]
        dtype = declared.dtype or np.dtype(np.float32)
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        arrays.append(values.astype(dtype))
    return arrays


def stored(folder: Path, kind: str) -> list[np.ndarray]:
    """Read `input_0.pb`, `input_1.pb`, ... (or the outputs) of a test data folder."""
    paths = sorted(folder.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem.rpartition("_")[2]))
    return [numpy_helper.to_array(TensorProto.FromString(p.read_bytes())) for p in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--device", choices=["CPU", "CUDA"], default="CPU")
    args = parser.parse_args()
    dev = device.create_cuda_gpu() if args.device == "CUDA" else device.create_cpu_device()
    proto = onnx.load(args.model) if args.model else stand_in(np.zeros((1, 1, 12, 12), np.float32))
    m = MyModel(proto, dev)

    data = args.model.parent / "test_data_set_0" if args.model else None
    tested = data is not None and data.is_dir()
    arrays = stored(data, "input") if tested else drawn(m)
    inputs = [tensor.PlaceHolder(a.shape, device=dev, dtype=a.dtype) for a in arrays]
    m.compile(inputs, is_train=False, use_graph=True, sequential=True)

    begun = time.perf_counter()
    for _ in track(range(args.batches), description="inference"):
        y = m.forward(*(tensor.Tensor(device=dev, data=a) for a in arrays))
    seconds = time.perf_counter() - begun
    for declared, t in zip(m.imported.graph.outputs, y, strict=True):
        print(f"{declared.name}: shape {t.shape}, largest at {int(tensor.to_numpy(t).argmax())}")
    print(f"{args.batches / seconds:.1f} batches a second")
    if tested:
        for t, want in zip(y, stored(data, "output"), strict=True):
            np.testing.assert_almost_equal(tensor.to_numpy(t), want, decimal=4)
        print(f"the outputs are those of {data}")


if __name__ == "__main__":
    main()
