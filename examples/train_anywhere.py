"""Train an ONNX file in another runtime: python examples/train_anywhere.py [MODEL.onnx] [--steps 30].

`to_training_onnx` writes the whole training step as one ONNX file; here onnxruntime runs it, in a separate process.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnx
from onnx import numpy_helper
from retrain import stand_in
from rich.progress import track

from singa import opt, sonnx
from singa_backend.engines.oracle import Oracle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, 1, 12, 12)).astype(np.float32)
    labels = (images[:, :, :6].sum((1, 2, 3)) > 0).astype(np.int64)
    model = onnx.load(args.model) if args.model else stand_in(images)
    step = sonnx.to_training_onnx(model, "softmax_cross_entropy", opt.SGD(lr=0.05, momentum=0.9))
    pairs = sonnx.step_pairs(step)
    states = {t.name: numpy_helper.to_array(t) for t in step.graph.initializer if t.name in pairs}
    losses = []
    with Oracle("onnxruntime") as runtime:
        serialized = step.SerializeToString()
        for _ in track(range(args.steps), description="training in onnxruntime"):
            made = runtime.run(serialized, {step.graph.input[0].name: images, "target": labels, **states})
            losses.append(float(made["loss"][0]))
            states = {name: made[after] for name, after in pairs.items()}
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
