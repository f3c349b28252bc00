"""The nets that benchmarks/compare_models.py exports from PyTorch: plain definitions, random weights, seed 0.

`build(name)` returns a net in evaluation mode.  The same torch release draws the same weights, so the peers of
benchmarks/compare.py that run PyTorch build the net again instead of reading a file.  `examples(name, batch)` returns its inputs
by name, in the order of `forward`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Make = Callable[[], nn.Module]


def conv(i: int, o: int, k: int = 3, s: int = 1, *, groups: int = 1, act: Make | None = nn.ReLU) -> nn.Sequential:
    """Convolution, batch norm and an activation."""
    body = nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o))
    return body.append(act()) if act else body


class Residual(nn.Module):
    def __init__(self, body: nn.Module, side: nn.Module | None = None, act: Make = nn.Identity) -> None:
        super().__init__()
        self.body, self.side, self.act = body, side or nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.side(x))


class Squeeze(nn.Module):
    def __init__(self, c: int, inner: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, inner, 1), act(), nn.Conv2d(inner, c, 1), gate())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


def head(i: int, classes: int = 1000) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(i, classes))


# --- images


def inverted(
    i: int, inner: int, o: int, k: int, s: int, act: Make, squeeze: int = 0, gate: Make = nn.Sigmoid, squeeze_act: Make = nn.ReLU
) -> nn.Module:
    """Widen by 1x1, filter each channel, perhaps squeeze and excite, narrow by 1x1, add where the shapes allow."""
    parts = [conv(i, inner, 1, act=act)] if inner != i else []
    parts.append(conv(inner, inner, k, s, groups=inner, act=act))
    if squeeze:
        parts.append(Squeeze(inner, squeeze, squeeze_act, gate))
    parts.append(conv(inner, o, 1, act=None))
    body = nn.Sequential(*parts)
    return Residual(body) if s == 1 and i == o else body


def mobilenetv2() -> nn.Module:
    blocks, i = [conv(3, 32, 3, 2, act=nn.ReLU6)], 32
    for t, c, n, s in [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]:
        for k in range(n):
            blocks.append(inverted(i, i * t, c, 3, s if k == 0 else 1, nn.ReLU6))
            i = c
    return nn.Sequential(*blocks, conv(i, 1280, 1, act=nn.ReLU6), head(1280))


def efficientnet_b0() -> nn.Module:
    blocks, i = [conv(3, 32, 3, 2, act=nn.SiLU)], 32
    for t, c, n, s, k in [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
                          (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]:  # fmt: skip
        for at in range(n):
            blocks.append(inverted(i, i * t, c, k, s if at == 0 else 1, nn.SiLU, max(1, i // 4), squeeze_act=nn.SiLU))
            i = c
    return nn.Sequential(*blocks, conv(i, 1280, 1, act=nn.SiLU), head(1280))


class Attention(nn.Module):
    """Attention of a sequence to itself, its query, key and value by one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class PreNorm(nn.Module):
    """A transformer block that normalizes first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.feed(x)


class Vit(nn.Module):
    def __init__(self, width: int = 192, heads: int = 3, depth: int = 12, size: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(PreNorm(width, heads) for _ in range(depth)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.classify(self.norm(self.blocks(x))[:, 0])


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of N x C x H x W."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.body = nn.Sequential(nn.LayerNorm(c, 1e-6), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.scale = nn.Parameter(torch.rand(c) * 0.4 + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.spatial(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext(widths: Sequence[int] = (96, 192, 384, 768), depths: Sequence[int] = (3, 3, 9, 3)) -> nn.Module:
    """ConvNeXt-T, or another size."""
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0], 1e-6)]
    for at, (c, n) in enumerate(zip(widths, depths, strict=True)):
        if at:
            parts += [ChannelNorm(widths[at - 1], 1e-6), nn.Conv2d(widths[at - 1], c, 2, 2)]
        parts += [ConvNextBlock(c) for _ in range(n)]
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.LayerNorm(widths[-1], 1e-6), nn.Linear(widths[-1], 1000)
    )


class Unet(nn.Module):
    def __init__(self, base: int = 32, levels: int = 4) -> None:
        super().__init__()
        c = [base << i for i in range(levels + 1)]

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(conv(i, o), conv(o, o))

        self.first = double(3, c[0])
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), double(c[i], c[i + 1])) for i in range(levels))
        self.up = nn.ModuleList(nn.ConvTranspose2d(c[i + 1], c[i], 2, 2) for i in reversed(range(levels)))
        self.join = nn.ModuleList(double(2 * c[i], c[i]) for i in reversed(range(levels)))
        self.last = nn.Conv2d(c[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        y = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = join(torch.cat([kept.pop(), up(y)], 1))
        return self.last(y)


class Split(nn.Module):
    """Half of the channels go through a chain of residual blocks, and every step is kept."""

    def __init__(self, i: int, o: int, n: int, add: bool) -> None:
        super().__init__()
        half = o // 2
        self.enter, self.leave = conv(i, o, 1, act=nn.SiLU), conv((2 + n) * half, o, 1, act=nn.SiLU)
        bodies = [nn.Sequential(conv(half, half, act=nn.SiLU), conv(half, half, act=nn.SiLU)) for _ in range(n)]
        self.blocks = nn.ModuleList(Residual(b) if add else b for b in bodies)

    def forward(self, x: Tensor) -> Tensor:
        kept = list(self.enter(x).chunk(2, 1))
        for block in self.blocks:
            kept.append(block(kept[-1]))
        return self.leave(torch.cat(kept, 1))


class Pyramid(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.enter, self.leave, self.pool = conv(c, c // 2, 1, act=nn.SiLU), conv(2 * c, c, 1, act=nn.SiLU), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.enter(x)]
        for _ in range(3):
            kept.append(self.pool(kept[-1]))
        return self.leave(torch.cat(kept, 1))


class Yolo(nn.Module):
    """A detector of three scales: backbone, neck, and a head that decodes its boxes."""

    def __init__(self, classes: int = 80, bins: int = 16, size: int = 640) -> None:
        super().__init__()

        def down(i: int, o: int) -> nn.Module:
            return conv(i, o, 3, 2, act=nn.SiLU)

        self.classes, self.bins = classes, bins
        self.p3 = nn.Sequential(down(3, 16), down(16, 32), Split(32, 32, 1, True), down(32, 64), Split(64, 64, 2, True))
        self.p4 = nn.Sequential(down(64, 128), Split(128, 128, 2, True))
        self.p5 = nn.Sequential(down(128, 256), Split(256, 256, 1, True), Pyramid(256))
        self.n4, self.n3 = Split(384, 128, 1, False), Split(192, 64, 1, False)
        self.d4, self.m4 = down(64, 64), Split(192, 128, 1, False)
        self.d5, self.m5 = down(128, 128), Split(384, 256, 1, False)

        def tower(i: int, inner: int, o: int) -> nn.Module:
            return nn.Sequential(conv(i, inner, act=nn.SiLU), conv(inner, inner, act=nn.SiLU), nn.Conv2d(inner, o, 1))

        self.boxes = nn.ModuleList(tower(c, 64, 4 * bins) for c in (64, 128, 256))
        self.scores = nn.ModuleList(tower(c, 80, classes) for c in (64, 128, 256))
        centers, strides = [], []
        for s in (8, 16, 32):
            at = (torch.arange(size // s) + 0.5).float()
            y, x = torch.meshgrid(at, at, indexing="ij")
            centers.append(torch.stack([x.flatten(), y.flatten()]))
            strides.append(torch.full((1, (size // s) ** 2), float(s)))
        self.register_buffer("centers", torch.cat(centers, 1)[None])
        self.register_buffer("strides", torch.cat(strides, 1)[None])
        self.register_buffer("edges", torch.arange(bins).float().reshape(1, bins, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.p3(x)
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        n4 = self.n4(torch.cat([functional.interpolate(p5, scale_factor=2.0), p4], 1))
        n3 = self.n3(torch.cat([functional.interpolate(n4, scale_factor=2.0), p3], 1))
        m4 = self.m4(torch.cat([self.d4(n3), n4], 1))
        m5 = self.m5(torch.cat([self.d5(m4), p5], 1))
        scales = list(zip((n3, m4, m5), self.boxes, self.scores, strict=True))
        boxes = torch.cat([box(f).flatten(2) for f, box, _ in scales], 2)
        scores = torch.cat([score(f).flatten(2) for f, _, score in scales], 2)
        b, _, n = boxes.shape
        sides = (boxes.reshape(b, 4, self.bins, n).transpose(1, 2).softmax(1) * self.edges).sum(1)
        near, far = sides.chunk(2, 1)
        low, high = self.centers - near, self.centers + far
        return torch.cat([torch.cat([(low + high) / 2, high - low], 1) * self.strides, scores.sigmoid()], 1)


def cnn28() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(1), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())))


# --- sequences


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.o(y.transpose(1, 2).reshape(b, t, c)))
        return self.norm2(x + self.feed(x))


class Bert(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12, depth: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.words, self.positions, self.kinds = (nn.Embedding(n, width) for n in (words, 512, 2))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(depth))
        self.pool = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        t = input_ids.shape[1]
        x = self.words(input_ids) + self.kinds(token_type_ids) + self.positions(torch.arange(t, device=input_ids.device))[None]
        x = self.norm(x)
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pool(x[:, 0]))


class GptLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, c = x.shape
        q, k, v = (f.view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in self.qkv(self.norm1(x)).split(c, 2))
        k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.feed(self.norm2(x)), k, v


class Gpt2(nn.Module):
    """Takes tokens, and the keys and values of those before them; returns scores, and the longer keys and values."""

    def __init__(self, width: int = 768, heads: int = 12, depth: int = 12, words: int = 50257) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(1024, width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.ModuleList(GptLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        t, p = input_ids.shape[1], past[0].shape[2]
        at = torch.arange(p, p + t, device=input_ids.device)
        x = self.words(input_ids) + self.positions(at)[None]
        mask = at[:, None] >= torch.arange(p + t, device=input_ids.device)[None, :]
        present = []
        for layer, key, value in zip(self.layers, past[::2], past[1::2], strict=True):
            x, k, v = layer(x, mask, key, value)
            present += [k, v]
        return functional.linear(self.norm(x), self.words.weight), *present


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, inner, bias=False), nn.ReLU(), nn.Linear(inner, width, bias=False))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) + bias, -1), v)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        return x + self.feed(self.norm2(x))


class T5Encoder(nn.Module):
    """Attention with a bias by relative position, in buckets that widen with the distance."""

    def __init__(self, width: int = 512, heads: int = 8, inner: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(32128, width), nn.Embedding(32, heads)
        self.layers = nn.ModuleList(T5Layer(width, heads, inner) for _ in range(depth))
        self.norm = RmsNorm(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        at = torch.arange(input_ids.shape[1])
        distance = at[None, :] - at[:, None]
        near = distance.abs()
        # The small sum keeps the bounds of the buckets (16, 32, 64) away from rounding, which differs between runtimes.
        far = 8 + (torch.log(near.clamp(min=1).float() / 8) / math.log(128 / 8) * 8 + 1e-3).long()
        bucket = (distance > 0).long() * 16 + torch.where(near < 8, near, far.clamp(max=15))
        bias = self.bias(bucket).permute(2, 0, 1)[None]
        bias = bias + (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.net = kind(128, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


# --- held out


def resnext(depths: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """ResNeXt-50, 32 x 4d, or one of other depths."""
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for (inner, o, s), n in zip([(128, 256, 1), (256, 512, 2), (512, 1024, 2), (1024, 2048, 2)], depths, strict=True):
        for k in range(n):
            step = s if k == 0 else 1
            body = nn.Sequential(conv(i, inner, 1), conv(inner, inner, 3, step, groups=32), conv(inner, o, 1, act=None))
            parts.append(Residual(body, None if i == o else conv(i, o, 1, step, act=None), nn.ReLU))
            i = o
    return nn.Sequential(*parts, head(i))


def mobilenetv3() -> nn.Module:
    """MobileNetV3-Large."""
    relu, swish = nn.ReLU, nn.Hardswish
    rows = [(3, 16, 16, 0, relu, 1), (3, 64, 24, 0, relu, 2), (3, 72, 24, 0, relu, 1), (5, 72, 40, 24, relu, 2),
            (5, 120, 40, 32, relu, 1), (5, 120, 40, 32, relu, 1), (3, 240, 80, 0, swish, 2), (3, 200, 80, 0, swish, 1),
            (3, 184, 80, 0, swish, 1), (3, 184, 80, 0, swish, 1), (3, 480, 112, 120, swish, 1), (3, 672, 112, 168, swish, 1),
            (5, 672, 160, 168, swish, 2), (5, 960, 160, 240, swish, 1), (5, 960, 160, 240, swish, 1)]  # fmt: skip
    blocks, i = [conv(3, 16, 3, 2, act=swish)], 16
    for k, inner, o, squeeze, act, s in rows:
        blocks.append(inverted(i, inner, o, k, s, act, squeeze, nn.Hardsigmoid))
        i = o
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000))
    return nn.Sequential(*blocks, conv(i, 960, 1, act=swish), tail)


class ConformerConv(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(c, 2 * c, 1), nn.Conv1d(c, c, 1)
        self.filter = nn.Sequential(nn.Conv1d(c, c, 31, padding=15, groups=c), nn.BatchNorm1d(c), nn.SiLU())
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.glu(self.enter(self.norm(x).transpose(1, 2)), 1)
        return self.leave(self.filter(y)).transpose(1, 2)


class Conformer(nn.Module):
    """Four blocks for speech: half a feed forward, attention, convolution over time, half a feed forward."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()

        def feed() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

        self.enter = nn.Linear(80, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([feed(), nn.Sequential(nn.LayerNorm(width), Attention(width, heads)), ConformerConv(width), feed(),
                           nn.LayerNorm(width)])
            for _ in range(depth)
        )  # fmt: skip
        self.leave = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for first, attend, convolve, second, norm in self.blocks:
            x = x + 0.5 * first(x)
            x = x + attend(x)
            x = x + convolve(x)
            x = norm(x + 0.5 * second(x))
        return self.leave(x).log_softmax(-1)


