"""25 kinds of nets in PaddlePaddle, as its own collections build them, at reduced width and depth; and how they are seeded.

Pooled shortcuts that round up, dropouts that scale in inference, hard sigmoids of slope 0.2, outputs from the middle, sizes that
are read from tensors.  All take images; U-Net is there once for each way in which it may enlarge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

Make = Callable[[], Any]


def chain(*steps: Any) -> nn.Sequential:
    """Steps one after another; None is none."""
    return nn.Sequential(*(s for s in steps if s is not None))


def conv(i: int, o: int, k: Any = 3, s: int = 1, p: Any = None, *, groups: int = 1, dilation: int = 1,
         act: Make | None = nn.ReLU) -> nn.Sequential:  # fmt: skip
    """Convolution, batch norm and an activation; padded so that stride 1 keeps the size."""
    pad = [n // 2 * dilation for n in ([k, k] if isinstance(k, int) else k)] if p is None else p
    body = nn.Conv2D(i, o, k, s, pad, dilation, groups, bias_attr=False)
    return chain(body, nn.BatchNorm2D(o), act() if act else None)


def head(i: int, drop: float = 0.0) -> nn.Sequential:
    """Global mean, dropout, and a layer of 10 scores."""
    return chain(nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Dropout(drop) if drop else None, nn.Linear(i, 10))


class Branches(nn.Layer):
    """Several ways side by side, concatenated by channels."""

    def __init__(self, *ways: Any) -> None:
        super().__init__()
        self.ways = nn.LayerList(ways)

    def forward(self, x: Any) -> Any:
        return paddle.concat([way(x) for way in self.ways], axis=1)


class Residual(nn.Layer):
    """A body beside the identity or a projection, added, then an activation."""

    def __init__(self, body: Any, beside: Any = None, act: Make = nn.ReLU) -> None:
        super().__init__()
        self.body, self.beside, self.act = body, beside or nn.Identity(), act()

    def forward(self, x: Any) -> Any:
        return self.act(paddle.add(self.beside(x), self.body(x)))


class Hard(nn.Layer):
    """A hard sigmoid of slope 0.2."""

    def forward(self, x: Any) -> Any:
        return functional.hardsigmoid(x, slope=0.2, offset=0.5)


class Squeeze(nn.Layer):
    """Squeeze and excite, by convolutions or by dense layers."""

    def __init__(self, c: int, inner: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid, dense: bool = False) -> None:
        super().__init__()
        self.pool, self.dense, self.act, self.gate = nn.AdaptiveAvgPool2D(1), dense, act(), gate()
        self.down = nn.Linear(c, inner) if dense else nn.Conv2D(c, inner, 1)
        self.up = nn.Linear(inner, c) if dense else nn.Conv2D(inner, c, 1)

    def forward(self, x: Any) -> Any:
        y = paddle.squeeze(self.pool(x), axis=[2, 3]) if self.dense else self.pool(x)
        y = self.gate(self.up(self.act(self.down(y))))
        return paddle.multiply(x, paddle.unsqueeze(y, axis=[2, 3]) if self.dense else y)


def bottleneck(i: int, inner: int, o: int, s: int = 1, *, groups: int = 1, last: Any = None, pooled: bool = False) -> Residual:
    """1x1, 3x3 (in groups), 1x1, something last, beside the identity or a 1x1 projection, which may halve by a mean."""
    body = chain(conv(i, inner, 1), conv(inner, inner, 3, s, groups=groups), conv(inner, o, 1, act=None), last)
    if s == 1 and i == o:
        return Residual(body)
    if pooled and s > 1:
        return Residual(body, chain(nn.AvgPool2D(s, s, 0, ceil_mode=True), conv(i, o, 1, act=None)))
    return Residual(body, conv(i, o, 1, s, act=None))


def alexnet() -> Any:
    """Large first kernels, overlapping pools, dense layers with a dropout that scales in inference."""
    drop = [nn.Dropout(0.5, mode="downscale_in_infer") for _ in range(2)]
    return chain(
        nn.Conv2D(3, 8, 11, 4, 5), nn.ReLU(), nn.MaxPool2D(3, 2), nn.Conv2D(8, 16, 5, 1, 2), nn.ReLU(), nn.MaxPool2D(3, 2),
        nn.Conv2D(16, 20, 3, 1, 1), nn.ReLU(), nn.Conv2D(20, 16, 3, 1, 1), nn.ReLU(), nn.Flatten(1, -1), drop[0],
        nn.Linear(144, 24), nn.ReLU(), drop[1], nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip


def vggnet() -> Any:
    """Pairs of 3x3 between pools, then dense layers."""
    stages: list[Any] = []
    for i, o in ((3, 8), (8, 12), (12, 16)):
        stages += [nn.Conv2D(i, o, 3, padding=1), nn.ReLU(), nn.Conv2D(o, o, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2, 2)]
    return chain(
        *stages, nn.AdaptiveAvgPool2D((2, 2)), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    )


def resnet() -> Any:
    """ResNet_vd: a stem of three 3x3, shortcuts that halve by a mean that rounds up."""
    return chain(conv(3, 6, 3, 2), conv(6, 6), conv(6, 8), nn.MaxPool2D(3, 2, 1), bottleneck(8, 4, 16, pooled=True),
                 bottleneck(16, 4, 16), bottleneck(16, 8, 32, 2, pooled=True), bottleneck(32, 8, 40, 2, pooled=True),
                 head(40))  # fmt: skip


def resnext() -> Any:
    """Bottlenecks whose middle is in 4 groups."""
    return chain(conv(3, 8, 7, 2), nn.MaxPool2D(3, 2, 1), bottleneck(8, 8, 16, groups=4), bottleneck(16, 8, 16, groups=4),
                 bottleneck(16, 16, 32, 2, groups=4), bottleneck(32, 16, 40, 2, groups=4), head(40))  # fmt: skip


def senet() -> Any:
    """SE-ResNet: bottlenecks that end in squeeze and excite by dense layers."""
    return chain(conv(3, 8, 7, 2), nn.MaxPool2D(3, 2, 1), bottleneck(8, 6, 16, last=Squeeze(16, 4, dense=True)),
                 bottleneck(16, 8, 24, 2, last=Squeeze(24, 4, dense=True)),
                 bottleneck(24, 8, 24, last=Squeeze(24, 4, dense=True)), head(24, 0.2))  # fmt: skip


def seresnext() -> Any:
    """Squeeze and excite at the end of bottlenecks in groups, three 3x3 first."""
    return chain(conv(3, 6, 3, 2), conv(6, 6), conv(6, 8), nn.MaxPool2D(3, 2, 1),
                 bottleneck(8, 8, 16, groups=4, last=Squeeze(16, 4, dense=True)),
                 bottleneck(16, 16, 32, 2, groups=4, last=Squeeze(32, 4, dense=True)), head(32, 0.5))  # fmt: skip


def regnet() -> Any:
    """RegNetX: blocks in groups of one width."""

    def block(i: int, o: int, s: int) -> Residual:
        body = chain(conv(i, o, 1), conv(o, o, 3, s, groups=o // 8), conv(o, o, 1, act=None))
        return Residual(body, None if s == 1 and i == o else conv(i, o, 1, s, act=None))

    return chain(conv(3, 8, 3, 2), block(8, 16, 2), block(16, 16, 1), block(16, 24, 2), block(24, 32, 2), head(32))


class Googlenet(nn.Layer):
    """Inception modules of four branches, and two classifiers from the middle: three outputs."""

    def __init__(self) -> None:
        super().__init__()

        def act(i: int, o: int, k: int, s: int = 1) -> Any:
            return chain(nn.Conv2D(i, o, k, s, k // 2, bias_attr=False), nn.ReLU())

        def module(i: int, a: int, b0: int, b: int, c0: int, c: int, d: int) -> Branches:
            return Branches(nn.Conv2D(i, a, 1), chain(nn.Conv2D(i, b0, 1), nn.Conv2D(b0, b, 3, padding=1)),
                            chain(nn.Conv2D(i, c0, 1), nn.Conv2D(c0, c, 5, padding=2)),
                            chain(nn.MaxPool2D(3, 1, 1), nn.Conv2D(i, d, 1)))  # fmt: skip

        def side(i: int) -> Any:
            return chain(nn.AvgPool2D(3, 3), nn.Conv2D(i, 8, 1), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))

        self.stem = chain(act(3, 8, 7, 2), nn.MaxPool2D(3, 2), act(8, 8, 1), act(8, 12, 3))
        self.a = chain(module(12, 4, 6, 8, 2, 4, 4), nn.ReLU(), nn.MaxPool2D(3, 2))
        self.b = chain(module(20, 8, 8, 10, 2, 4, 4), nn.ReLU())
        self.c = chain(module(26, 8, 6, 10, 4, 6, 6), nn.ReLU())
        self.out, self.side1, self.side2 = head(30, 0.4), side(26), side(30)

    def forward(self, x: Any) -> Any:
        b = self.b(self.a(self.stem(x)))
        c = self.c(b)
        return self.out(c), self.side1(b), self.side2(c)


def inceptionnet() -> Any:
    """Inception v4: pools beside strided convolutions, 1x7 and 7x1, means that do not count the padding, twins at the end."""

    def mean(i: int, o: int) -> Any:
        return chain(nn.AvgPool2D(3, 1, 1, exclusive=True), conv(i, o, 1))

    return chain(
        conv(3, 8, 3, 2, 0), conv(8, 8, 3, 1, 0), conv(8, 10), Branches(nn.MaxPool2D(3, 2), conv(10, 10, 3, 2, 0)),
        Branches(conv(20, 8, 1), chain(conv(20, 6, 1), conv(6, 8)), chain(conv(20, 6, 1), conv(6, 6), conv(6, 8)), mean(20, 8)),
        Branches(conv(32, 10, 3, 2, 0), chain(conv(32, 8, 1), conv(8, 8), conv(8, 10, 3, 2, 0)), nn.MaxPool2D(3, 2)),
        Branches(conv(52, 12, 1), chain(conv(52, 6, 1), conv(6, 6, [1, 7]), conv(6, 8, [7, 1])), mean(52, 8)),
        Branches(conv(28, 12, 1), chain(conv(28, 8, 1), Branches(conv(8, 6, [1, 3]), conv(8, 6, [3, 1]))), mean(28, 8)),
        head(32, 0.2),
    )  # fmt: skip


def mobilenetv1() -> Any:
    """Depthwise and pointwise in turn."""
    shape = ((8, 12, 1), (12, 16, 2), (16, 16, 1), (16, 24, 2), (24, 32, 1))
    return chain(conv(3, 8, 3, 2), *(chain(conv(i, i, 3, s, groups=i), conv(i, o, 1)) for i, o, s in shape), head(32))


def inverted(i: int, inner: int, o: int, k: int, s: int, act: Make, *, squeeze: Any = None) -> Any:
    """Widen, filter each channel, (squeeze), narrow; added where shapes allow."""
    first = conv(i, inner, 1, act=act) if inner != i else None
    body = chain(first, conv(inner, inner, k, s, groups=inner, act=act), squeeze, conv(inner, o, 1, act=None))
    return Residual(body, None, nn.Identity) if s == 1 and i == o else body


def mobilenetv2() -> Any:
    """Inverted residuals with relu6."""
    shape = ((8, 8, 8, 1), (8, 24, 12, 2), (12, 32, 12, 1), (12, 32, 16, 2), (16, 48, 16, 1))
    blocks = [inverted(i, n, o, 3, s, nn.ReLU6) for i, n, o, s in shape]
    return chain(conv(3, 8, 3, 2, act=nn.ReLU6), *blocks, conv(16, 40, 1, act=nn.ReLU6), head(40))


def mobilenetv3() -> Any:
    """Hard swish, squeeze and excite by a hard sigmoid of slope 0.2, kernels of 5x5."""
    blocks = [
        inverted(i, n, o, k, s, act, squeeze=Squeeze(n, max(4, n // 4), nn.ReLU, Hard) if se else None)
        for i, n, o, k, s, act, se in ((8, 8, 8, 3, 2, nn.ReLU, True), (8, 24, 12, 3, 1, nn.ReLU, False),
                                       (12, 32, 16, 5, 2, nn.Hardswish, True), (16, 32, 16, 5, 1, nn.Hardswish, True))
    ]  # fmt: skip
    return chain(conv(3, 8, 3, 2, act=nn.Hardswish), *blocks, conv(16, 40, 1, act=nn.Hardswish), nn.AdaptiveAvgPool2D(1),
                 nn.Conv2D(40, 40, 1, bias_attr=False), nn.Hardswish(), nn.Dropout(0.2, mode="downscale_in_infer"),
                 nn.Flatten(1, -1), nn.Linear(40, 10))  # fmt: skip


def efficientnet() -> Any:
    """MBConv blocks: swish, squeeze and excite by a quarter of the block's input."""
    shape = ((8, 8, 8, 3, 1), (8, 32, 12, 3, 2), (12, 40, 12, 3, 1), (12, 40, 16, 5, 2))
    blocks = [inverted(i, n, o, k, s, nn.Swish, squeeze=Squeeze(n, max(1, i // 4), nn.Swish)) for i, n, o, k, s in shape]
    return chain(conv(3, 8, 3, 2, act=nn.Swish), *blocks, conv(16, 40, 1, act=nn.Swish), head(40, 0.2))


class Dense(nn.Layer):
    """A layer whose result is concatenated to what it was given."""

    def __init__(self, i: int, grow: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm2D(i), conv(i, 2 * grow, 1)
        self.grown = nn.Conv2D(2 * grow, grow, 3, padding=1, bias_attr=False)

    def forward(self, x: Any) -> Any:
        return paddle.concat([x, self.grown(self.inner(functional.relu(self.norm(x))))], axis=1)


def densenet() -> Any:
    """Dense blocks with a halving transition between."""
    middle = [nn.BatchNorm2D(26), nn.ReLU(), nn.Conv2D(26, 13, 1, bias_attr=False), nn.AvgPool2D(2, 2)]
    return chain(conv(3, 8, 7, 2), nn.MaxPool2D(3, 2, 1), Dense(8, 6), Dense(14, 6), Dense(20, 6), *middle,
                 Dense(13, 6), Dense(19, 6), Dense(25, 6), nn.BatchNorm2D(31), nn.ReLU(), head(31))  # fmt: skip


class Shuffle(nn.Layer):
    """ShuffleNetV2's unit: half of the channels pass, half are filtered; both are, where it halves; then a shuffle."""

    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        half, given = o // 2, i if s == 2 else i // 2
        self.s = s
        self.right = chain(conv(given, half, 1), conv(half, half, 3, s, groups=half, act=None), conv(half, half, 1))
        self.left = chain(conv(i, i, 3, s, groups=i, act=None), conv(i, half, 1)) if s == 2 else nn.Identity()

    def forward(self, x: Any) -> Any:
        left, right = (x, x) if self.s == 2 else paddle.split(x, [x.shape[1] // 2, x.shape[1] // 2], axis=1)
        y = paddle.concat([self.left(left), self.right(right)], axis=1)
        batch, (c, h, w) = paddle.shape(y)[0], y.shape[1:]
        return paddle.reshape(paddle.transpose(paddle.reshape(y, [batch, 2, c // 2, h, w]), [0, 2, 1, 3, 4]), [batch, c, h, w])


def shufflenetv2() -> Any:
    """Channel splits and shuffles of two."""
    units = [Shuffle(8, 24, 2), Shuffle(24, 24, 1), Shuffle(24, 32, 2), Shuffle(32, 32, 1)]
    return chain(conv(3, 8, 3, 2), nn.MaxPool2D(3, 2, 1), *units, conv(32, 40, 1), head(40))


def squeezenet() -> Any:
    """Fire modules, and a convolution as the classifier."""

    def fire(i: int, squeeze: int, widen: int) -> Any:
        both = Branches(chain(nn.Conv2D(squeeze, widen, 1), nn.ReLU()), chain(nn.Conv2D(squeeze, widen, 3, padding=1), nn.ReLU()))
        return chain(nn.Conv2D(i, squeeze, 1), nn.ReLU(), both)

    return chain(nn.Conv2D(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2D(3, 2), fire(16, 6, 12), fire(24, 6, 12),
                 nn.MaxPool2D(3, 2), fire(24, 8, 16), nn.Dropout(), nn.Conv2D(32, 10, 1), nn.ReLU(),
                 nn.AdaptiveAvgPool2D(1), nn.Flatten())  # fmt: skip


def separable(i: int, o: int, s: int = 1, dilation: int = 1, act: Make | None = None) -> Any:
    """A filter for each channel, then a 1x1."""
    first = nn.Conv2D(i, i, 3, s, dilation, dilation, groups=i, bias_attr=False)
    return chain(first, nn.BatchNorm2D(i), nn.Conv2D(i, o, 1, bias_attr=False), nn.BatchNorm2D(o), act() if act else None)


def xception() -> Any:
    """Separable convolutions with the activation before, pools beside strided projections."""
    middle = chain(nn.ReLU(), separable(24, 24), nn.ReLU(), separable(24, 24), nn.ReLU(), separable(24, 24))
    return chain(
        conv(3, 8, 3, 2), conv(8, 12),
        Residual(chain(separable(12, 16), nn.ReLU(), separable(16, 16), nn.MaxPool2D(3, 2, 1)),
                 conv(12, 16, 1, 2, act=None), nn.Identity),
        Residual(chain(nn.ReLU(), separable(16, 24), nn.ReLU(), separable(24, 24), nn.MaxPool2D(3, 2, 1)),
                 conv(16, 24, 1, 2, act=None), nn.Identity),
        Residual(middle, None, nn.Identity), separable(24, 40, act=nn.ReLU), head(40),
    )  # fmt: skip


class Deeplab(nn.Layer):
    """Xception as DeepLab has it: atrous instead of strided at the end, a pyramid of dilations, resized to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.early = chain(conv(3, 8, 3, 2), Residual(chain(separable(8, 12, 1, act=nn.ReLU), separable(12, 12, 2)),
                                                      conv(8, 12, 1, 2, act=None)))  # fmt: skip
        self.late = Residual(chain(separable(12, 16, 1, 2, nn.ReLU), separable(16, 16, 1, 4)), conv(12, 16, 1, act=None))
        self.pyramid = nn.LayerList([conv(16, 8, 1), separable(16, 8, 1, 2, nn.ReLU), separable(16, 8, 1, 3, nn.ReLU)])
        self.mean = chain(nn.AdaptiveAvgPool2D(1), conv(16, 8, 1))
        self.low, self.out = conv(12, 4, 1), chain(separable(36, 12, act=nn.ReLU), nn.Conv2D(12, 2, 1))

    def forward(self, x: Any) -> Any:
        low = self.early(x)
        y = self.late(low)
        mean = functional.interpolate(self.mean(y), size=paddle.shape(y)[2:], mode="bilinear", align_corners=True)
        y = paddle.concat([*(way(y) for way in self.pyramid), mean, self.low(low)], axis=1)
        return functional.interpolate(self.out(y), size=paddle.shape(x)[2:], mode="bilinear", align_corners=False)


class Dual(nn.Layer):
    """DPN's block: some channels are added, some are concatenated."""

    def __init__(self, added: int, given: int, inner: int, grow: int, s: int = 1, first: bool = False) -> None:
        super().__init__()
        self.added, self.grow = added, grow
        self.project = conv(given, added + 2 * grow, 1, s) if first else None
        self.body = chain(conv(given, inner, 1), conv(inner, inner, 3, s, groups=4), conv(inner, added + grow, 1))

    def forward(self, pair: Any) -> Any:
        x = paddle.concat(pair, axis=1) if isinstance(pair, (list, tuple)) else pair
        if self.project is not None:
            kept, dense = paddle.split(self.project(x), [self.added, 2 * self.grow], axis=1)
        else:
            kept, dense = pair
        more, grown = paddle.split(self.body(x), [self.added, self.grow], axis=1)
        return [paddle.add(kept, more), paddle.concat([dense, grown], axis=1)]


class Dpn(nn.Layer):
    """Dual paths: a residual and a dense one through the same convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = chain(conv(3, 8, 3, 2), nn.MaxPool2D(3, 2, 1))
        self.blocks = nn.LayerList(
            [Dual(16, 8, 8, 4, first=True), Dual(16, 28, 8, 4), Dual(24, 32, 12, 4, 2, True), Dual(24, 36, 12, 4)]
        )
        self.out = chain(nn.BatchNorm2D(40), nn.ReLU(), head(40))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(paddle.concat(x, axis=1))


def darknet() -> Any:
    """DarkNet-53: 1x1 and 3x3 with leaky relus, added."""

    def leaky() -> Any:
        return nn.LeakyReLU(0.1)

    def block(c: int) -> Residual:
        return Residual(chain(conv(c, c // 2, 1, act=leaky), conv(c // 2, c, 3, act=leaky)), None, nn.Identity)

    return chain(conv(3, 8, 3, act=leaky), conv(8, 12, 3, 2, act=leaky), block(12), conv(12, 16, 3, 2, act=leaky),
                 block(16), block(16), conv(16, 24, 3, 2, act=leaky), block(24), head(24))  # fmt: skip


class Ghost(nn.Layer):
    """Half of the channels by a convolution, the others from those by a cheap filter."""

    def __init__(self, i: int, o: int, act: Make | None = nn.ReLU) -> None:
        super().__init__()
        self.first, self.cheap = conv(i, o // 2, 1, act=act), conv(o // 2, o // 2, 3, groups=o // 2, act=act)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return paddle.concat([y, self.cheap(y)], axis=1)


class Clipped(nn.Layer):
    """GhostNet's gate."""

    def forward(self, x: Any) -> Any:
        return paddle.clip(x, min=0, max=1)


def ghostnet() -> Any:
    """Ghost bottlenecks, with squeeze and excite by a clip."""

    def block(i: int, inner: int, o: int, s: int, excited: bool) -> Residual:
        halve = conv(inner, inner, 3, s, groups=inner, act=None) if s == 2 else None
        excite = Squeeze(inner, inner // 4, nn.ReLU, Clipped, dense=True) if excited else None
        body = chain(Ghost(i, inner), halve, excite, Ghost(inner, o, None))
        beside = None if s == 1 and i == o else chain(conv(i, i, 3, s, groups=i, act=None), conv(i, o, 1, act=None))
        return Residual(body, beside, nn.Identity)

    return chain(conv(3, 8, 3, 2), block(8, 16, 8, 1, False), block(8, 24, 12, 2, False), block(12, 32, 12, 1, True),
                 block(12, 32, 16, 2, True), conv(16, 40, 1), head(40, 0.2))  # fmt: skip


class Rep(nn.Layer):
    """RepVGG in its form for training: 3x3, 1x1 and a batch norm of the input, added."""

    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        self.three, self.one = conv(i, o, 3, s, act=None), conv(i, o, 1, s, act=None)
        self.same = nn.BatchNorm2D(i) if i == o and s == 1 else None

    def forward(self, x: Any) -> Any:
        y = self.three(x) + self.one(x)
        return functional.relu(y if self.same is None else y + self.same(x))


def repvgg() -> Any:
    """Three branches in every layer."""
    return chain(Rep(3, 8, 2), Rep(8, 12, 2), Rep(12, 12, 1), Rep(12, 20, 2), Rep(20, 20, 1), head(20))


class Hierarchy(nn.Layer):
    """Res2Net's middle: channels are split, each part is filtered together with the result of the part before it."""

    def __init__(self, c: int, parts: int, s: int) -> None:
        super().__init__()
        self.parts, self.s = parts, s
        self.filters = nn.LayerList([conv(c // parts, c // parts, 3, s) for _ in range(parts - 1)])
        self.pool = nn.AvgPool2D(3, s, 1)

    def forward(self, x: Any) -> Any:
        xs = paddle.split(x, self.parts, axis=1)
        ys = [self.filters[0](xs[0])]
        for i in range(1, self.parts - 1):
            ys.append(self.filters[i](xs[i] if self.s == 2 else paddle.add(xs[i], ys[-1])))
        return paddle.concat([*ys, xs[-1] if self.s == 1 else self.pool(xs[-1])], axis=1)


def res2net() -> Any:
    """Bottlenecks with a hierarchy of four parts inside."""

    def block(i: int, inner: int, o: int, s: int) -> Residual:
        body = chain(conv(i, inner, 1), Hierarchy(inner, 4, s), conv(inner, o, 1, act=None))
        return Residual(body, None if s == 1 and i == o else conv(i, o, 1, s, act=None))

    return chain(
        conv(3, 8, 7, 2), nn.MaxPool2D(3, 2, 1), block(8, 16, 24, 1), block(24, 16, 24, 1), block(24, 24, 32, 2), head(32)
    )


class Attention(nn.Layer):
    """All heads by one projection; the batch is read from the tensor."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.size, self.heads, self.project, self.out = size, heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Any) -> Any:
        each = self.size // self.heads
        qkv = self.project(x).reshape([-1, x.shape[1], 3, self.heads, each]).transpose([2, 0, 3, 1, 4])
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = functional.softmax(q.matmul(k.transpose([0, 1, 3, 2])) * each**-0.5, axis=-1)
        return self.out(scores.matmul(v).transpose([0, 2, 1, 3]).reshape([-1, x.shape[1], self.size]))


class Added(nn.Layer):
    """A transformer's layer: a body after a norm, added to its input."""

    def __init__(self, size: int, *body: Any) -> None:
        super().__init__()
        self.body = chain(nn.LayerNorm(size, 1e-6), *body)

    def forward(self, x: Any) -> Any:
        return paddle.add(x, self.body(x))


class Vit(nn.Layer):
    """A Vision Transformer: patches, a class token that is expanded, positions, layers with norms before."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2D(3, size, 8, 8)
        self.token, self.places = self.create_parameter([1, 1, size]), self.create_parameter([1, 17, size])
        feed = [(nn.Linear(size, 48), nn.GELU(), nn.Linear(48, size)) for _ in range(2)]
        self.layers = chain(*(part for f in feed for part in (Added(size, Attention(size, 4)), Added(size, *f))))
        self.out = chain(nn.LayerNorm(size, 1e-6), nn.Linear(size, 10))

    def forward(self, x: Any) -> Any:
        batch = paddle.shape(x)[0]
        x = self.patch(x).flatten(2).transpose([0, 2, 1])
        x = paddle.concat([self.token.expand([batch, -1, -1]), x], axis=1) + self.places
        return self.out(self.layers(x)[:, 0])


class Unet(nn.Layer):
    """Down twice and up twice with skips; up by a resize of some mode, or by a transposed convolution."""

    def __init__(self, **up: Any) -> None:
        super().__init__()
        self.down1, self.down2, self.floor = conv(3, 8), conv(8, 12), conv(12, 16)
        self.grow2, self.grow1 = ((nn.Conv2DTranspose(16, 16, 2, 2), nn.Conv2DTranspose(12, 12, 2, 2)) if not up else
                                  (nn.Upsample(scale_factor=2, **up), nn.Upsample(scale_factor=2, **up)))  # fmt: skip
        self.up2, self.up1, self.out = conv(28, 12), conv(20, 8), nn.Conv2D(8, 2, 1)

    def forward(self, x: Any) -> Any:
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2, 2))
        c = self.floor(functional.max_pool2d(b, 2, 2))
        b = self.up2(paddle.concat([b, self.grow2(c)], axis=1))
        return self.out(self.up1(paddle.concat([a, self.grow1(b)], axis=1)))


NETS: dict[str, tuple[Make, int]] = {
    "alexnet": (alexnet, 64), "googlenet": (Googlenet, 32), "resnext": (resnext, 32), "senet": (senet, 32),
    "regnet": (regnet, 32), "shufflenetv2": (shufflenetv2, 32), "squeezenet": (squeezenet, 32), "vggnet": (vggnet, 32),
    "resnet": (resnet, 32),
    "mobilenetv1": (mobilenetv1, 32), "mobilenetv2": (mobilenetv2, 32), "mobilenetv3": (mobilenetv3, 32),
    "efficientnet": (efficientnet, 32), "inceptionnet": (inceptionnet, 40), "densenet": (densenet, 32),
    "xception": (xception, 32),
    "seresnext": (seresnext, 32), "dpn": (Dpn, 32), "darknet": (darknet, 32), "ghostnet": (ghostnet, 32), "repvgg": (repvgg, 32),
    "deeplab": (Deeplab, 24), "vit": (Vit, 32), "res2net": (res2net, 32),
    "unet_nearest": (lambda: Unet(mode="nearest"), 16), "unet_halves": (lambda: Unet(mode="bilinear", align_mode=0), 16),
    "unet_asymmetric": (lambda: Unet(mode="bilinear", align_mode=1), 16),
    "unet_corners": (lambda: Unet(mode="bilinear", align_corners=True), 16), "unet_bicubic": (lambda: Unet(mode="bicubic"), 16),
    "unet_transposed": (Unet, 16),
}  # fmt: skip
"""Each net and the size of its images."""


def net(name: str) -> Any:
    """A net in inference mode with seeded weights, and batch norms whose statistics are not 0 and 1, so that a mistake shows."""
    rng = np.random.default_rng(1)
    made = NETS[name][0]()
    made.eval()
    for key, weight in made.state_dict().items():
        shape = list(weight.shape)
        if len(shape) == 1:
            above = key.endswith(("_variance", ".weight"))
            value = rng.uniform(0.5, 1.5, shape) if above else rng.uniform(-0.2, 0.2, shape)
        else:
            inputs = shape[0] if len(shape) == 2 else np.prod(shape[1:])
            value = rng.standard_normal(shape) * ((1 if shape[1] == 1 else 2) / inputs) ** 0.5
        weight.set_value(value.astype(np.float32))
    return made
