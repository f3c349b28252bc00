"""benchmarks/scaling.py: its formulas against messages that are simulated one by one, its bytes, and its report; no times."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.helpers.paths import PROJECT

from singa import autograd, layer, opt, tensor
from singa_backend.collectives import Communicator, LocalGroup

NAMES = ("scaling", "scaling_model", "scaling_rank")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import the modules as the command does: from their folder."""
    before = list(sys.path)
    sys.path.insert(0, str(PROJECT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path[:] = before


# --- times


class Wires:
    """Workers with a clock each: a message leaves when both of its workers are free, and occupies them until its end."""

    def __init__(self, workers: int, latency: float, bandwidth: float) -> None:
        self.clocks = [0.0] * workers
        self.latency, self.bandwidth = latency, bandwidth

    def send(self, messages: Sequence[tuple[int, int, int]]) -> None:
        """Send (from, to, bytes), all at once."""
        after = list(self.clocks)
        for source, target, size in messages:
            end = max(self.clocks[source], self.clocks[target]) + self.latency + size / self.bandwidth
            after[source], after[target] = max(after[source], end), max(after[target], end)
        self.clocks = after


def ring_reduced(wires: Wires, values: list[list[np.ndarray]]) -> None:
    """values[w][part]: each part goes round the ring and grows; then it goes round again."""
    size = len(values)
    for grows in (True, False):
        for i in range(size - 1):
            moves = [(w, (w + 1) % size, (w - i + (0 if grows else 1)) % size) for w in range(size)]
            sent = [values[w][part].copy() for w, _, part in moves]
            wires.send([(w, to, a.nbytes) for (w, to, _), a in zip(moves, sent, strict=True)])
            for (_, to, part), a in zip(moves, sent, strict=True):
                values[to][part] = values[to][part] + a if grows else a


def tree_reduced(wires: Wires, values: list[np.ndarray]) -> None:
    """Up: in round r every second of those that are left sends to the one before it; down: the other way round."""
    size, steps = len(values), []
    distance = 1
    while distance < size:
        steps.append([(w + distance, w) for w in range(0, size - distance, 2 * distance)])
        distance *= 2
    for pairs in steps:
        wires.send([(a, b, values[a].nbytes) for a, b in pairs])
        for a, b in pairs:
            values[b] = values[b] + values[a]
    for pairs in reversed(steps):
        wires.send([(b, a, values[b].nbytes) for a, b in pairs])
        for a, b in pairs:
            values[a] = values[b]


def ring_gathered(wires: Wires, have: list[dict[int, np.ndarray]]) -> None:
    size = len(have)
    for i in range(size - 1):
        moves = [(w, (w + 1) % size, (w - i) % size) for w in range(size)]
        wires.send([(w, to, have[w][part].nbytes) for w, to, part in moves])
        for w, to, part in moves:
            have[to][part] = have[w][part]


def tree_gathered(wires: Wires, have: list[dict[int, np.ndarray]]) -> None:
    """Each worker sends what it has to the one `distance` before it; at the end only what that lacks."""
    size, distance = len(have), 1
    while distance < size:
        moves = [(w, (w - distance) % size) for w in range(size)]
        news = [{p: a for p, a in have[w].items() if p not in have[to]} for w, to in moves]
        wires.send([(w, to, sum(a.nbytes for a in new.values())) for (w, to), new in zip(moves, news, strict=True)])
        for (_, to), new in zip(moves, news, strict=True):
            have[to].update(new)
        distance *= 2


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_collectives_take_the_time_of_their_messages(bench: Any, workers: int) -> None:
    net = bench.scaling_model.Network("n", 3e-6, 2e9)
    rng = np.random.default_rng(workers)
    parts = rng.integers(0, 9, (workers, workers, 6)).astype(float)
    whole = parts.reshape(workers, -1)
    size = whole[0].nbytes
    found = {}

    wires = Wires(workers, net.latency, net.bandwidth)
    cut = [list(p) for p in parts]
    ring_reduced(wires, cut)
    assert all(np.array_equal(np.concatenate(c), whole.sum(0)) for c in cut)
    found["all-reduce", "ring"] = max(wires.clocks)

    wires = Wires(workers, net.latency, net.bandwidth)
    flat = list(whole)
    tree_reduced(wires, flat)
    assert all(np.array_equal(f, whole.sum(0)) for f in flat)
    found["all-reduce", "tree"] = max(wires.clocks)

    gathers: dict[str, Callable[[Wires, list[dict[int, np.ndarray]]], None]] = {"ring": ring_gathered, "tree": tree_gathered}
    for name, gather in gathers.items():
        wires = Wires(workers, net.latency, net.bandwidth)
        have = [{w: whole[w]} for w in range(workers)]
        gather(wires, have)
        assert all(len(h) == workers for h in have)
        found["all-gather", name] = max(wires.clocks)

    for kind, seconds in found.items():
        assert bench.scaling_model.COLLECTIVES[kind](workers, size, net) == pytest.approx(seconds), kind


def test_overlap_is_a_schedule_of_buckets(bench: Any) -> None:
    """Two workers, 1 s for 4 elements: a step of 12 s, its forward pass 2 s, its backward pass 8 s; the update is the rest."""
    sm = bench.scaling_model
    net, work = sm.Network("n", 0.0, 16.0), sm.Work(10.0, 12.0, 2 / 12, 8 / 12, 0.5)

    def seconds(mode: str, full: list[int], overlap: bool, share: float = 0.5) -> float:
        return float(sm.step_time(mode, full, 2, net, "ring", work, overlap, share))

    assert seconds("plain", [4, 8], False) == pytest.approx(12 + 1 + 2)
    assert seconds("plain", [4, 8], True) == pytest.approx(12 + 2)  # the first is sent within the backward pass
    assert seconds("plain", [24, 8], True) == pytest.approx(12 + 6 + 2 - 4)  # it ends 2 s after the backward pass
    assert seconds("half", [4, 8], False) == pytest.approx(12 + 1.5)
    assert seconds("partialUpdate", [4, 8], True) == pytest.approx(12 + 1.5)  # a bucket of 6, after the update
    assert seconds("sparseTopK", [4, 8], False) == pytest.approx(12 + 3 + 3)  # 48 bytes from the other; 6 values of 0.5 s
    assert sm.efficiency("plain", [4, 8], 2, net, "ring", work, False) == pytest.approx(10 / 15)


def test_where_a_mode_stops(bench: Any) -> None:
    stops = bench.scaling_model.stops
    assert stops([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]) == 256
    assert stops([0.9, 0.4, 0.6, 0.4, 0.3, 0.2, 0.1, 0.0]) == 64 and stops([0.4] * 8) == 8 and stops([0.5] * 8) is None


def test_a_network_is_fitted(bench: Any) -> None:
    sm = bench.scaling_model
    net = sm.Network("n", 7e-6, 3e9)
    small, large = (sm.ring_all_reduce(2, size, net) for size in (0, 1 << 24))
    assert sm.fitted(small, large, 1 << 24) == pytest.approx((7e-6, 3e9))


# --- bytes


def trained(comm: Communicator, mode: str, threshold: int, steps: int) -> tuple[list[int], list[int], list[int]]:
    """The bytes of each step, the sizes of the gradients, and how many values reach the bound of 0.01, without residuals."""
    autograd.training = True
    rng = np.random.default_rng(comm.rank)
    weights = [
        tensor.Tensor(data=np.random.default_rng(i).standard_normal(s).astype(np.float32), name=f"w{i}", stores_grad=True)
        for i, s in enumerate([(7, 11), (11, 3), (3, 40), (40, 2)])
    ]
    dist = opt.DistOpt(opt.SGD(lr=0.01), communicator=comm)
    calls: dict[str, Callable[[Any], None]] = {
        "plain": lambda y: dist.backward_and_update(y, threshold),
        "half": lambda y: dist.backward_and_update_half(y, threshold),
        "partialUpdate": lambda y: dist.backward_and_partial_update(y, threshold),
        "sparseTopK": lambda y: dist.backward_and_sparse_update(y, threshold, spars=0.15, topK=True, corr=False),
        "sparseThreshold": lambda y: dist.backward_and_sparse_update(y, threshold, spars=0.01, corr=False),
    }
    sent, sizes, chosen = [], [], []
    for _ in range(steps):

        def loss(x: np.ndarray) -> Any:
            y = tensor.Tensor(data=x, requires_grad=False)
            for w in weights:
                y = autograd.tanh(autograd.matmul(y, w))
            return autograd.reduce_mean(y)

        x = rng.standard_normal((5, 7)).astype(np.float32)
        pairs = list(autograd.backward(loss(x)))
        sizes = [p.size() for p, _ in pairs]
        chosen.append(sum(int((np.abs(g.data) >= np.float32(0.01)).sum()) for _, g in pairs))
        before = comm.sent
        calls[mode](loss(x))
        sent.append(comm.sent - before)
    return sent, sizes, chosen


@pytest.mark.parametrize("threshold", [0, 60, 80, 10**6])
@pytest.mark.parametrize("mode", ["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"])
def test_bytes_are_those_of_the_formula(bench: Any, mode: str, threshold: int) -> None:
    sm = bench.scaling_model
    try:
        for sent, sizes, chosen in LocalGroup(2).run(lambda comm: trained(comm, mode, threshold, 6)):
            assert sizes == [80, 120, 33, 77]
            full = sm.buckets(sizes, threshold)
            assert full == {0: sizes, 60: [80, 120, 77, 33], 80: [120, 113, 77], 10**6: [310]}[threshold]
            assert sent[1:] == [sm.bytes_of(mode, full, i, 0.15, chosen[i]) for i in range(1, 6)]
    finally:
        autograd.training = False


@pytest.fixture
def tiny(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Tiny(bench.scaling_rank.Trained):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layer.Linear(5), layer.Linear(10)

        def forward(self, x: Any) -> Any:
            return self.b(autograd.relu(self.a(x)))

    monkeypatch.setitem(bench.scaling_rank.NETS, "mlp", Tiny)
    yield bench
    autograd.training = False


def test_what_a_rank_counts(tiny: Any) -> None:
    job = {"net": "mlp", "batch": 3, "steps": 3, "modes": tiny.scaling_model.MODES, "spars": {"sparseThreshold": 0.02}}
    for found in LocalGroup(2).run(lambda comm: tiny.scaling_rank.counted(comm, job)):
        assert sorted(found["sizes"]) == [5, 10, 50, 3920]
        rows = tiny.scaling.formula(found)
        assert [r["mode"] for r in rows] == list(tiny.scaling_model.MODES)
        for row in rows:
            assert row["sent"] == row["formula"] and len(row["sent"]) == 3, row["mode"]
        bound = found["modes"]["sparseThreshold"]
        assert all(0 < n < 3985 for n in bound["chosen"]) and bound["sent"][0] > rows[-1]["formula"][0] - 8 * 3985


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_rank_times(tiny: Any, graph: bool) -> None:
    """Only the form of the result, and that the operations of the communicator are seen."""
    settings = {"net": "mlp", "batch": 3, "steps": 2, "warm": 3, "graph": graph}

    def work(comm: Communicator, exchange: bool) -> Any:
        return tiny.scaling_rank.timed(comm, {**settings, "exchange": exchange, "modes": ["plain", "sparseTopK"][: 1 + exchange]})

    for exchange in (True, False):
        for found in LocalGroup(2).run(lambda comm, e=exchange: work(comm, e)):
            assert set(found) == ({"plain", "sparseTopK"} if exchange else {"plain"})
            for row in found.values():
                assert set(row) == {"step", "cpu", "started", "waited"} and row["step"] > 0
                assert (row["started"] > 0) == (row["waited"] > 0) == exchange
    (found,) = LocalGroup(1).run(lambda comm: tiny.scaling_rank.phased(comm, settings))
    assert all(found[k] > 0 for k in ("forward", "backward", "update", "value"))
    (found,) = LocalGroup(1).run(lambda comm: tiny.scaling_rank.linked(comm, {"sizes": [4, 400], "repeats": 1}))
    assert set(found["seconds"]) == {"4", "400"}


# --- the report


@pytest.fixture
def document(bench: Any) -> Any:
    """A report of made figures: a step of one rank takes 1 s, of two 1.25 s in every mode, of four 3 s."""
    sizes = [2_000_000, 3_000_000, 500_000]
    full = bench.scaling_model.buckets(sizes)
    modes = {}
    for mode in bench.scaling_model.MODES:
        spars = 0.01 if mode == "sparseThreshold" else 0.05
        sent = [bench.scaling_model.bytes_of(mode, full, i, spars, 1000) for i in range(5)]
        modes[mode] = {"spars": spars, "sent": [sent[0] + 512, *sent[1:]], "chosen": [1000] * 5}
    times = []
    for graph in (False, True):
        for ranks, exchange in bench.scaling.TURNS:
            for mode in bench.scaling_model.MODES if exchange and ranks < 4 and not graph else ("plain",):
                for i in range(3):
                    step = {1: 1.0, 2: 1.25, 4: 3.0}[ranks] * (1 + i)  # a machine that slows down
                    row = {"step": step, "cpu": 1.0, "started": 0.05 * step, "waited": 0.1 * step}
                    times.append({"round": i, "graph": graph, "ranks": ranks, "exchange": exchange, "mode": mode, **row})
    phases = {"forward": 0.2, "backward": 0.6, "update": 0.2, "value": 1e-9}
    net = {"size": 64, "batch": 8, "bytes": {"sizes": sizes, "modes": modes}, "phases": phases, "times": times}
    made = {"machine": "a machine", "load": 0.1, "load_after": 1.0, "rounds": 3, "steps": 4, "nets": {"resnet18": net}}
    made["link"] = {"seconds": {"4": 1e-5, "16777216": 0.01}}
    made["model"] = bench.scaling.modelled(made)
    return made


def test_the_report_shows_the_figures(bench: Any, document: Any) -> None:
    page = bench.scaling.page(document)
    lines = page.splitlines()
    assert "| ResNet-18 | plain | 2 | 22,000,000 | 22,000,000 | 1.000 | 4 of 4 |" in lines
    assert "| ResNet-18 | partialUpdate | 2 | 11,000,000 | 11,000,000 | 0.500 | 4 of 4 |" in lines
    assert "| ResNet-18 | tape | 2 | yes | 2.500 (1.250-3.750) | 1.000 | 6.40 | 1.60 (1.60-1.60) | 2.00 | 5.0% | 10.0% |" in lines
    assert "* ResNet-18, tape: 2 ranks do 1.60 times the samples per second of one (goal 1.5: reached); 2 processes" in page
    assert "latency 5 us, bandwidth 1.68 GB/s" in page
    for turn in document["nets"]["resnet18"]["times"]:
        turn["step"] *= 1.1 if turn["ranks"] == 2 else 1.0
    assert "2 ranks do 1.45 times the samples per second of one (goal 1.5: NOT reached)" in bench.scaling.page(document)


def test_the_report_has_every_row_of_the_model(bench: Any, document: Any) -> None:
    """The efficiency of a figure of the table, computed by hand: 46 ms of exchange and 1 ms for each of 14 messages."""
    rows = {(r["worker"], r["network"].split(",")[0], r["mode"]): r["efficiency"] for r in document["model"]}
    assert len(rows) == len(document["model"]) == 2 * 4 * 5
    plain = rows["thread", "Ethernet 10 Gbit/s", "plain"]
    seconds = 2 * 7 / 8 * 22e6 / 1.25e9 + 2 * 14 * 50e-6
    assert plain["ring"][0] == pytest.approx(1 / (1 + seconds), abs=1e-4)
    assert plain["ring, overlap"][0] > plain["ring"][0]
    assert all(0 < e <= 1 for efficiency in rows.values() for curve in efficiency.values() for e in curve)
    page = bench.scaling.page(document)
    assert page.count("| InfiniBand 400 Gbit/s, 2 us |") == 10 and page.count("\n### ") == 2


def test_the_files_of_a_report(bench: Any, document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.scaling.save(document, tmp_path)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(files) == {f"benchmark-scaling.{kind}" for kind in ("json", "md", "svg")}
    assert json.loads(files["benchmark-scaling.json"]) == document
    root = ElementTree.fromstring(files["benchmark-scaling.svg"])
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2 * 4 * (3 + 2 * 5)
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    points = [tuple(map(float, p.split(","))) for e in lines for p in e.attrib["points"].split()]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)

    again = tmp_path / "again"
    again.mkdir()
    arguments = ["scaling.py", "--again", str(tmp_path / "benchmark-scaling.json"), "--report", str(again)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench.scaling.main() == 0
    assert {p.name: p.read_bytes() for p in again.iterdir()} == files
    document["nets"]["resnet18"]["bytes"]["modes"]["half"]["sent"][2] += 4
    bench.scaling.save(document, tmp_path)
    assert bench.scaling.main() == 1


def test_wrong_options_are_refused(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--size", "16"), ("--rounds", "0"), ("--batch", "0"), ("--steps", "-1"), ("--nets", "vgg")):
        monkeypatch.setattr(sys, "argv", ["scaling.py", option, value])
        with pytest.raises(SystemExit):
            bench.scaling.main()
        assert option in capsys.readouterr().err
