"""Nets of PyTorch for `align.py`, which are not those of tests/models, exported by both exporters of PyTorch.

    python benchmarks/align_nets.py FOLDER [--only NAME]

Writes NET-script-17.onnx, NET-dynamo-18.onnx and NET.npz with the inputs x0_0, x0_1, ...  The functions of this file return the
nets, so that `--against torch:align_nets:NET` runs them from this folder.  The weights are random and always the same.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from singa_backend.io import files

EXPORTS = {"script-17": (17, False), "dynamo-18": (18, True)}


# --- ConvNeXt -------------------------------------------------------------------------------------------------------------


class Image2dNorm(nn.LayerNorm):
    """A LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(size, size, 7, padding=3, groups=size), nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.gamma = nn.Parameter(0.5 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(functional.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), Image2dNorm(8))
        self.stages = nn.ModuleList()
        for inputs, outputs in ((8, 8), (8, 12), (12, 16)):
            down = nn.Sequential(Image2dNorm(inputs), nn.Conv2d(inputs, outputs, 2, 2)) if inputs != outputs else nn.Identity()
            self.stages.append(nn.Sequential(down, ConvNextBlock(outputs), ConvNextBlock(outputs)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((-2, -1))))


# --- T5 -------------------------------------------------------------------------------------------------------------------


class T5Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Attention(nn.Module):
    """Without a scale; relative positions in buckets add a bias."""

    def __init__(self, size: int, heads: int, *, relative: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.relative = nn.Embedding(16, heads) if relative else None

    def _buckets(self, length: int, other: int) -> Tensor:
        apart = torch.arange(other)[None, :] - torch.arange(length)[:, None]
        if self.causal:
            apart, base, count = -apart.clamp(max=0), torch.zeros_like(apart), 16
        else:
            base, count, apart = (apart > 0).long() * 8, 8, apart.abs()
        far = count // 2 + (torch.log(apart.float().clamp(min=1) / (count // 2)) * (count / 4)).long()
        return base + torch.where(apart < count // 2, apart, far.clamp(max=count - 1))

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        other = x if memory is None else memory
        q, k, v = self._split(self.q(x)), self._split(self.k(other)), self._split(self.v(other))
        scores = q @ k.transpose(-2, -1)
        if self.relative is not None:
            bias = self.relative(self._buckets(x.shape[1], other.shape[1])).permute(2, 0, 1)[None]
            if self.causal:
                bias = bias + torch.full((x.shape[1], x.shape[1]), -1e9).triu(1)
        if bias is not None:
            scores = scores + bias
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
        return self.o(y), bias


class T5Layer(nn.Module):
    def __init__(self, size: int, *, relative: bool, decoder: bool) -> None:
        super().__init__()
        self.attend, self.norm = T5Attention(size, 4, relative=relative, causal=decoder), T5Norm(size)
        self.cross = T5Attention(size, 4, relative=False, causal=False) if decoder else None
        self.cross_norm = T5Norm(size) if decoder else None
        self.feed_norm, self.wi = T5Norm(size), nn.Linear(size, 2 * size, bias=False)
        self.wo = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y, bias = self.attend(self.norm(x), None, bias)
        x = x + y
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)[0]
        return x + self.wo(functional.relu(self.wi(self.feed_norm(x)))), bias


class T5(nn.Module):
    def __init__(self, words: int = 50, size: int = 24) -> None:
        super().__init__()
        self.shared = nn.Embedding(words, size)
        self.encoder = nn.ModuleList(T5Layer(size, relative=not i, decoder=False) for i in range(2))
        self.decoder = nn.ModuleList(T5Layer(size, relative=not i, decoder=True) for i in range(2))
        self.encoder_norm, self.decoder_norm = T5Norm(size), T5Norm(size)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        x, bias = self.shared(ids), None
        for layer in self.encoder:
            x, bias = layer(x, bias)
        memory, y, bias = self.encoder_norm(x), self.shared(decoder_ids), None
        for layer in self.decoder:
            y, bias = layer(y, bias, memory)
        return (self.decoder_norm(y) * y.shape[-1] ** -0.5) @ self.shared.weight.T


# --- U-Net ----------------------------------------------------------------------------------------------------------------


class ResidualPair(nn.Module):
    """GroupNorm, SiLU and a convolution twice, with a shortcut, as in diffusion models."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(12, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(when))[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class Diffusion(nn.Module):
    """A U-Net with an embedding of the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 12))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down1, self.shrink1 = ResidualPair(8, 8), nn.Conv2d(8, 8, 3, 2, 1)
        self.down2, self.shrink2 = ResidualPair(8, 12), nn.Conv2d(12, 12, 3, 2, 1)
        self.middle = ResidualPair(12, 12)
        self.grow2, self.up2 = nn.ConvTranspose2d(12, 12, 2, 2), ResidualPair(24, 12)
        self.grow1, self.up1 = nn.ConvTranspose2d(12, 8, 2, 2), ResidualPair(16, 8)
        self.norm, self.last = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * torch.exp(-torch.arange(4.0))
        when = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.first(image)
        a = self.down1(x, when)
        b = self.down2(self.shrink1(a), when)
        c = self.middle(self.shrink2(b), when)
        c = self.up2(torch.cat([self.grow2(c), b], 1), when)
        c = self.up1(torch.cat([self.grow1(c), a], 1), when)
        return self.last(functional.silu(self.norm(c)))


