"""Writes the foreign models of this folder: six nets with seeded random weights, exported from PyTorch by both of its exporters.

    tox -e models            # writes tests/models/*.onnx and *.npz again; torch is needed here and nowhere else

Each net is written four times: by the exporter that traces TorchScript at an old and a newer opset, and by the one that
captures an FX graph (`dynamo`) at two newer ones: NET-script-11.onnx, ..., NET-dynamo-23.onnx.  The batch size is dynamic
everywhere, the length of sequences if the net has one.  NET.npz holds torch's own inputs and outputs at two batch
sizes: x0_0, x0_1, ..., y0_0, ... .

Four more nets are written into tests/trained; their files have constants next to their parameters: buffers with the mean
and deviation of images, tables of cosines, masks, a learned scale and learned tokens.  parameters.json in both folders lists,
for each file, the initializers and constants that come from parameters of torch (`parameters` in tests/frameworks/common.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "frameworks"))

from common import keep_parameters  # noqa: E402


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen by 1x1, filter each channel, narrow by 1x1, add if the shapes are equal."""

    def __init__(self, inputs: int, outputs: int, stride: int, widen: int) -> None:
        super().__init__()
        inner = inputs * widen
        self.add = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.add else self.body(x)


class MobileNet(nn.Module):
    """MobileNetV2 at an eighth of its width and less depth; images of 3 x 48 x 48 to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        shape = [(8, 8, 1, 1), (8, 12, 2, 4), (12, 12, 1, 4), (12, 16, 2, 4), (16, 16, 1, 4), (16, 24, 2, 4), (24, 24, 1, 4)]
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(*(InvertedResidual(*s) for s in shape))
        self.head = nn.Sequential(nn.Conv2d(24, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6())
        self.classify = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(functional.adaptive_avg_pool2d(self.head(self.blocks(self.stem(x))), 1).flatten(1))


class SelfAttention(nn.Module):
    """One projection to Q, K and V, then scaled scores with a mask that is added or causal; or torch's own function of it."""

    def __init__(self, size: int, heads: int, *, causal: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.project, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.project(x).reshape(batch, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(batch, length, size))
        scores = q @ k.transpose(-2, -1) / (size // self.heads) ** 0.5
        if self.causal:
            place = torch.arange(length, device=x.device)
            scores = scores.masked_fill(place > place[:, None], float("-inf"))
        if bias is not None:
            scores = scores + bias
        return self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, size))


class Block(nn.Module):
    """A transformer's layer, with norms before (GPT-2, ViT) or after (BERT)."""

    def __init__(self, size: int, heads: int, *, before: bool, causal: bool = False, fused: bool = False,
                 gelu: str = "none") -> None:  # fmt: skip
        super().__init__()
        self.before = before
        self.attend = SelfAttention(size, heads, causal=causal, fused=fused)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.feed = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(approximate=gelu), nn.Linear(2 * size, size))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.before:
            x = x + self.attend(self.norm1(x), bias)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x, bias))
        return self.norm2(x + self.feed(x))


class Bert(nn.Module):
    """Token, position and segment embeddings, layers with a padding mask, and the pooled first token."""

    def __init__(self, words: int = 60, size: int = 32) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(words, size), nn.Embedding(32, size), nn.Embedding(2, size)
        self.norm = nn.LayerNorm(size)
        self.layers = nn.ModuleList(Block(size, 4, before=False) for _ in range(2))
        self.pool = nn.Linear(size, size)

    def forward(self, ids: Tensor, kinds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(place) + self.kinds(kinds))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pool(x[:, 0]))


