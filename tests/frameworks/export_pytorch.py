"""Makes tests/frameworks/pytorch: 16 image nets at reduced width and depth, exported from PyTorch by both of its exporters.

    tox -e frameworks-pytorch        # torch is needed here and nowhere else

Each net keeps what is characteristic of its kind (channel shuffles, concatenated branches, squeeze and excite, ...), has
seeded random weights and takes images of 3 x 32 x 32 (larger where it halves often) to 10 scores.  NET-script-12.onnx is
traced as TorchScript and keeps its batch norms; NET-dynamo-18.onnx is captured as an FX graph, and its exporter folds them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from common import export_all, images, keep, keep_data
from torch import Tensor, nn
from torch.nn import functional

Make = Callable[[], nn.Module]


def conv(i: int, o: int, k: int | tuple[int, int] = 3, s: int = 1, p: int | tuple[int, int] | None = None, *, groups: int = 1,
         act: Make | None = nn.ReLU) -> nn.Sequential:  # fmt: skip
    """Convolution, batch norm and an activation; padded so that stride 1 keeps the size."""
    pad = (k // 2 if isinstance(k, int) else tuple(n // 2 for n in k)) if p is None else p
    body = nn.Sequential(nn.Conv2d(i, o, k, s, pad, groups=groups, bias=False), nn.BatchNorm2d(o))
    return body.append(act()) if act else body


def head(i: int, dropout: float = 0.0) -> nn.Sequential:
    """Global mean, dropout, and a layer of 10 scores."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Dropout(dropout), nn.Linear(i, 10))


class Branches(nn.Module):
    """Several ways side by side, concatenated by channels."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


class Residual(nn.Module):
    """A body beside the identity or a projection, added, then an activation."""

    def __init__(self, body: nn.Module, beside: nn.Module | None = None, act: Make = nn.ReLU) -> None:
        super().__init__()
        self.body, self.beside, self.act = body, beside or nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.beside(x))


class Squeeze(nn.Module):
    """Squeeze and excite: channels weighed by a small net of their means."""

    def __init__(self, c: int, inner: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, inner, 1), act(), nn.Conv2d(inner, c, 1), gate())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


def bottleneck(i: int, inner: int, o: int, s: int = 1, *, groups: int = 1, squeeze: int = 0) -> Residual:
    """1x1, 3x3 (in groups), 1x1, perhaps squeezed and excited, beside the identity or a 1x1 projection."""
    body = nn.Sequential(conv(i, inner, 1), conv(inner, inner, 3, s, groups=groups), conv(inner, o, 1, act=None))
    if squeeze:
        body.append(Squeeze(o, squeeze))
    return Residual(body, None if s == 1 and i == o else conv(i, o, 1, s, act=None))


def alexnet() -> nn.Module:
    """Large first kernels, local response norm, overlapping pools, three dense layers with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 11, 4, 2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 16, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(),
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def vggnet() -> nn.Module:
    """Pairs of 3x3 convolutions between pools, then dense layers."""
    stages: list[nn.Module] = []
    for i, o in ((3, 8), (8, 12), (12, 16), (16, 16)):
        stages += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(),
                         nn.Linear(32, 10))  # fmt: skip


def resnet() -> nn.Module:
    """ResNet-50's stem and bottlenecks, one or two to a stage."""
    return nn.Sequential(
        conv(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), bottleneck(8, 4, 16), bottleneck(16, 4, 16), bottleneck(16, 8, 32, 2),
        bottleneck(32, 8, 32), bottleneck(32, 12, 48, 2), bottleneck(48, 12, 48), head(48),
    )  # fmt: skip


def resnext() -> nn.Module:
    """Bottlenecks whose middle is in 4 groups."""
    return nn.Sequential(
        conv(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), bottleneck(8, 8, 16, groups=4), bottleneck(16, 8, 16, groups=4),
        bottleneck(16, 16, 32, 2, groups=4), bottleneck(32, 16, 32, groups=4), bottleneck(32, 24, 48, 2, groups=4), head(48),
    )  # fmt: skip


def senet() -> nn.Module:
    """SENet-154's stem of three 3x3 and a pool that rounds up, bottlenecks in groups with squeeze and excite."""
    return nn.Sequential(
        conv(3, 8, 3, 2), conv(8, 8), conv(8, 12), nn.MaxPool2d(3, 2, ceil_mode=True), bottleneck(12, 8, 16, groups=4, squeeze=4),
        bottleneck(16, 16, 32, 2, groups=4, squeeze=4), bottleneck(32, 16, 32, groups=4, squeeze=4), head(32, 0.2),
    )  # fmt: skip


