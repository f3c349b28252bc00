"""Fine-tuning of decoders against PyTorch: the loss of next tokens with ignored labels, its gradients, and adapters.

One decoder is exported by PyTorch; the other one has caches and GroupQueryAttention, as onnxruntime-genai's builder writes them.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from tests.helpers import language_models
from torch import nn
from torch.nn import functional

from singa import autograd, sonnx
from singa._core.tensor import Tensor
from singa.cli import main

F = np.float32
WORDS, WIDTH, HEADS = 29, 16, 2
RNG = np.random.default_rng(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """As GPT-2: the table of tokens is the last layer, too.  (With optimize=True the exporter would store it twice.)"""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def grouped() -> tuple[onnx.ModelProto, dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]]:
    """The decoder of genai's kind, its weights, and its scores in PyTorch."""
    model = language_models.grouped()
    for t in model.graph.initializer:
        if (t.name[0] in "qkvo" and t.name[1:].isdigit()) or t.name == "head":
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t) / 3, t.name))
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    heads, size = language_models.HEADS, language_models.WIDE

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (weights[n][: x.shape[2]] for n in ("cos", "sin"))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def scores(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        x = w["wte"][ids]
        for n in range(language_models.LAYERS):
            q, k, v = (x @ w[f"{p}{n}"] for p in "qkv")
            q = turned(q.reshape(*x.shape[:2], heads, size).transpose(1, 2))
            k, v = turned(k[:, None]), v[:, None]
            y = functional.scaled_dot_product_attention(
                q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), is_causal=True
            )
            x = x + y.transpose(1, 2).reshape(x.shape) @ w[f"o{n}"]
        return x @ w["head"]

    return model, weights, scores


