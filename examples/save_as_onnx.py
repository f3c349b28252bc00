"""Save a network of layers as an ONNX file: python examples/save_as_onnx.py [--steps 100] [--no-graph] [--output quarters.onnx].

The network learns which quarter of an image is the brightest.  It is written as ONNX and returns the same values in SINGA, read
back, and in onnxruntime, in a separate process.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import onnx
from rich.progress import track

from singa import autograd, device, layer, model, opt, sonnx, tensor
from singa_backend import MissingDependency
from singa_backend.engines.oracle import Oracle


class Net(model.Model):
    """A convolutional network, written as in SINGA's documents."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(8, 3, padding=1, bias=False)
        self.bn1 = layer.BatchNorm2d()
        self.relu1 = layer.ReLU()
        self.pool1 = layer.MaxPool2d(2, 2)
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(32)
        self.relu2 = layer.ReLU()
        self.linear2 = layer.Linear(classes)

    def forward(self, x: Any) -> Any:
        y = self.pool1(self.relu1(self.bn1(self.conv1(x))))
        return self.linear2(self.relu2(self.linear1(self.flatten(y))))

    def train_one_batch(self, x: Any, y: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def batch(rng: np.random.Generator, count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    images = rng.standard_normal((count, 1, 12, 12)).astype(np.float32)
    quarters = images.reshape(count, 2, 6, 2, 6).sum((2, 4)).reshape(count, 4)
    return images, quarters.argmax(1).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-graph", action="store_true", help="run the steps on the tape")
    parser.add_argument("--output", default="quarters.onnx")
    args = parser.parse_args()
    dev, rng = device.create_cpu_device(), np.random.default_rng(0)
    m = Net()
    m.set_optimizer(opt.Adam(lr=0.005))
    images, labels = batch(rng)
    tx, ty = tensor.Tensor(images.shape, dev), tensor.Tensor(labels.shape, dev, tensor.int32)
    m.compile([tx], is_train=True, use_graph=not args.no_graph, sequential=True)
    losses = []
    for _ in track(range(args.steps), description="training"):
        images, labels = batch(rng)
        tx.copy_from_numpy(images)
        ty.copy_from_numpy(labels)
        _, loss = m(tx, ty)
        losses.append(float(tensor.to_numpy(loss)[0]))
    first, last = np.mean(losses[:5]), np.mean(losses[-5:])
    print(f"loss {first:.4f} -> {last:.4f}")

    m.eval()
    y = tensor.to_numpy(m(tx))
    print(f"accuracy {float((y.argmax(1) == labels).mean()):.3f}")
    proto = sonnx.export(m, [tx], opset=21)
    onnx.checker.check_model(proto, full_check=True)
    sonnx.save(proto, args.output)
    print(f"wrote {args.output}: {len(proto.graph.node)} nodes, {len(proto.graph.initializer)} initializers")

    again = sonnx.prepare(args.output, device=dev).run([images])[0]
    print(f"read again: the largest difference is {np.abs(again - y).max():.1e}")
    try:
        with Oracle("onnxruntime") as runtime:
            made = runtime.run(proto.SerializeToString(), {proto.graph.input[0].name: images})
    except MissingDependency as error:
        print(error)
        return
    print(f"in onnxruntime: the largest difference is {np.abs(next(iter(made.values())) - y).max():.1e}")


if __name__ == "__main__":
    main()
