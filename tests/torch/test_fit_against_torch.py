"""Accumulation, normalization over all workers, and data of PyTorch and Hugging Face, against PyTorch's own loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from singa import autograd, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa._training.fit import fit
from singa.data import ArrayLoader
from singa_backend.collectives import Communicator, LocalGroup
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(27, 3, 6, 6)).astype(F), RNG.integers(0, 4, 27)
graphs = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


def network(norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    norms = [torch.nn.BatchNorm2d(4)] if norm else []
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), *norms, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 4))


class Net(sonnx.SONNXModel):
    def __init__(self, net: torch.nn.Module, rule: Any) -> None:
        program = torch.onnx.export(
            net.train(), (torch.zeros(2, 3, 6, 6),), dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},), optimize=False,
            training=torch.onnx.TrainingMode.PRESERVE, verbose=False, input_names=["x"],
        )  # fmt: skip
        super().__init__(program.model_proto)
        self.optimizer = rule

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        out = self.forward(x)[0]
        loss = autograd.softmax_cross_entropy(out, labels)
        self.optimizer(loss)
        return out, loss


def parameters(net: Net) -> list[np.ndarray]:
    return [np.asarray(p.data) for p in net.get_params().values()]


def assert_equal(net: Net, theirs: torch.nn.Module, bound: float = 1e-5) -> None:
    there = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    ours = {n: np.asarray(p.data) for n, p in net.get_params().items()}
    assert there.keys() == ours.keys()
    for n, value in there.items():
        np.testing.assert_allclose(ours[n], value, atol=bound)


@graphs
@pytest.mark.parametrize("rule", ["sgd", "adamw", "clipped"])
def test_accumulation_is_that_of_a_loop_of_pytorch(rule: str, graph: bool) -> None:
    """loss / (samples of the group) summed, backward() on each micro-batch, one step(); 27 samples leave smaller groups."""
    theirs = network()
    ours: Any = opt.AdamW(0.01, weight_decay=0.01) if rule == "adamw" else opt.SGD(0.1, momentum=0.9)
    there: Any = (
        torch.optim.AdamW(theirs.parameters(), 0.01, weight_decay=0.01)
        if rule == "adamw"
        else torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    )
    ours.accumulate_gradients(3)
    if rule == "clipped":
        ours.clip_gradients(norm=0.5)
    net = Net(theirs, ours)
    net.graph(graph)
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS)), batch_size=4)
    history = net.fit(loader, epochs=3)
    losses = []
    for _ in range(3):
        batches = list(loader)
        for first in range(0, len(batches), 3):
            group = batches[first : first + 3]
            samples, summed = sum(len(t) for _, t in group), 0.0
            there.zero_grad()
            for x, t in group:
                loss = torch.nn.functional.cross_entropy(theirs(x), t, reduction="sum") / samples
                loss.backward()
                summed += float(loss.detach())
            if rule == "clipped":
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            there.step()
            losses.append(summed)
    np.testing.assert_allclose(history.losses, losses, atol=1e-5)
    assert_equal(net, theirs)


@graphs
def test_workers_normalize_as_pytorch_does_with_the_whole_batch(graph: bool) -> None:
    """PyTorch's SyncBatchNorm needs GPUs; it is defined as the BatchNorm of one process with all samples."""
    theirs = network(norm=True)
    sgd = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    group = LocalGroup(2)
    nets: list[Any] = [
        Net(theirs, opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=c, sync_batch_norm=True)) for c in group.ranks
    ]

    def work(comm: Communicator) -> list[float]:
        tape.training = False
        nets[comm.rank].graph(graph)
        return fit(nets[comm.rank], X, LABELS, epochs=2, batch_size=7, group=comm).losses

    found = group.run(work)
    loader, losses = ArrayLoader(X, LABELS, batch_size=7, shuffle=True), []
    for _ in range(2):
        for x, t in loader:
            sgd.zero_grad()
            loss = torch.nn.functional.cross_entropy(theirs.train()(torch.from_numpy(x.data)), torch.from_numpy(t.data))
            loss.backward()
            sgd.step()
            losses.append(float(loss.detach()))
    for net, own in zip(nets, found, strict=True):
        np.testing.assert_allclose(own, losses, atol=1e-5)
        assert_equal(net, theirs)


