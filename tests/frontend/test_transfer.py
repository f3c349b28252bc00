"""Transfer learning on real data: a convnet that knows half of the digits, from its ONNX file, learns all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from singa import autograd, device, layer, opt, sonnx
from singa._core.tensor import Tensor
from singa._training.fit import accuracy, fit
from singa.model import Model
from singa_backend.engines.oracle import Oracle

F = np.float32


class Digits(Model):
    """Two convolutions, a hidden layer and a head, for 8 x 8 images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(16, 3, padding=1)
        self.bn1 = layer.BatchNorm2d()
        self.conv2 = layer.Conv2d(32, 3, padding=1)
        self.pool = layer.MaxPool2d(2, 2)
        self.flat = layer.Flatten()
        self.hidden = layer.Linear(64)
        self.head = layer.Linear(classes)
        self.rule: Any = opt.Adam(lr=2e-3)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.bn1(self.conv1(x)))
        y = self.pool(autograd.relu(self.conv2(y)))
        y = autograd.relu(self.hidden(self.flat(y)))
        return self.head(y)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.rule(loss)
        return y, loss


class Transfer(sonnx.SONNXModel):
    """All of a file but its last layer (a product and a sum), and a new head."""

    def __init__(self, proto: Any, classes: int) -> None:
        super().__init__(proto)
        self.head = layer.Linear(classes)
        self.rule: Any = opt.Adam(lr=2e-3)

    def forward(self, *xs: Any, **kwargs: Any) -> Any:
        return self.head(super().forward(*xs, last_layers=-3)[0])

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.rule(loss)
        return y, loss


def test_five_folds_of_the_digits() -> None:
    """Mean accuracy on unseen digits of at least 97 %; the exported file answers alike elsewhere."""
    bunch = load_digits()
    x, y = (bunch.images[:, None] / 16).astype(F), bunch.target.astype(np.int64)
    found = []
    with Oracle("onnxruntime") as oracle:
        for fold, (train, test) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)):
            device.default_device.SetRandSeed(fold)
            half = train[y[train] < 5]
            first = Digits(5)
            example = [Tensor(data=x[:32], requires_grad=False)]
            first.compile(example, is_train=True, use_graph=True)
            fit(first, x[half], y[half], epochs=3, batch_size=32, seed=fold)
            first.eval()
            proto = sonnx.export(first, example, opset=21)
            for info in (*proto.graph.input, *proto.graph.output):
                info.type.tensor_type.shape.dim[0].dim_param = "N"
            second = Transfer(proto, 10)
            second.compile(example, is_train=True, use_graph=True)
            fit(second, x[train], y[train], epochs=8, batch_size=32, seed=fold)
            scores = second.predict(x[test])
            found.append(accuracy(scores, y[test]))
            second.eval()
            written = sonnx.export(second, opset=21)
            theirs = oracle.run(written.SerializeToString(), {written.graph.input[0].name: x[test]})
            np.testing.assert_allclose(theirs[written.graph.output[0].name], scores, rtol=1e-4, atol=1e-4)
    print(f"accuracy by fold: {', '.join(f'{a:.4f}' for a in found)}; mean {np.mean(found):.4f}")
    assert np.mean(found) >= 0.97