class Gpt(nn.Module):
    """GPT-2: causal layers with norms before, and logits by the transposed token embedding."""

    def __init__(self, words: int = 60, size: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(32, size)
        self.layers = nn.ModuleList(Block(size, 4, before=True, causal=True, gelu="tanh") for _ in range(2))
        self.norm = nn.LayerNorm(size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.words.weight.T


class Lstm(nn.Module):
    """A two-layer LSTM in both directions over embedded words, then a classifier; its last states are outputs too."""

    def __init__(self, words: int = 60, size: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)
        self.lstm = nn.LSTM(16, size, num_layers=2, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(2 * size, 5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(self.words(ids))
        return functional.log_softmax(self.classify(y.mean(1)), -1), h, c


class Double(nn.Sequential):
    """Two convolutions of 3 x 3, each normalised in groups."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.1),
        )  # fmt: skip


class Unet(nn.Module):
    """Down twice and up twice with skips: Resize bilinear, Resize nearest, and a transposed convolution at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.floor = Double(3, 8), Double(8, 12), Double(12, 16)
        self.up2, self.up1 = Double(28, 12), Double(20, 8)
        self.out = nn.ConvTranspose2d(8, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2))
        c = self.floor(functional.avg_pool2d(b, 2))
        c = functional.interpolate(c, scale_factor=2.0, mode="bilinear", align_corners=False)
        b = self.up2(torch.cat([c, b], 1))
        b = functional.interpolate(b, scale_factor=2.0, mode="nearest")
        return torch.sigmoid(self.out(self.up1(torch.cat([b, a], 1))))


class Vit(nn.Module):
    """A Vision Transformer: patches of 8 x 8 by a convolution, a class token, positions, layers, a head."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, size, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, size) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 17, size) * 0.02)
        self.layers = nn.ModuleList(Block(size, 4, before=True, fused=True) for _ in range(2))
        self.norm, self.classify = nn.LayerNorm(size), nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.classify(self.norm(x)[:, 0])


class Scaled(nn.Module):
    """A residual branch with a learned scale of each channel, as CaiT has it."""

    def __init__(self, body: nn.Module, size: int) -> None:
        super().__init__()
        self.body, self.gamma = body, nn.Parameter(torch.full((size,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.body(x)


class Clip(nn.Module):
    """CLIP: images (normalized by buffers) and texts to unit vectors, whose products a learned scale multiplies."""

    def __init__(self, words: int = 60, size: int = 32) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.48, 0.46, 0.41])[:, None, None])
        self.register_buffer("deviation", torch.tensor([0.27, 0.26, 0.28])[:, None, None])
        self.patch = nn.Conv2d(3, size, 8, 8, bias=False)
        self.token, self.places = nn.Parameter(torch.randn(size) * 0.1), nn.Parameter(torch.randn(17, size) * 0.1)
        self.before = nn.LayerNorm(size)
        self.sight = nn.ModuleList([Block(size, 4, before=True, fused=True), Scaled(nn.Linear(size, size), size)])
        self.words, self.order = nn.Embedding(words, size), nn.Parameter(torch.randn(16, size) * 0.1)
        self.read = Block(size, 4, before=True, causal=True)
        self.seen, self.meant = nn.Parameter(torch.randn(size, 24) * 0.2), nn.Parameter(torch.randn(size, 24) * 0.2)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        x = self.patch((images - self.mean) / self.deviation).flatten(2).transpose(1, 2)
        x = self.before(torch.cat([self.token.expand(x.shape[0], 1, -1), x], 1) + self.places)
        for layer in self.sight:
            x = layer(x)
        x = x[:, 0] @ self.seen
        y = self.read(self.words(ids) + self.order[: ids.shape[1]])[:, -1] @ self.meant
        x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * x @ y.t()


class Rms(nn.Module):
    """Root mean square norm in parts, as Llama writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Rotary(nn.Module):
    """Llama: rotary positions from tables (`table`) or computed from frequencies, root mean square norms, gated layers."""

    def __init__(self, words: int = 60, size: int = 32, heads: int = 4, *, table: bool) -> None:
        super().__init__()
        self.heads, self.table, half = heads, table, size // heads // 2
        frequencies = 1.0 / 10000 ** (torch.arange(half) / half)
        angles = torch.outer(torch.arange(32.0), frequencies).repeat(1, 2)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.full((32, 32), -1e9).triu(1), persistent=False)
        self.words, self.norms = nn.Embedding(words, size), nn.ModuleList(Rms(size) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((size, 48), (size, 48), (48, size)))
        self.head = nn.Linear(size, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        batch, length, size = x.shape
        if self.table:
            cos, sin = self.cosines[:length], self.sines[:length]
        else:
            place = torch.arange(length, device=ids.device).to(x.dtype)
            angles = (self.frequencies[:, None] @ place[None, :]).transpose(0, 1)
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos(), angles.sin()

        def turned(y: Tensor) -> Tensor:
            y = y.reshape(batch, length, self.heads, size // self.heads).transpose(1, 2)
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        y = self.norms[0](x)
        q, k = turned(self.q(y)), turned(self.k(y))
        v = self.v(y).reshape(batch, length, self.heads, size // self.heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * (size // self.heads) ** -0.5 + self.mask[:length, :length]
        x = x + self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, size))
        y = self.norms[1](x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x))


class Waves(nn.Module):
    """Sinusoidal positions as a buffer, a learned token, relative biases of an attention, a norm without weights, slopes."""

    def __init__(self, words: int = 60, size: int = 32, length: int = 15) -> None:
        super().__init__()
        angles = torch.arange(length + 1.0)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).reshape(1, length + 1, size))
        place = torch.arange(length + 1)
        self.register_buffer("distance", place[:, None] - place + length)
        self.size, self.length = size, length
        self.words, self.token = nn.Embedding(words, size), nn.Parameter(torch.randn(1, 1, size) * 0.3)
        self.bias = nn.Parameter(torch.randn(2 * length + 1, 4) * 0.2)
        self.attend, self.plain = SelfAttention(size, 4), nn.LayerNorm(size, elementwise_affine=False)
        self.slope, self.gain = nn.PReLU(), nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(size, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) * self.size**0.5
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        bias = self.bias[self.distance.reshape(-1)].reshape(*self.distance.shape, -1).permute(2, 0, 1)
        x = x + self.gain * self.attend(self.plain(x), bias[None])
        return self.head(self.slope(x)[:, 0])


