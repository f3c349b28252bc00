"""`sonnx train --head N --lora R` and PEFT: the new layer is a module that PEFT saves whole, of another size than the file's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from tests.helpers.onnxruntime_adapters import in_child
from torch import nn

from singa import autograd, opt, sonnx
from singa.cli import main
from singa.tensor import Tensor
from singa_backend.adapters import Adapter, LowRank
from singa_backend.adapters.files import load_adapter
from singa_backend.adapters.peft import read_peft

OLD, NEW = 3, 5


class Classifier(nn.Module):
    """Two adapted layers, and a last layer: Linear with or without bias, or a convolution that is pooled."""

    def __init__(self, kind: str, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 8, 3, padding=1), nn.Linear(8, 8)
        self.kind = kind
        self.head = nn.Conv1d(8, outputs, 1) if kind == "convolution" else nn.Linear(8, outputs, bias=kind != "plain")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x)).transpose(1, 2)))
        if self.kind == "convolution":
            return self.head(h.transpose(1, 2)).mean(2)
        return self.head(h.mean(1))


KINDS = ("linear", "plain", "convolution")
CASES = [(kind, dynamo) for kind in KINDS for dynamo in (True, False)]
X = np.random.default_rng(0).normal(size=(8, 2, 6)).astype(np.float32)
T = np.random.default_rng(1).integers(0, NEW, 8)


def network(kind: str, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return Classifier(kind, outputs).eval()


def resized(kind: str) -> nn.Module:
    """The network with a new last layer, as one prepares it for PEFT; the other weights are those of the file."""
    net, old = network(kind, NEW), network(kind, OLD)
    net.load_state_dict({n: t for n, t in old.state_dict().items() if not n.startswith("head")}, strict=False)
    return net


def exported(kind: str, dynamo: bool, path: Path) -> Path:
    form: dict[str, Any] = {"dynamic_shapes": {"x": {0: "n"}}} if dynamo else {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    torch.onnx.export(network(kind, OLD), (torch.from_numpy(X),), path, dynamo=dynamo, input_names=["x"], output_names=["y"],
                      **({"verbose": False, "external_data": False} if dynamo else {"opset_version": 17}), **form)  # fmt: skip
    return path


def invoke(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done.output


def outputs(net: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(net(torch.from_numpy(X)).numpy())


@pytest.mark.parametrize(("kind", "dynamo"), CASES)
def test_peft_loads_the_new_layer_and_it_comes_back(kind: str, dynamo: bool, tmp_path: Path) -> None:
    model = exported(kind, dynamo, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, y=T)
    common = ("train", model, "--data", tmp_path / "d.npz", "--head", NEW, "--lora", 2, "--lr", 0.1, "--epochs", 3)
    invoke(*common, "-o", tmp_path / "a.safetensors")
    invoke("adapter", tmp_path / "a.safetensors", "--model", model, "-o", tmp_path / "folder")
    want = sonnx.prepare(model, adapter=tmp_path / "a.safetensors").run([X])[0]
    assert want.shape == (8, NEW)

    loaded = PeftModel.from_pretrained(resized(kind), tmp_path / "folder").eval()
    assert loaded.peft_config["default"].modules_to_save == ["head"]
    np.testing.assert_allclose(outputs(loaded), want, rtol=0, atol=1e-5)

    np.testing.assert_array_equal(sonnx.prepare(model, adapter=tmp_path / "folder").run([X])[0], want)
    invoke("adapter", tmp_path / "folder", "--model", model, "-o", tmp_path / "back.safetensors")
    one, two = Adapter.load(tmp_path / "a.safetensors"), Adapter.load(tmp_path / "back.safetensors")
    assert one.changes.keys() == two.changes.keys() and one.values.keys() == two.values.keys()
    assert two.settings["head"] == NEW
    for name, c in one.changes.items():
        assert np.array_equal(c.a, two.changes[name].a) and np.array_equal(c.b, two.changes[name].b)
        assert c.scale == two.changes[name].scale
    assert all(np.array_equal(v, two.values[n]) for n, v in one.values.items())


@pytest.mark.parametrize(("kind", "dynamo"), CASES)
def test_a_layer_that_peft_has_saved(kind: str, dynamo: bool, tmp_path: Path) -> None:
    """The file with the adapter declares the new sizes, and runs in onnxruntime; it trains on from there."""
    model = exported(kind, dynamo, tmp_path / "m.onnx")
    torch.manual_seed(2)
    tuned: Any = get_peft_model(resized(kind), LoraConfig(r=2, target_modules=["first", "second"], modules_to_save=["head"]))
    for p in tuned.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)
    tuned.eval().save_pretrained(tmp_path / "folder")
    want = outputs(tuned)
    for form in ("merged", "factors"):
        invoke("merge", model, tmp_path / "folder", "-o", tmp_path / f"{form}.onnx", "--form", form)
        found = onnx.load(tmp_path / f"{form}.onnx")
        assert found.graph.output[0].type.tensor_type.shape.dim[1].dim_value == NEW
        onnx.checker.check_model(found, full_check=True)
        np.testing.assert_allclose(sonnx.prepare(found).run([X])[0], want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(in_child(("run", found.SerializeToString(), {"x": X}))[0][0], want, rtol=0, atol=1e-5)


class Tuned(sonnx.SONNXModel):
    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)[0]
        loss = autograd.softmax_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_peft(kind: str, tmp_path: Path) -> None:
    """From PEFT's first values: 30 steps of AdamW; the losses, and what is trained, by a folder that PEFT reads."""
    model = exported(kind, True, tmp_path / "m.onnx")
    torch.manual_seed(2)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["first", "second"], modules_to_save=["head"])
    theirs: Any = get_peft_model(resized(kind), config)
    theirs.save_pretrained(tmp_path / "start")
    ours = Tuned(str(model))
    ours.load_adapter(load_adapter(tmp_path / "start", onnx.load(model)))
    ours.set_optimizer(opt.AdamW(lr=0.02))
    x, t = Tensor(data=X, requires_grad=False), Tensor(data=T, requires_grad=False)
    ours.compile([x], is_train=True, use_graph=True)
    rule = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.02)
    theirs.train()
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(theirs(torch.from_numpy(X)), torch.from_numpy(T))
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append((float(ours(x, t)[1].data.reshape(-1)[0]), float(loss.detach())))
    mine, their = np.array(losses).T
    assert mine[-1] < 0.8 * mine[0]
    np.testing.assert_allclose(mine, their, rtol=0, atol=1e-5)
    trained = ours.adapter()
    trained.save(tmp_path / "trained.safetensors")
    invoke("adapter", tmp_path / "trained.safetensors", "--model", model, "-o", tmp_path / "trained")
    again = PeftModel.from_pretrained(resized(kind), tmp_path / "trained").eval()
    np.testing.assert_allclose(outputs(again), outputs(theirs.eval()), rtol=0, atol=1e-4)


def test_a_network_with_the_old_layer_is_refused_by_peft(tmp_path: Path) -> None:
    """As an adapter of PEFT itself: the network must have the new layer first."""
    model = exported("linear", True, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, y=T)
    invoke("train", model, "--data", tmp_path / "d.npz", "--head", NEW, "--lora", 2, "-o", tmp_path / "a.safetensors")
    invoke("adapter", tmp_path / "a.safetensors", "--model", model, "-o", tmp_path / "folder")
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(network("linear", OLD), tmp_path / "folder")


def test_a_saved_layer_in_the_middle_stays_a_list(tmp_path: Path) -> None:
    """Only the last layer can have another number of outputs in a file; other modules are replaced in their size."""
    model = exported("linear", True, tmp_path / "m.onnx")
    config = LoraConfig(r=2, target_modules=["first"], modules_to_save=["second", "head"])
    get_peft_model(copy.deepcopy(resized("linear")), config).save_pretrained(tmp_path / "folder")
    found = read_peft(tmp_path / "folder", onnx.load(model))
    assert found.settings["head"] == NEW and len(found.values) == 4
    assert all(isinstance(c, LowRank) for c in found.changes.values())
