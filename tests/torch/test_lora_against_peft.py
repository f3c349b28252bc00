"""Low-rank adapters of exported files against PEFT on the same net: the same factors, 50 steps, the same losses and factors."""

from __future__ import annotations

import copy
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from peft import LoraConfig, get_peft_model
from torch import nn

from singa import autograd, opt, sonnx
from singa.tensor import Tensor
from singa_backend.adapters import Adapter, LowRank
from singa_backend.adapters.uses import weights
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput
from singa_backend.passes import ModelEditor

STEPS = 50
RATES = {"transformer": {"SGD": 0.05, "AdamW": 0.003}, "convolutions": {"SGD": 0.1, "AdamW": 0.005}}
CLASSES = 5


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(x)).mean(1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.third = nn.Conv2d(16, 16, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        with torch.no_grad():  # the exporter writes equal tensors once: the statistics would be the scale and the bias
            for i, t in enumerate((self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var)):
                t.uniform_(0.5 + i, 1.0 + i)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = nn.functional.silu
        h = self.norm(silu(self.third(silu(self.second(silu(self.first(x)))))))  # after a SiLU it is not folded into a weight
        return self.head(h.mean((2, 3)))


TARGETS = {
    "transformer": ["query", "key", "value", "out", "up", "down"],
    "convolutions": ["first", "second", "third"],
}


class Tuned(sonnx.SONNXModel):
    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)[0]
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


@cache
def built(name: str) -> tuple[nn.Module, np.ndarray, np.ndarray, bytes]:
    """A net, a batch, its targets, and the net as a file."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    net: nn.Module = Transformer() if name == "transformer" else Convolutions()
    x = rng.integers(0, 40, (8, 6)) if name == "transformer" else rng.normal(size=(8, 3, 8, 8)).astype(np.float32)
    out = io.BytesIO()
    example = (torch.from_numpy(x),)
    batch = {0: torch.export.Dim("n")}
    program = torch.onnx.export(net.eval(), example, dynamo=True, dynamic_shapes=(batch,), verbose=False, optimize=True)
    program.save(out)
    return net, x, rng.integers(0, CLASSES, 8), out.getvalue()


def names(net: nn.Module, model: onnx.ModelProto, targets: list[str]) -> dict[str, str]:
    """The name of the weight in the file for each layer of PEFT, by its values."""
    found = {}
    stored = {n: numpy_helper.to_array(w.main.origin.tensor) for n, w in weights(ModelEditor(model)).items()}
    for title, layer in net.named_modules():
        if title.split(".")[-1] in targets:
            w = layer.weight.detach().numpy()
            found[title] = next(n for n, a in stored.items() if any(a.shape == v.shape and (a == v).all() for v in (w, w.T)))
    return found


def layers(tuned: Any) -> dict[str, Any]:
    return {n.removeprefix("base_model.model."): m for n, m in tuned.named_modules() if hasattr(m, "lora_A")}


def factors(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    return layer.lora_A["default"].weight.detach().numpy().copy(), layer.lora_B["default"].weight.detach().numpy().copy()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("name", TARGETS)
def test_fifty_steps(name: str, rank: int, optimizer: str, tmp_path: Path) -> None:
    net, x, t, data = built(name)
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    model = onnx.load(path)
    by_layer = names(net, model, TARGETS[name])
    assert set(sonnx.lora(model, rank).adapter().changes) == set(by_layer.values())  # all but the head

    torch.manual_seed(1)
    tuned = get_peft_model(
        copy.deepcopy(net), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[name], bias="lora_only")
    )
    theirs = layers(tuned)
    start = {by_layer[n]: LowRank(*factors(m), m.scaling["default"]) for n, m in theirs.items()}
    biases = sonnx.lora(model, rank, bias="lora_only").adapter().values

    ours = Tuned(str(path))
    ours.load_adapter(Adapter(start, biases, "", {}))
    rate = RATES[name][optimizer]
    ours.set_optimizer(opt.SGD(lr=rate) if optimizer == "SGD" else opt.AdamW(lr=rate))
    tx, tt = Tensor(data=x, requires_grad=False), Tensor(data=t, requires_grad=False)
    ours.compile([tx], is_train=True, use_graph=True)

    trained = [p for p in tuned.parameters() if p.requires_grad]
    rule = torch.optim.SGD(trained, lr=rate) if optimizer == "SGD" else torch.optim.AdamW(trained, lr=rate)
    tuned.train()
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(tuned(torch.from_numpy(x)), torch.from_numpy(t))
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append((float(ours(tx, tt)[1].data.reshape(-1)[0]), float(loss.detach())))
    mine, their = np.array(losses).T
    assert mine[-1] < mine[0] - 0.02
    np.testing.assert_allclose(mine, their, rtol=0, atol=1e-5)

    found = ours.adapter()
    for layer, m in theirs.items():
        for got, want in zip((found.changes[by_layer[layer]].a, found.changes[by_layer[layer]].b), factors(m), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    params = ours.get_params()
    assert all((stored[n] == params[n].data).all() for n in stored.keys() & params.keys() - found.values.keys())
    assert path.read_bytes() == data
    _in_onnxruntime(ours, x, tuned, grouped=name == "convolutions")


def _in_onnxruntime(ours: Tuned, x: np.ndarray, tuned: Any, grouped: bool) -> None:
    """The model with its adapter, and the merged one, in onnxruntime, which knows nothing of adapters."""
    ours.eval()
    tuned.eval()
    want = tuned(torch.from_numpy(x)).detach().numpy()
    if not grouped:  # the running variance of PyTorch is that of a sample, ONNX's that of the batch
        np.testing.assert_allclose(ours.forward(x)[0].data, want, rtol=1e-5, atol=1e-5)
    forms = [ours.unmerged()]
    if grouped:  # PEFT's A of a convolution with groups has none: neither PEFT nor this project merges it
        with pytest.raises(InvalidInput, match="no groups"):
            ours.merged()
    else:
        forms.append(ours.merged())
    with Oracle("onnxruntime") as oracle:
        for form in forms:
            got = oracle.run(form.SerializeToString(), {form.graph.input[0].name: x})
            np.testing.assert_allclose(next(iter(got.values())), ours.forward(x)[0].data, rtol=1e-5, atol=1e-5)