def regnet() -> nn.Module:
    """RegNetY: groups of one width through all stages, squeeze and excite inside the block."""

    def block(i: int, o: int, s: int) -> Residual:
        body = nn.Sequential(conv(i, o, 1), conv(o, o, 3, s, groups=o // 8), Squeeze(o, max(2, i // 4)), conv(o, o, 1, act=None))
        return Residual(body, None if s == 1 and i == o else conv(i, o, 1, s, act=None))

    return nn.Sequential(conv(3, 8, 3, 2), block(8, 16, 2), block(16, 16, 1), block(16, 24, 2), block(24, 40, 2), head(40))


def googlenet() -> nn.Module:
    """Inception modules of four branches, pools that round up."""

    def module(i: int, a: int, b0: int, b: int, c0: int, c: int, d: int) -> Branches:
        pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), conv(i, d, 1))
        return Branches(conv(i, a, 1), nn.Sequential(conv(i, b0, 1), conv(b0, b)),
                        nn.Sequential(conv(i, c0, 1), conv(c0, c)), pooled)  # fmt: skip

    return nn.Sequential(
        conv(3, 8, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5), conv(8, 8, 1), conv(8, 12),
        module(12, 4, 6, 8, 2, 4, 4), module(20, 8, 8, 10, 2, 6, 4), nn.MaxPool2d(3, 2, ceil_mode=True),
        module(28, 10, 6, 12, 2, 6, 6), module(34, 8, 8, 14, 4, 6, 6), nn.MaxPool2d(2, 2, ceil_mode=True),
        module(34, 12, 8, 12, 4, 8, 8), head(40, 0.4),
    )  # fmt: skip