class Crnn(nn.Module):
    """A text recognizer: convolutions reduce the height to one row, two GRUs read it in both directions."""

    def __init__(self, classes: int = 96) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(1, 64), nn.MaxPool2d(2), conv(64, 128), nn.MaxPool2d(2), conv(128, 256), conv(256, 256), nn.MaxPool2d((2, 1)),
            conv(256, 512), nn.MaxPool2d((2, 1)), nn.Conv2d(512, 512, (2, 1)), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.read = nn.GRU(512, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.classify = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).squeeze(2).transpose(1, 2)
        return self.classify(self.read(y)[0]).log_softmax(-1)


class Window(nn.Module):
    """Attention within windows of 7 x 7, perhaps shifted by 3, with a learned bias by relative position."""

    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(1, heads, 49, 49) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        zone = torch.zeros(size, size)
        for n, rows in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
            for m, columns in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
                zone[rows, columns] = 3 * n + m
        parts = self.split(zone[None, :, :, None]).squeeze(-1)
        apart = parts[:, None, :] != parts[:, :, None]
        self.register_buffer("mask", apart.float()[None, :, None] * -100.0)

    @staticmethod
    def split(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        q, k, v = self.qkv(self.split(y)).reshape(-1, 49, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads) + self.bias
        if self.shift:
            n = self.mask.shape[1]
            scores = (scores.view(b, n, self.heads, 49, 49) + self.mask).view(-1, self.heads, 49, 49)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 49, c))
        y = y.view(b, h // 7, w // 7, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.feed(x)


class Merge(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * c), nn.Linear(4 * c, 2 * c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduce(self.norm(y))


class Swin(nn.Module):
    """A small Swin transformer: three stages of two blocks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        parts: list[nn.Module] = []
        for at, size in enumerate((56, 28, 14)):
            c = width << at
            parts += [Window(c, c // 32, size, 0), Window(c, c // 32, size, 3)]
            parts += [Merge(c)] if at < 2 else []
        self.body = nn.Sequential(*parts)
        self.last, self.classify = nn.LayerNorm(4 * width), nn.Linear(4 * width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.norm(self.patches(x).permute(0, 2, 3, 1)))
        return self.classify(self.last(x).mean((1, 2)))


# --- the table


def _image(size: int = 224, channels: int = 3, height: int = 0) -> Callable[[int], dict[str, Tensor]]:
    return lambda b: {"x": torch.randn(b, channels, height or size, size)}


def _sequence(t: int, width: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda b: {"x": torch.randn(b, t, width)}


def _tokens(words: int, t: int, *others: str) -> Callable[[int], dict[str, Tensor]]:
    return lambda b: {"input_ids": torch.randint(words, (b, t)), **{n: torch.ones(b, t, dtype=torch.long) for n in others}}


def _past(t: int, p: int) -> Callable[[int], dict[str, Tensor]]:
    names = [f"past_{i}_{kind}" for i in range(12) for kind in ("key", "value")]
    return lambda b: {"input_ids": torch.randint(50257, (b, t)), **{n: torch.randn(b, 12, p, 64) for n in names}}


NETS: dict[str, tuple[Make, Callable[[int], dict[str, Tensor]]]] = {
    "mobilenetv2": (mobilenetv2, _image()),
    "efficientnet-b0": (efficientnet_b0, _image()),
    "vit-tiny": (Vit, _image()),
    "convnext-tiny": (convnext, _image()),
    "unet": (Unet, _image(256)),
    "yolo": (Yolo, _image(640)),
    "bert": (Bert, _tokens(30522, 128, "attention_mask", "token_type_ids")),
    "gpt2": (Gpt2, _past(64, 64)),
    "gpt2-decode": (Gpt2, _past(1, 512)),
    "t5-encoder": (T5Encoder, _tokens(32128, 128, "attention_mask")),
    "lstm": (lambda: Recurrent(nn.LSTM), _sequence(64, 128)),
    "gru": (lambda: Recurrent(nn.GRU), _sequence(64, 128)),
    "mlp": (mlp, lambda b: {"x": torch.randn(b, 64)}),
    "cnn28": (cnn28, _image(28, 1)),
    # of busy.py
    "vit-small": (lambda: Vit(width=128, heads=4, depth=6, size=32, patch=4), _image(32)),
    "bert4": (lambda: Bert(depth=4), _tokens(30522, 128, "attention_mask", "token_type_ids")),
    # held out: not looked at before the end
    "resnext": (resnext, _image()),
    "mobilenetv3": (mobilenetv3, _image()),
    "conformer": (Conformer, _sequence(200, 80)),
    "crnn": (Crnn, _image(128, 1, 32)),
    "swin": (Swin, _image()),
}


def build(name: str) -> nn.Module:
    """Return a net of the table with random weights, in evaluation mode."""
    torch.manual_seed(0)
    net = NETS[name][0]()
    for part in net.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d)):
            nn.init.kaiming_normal_(part.weight)
        elif isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(part.weight, 0.5, 1.0)
            nn.init.uniform_(part.running_var, 0.8, 1.2)
            nn.init.normal_(part.bias, std=0.05)
            nn.init.normal_(part.running_mean, std=0.05)
        elif isinstance(part, nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.05)
    return net.eval()


def examples(name: str, batch: int) -> dict[str, Tensor]:
    """Return inputs of the sizes that a net of the table takes."""
    return NETS[name][1](batch)


def export(name: str, batch: int) -> Any:
    """Return a net as a ModelProto: opset 18, by the exporter that captures an FX graph; the length of a past stays open."""
    feeds = examples(name, batch)
    net = build(name)
    shapes: Any = None
    if name == "gpt2-decode":
        past = torch.export.Dim("past", min=2, max=1023)
        shapes = (None, tuple({2: past} for _ in range(24)))
    outputs = None
    if name.startswith("gpt2"):
        outputs = ["logits", *(n.replace("past", "present") for n in list(feeds)[1:])]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            net, tuple(feeds.values()), dynamo=True, opset_version=18, optimize=True, dynamic_shapes=shapes,
            input_names=list(feeds), output_names=outputs, verbose=False,
        )  # fmt: skip
    assert program is not None
    return program.model_proto