# --- GRU ------------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A GRU in both directions; attention and maxima over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.gru = nn.GRU(16, 12, batch_first=True, bidirectional=True)
        self.again = nn.GRU(24, 12, batch_first=True)
        self.score = nn.Linear(24, 1)
        self.norm, self.hidden, self.classify = nn.LayerNorm(36), nn.Linear(36, 20), nn.Linear(20, 5)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.gru(self.words(ids))
        share = torch.softmax(self.score(torch.tanh(y)), 1)
        z, _ = self.again(y)
        x = torch.cat([(share * y).sum(1), z.amax(1)], -1)
        return self.classify(functional.elu(self.hidden(self.norm(x))))


# --- ViT with shared weights ----------------------------------------------------------------------------------------------


class SharedVit(nn.Module):
    """One layer of a transformer, computed four times; `nn.MultiheadAttention`."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.patch, self.places = nn.Conv2d(3, size, 8, 8), nn.Parameter(0.1 * torch.randn(1, 17, size))
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, size))
        self.norm1, self.attend = nn.LayerNorm(size), nn.MultiheadAttention(size, 4, batch_first=True)
        self.norm2, self.feed = nn.LayerNorm(size), nn.Sequential(nn.Linear(size, 48), nn.GELU(), nn.Linear(48, size))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for _ in range(4):
            y = self.norm1(x)
            x = x + self.attend(y, y, y, need_weights=False)[0]
            x = x + self.feed(self.norm2(x))
        return self.head(self.norm(x)[:, 0])


# --- the nets -------------------------------------------------------------------------------------------------------------


def _settled(net: nn.Module) -> nn.Module:
    """The net for inference, with statistics and weights of norms that are not 0 and 1."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return net.eval()


def _made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return _settled(kind())


def convnext() -> nn.Module:
    return _made(ConvNext)


def t5() -> nn.Module:
    return _made(T5)


def diffusion() -> nn.Module:
    return _made(Diffusion)


def gru() -> nn.Module:
    return _made(Classifier)


def shared_vit() -> nn.Module:
    return _made(SharedVit)


def _images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def _words(length: int, words: int = 60) -> Tensor:
    return torch.randint(0, words, (2, length))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], tuple[str, ...]]] = {
    "convnext": (convnext, lambda: (_images(32),), ("image",)),
    "t5": (t5, lambda: (_words(9, 50), _words(7, 50)), ("ids", "decoder_ids")),
    "diffusion": (diffusion, lambda: (_images(16), torch.rand(2)), ("image", "step")),
    "gru": (gru, lambda: (_words(8),), ("ids",)),
    "shared_vit": (shared_vit, lambda: (_images(32),), ("image",)),
}
"""Each net, its inputs, and their names."""


def export(name: str, folder: Path) -> None:
    """Write the files of one net."""
    warnings.simplefilter("ignore")
    make, inputs, names = NETS[name]
    torch.manual_seed(2)
    x = inputs()
    for suffix, (opset, dynamo) in EXPORTS.items():
        net, target = make(), folder / f"{name}-{suffix}.onnx"
        if dynamo:
            program = torch.onnx.export(
                net, x, input_names=names, opset_version=opset, dynamo=True, external_data=False, verbose=False
            )
            assert program is not None
            program.save(str(target))
        else:
            written = io.BytesIO()
            torch.onnx.export(net, x, written, input_names=names, opset_version=opset, dynamo=False)
            target.write_bytes(written.getvalue())
    with torch.no_grad():
        y = make()(*x)
    arrays = {f"x0_{i}": t.numpy() for i, t in enumerate(x)} | {"y0_0": y.numpy()}
    with files.writing(folder / f"{name}.npz") as file:
        np.savez(file, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of nets")
    given = parser.parse_args()
    files.new_folder(given.folder)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in NETS:
            if given.only in name:
                pool.submit(export, name, given.folder).result()
                print(name, flush=True)


if __name__ == "__main__":
    main()