# --- data


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": torch.from_numpy(x), "labels": int(t)} for x, t in zip(X, LABELS, strict=True)])


def hugging_face(kind: str | None) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"x": datasets.Array3D((3, 6, 6), "float32"), "labels": datasets.Value("int64"), "text": datasets.Value("string")}
    )
    rows = datasets.Dataset.from_dict({"x": list(X), "labels": LABELS, "text": ["a"] * 27}, features=features)
    return rows.with_format(kind) if kind else rows


@pytest.mark.parametrize("source", ["tuples", "dicts", "stream", "grad", "numpy"])
def test_a_loader_of_pytorch_is_data(source: str) -> None:
    x, t = torch.from_numpy(X), torch.from_numpy(LABELS)
    data: Any = {
        "tuples": lambda: DataLoader(TensorDataset(x, t), batch_size=4),
        "dicts": lambda: DataLoader([{"labels": b, "x": a} for a, b in zip(x, t, strict=True)], batch_size=4),  # type: ignore[arg-type]
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "grad": lambda: [(x[i : i + 4].clone().requires_grad_(), t[i : i + 4]) for i in range(0, 27, 4)],
        "numpy": lambda: [(X[i : i + 4], LABELS[i : i + 4]) for i in range(0, 27, 4)],
    }[source]()
    net, other = Net(network(), opt.SGD(0.1)), Net(network(), opt.SGD(0.1))
    plain = ArrayLoader(X, LABELS, batch_size=4)
    assert net.fit(data, epochs=2).losses == other.fit(plain, epochs=2).losses
    assert net.evaluate(data) == other.evaluate(plain)
    np.testing.assert_array_equal(net.predict(data), other.predict(plain))


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_a_dataset_of_hugging_face_is_data(kind: str | None) -> None:
    rows = hugging_face(kind)
    net, other = Net(network(), opt.SGD(0.1)), Net(network(), opt.SGD(0.1))
    assert net.fit(rows, epochs=2, batch_size=4, seed=3).losses == other.fit(X, LABELS, epochs=2, batch_size=4, seed=3).losses
    np.testing.assert_array_equal(net.predict(rows, batch_size=4), other.predict(X, batch_size=4))
    assert net.evaluate(rows, batch_size=4) == other.evaluate(X, LABELS, batch_size=4)
    stream = rows.to_iterable_dataset().with_format("numpy")
    assert net.fit(stream, batch_size=4).losses == other.fit(ArrayLoader(X, LABELS, batch_size=4)).losses


def test_tensors_are_not_copied_and_bfloat16_keeps_its_bits() -> None:
    seen = []

    class Keeps(Net):
        def forward(self, *xs: Any, **kwargs: Any) -> Any:
            seen.append(xs[0])
            return super().forward(*xs, **kwargs)

    net = Keeps(network(), opt.SGD(0.1))
    x = torch.from_numpy(X[:4].copy())
    net.predict([(x,)])
    assert seen[-1].data.ctypes.data == x.data_ptr()
    half = x.to(torch.bfloat16)
    net.predict([(half,)])
    assert seen[-1].data.dtype.name == "bfloat16" and seen[-1].data.ctypes.data == half.data_ptr()
    np.testing.assert_array_equal(seen[-1].data.astype(F), half.float().numpy())


@pytest.mark.parametrize("place", ["meta", "sparse"])
def test_tensors_without_values_are_refused(place: str) -> None:
    x = torch.zeros(4, 3, 6, 6, device="meta") if place == "meta" else torch.zeros(4, 108).to_sparse()
    with pytest.raises(InvalidInput, match="must be dense and on the CPU or a GPU"):
        Net(network(), opt.SGD(0.1)).fit([(x, torch.zeros(4, dtype=torch.int64))])
