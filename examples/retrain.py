"""Retrain an ONNX file: python examples/retrain.py [MODEL.onnx] [--no-graph] [--steps 50].

Without a file the example makes a small network and runs offline in seconds.  The images are random; a rule labels them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import onnx
from rich.progress import track

from singa import autograd, device, layer, opt, sonnx, tensor
from singa.model import Model


class Small(Model):
    """The network that replaces a file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(8, 3, padding=1, activation="RELU")
        self.pool = layer.MaxPool2d(2, 2)
        self.flat = layer.Flatten()
        self.fc = layer.Linear(4)

    def forward(self, x: Any) -> Any:
        return self.fc(self.flat(self.pool(self.conv(x))))


class MyModel(sonnx.SONNXModel):
    """As in SINGA's documents: forward, a training step, an optimizer."""

    def forward(self, *x: Any, **kwargs: Any) -> Any:
        return super().forward(*x, **kwargs)[0]

    def train_one_batch(self, x: Any, y: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer.backward_and_update(loss)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def stand_in(x: np.ndarray) -> onnx.ModelProto:
    """Return a model of the small network, which takes images such as x."""
    net = Small()
    example = tensor.from_numpy(x)
    net.compile([example], is_train=False)
    return sonnx.export(net, [example])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--no-graph", action="store_true", help="run the steps on the tape")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", default="retrained.onnx")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, 1, 12, 12)).astype(np.float32)
    labels = (2 * (images[:, :, :6].sum((1, 2, 3)) > 0) + (images[..., :6].sum((1, 2, 3)) > 0)).astype(np.int32)

    dev = device.create_cpu_device()
    m = MyModel(onnx.load(args.model) if args.model else stand_in(images))
    m.set_optimizer(opt.SGD(lr=0.05, momentum=0.9, weight_decay=1e-5))
    tx = tensor.Tensor(images.shape, dev, tensor.float32)
    ty = tensor.Tensor((32,), dev, tensor.int32)
    m.compile([tx], is_train=True, use_graph=not args.no_graph, sequential=True)
    first = last = 0.0
    for i in track(range(args.steps), description="training"):
        tx.copy_from_numpy(images)
        ty.copy_from_numpy(labels)
        _, loss = m(tx, ty)
        last = float(tensor.to_numpy(loss)[0])
        first = last if i == 0 else first
    print(f"loss {first:.4f} -> {last:.4f}")
    m.eval()
    print(f"accuracy {float((tensor.to_numpy(m(tx)).argmax(1) == labels).mean()):.3f}")
    sonnx.save(sonnx.export(m), args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