def their_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As the causal models of transformers compute it."""
    return functional.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)


def drawn(words: int, rows: int = 6, length: int = 9) -> tuple[np.ndarray, np.ndarray]:
    ids = RNG.integers(0, words, (rows, length))
    lengths, prompts = RNG.integers(4, length + 1, (rows, 1)), RNG.integers(0, 3, (rows, 1))
    at = np.arange(length)
    return ids, np.where((at < lengths) & (at >= prompts), ids, -100)


def our_gradients(model: Any, ids: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    net = sonnx.SONNXModel(model)
    net.train()
    inputs = sonnx.decoder_inputs(net, ids)
    scores = net.forward(*(Tensor(data=a, requires_grad=False) for a in inputs.values()))[0]
    loss = autograd.next_token_cross_entropy(scores, Tensor(data=labels))
    found = {p.name: g.data for p, g in autograd.backward(loss)}
    net.eval()
    return float(loss.data[0]), found


@pytest.fixture(scope="module")
def exported() -> tuple[bytes, Decoder]:
    torch.manual_seed(0)
    net = Decoder().eval()
    ids = torch.zeros(2, 5, dtype=torch.int64)
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=64)},)
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(net, (ids,), dynamo=True, dynamic_shapes=sizes, input_names=["input_ids"],
                                    output_names=["logits"], opset_version=18, optimize=False, verbose=False)  # fmt: skip
    assert program is not None
    target.write(program.model_proto.SerializeToString())
    return target.getvalue(), net


def test_the_loss_and_gradients_of_an_exported_decoder(exported: tuple[bytes, Decoder]) -> None:
    model, net = exported
    ids, labels = drawn(WORDS)
    net.zero_grad()
    loss = their_loss(net(torch.from_numpy(ids)), torch.from_numpy(labels))
    loss.backward()  # type: ignore[no-untyped-call]
    ours, found = our_gradients(model, ids, labels)
    assert ours == pytest.approx(loss.item(), rel=1e-6)
    theirs = {n: p.grad.numpy() for n, p in net.named_parameters() if p.grad is not None}
    assert found.keys() == theirs.keys()
    for name, g in theirs.items():
        np.testing.assert_allclose(found[name], g, rtol=1e-4, atol=1e-6 * float(np.abs(g).max() + 1), err_msg=name)


def test_the_loss_and_gradients_of_a_decoder_with_caches() -> None:
    model, weights, scores = grouped()
    ids, labels = drawn(200)
    trained = {n: w.requires_grad_() for n, w in weights.items() if w.is_floating_point() and n not in ("cos", "sin")}
    loss = their_loss(scores(trained, torch.from_numpy(ids)), torch.from_numpy(labels))
    loss.backward()  # type: ignore[no-untyped-call]
    ours, found = our_gradients(model, ids, labels)
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == trained.keys()
    for name, w in trained.items():
        assert w.grad is not None
        g = w.grad.numpy()
        np.testing.assert_allclose(found[name], g, rtol=1e-3, atol=1e-4 * float(np.abs(g).max()), err_msg=name)


def train(folder: Path, *given: Any) -> dict[str, Any]:
    line = ["train", folder / "m.onnx", "--data", folder / "d.npz", "--loss", "next_token_cross_entropy", "--target", "labels",
            "--batch-size", 2, "--accumulate", 3, "--epochs", 4, "--momentum", 0, "--json", *given]  # fmt: skip
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_command_trains_an_exported_decoder_as_pytorch(exported: tuple[bytes, Decoder], tmp_path: Path) -> None:
    """Updates of three batches with unlike numbers of tokens."""
    model, net = exported
    (tmp_path / "m.onnx").write_bytes(model)
    ids, labels = drawn(WORDS)
    np.savez(tmp_path / "d.npz", input_ids=ids, labels=labels)
    told = train(tmp_path, "--lr", 0.2, "-o", tmp_path / "o.onnx")
    twin = Decoder()
    twin.load_state_dict(net.state_dict())
    sgd, losses = torch.optim.SGD(twin.parameters(), lr=0.2), []
    for _ in range(4):
        sgd.zero_grad()
        loss = their_loss(twin(torch.from_numpy(ids)), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        losses.append(loss.item())
    assert told["losses"] == pytest.approx(losses, rel=1e-4)
    after = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "o.onnx").graph.initializer}
    for name, p in twin.named_parameters():
        np.testing.assert_allclose(after[name], p.detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_command_trains_adapters_of_a_decoder_with_caches_as_pytorch(tmp_path: Path) -> None:
    """From the first values of the command, which are those of a training with a rate of 0."""
    model, weights, scores = grouped()
    onnx.save(model, tmp_path / "m.onnx")
    ids, labels = drawn(200)
    np.savez(tmp_path / "d.npz", input_ids=ids, labels=labels)
    from singa_backend.adapters import Adapter

    def adapter(rate: float) -> Any:
        told = train(tmp_path, "--lora", 4, "--lora-alpha", 8, "--lr", rate, "-o", tmp_path / "a.safetensors")
        return told["losses"], Adapter.load(tmp_path / "a.safetensors")

    _, first = adapter(0)
    losses, last = adapter(0.05)
    pairs = {n: [torch.from_numpy(np.array(f)).requires_grad_() for f in (c.a, c.b)] for n, c in first.changes.items()}
    assert pairs.keys() == {f"{p}{n}" for p in "qkvo" for n in range(language_models.LAYERS)}
    sgd, theirs = torch.optim.SGD([f for pair in pairs.values() for f in pair], lr=0.05), []
    for _ in range(4):
        sgd.zero_grad()
        changed = weights | {n: weights[n] + 2 * (b @ a).T for n, (a, b) in pairs.items()}
        loss = their_loss(scores(changed, torch.from_numpy(ids)), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        theirs.append(loss.item())
    assert losses == pytest.approx(theirs, rel=1e-4) and losses[-1] < losses[0]
    for n, (a, b) in pairs.items():
        for mine, factor in ((last.changes[n].a, a), (last.changes[n].b, b)):
            np.testing.assert_allclose(mine, factor.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=n)
