"""InceptionV3: branches of factorized convolutions side by side (Szegedy et al. 2015)."""

from __future__ import annotations

from typing import Any

from singa import layer, model
from singa._core.tensor import Tensor

from .parts import Chain, ConvNorm, pooled, scaled


class Branches(layer.Layer):
    """What several branches make of one input, side by side."""

    def __init__(self, *branches: Any) -> None:
        super().__init__()
        self.branches = branches
        self.register_layers({f"branch{i}": b for i, b in enumerate(branches)})
        self.cat = layer.Cat(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cat([branch(x) for branch in self.branches])  # type: ignore[no-any-return]


class InceptionV3(model.Model):
    """Stem, three modules at 35 x 35, a reduction, four at 17 x 17, a reduction, two at 8 x 8 (sizes of the paper's 299).

    The auxiliary classifier of training is left out.  x: (N, 3, S, S), S of 75 at least.  y: (N, classes).
    """

    def __init__(self, width: float = 1.0, classes: int = 1000, ratio: float = 0.5) -> None:
        super().__init__()
        self.width = width
        conv = self._conv
        self.stem = Chain(
            conv(32, 3, 2, 0), conv(32, 3, 1, 0), conv(64, 3), layer.MaxPool2d(3, 2), conv(80), conv(192, 3, 1, 0),
            layer.MaxPool2d(3, 2),
        )  # fmt: skip
        self.mixed = Chain(
            self._a(32), self._a(64), self._a(64), self._b(), self._c(128), self._c(160), self._c(160), self._c(192), self._d(),
            self._e(), self._e(),
        )  # fmt: skip
        self.drop = layer.Dropout(ratio)
        self.fc = layer.Linear(classes)

    def _conv(self, channels: int, kernel: Any = 1, stride: int = 1, padding: Any = None) -> ConvNorm:
        return ConvNorm(scaled(channels, self.width), kernel, stride, padding, epsilon=1e-3)

    def _a(self, pooled: int) -> Branches:
        conv = self._conv
        return Branches(
            conv(64), Chain(conv(48), conv(64, 5)), Chain(conv(64), conv(96, 3), conv(96, 3)),
            Chain(layer.AvgPool2d(3, 1, 1), conv(pooled)),
        )  # fmt: skip

    def _b(self) -> Branches:
        conv = self._conv
        return Branches(conv(384, 3, 2, 0), Chain(conv(64), conv(96, 3), conv(96, 3, 2, 0)), layer.MaxPool2d(3, 2))

    def _c(self, inner: int) -> Branches:
        conv = self._conv
        return Branches(
            conv(192), Chain(conv(inner), conv(inner, (1, 7)), conv(192, (7, 1))),
            Chain(conv(inner), conv(inner, (7, 1)), conv(inner, (1, 7)), conv(inner, (7, 1)), conv(192, (1, 7))),
            Chain(layer.AvgPool2d(3, 1, 1), conv(192)),
        )  # fmt: skip

    def _d(self) -> Branches:
        conv = self._conv
        return Branches(
            Chain(conv(192), conv(320, 3, 2, 0)),
            Chain(conv(192), conv(192, (1, 7)), conv(192, (7, 1)), conv(192, 3, 2, 0)), layer.MaxPool2d(3, 2),
        )  # fmt: skip

    def _e(self) -> Branches:
        conv = self._conv

        def split() -> Branches:
            return Branches(conv(384, (1, 3)), conv(384, (3, 1)))

        return Branches(
            conv(320), Chain(conv(384), split()), Chain(conv(448), conv(384, 3), split()),
            Chain(layer.AvgPool2d(3, 1, 1), conv(192)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(pooled(self.mixed(self.stem(x)))))  # type: ignore[no-any-return]