def _images(batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size),)


def _words(batch: int, length: int) -> Tensor:
    return torch.randint(0, 60, (batch, length))


def _bert(batch: int, length: int) -> tuple[Tensor, ...]:
    mask = (torch.arange(length) < torch.randint(2, length + 1, (batch, 1))).long()
    return _words(batch, length), torch.randint(0, 2, (batch, length)), mask


Net = tuple[nn.Module, list[tuple[Tensor, ...]], list[str], list[str], bool]
"""A net, inputs for two batch sizes (and lengths), names of inputs, names of outputs, whether the length of sequences is free."""
TRAINED = dict.fromkeys(("clip", "rotary", "turning", "waves"), "trained")
"""The nets that have constants next to their parameters, and their folder."""
OLDEST = {"vit": 14, "clip": 14}
"""The first opset for which a net's functions can be exported, if it is not 11."""


def _nets() -> dict[str, Net]:
    """All nets, the same ones on every call: an exporter may leave its mark on the net that it was given."""
    torch.manual_seed(0)
    nets: dict[str, Net] = {
        "mobilenetv2": (MobileNet(), [_images(2, 48), _images(3, 48)], ["image"], ["logits"], False),
        "bert": (Bert(), [_bert(2, 7), _bert(3, 11)], ["ids", "kinds", "mask"], ["hidden", "pooled"], True),
        "gpt2": (Gpt(), [(_words(2, 7),), (_words(3, 11),)], ["ids"], ["logits"], True),
        "lstm": (Lstm(), [(_words(2, 7),), (_words(3, 11),)], ["ids"], ["logprob", "h", "c"], True),
        "unet": (Unet(), [_images(2, 16), _images(3, 16)], ["image"], ["mask"], False),
        "vit": (Vit(), [_images(2, 32), _images(3, 32)], ["image"], ["logits"], False),
    }
    for net, *_ in nets.values():
        _settle(net.eval())
    trained = _trained()  # after the others, whose random numbers must not change
    for net, *_ in trained.values():
        _settle(net.eval())
    return nets | trained


def _trained() -> dict[str, Net]:
    """The nets of TRAINED."""
    return {
        "clip": (Clip(), [(*_images(2, 32), _words(2, 7)), (*_images(3, 32), _words(3, 7))], ["image", "ids"], ["logits"], False),
        "rotary": (Rotary(table=True), [(_words(2, 7),), (_words(3, 11),)], ["ids"], ["logits"], True),
        "turning": (Rotary(table=False), [(_words(2, 7),), (_words(3, 11),)], ["ids"], ["logits"], True),
        "waves": (Waves(), [(_words(2, 15),), (_words(3, 15),)], ["ids"], ["logits"], False),
    }


