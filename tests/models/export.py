"""Makes the foreign models beside it: six nets with seeded random weights, exported from PyTorch by both of its exporters.

    tox -e models            # writes tests/models/*.onnx and *.npz anew; torch is needed here and nowhere else

Each net is written four times: by the exporter that traces TorchScript at an old and a newer opset, and by the one that
captures an FX graph (`dynamo`) at two newer ones: NET-script-11.onnx, ..., NET-dynamo-23.onnx.  The batch size is dynamic
everywhere, the length of sequences where the net has one.  NET.npz holds torch's own inputs and outputs at two batch
sizes: x0_0, x0_1, ..., y0_0, ... .
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen by 1x1, filter each channel, narrow by 1x1, add where shapes allow."""

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
    """A transformer's layer, norms before (GPT-2, ViT) or behind (BERT)."""

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


def _images(batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size),)


def _words(batch: int, length: int) -> Tensor:
    return torch.randint(0, 60, (batch, length))


def _bert(batch: int, length: int) -> tuple[Tensor, ...]:
    mask = (torch.arange(length) < torch.randint(2, length + 1, (batch, 1))).long()
    return _words(batch, length), torch.randint(0, 2, (batch, length)), mask


Net = tuple[nn.Module, list[tuple[Tensor, ...]], list[str], list[str], bool]
"""A net, inputs for two batch sizes (and lengths), names of the inputs, names of the outputs, sequences of any length?"""
OLDEST = {"vit": 14}
"""The first opset for which a net's functions can be exported, where it is not 11."""


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
    return nets


def _settle(net: nn.Module) -> None:
    """Batch norms leave training with statistics that are not 0 and 1, so that a mistake in them shows."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)


def _export(name: str, opset: int, dynamo: bool, target: Path) -> None:
    warnings.simplefilter("ignore")
    net, examples, inputs, outputs, any_length = _nets()[name]
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
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--only", default="")
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
        np.savez_compressed(options.to / f"{name}.npz", **data)
        for dynamo, opset in ((False, OLDEST.get(name, 11)), (False, 17), (True, 18), (True, 23)):
            target = options.to / f"{name}-{'dynamo' if dynamo else 'script'}-{opset}.onnx"
            asked[target] = (name, opset, dynamo)
    # A process for each: the second capture of an LSTM in one process loses the free length.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        jobs = {target: pool.submit(_export, *asking, target) for target, asking in asked.items()}
        for target, job in jobs.items():
            job.result()
            print(f"{target.name:28} {target.stat().st_size / 1000:6.1f} kB", flush=True)


if __name__ == "__main__":
    main()
