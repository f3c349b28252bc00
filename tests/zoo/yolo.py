"""Tiny YOLOv2, and YOLOv5 (release 6): cross-stage partial blocks, poolings in series, a pyramid up and down, anchors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from singa import autograd, layer, model
from singa._core.ops import op
from singa._core.tensor import Tensor

from .parts import Chain, ConvNorm, scaled, silu

ANCHORS = (((10, 13), (16, 30), (33, 23)), ((30, 61), (62, 45), (59, 119)), ((116, 90), (156, 198), (373, 326)))
"""(width, height) in pixels, three for each of the strides 8, 16, 32."""


class TinyYOLOv2(model.Model):
    """Redmon and Farhadi 2016, the tiny one: eight convolutions of 3 x 3 with poolings, and one of 1 x 1 for five boxes.

    x: (N, 3, S, S), S a multiple of 32, 0 to 255 with the default `factor`.  y: (N, 5 * (5 + classes), S / 32, S / 32).
    """

    def __init__(self, width: float = 1.0, classes: int = 20, factor: float = 1 / 255) -> None:
        super().__init__()
        self.factor = factor
        steps: list[layer.Layer] = []
        for i, channels in enumerate((16, 32, 64, 128, 256, 512, 1024, 1024)):
            steps.append(ConvNorm(scaled(channels, width), 3, activation=lambda x: autograd.leakyrelu(x, 0.1)))
            if i < 6:
                steps.append(layer.MaxPool2d(2, 2) if i < 5 else layer.MaxPool2d(2, 1, pad_mode="SAME_UPPER"))
        self.features = Chain(*steps)
        self.head = layer.Conv2d(5 * (5 + classes), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x * self.factor))  # type: ignore[no-any-return]


def conv(channels: int, kernel: int = 1, stride: int = 1, padding: int | None = None) -> ConvNorm:
    return ConvNorm(channels, kernel, stride, padding, activation=silu, epsilon=1e-3)


class Residual(layer.Layer):
    """1 x 1 and 3 x 3, added to the input where `adds`."""

    def __init__(self, channels: int, adds: bool) -> None:
        super().__init__()
        self.one, self.two = conv(channels), conv(channels, 3)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return autograd.add(x, y) if self.adds else y  # type: ignore[no-any-return]


class C3(layer.Layer):
    """Cross-stage partial: half of the channels through `count` residual blocks, half past them, then mixed."""

    def __init__(self, channels: int, count: int, adds: bool = True) -> None:
        super().__init__()
        half = channels // 2
        self.enter, self.past, self.mix = conv(half), conv(half), conv(channels)
        self.blocks = Chain(*(Residual(half, adds) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(autograd.cat([self.blocks(self.enter(x)), self.past(x)], 1))  # type: ignore[no-any-return]


class SPPF(layer.Layer):
    """Three poolings of 5 x 5 in series, side by side: windows of 5, 9 and 13."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter, self.mix = conv(channels // 2), conv(channels)
        self.pool = layer.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        once = self.pool(x)
        twice = self.pool(once)
        return self.mix(autograd.cat([x, once, twice, self.pool(twice)], 1))  # type: ignore[no-any-return]


class Detect(layer.Layer):
    """Boxes of three scales.  xs: (N, C, H, W) each; y: (N, boxes, 5 + classes) of centre, size, presence and classes."""

    def __init__(self, classes: int, strides: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        self.classes, self.strides = classes, strides
        self.heads = [layer.Conv2d(3 * (5 + classes), 1) for _ in strides]
        self.register_layers({f"head{i}": h for i, h in enumerate(self.heads)})

    def forward(self, xs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        raws, boxes = [], []
        for x, head, stride, anchors in zip(xs, self.heads, self.strides, ANCHORS, strict=True):
            n, _, height, width = x.shape
            raw = autograd.reshape(head(x), (n, 3, 5 + self.classes, height, width))
            raw = autograd.transpose(raw, (0, 1, 3, 4, 2))
            centre, size, rest = autograd.split(autograd.sigmoid(raw), 4, parts=[2, 2, 1 + self.classes])
            centre = (centre * 2.0 - 0.5 + self._grid(raw)) * float(stride)
            size = (size * 2.0) ** 2.0 * op.constant(np.reshape(anchors, (1, 3, 1, 1, 2)), np.float32)
            boxes.append(autograd.reshape(autograd.cat([centre, size, rest], 4), (n, -1, 5 + self.classes)))
            raws.append(raw)
        return autograd.cat(boxes, 1), raws

    def _grid(self, raw: Tensor) -> Tensor:
        """Column and row of each cell, (1, 1, H, W, 2), of whatever size the image has."""
        height, width = (op.Cast(op.Squeeze(op.Shape(raw, start=i, end=i + 1), [0]), to=1) for i in (2, 3))
        rows = op.Reshape(op.Range(0.0, height, 1.0), [1, 1, -1, 1, 1])
        columns = op.Reshape(op.Range(0.0, width, 1.0), [1, 1, 1, -1, 1])
        zeros = (rows + columns) * 0.0
        return autograd.cat([zeros + columns, zeros + rows], 4)  # type: ignore[no-any-return]


class YOLOv5(model.Model):
    """YOLOv5, release 6; the defaults are its small form.  x: (N, 3, S, S), S a multiple of 32.

    Returns the boxes (N, S * S * 63 / 1024, 5 + classes), and the raw values of each scale (N, 3, H, W, 5 + classes).
    """

    def __init__(self, width: float = 0.5, depth: float = 0.33, classes: int = 80) -> None:
        super().__init__()

        def c(channels: int) -> int:
            return scaled(channels, width, 4)

        def n(count: int) -> int:
            return max(1, math.floor(count * depth + 0.5))

        self.stem = Chain(conv(c(64), 6, 2, 2), conv(c(128), 3, 2), C3(c(128), n(3)))
        self.p3 = Chain(conv(c(256), 3, 2), C3(c(256), n(6)))
        self.p4 = Chain(conv(c(512), 3, 2), C3(c(512), n(9)))
        self.p5 = Chain(conv(c(1024), 3, 2), C3(c(1024), n(3)), SPPF(c(1024)))
        self.up5, self.merge4 = conv(c(512)), C3(c(512), n(3), False)
        self.up4, self.merge3 = conv(c(256)), C3(c(256), n(3), False)
        self.down3, self.out4 = conv(c(256), 3, 2), C3(c(512), n(3), False)
        self.down4, self.out5 = conv(c(512), 3, 2), C3(c(1024), n(3), False)
        self.detect = Detect(classes)

    def forward(self, x: Tensor) -> list[Tensor]:
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        top = self.up5(self.p5(p4))
        middle = self.up4(self.merge4(autograd.cat([_doubled(top), p4], 1)))
        y3 = self.merge3(autograd.cat([_doubled(middle), p3], 1))
        y4 = self.out4(autograd.cat([self.down3(y3), middle], 1))
        y5 = self.out5(autograd.cat([self.down4(y4), top], 1))
        boxes, raws = self.detect([y3, y4, y5])
        return [boxes, *raws]


def _doubled(x: Tensor) -> Tensor:
    return autograd.upsample(x, "nearest", [1, 1, 2, 2])  # type: ignore[no-any-return]