def _settle(net: nn.Module) -> None:
    """Draw statistics and weights of norms that are not 0 and 1, so that a mistake in them shows."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)
        if isinstance(module, norms) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)


def _changed(net: nn.Module) -> nn.Module:
    """The same net with other values of its parameters."""
    with torch.no_grad():
        for p in net.parameters():
            p += 0.01 * (1 + torch.rand_like(p))
    return net


def _export(name: str, opset: int, dynamo: bool, target: Path, *, changed: bool = False) -> None:
    warnings.simplefilter("ignore")
    net, examples, inputs, outputs, any_length = _nets()[name]
    if changed:
        _changed(net)
    axes = {0: "batch", 1: "length"} if any_length else {0: "batch"}
    if dynamo:
        shapes = tuple({k: torch.export.Dim(v, max=32 if v == "length" else 64) for k, v in axes.items()} for _ in inputs)
        program = torch.onnx.export(
            net, examples[0], None, input_names=inputs, output_names=outputs, opset_version=opset, dynamo=True,
            dynamic_shapes=shapes, external_data=False, verbose=False,
        )  # fmt: skip
        program.save(str(target))
    else:
        names = dict.fromkeys(inputs, axes) | {n: {0: "batch"} for n in outputs if n not in ("h", "c")}
        torch.onnx.export(
            net, examples[0], str(target), input_names=inputs, output_names=outputs, opset_version=opset, dynamo=False,
            dynamic_axes=names,
        )  # fmt: skip
    model = onnx.load(target)
    for node in model.graph.node:  # the places in the exporter's own source are of no use here
        node.doc_string = ""
        del node.metadata_props[:]
    del model.graph.value_info[:], model.metadata_props[:], model.graph.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    for function in model.functions:
        del function.metadata_props[:], function.value_info[:]
        for node in function.node:
            del node.metadata_props[:]
    onnx.checker.check_model(model)
    free = {d.dim_param for value in model.graph.input for d in value.type.tensor_type.shape.dim if d.dim_param}
    if free != set(axes.values()):
        raise ValueError(f"{target.name}: the sizes {sorted(axes.values())} should be free; the exporter left {sorted(free)}")
    target.write_bytes(model.SerializeToString(deterministic=True))


def main() -> None:
    """Write every model and its data."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--to", type=Path, default=HERE.parent)
    parser.add_argument("--only", default="")
    parser.add_argument("--lists", action="store_true", help="write only parameters.json, for the files that are there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    asked: dict[Path, tuple[str, int, bool]] = {}
    for name, (net, examples, *_) in _nets().items():
        if options.only not in name:
            continue
        data: dict[str, np.ndarray] = {}
        for i, example in enumerate(examples):
            with torch.no_grad():
                found = net(*example)
            for side, values in (("x", example), ("y", found if isinstance(found, tuple) else (found,))):
                data |= {f"{side}{i}_{j}": v.numpy() for j, v in enumerate(values)}
        folder = options.to / TRAINED.get(name, HERE.name)
        folder.mkdir(exist_ok=True)
        if not options.lists:
            np.savez_compressed(folder / f"{name}.npz", **data)
        for dynamo, opset in ((False, OLDEST.get(name, 11)), (False, 17), (True, 18), (True, 23)):
            target = folder / f"{name}-{'dynamo' if dynamo else 'script'}-{opset}.onnx"
            asked[target] = (name, opset, dynamo)
    # A process for each: the second capture of an LSTM in one process loses the free length.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1)
    with pool, tempfile.TemporaryDirectory() as scratch:
        others = {target: Path(scratch) / target.name for target in asked}
        jobs = {target: [] if options.lists else [pool.submit(_export, *asking, target)] for target, asking in asked.items()}
        for target, asking in asked.items():
            jobs[target].append(pool.submit(_export, *asking, others[target], changed=True))
        for target in asked:
            for job in jobs[target]:
                job.result()
            keep_parameters(target, onnx.load(others[target]))
            print(f"{target.name:28} {target.stat().st_size / 1000:6.1f} kB", flush=True)


if __name__ == "__main__":
    main()