class Twin(nn.Module):
    """A convolution followed by two side by side: Inception's 1x3 and 3x1."""

    def __init__(self, first: nn.Module, c: int, o: int) -> None:
        super().__init__()
        self.first, self.both = first, Branches(conv(c, o, (1, 3)), conv(c, o, (3, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.first(x))


def inceptionnet() -> nn.Module:
    """Inception v3's five kinds of modules: 5x5, double 3x3, 1x7 and 7x1, reductions, twins; means that count the padding."""

    def mean(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(i, o, 1))

    return nn.Sequential(
        conv(3, 8, 3, 2, 0), conv(8, 8, 3, 1, 0), conv(8, 12), nn.MaxPool2d(3, 2), conv(12, 12, 1), conv(12, 16, 3, 1, 0),
        Branches(conv(16, 8, 1), nn.Sequential(conv(16, 6, 1), conv(6, 8, 5)),
                 nn.Sequential(conv(16, 6, 1), conv(6, 8), conv(8, 8)), mean(16, 4)),
        Branches(conv(28, 12, 3, 2, 0), nn.Sequential(conv(28, 8, 1), conv(8, 8), conv(8, 8, 3, 2, 0)), nn.MaxPool2d(3, 2)),
        Branches(conv(48, 12, 1), nn.Sequential(conv(48, 6, 1), conv(6, 6, (1, 7)), conv(6, 8, (7, 1))),
                 nn.Sequential(conv(48, 6, 1), conv(6, 6, (7, 1)), conv(6, 8, (1, 7))), mean(48, 8)),
        Branches(conv(36, 12, 1), Twin(conv(36, 8, 1), 8, 6), Twin(nn.Sequential(conv(36, 8, 1), conv(8, 8)), 8, 6), mean(36, 8)),
        head(44, 0.5),
    )  # fmt: skip


def mobilenetv1() -> nn.Module:
    """Depthwise and pointwise convolutions in turn."""
    body = conv(3, 8, 3, 2)
    for i, o, s in ((8, 12, 1), (12, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2)):
        body += conv(i, i, 3, s, groups=i) + conv(i, o, 1)
    return body.append(head(32))


def inverted(i: int, inner: int, o: int, k: int, s: int, act: Make, *, squeeze: nn.Module | None = None) -> nn.Module:
    """MobileNetV2's block: widen, filter each channel, (squeeze), narrow; added where shapes allow."""
    body = conv(i, inner, 1, act=act) if inner != i else nn.Sequential()
    body += conv(inner, inner, k, s, groups=inner, act=act)
    if squeeze is not None:
        body.append(squeeze)
    body += conv(inner, o, 1, act=None)
    return Residual(body, None, nn.Identity) if s == 1 and i == o else body


def mobilenetv2() -> nn.Module:
    """Inverted residuals with ReLU6."""
    shape = [(8, 8, 8, 1), (8, 24, 12, 2), (12, 32, 12, 1), (12, 32, 16, 2), (16, 48, 16, 1), (16, 48, 24, 1)]
    blocks = [inverted(i, n, o, 3, s, nn.ReLU6) for i, n, o, s in shape]
    return nn.Sequential(conv(3, 8, 3, 2, act=nn.ReLU6), *blocks, conv(24, 48, 1, act=nn.ReLU6), head(48, 0.2))


def mobilenetv3() -> nn.Module:
    """Hard swish, squeeze and excite by hard sigmoid, kernels of 5x5, a dense layer before the last."""
    blocks = [
        inverted(i, n, o, k, s, act, squeeze=Squeeze(n, max(4, n // 4), nn.ReLU, nn.Hardsigmoid) if se else None)
        for i, n, o, k, s, act, se in ((8, 8, 8, 3, 2, nn.ReLU, True), (8, 24, 12, 3, 1, nn.ReLU, False),
                                       (12, 32, 16, 5, 2, nn.Hardswish, True), (16, 40, 16, 5, 1, nn.Hardswish, True))
    ]  # fmt: skip
    return nn.Sequential(conv(3, 8, 3, 2, act=nn.Hardswish), *blocks, conv(16, 40, 1, act=nn.Hardswish), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(40, 48), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(48, 10))  # fmt: skip


def efficientnet() -> nn.Module:
    """MBConv blocks: swish, squeeze and excite by a quarter of the block's input."""
    blocks = [
        inverted(i, n, o, k, s, nn.SiLU, squeeze=Squeeze(n, max(1, i // 4), nn.SiLU))
        for i, n, o, k, s in ((8, 8, 8, 3, 1), (8, 32, 12, 3, 2), (12, 48, 12, 3, 1), (12, 48, 16, 5, 2), (16, 48, 16, 5, 1))
    ]
    return nn.Sequential(conv(3, 8, 3, 2, act=nn.SiLU), *blocks, conv(16, 48, 1, act=nn.SiLU), head(48, 0.2))


class Dense(nn.Module):
    """DenseNet's block: every layer sees the concatenation of all before it."""

    def __init__(self, i: int, grow: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), conv(c, 2 * grow, 1), nn.Conv2d(2 * grow, grow, 3, padding=1, bias=False))
            for c in range(i, i + layers * grow, grow)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet() -> nn.Module:
    """Dense blocks with halving transitions between."""

    def transition(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, o, 1, bias=False), nn.AvgPool2d(2, 2))

    return nn.Sequential(conv(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), Dense(8, 6, 3), transition(26, 12), Dense(12, 6, 4),
                         transition(36, 18), Dense(18, 6, 3), nn.BatchNorm2d(36), nn.ReLU(), head(36))  # fmt: skip


def shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels dealt out over the groups."""
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Shuffle1(nn.Module):
    """ShuffleNetV1's unit: 1x1 in groups, shuffle, depthwise, 1x1 in groups; beside a mean pool where it halves."""

    def __init__(self, i: int, o: int, s: int, groups: int, first: bool = False) -> None:
        super().__init__()
        self.groups, self.s = groups, s
        inner, out = o // 4 // groups * groups, o - i if s == 2 else o
        self.reduce = conv(i, inner, 1, groups=1 if first else groups)
        self.body = nn.Sequential(conv(inner, inner, 3, s, groups=inner, act=None), conv(inner, out, 1, groups=groups, act=None))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(shuffle(self.reduce(x), self.groups))
        return torch.relu(torch.cat([functional.avg_pool2d(x, 3, 2, 1), y], 1) if self.s == 2 else x + y)


def shufflenetv1() -> nn.Module:
    """Shuffled groups of three."""
    units = [Shuffle1(9, 48, 2, 3, first=True), Shuffle1(48, 48, 1, 3), Shuffle1(48, 96, 2, 3), Shuffle1(96, 96, 1, 3)]
    return nn.Sequential(conv(3, 9, 3, 2), nn.MaxPool2d(3, 2, 1), *units, head(96))


class Shuffle2(nn.Module):
    """ShuffleNetV2's unit: half of the channels pass, half are filtered; both are, where it halves; then a shuffle."""

    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        half, given = o // 2, i if s == 2 else i // 2
        self.s = s
        self.right = conv(given, half, 1) + conv(half, half, 3, s, groups=half, act=None) + conv(half, half, 1)
        self.left = conv(i, i, 3, s, groups=i, act=None) + conv(i, half, 1) if s == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.s == 2 else x.chunk(2, 1)
        return shuffle(torch.cat([self.left(left), self.right(right)], 1), 2)


def shufflenetv2() -> nn.Module:
    """Channel splits and shuffles of two."""
    units = [Shuffle2(8, 24, 2), Shuffle2(24, 24, 1), Shuffle2(24, 40, 2), Shuffle2(40, 40, 1), Shuffle2(40, 40, 1)]
    return nn.Sequential(conv(3, 8, 3, 2), nn.MaxPool2d(3, 2, 1), *units, conv(40, 48, 1), head(48))


def squeezenet() -> nn.Module:
    """Fire modules, pools that round up, and a convolution as the classifier."""

    def fire(i: int, squeeze: int, widen: int) -> nn.Sequential:
        both = Branches(nn.Sequential(nn.Conv2d(squeeze, widen, 1), nn.ReLU()),
                        nn.Sequential(nn.Conv2d(squeeze, widen, 3, padding=1), nn.ReLU()))  # fmt: skip
        return nn.Sequential(nn.Conv2d(i, squeeze, 1), nn.ReLU(), both)

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), fire(16, 6, 12), fire(24, 6, 12),
        nn.MaxPool2d(3, 2, ceil_mode=True), fire(24, 8, 16), fire(32, 8, 16), nn.Dropout(), nn.Conv2d(32, 10, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alexnet": (alexnet, 64), "vggnet": (vggnet, 32), "resnet": (resnet, 32), "resnext": (resnext, 32), "senet": (senet, 32),
    "regnet": (regnet, 32), "googlenet": (googlenet, 32), "inceptionnet": (inceptionnet, 48), "mobilenetv1": (mobilenetv1, 32),
    "mobilenetv2": (mobilenetv2, 32), "mobilenetv3": (mobilenetv3, 32), "efficientnet": (efficientnet, 32),
    "densenet": (densenet, 32), "shufflenetv1": (shufflenetv1, 32), "shufflenetv2": (shufflenetv2, 32),
    "squeezenet": (squeezenet, 32),
}  # fmt: skip
"""Each net and the size of its images."""


def net(name: str, *, changed: bool = False) -> nn.Module:
    """A net in inference mode, the same one on every call: an exporter may leave its mark on the net that it was given.

    changed: with other values of its parameters, and the same buffers.
    """
    torch.manual_seed(1)
    made = NETS[name][0]().eval()
    for module in made.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not 0 and 1, so that a mistake in them shows
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    if changed:
        with torch.no_grad():
            for p in made.parameters():
                p += 0.01 * (1 + torch.rand_like(p))
    return made


def export(name: str, folder: Path) -> Iterator[Path]:
    """Write the data of a net and both of its files."""
    warnings.simplefilter("ignore")
    batches = images(NETS[name][1])
    with torch.no_grad():
        found = [net(name)(torch.from_numpy(x)).numpy() for x in batches]
    keep_data(folder / f"{name}.npz", [[x] for x in batches], [[y] for y in found])
    yield folder / f"{name}.npz"
    files = {f"{name}-script-12.onnx": _script, f"{name}-dynamo-18.onnx": _dynamo}
    for file, write in files.items():
        model, other = write(name, False), write(name, True)
        keep(folder / file, model, other)
        yield folder / file


NAMED: dict[str, Any] = {"input_names": ["image"], "output_names": ["scores"], "verbose": False}


def _script(name: str, changed: bool) -> onnx.ModelProto:
    """The file of the exporter that traces TorchScript."""
    example = torch.from_numpy(images(NETS[name][1])[1])
    axes = {"image": {0: "batch"}, "scores": {0: "batch"}}
    kept = torch.onnx.TrainingMode.PRESERVE  # the mode of the net, and its batch norms as they are
    file = io.BytesIO()
    torch.onnx.export(
        net(name, changed=changed), (example,), file, opset_version=12, dynamo=False, training=kept, dynamic_axes=axes, **NAMED
    )
    return onnx.load_model_from_string(file.getvalue())


def _dynamo(name: str, changed: bool) -> onnx.ModelProto:
    """The file of the exporter that captures an FX graph."""
    example = torch.from_numpy(images(NETS[name][1])[1])
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    program = torch.onnx.export(net(name, changed=changed), (example,), None, opset_version=18, dynamo=True,
                                external_data=False, dynamic_shapes=shapes, **NAMED)  # fmt: skip
    proto: onnx.ModelProto = program.model_proto
    return proto


if __name__ == "__main__":
    export_all(__doc__, "pytorch", NETS, export)
