"""The nets that benchmarks/compare_training.py trains, in PyTorch; those that differ from inference's only in size are its nets.

`build(name)` returns a net in training mode with the weights of PyTorch's own initialization, seed 0.  A net takes one input and
returns scores N x C, or N x C x H x W.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import compare_nets
import torch
from compare_nets import Make, conv, head
from compare_training_lanes import NETS, data
from torch import Tensor, nn
from torch.nn import functional

WORDS, TAGS, WIDTH, DEPTH, HEADS = NETS["gpt"].words, NETS["lstm"].classes, 256, 4, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(1), nn.Linear(64 * 49, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for o, s in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        body = nn.Sequential(conv(i, o, 3, s), conv(o, o, act=None))
        parts.append(compare_nets.Residual(body, None if s == 1 and i == o else conv(i, o, 1, s, act=None), nn.ReLU))
        i = o
    return nn.Sequential(*parts, head(i))


class Tagger(nn.Module):
    """A recurrent net that scores tags for each token."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words, self.net, self.tags = nn.Embedding(WORDS, 128), kind(128, 128, batch_first=True), nn.Linear(128, TAGS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tags(self.net(self.words(tokens))[0]).reshape(-1, TAGS)


class Classifier(nn.Module):
    """Layers of BERT without a mask; the first token is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.norm = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(compare_nets.BertLayer(WIDTH, HEADS) for _ in range(DEPTH))
        self.classify = nn.Linear(WIDTH, NETS["bert"].classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions.weight[None, : tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, None)
        return self.classify(x[:, 0])


class CausalLayer(compare_nets.GptLayer):
    """A layer of GPT-2 without a past."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f.view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in self.qkv(self.norm1(x)).split(c, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.feed(self.norm2(x))


class Gpt(nn.Module):
    """Layers of GPT-2 that score the next token; its head has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.Sequential(*(CausalLayer(WIDTH, HEADS) for _ in range(DEPTH)))
        self.norm, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[None, : tokens.shape[1]]
        return self.score(self.norm(self.layers(x))).reshape(-1, WORDS)


MAKE: dict[str, Make] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "mobilenetv2": compare_nets.mobilenetv2,
    "lstm": lambda: Tagger(nn.LSTM),
    "bert": Classifier,
    "gpt": Gpt,
    "unet": lambda: compare_nets.Unet(16, 3),
    # held out: named before anything was tuned
    "resnext": lambda: compare_nets.resnext((1, 1, 1, 1)),
    "mobilenetv3": compare_nets.mobilenetv3,
    "gru": lambda: Tagger(nn.GRU),
    "vit": lambda: compare_nets.Vit(size=32, patch=4),
    "convnext": lambda: compare_nets.convnext((40, 80, 160, 320), (2, 2, 6, 2)),
}


SMOOTH: dict[type[nn.Module], Make] = {
    nn.ReLU: nn.SiLU, nn.ReLU6: nn.SiLU, nn.Hardswish: nn.SiLU, nn.Hardsigmoid: nn.Sigmoid,
}  # fmt: skip
"""What replaces activations whose derivative jumps; averages replace maxima of pooling."""


def build(name: str, smooth: bool = False) -> nn.Module:
    """Return a net in training mode, perhaps without kinks; each call returns the same weights."""
    torch.manual_seed(0)
    net = MAKE[name]()
    found = [(parent, at, part) for parent in net.modules() for at, part in parent.named_children()]
    kinks = [(parent, at, part) for parent, at, part in found if type(part) in (*SMOOTH, nn.MaxPool2d)]
    assert bool(kinks) == NETS[name].kinks
    for parent, at, part in kinks if smooth else ():
        pool = isinstance(part, nn.MaxPool2d)
        setattr(parent, at, nn.AvgPool2d(part.kernel_size, part.stride, part.padding) if pool else SMOOTH[type(part)]())
    return net.train()


def export(name: str, path: Path, smooth: bool = False) -> None:
    """Write a net as a file for training: batch norms are not folded, and every parameter keeps its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            build(name, smooth), (torch.from_numpy(data(name)[0]),), str(path), opset_version=17, dynamo=False,
            do_constant_folding=False, training=torch.onnx.TrainingMode.TRAINING, input_names=["x"], output_names=["y"],
        )  # fmt: skip
