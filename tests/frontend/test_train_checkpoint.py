"""`sonnx train --checkpoint`: a training that was killed, stopped or damaged continues to the bit, or is refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa import opt
from singa._core.tensor import Tensor
from singa._onnx.model import SONNXModel
from singa._training.checkpoint import Checkpoint
from singa._training.fit import Position, fit
from singa.cli import main
from singa.cli._curves import write_plot
from singa.cli._train_setup import digest
from singa.device import default_device

F = np.float32
TEXT = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y)'
    "{ h = MatMul(x, w1) \n b = BatchNormalization(h, scale, bias, mean, var) \n r = Relu(b) \n d = Dropout(r, ratio, training)"
    "\n p = MatMul(d, w2) \n y = Add(p, b2) }"
)
STEPS = 4  # of an epoch: 14 samples in batches of 4


def model(seed: int = 0) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    made = parser.parse_model(TEXT)
    states = {
        "w1": rng.normal(size=(6, 8)), "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8),
        "w2": rng.normal(size=(8, 3)) * 0.3, "b2": np.zeros(3), "ratio": np.float32(0.4),
    }  # fmt: skip
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in states.items())
    made.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    return made


def fill(folder: Path) -> Path:
    onnx.save(model(), folder / "m.onnx")
    rng = np.random.default_rng(1)
    for name in ("data", "held", "other"):
        np.savez(folder / f"{name}.npz", x=rng.normal(size=(14, 6)).astype(F), y=rng.integers(0, 3, 14))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def train(folder: Path, *more: str, epochs: int = 3, data: str = "data") -> Result:
    fixed = [str(folder / "m.onnx"), "--data", str(folder / f"{data}.npz"), "--batch-size", "4", "--epochs", str(epochs)]
    return CliRunner().invoke(main, ["train", *fixed, *(a.replace("@", f"{folder}/") for a in more)])


def states(path: Path) -> dict[str, bytes]:
    return {t.name: numpy_helper.to_array(t).tobytes() for t in onnx.load(path).graph.initializer}


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """The process dies right after a number of checkpoints."""
    write, done = Checkpoint.write, []

    def dying(self: Checkpoint, place: Position) -> None:
        write(self, place)
        done.append(1)
        if len(done) == writes:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "write", dying)
        with pytest.raises(Killed):
            yield
    assert len(done) == writes


RUNS = [
    ("--optimizer", "sgd"), ("--optimizer", "sgd", "--momentum", "0", "--no-graph"), ("--optimizer", "adam"),
    ("--optimizer", "adam", "--no-graph", "--weight-decay", "0.01"), ("--optimizer", "rmsprop"), ("--optimizer", "adagrad"),
    ("--optimizer", "adamw", "--schedule", "cosine", "--warmup", "2", "--clip-norm", "0.5"), ("--device", "STRICT"),
    ("--optimizer", "adam", "--freeze", "w1", "--validation", "@held.npz", "--seed", "7"), ("--precision", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "every"), [(r, (None, 3)[i % 2]) for i, r in enumerate(RUNS)], ids=str)
def test_a_killed_training_continues_to_the_bit(folder: Path, run: tuple[str, ...], every: int | None) -> None:
    whole = train(folder, *run, "-o", "@whole.onnx", "--json")
    assert whole.exit_code == 0, whole.output
    flags = ["--checkpoint", "@run.ckpt", *(["--every", str(every)] if every else [])]
    for writes, resume in ((1, []), (1 if every else 2, ["--resume"])):
        with killed_after(writes):
            train(folder, *run, *flags, *resume)
    last = train(folder, *run, *flags, "--resume", "-o", "@resumed.onnx", "--json")
    assert last.exit_code == 0, last.output
    assert states(folder / "resumed.onnx") == states(folder / "whole.onnx")
    assert json.loads(last.stdout) == json.loads(whole.stdout)
    assert states(folder / "whole.onnx") != states(folder / "m.onnx")
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


def test_a_schedule_continues(folder: Path) -> None:
    """The optimizers of the API: hyperparameters that depend on the step."""
    stored = np.load(folder / "data.npz")
    x, y = stored["x"], stored["y"]

    class Net(SONNXModel):
        def train_one_batch(self, a: Tensor, t: Tensor) -> Any:
            from singa import autograd

            out = self.forward(a)[0]
            loss = autograd.softmax_cross_entropy(out, t)
            self.optimizer(loss)
            return out, loss

    def trained(graph: bool, first: int | None) -> tuple[Any, ...]:
        def begin() -> Any:
            default_device.SetRandSeed(3)
            net = Net(model())
            net.optimizer = opt.SGD(lr=opt.ExponentialDecay(0.1, 3, 0.5, True), momentum=opt.ExponentialDecay(0.9, 5, 0.9))
            net.train()
            net.graph(graph)
            return net, Checkpoint(folder / f"{graph}.ckpt", net, net.optimizer, default_device, {}, {})

        net, kept = begin()
        if first:
            fit(net, x, y, epochs=first, batch_size=4, reached=kept.write)
            net, kept = begin()
            default_device.SetRandSeed(99)
        start = kept.read(len(y), 4) if first else None
        history = fit(net, x, y, epochs=4, batch_size=4, start=start)
        every = {**net.get_states(), **net.optimizer.get_states(), "lr": net.optimizer.lr_value}
        return history.losses, history.epochs, history.weights, {n: np.asarray(t.data).tobytes() for n, t in every.items()}

    tape, recorded = ([trained(graph, first) for first in (None, 1, 3)] for graph in (False, True))
    assert tape[0] == tape[1] == tape[2] and recorded[0] == recorded[1] == recorded[2]
    assert tape[0][0] == pytest.approx(recorded[0][0], rel=1e-5)


def test_a_sigkill_leaves_a_checkpoint_that_continues(folder: Path) -> None:
    assert train(folder, "-o", "@whole.onnx").exit_code == 0
    program = (
        "import os, signal, sys\n"
        "from singa._training import checkpoint\n"
        "from singa.cli import main\n"
        "write, seen = checkpoint.Checkpoint.write, []\n"
        "def dying(self, place):\n"
        "    write(self, place); seen.append(1)\n"
        "    if len(seen) == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.Checkpoint.write = dying\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ["train", "m.onnx", "--data", "data.npz", "--batch-size", "4", "--epochs", "3", "--every", "1"]
    done = subprocess.run([sys.executable, "-c", program, *arguments, "--checkpoint", "run.ckpt"], cwd=folder, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert train(folder, "--checkpoint", "@run.ckpt", "--resume", "-o", "@resumed.onnx").exit_code == 0
    assert states(folder / "resumed.onnx") == states(folder / "whole.onnx")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("graph", [True, False])
def test_a_signal_in_the_middle_of_a_step_keeps_the_state_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, graph: bool
) -> None:
    more = () if graph else ("--no-graph",)
    assert train(folder, *more, "-o", "@whole.onnx", "--validation", "@held.npz").exit_code == 0
    (folder / "out.onnx").write_bytes(b"old")
    apply, calls = opt.Optimizer.apply, []

    def interrupted(*args: Any) -> None:
        apply(*args)
        calls.append(1)
        if len(calls) == 3:  # some parameters are updated, others are not
            signal.raise_signal(number)

    flags = ("--checkpoint", "@run.ckpt", "--validation", "@held.npz")
    with monkeypatch.context() as patch:
        patch.setattr(opt.Optimizer, "apply", interrupted)
        stopped = train(folder, *more, *flags, "-o", "@out.onnx", "--plot", "@loss.html")
    assert stopped.exit_code == 128 + number
    assert "stopped after step 1 of 12" in stopped.stderr and "--resume" in stopped.stderr and "run.ckpt" in stopped.stderr
    assert (folder / "out.onnx").read_bytes() == b"old" and "step 1" in (folder / "loss.html").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(folder, *more, *flags, "--resume", "-o", "@out.onnx").exit_code == 0
    assert states(folder / "out.onnx") == states(folder / "whole.onnx")


def test_a_second_ctrl_c_stops_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the update, which has five parameters."""
    apply, calls = opt.Optimizer.apply, []

    def interrupted(*args: Any) -> None:
        apply(*args)
        calls.append(1)
        if len(calls) in (8, 9):  # in the second step
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(opt.Optimizer, "apply", interrupted)
    stopped = train(folder, "--no-graph", "--checkpoint", "@run.ckpt", "--every", "1")
    assert stopped.exit_code == 130 and len(calls) == 10
    assert "stopped after step 1 of 12" in stopped.stderr and "run.ckpt holds step 1:" in stopped.stderr
    assert len(losses(folder / "run.ckpt")) == 1


def test_ctrl_c_without_a_checkpoint_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "out.onnx").write_bytes(b"old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opt.Optimizer, "step", interrupted)
    stopped = train(folder, "-o", "@out.onnx")
    assert stopped.exit_code == 130 and "out.onnx is not written" in stopped.stderr and "--checkpoint" in stopped.stderr
    assert (folder / "out.onnx").read_bytes() == b"old"


# --- refusals


@pytest.mark.parametrize(("flags", "told"), [
    ((), "-o OUT"), (("--plot", "@a.html"), "--checkpoint PATH"), (("-o", "@o.onnx", "--every", "3"), "--every needs"),
    (("-o", "@o.onnx", "--resume"), "--resume needs --checkpoint"), (("--checkpoint", "@m.onnx"), "must differ from"),
    (("--checkpoint", "@held.npz"), "exists"), (("-o", "@o.onnx", "--checkpoint", "@o.onnx"), "must differ from"),
    (("-o", "@held.npz", "--validation", "@held.npz"), "-o must differ from --validation"),
    (("-o", "@data.npz"), "-o must differ from --data"), (("-o", "@a.html", "--plot", "@a.html"), "--plot must differ from -o"),
    (("--checkpoint", "@missing/run.ckpt"), "does not exist"), (("--checkpoint", "@run.ckpt", "--every", "0"), "--every"),
    (("--checkpoint", "@run.ckpt", "--resume"), "there is no checkpoint"),
    (("--checkpoint", "@held.npz", "--resume"), "SX340"), (("-o", "@o.onnx", "--plot", "@missing/a.html"), "does not exist"),
], ids=lambda v: v if isinstance(v, str) else " ".join(v))  # fmt: skip
def test_arguments_that_lose_the_result_are_refused_at_the_start(folder: Path, flags: tuple[str, ...], told: str) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    refused = train(folder, *flags)
    assert refused.exit_code in (2, 3) and told in refused.stderr.replace("\n", " ") and "training:" not in refused.stderr
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


OTHER = [
    (("--optimizer", "adam"), "--optimizer was sgd, got adam"), (("--momentum", "0"), "sgd without momentum"),
    (("--batch-size", "5"), "--batch-size was 4, got 5"), (("--loss", "cross_entropy"), "--loss"), (("--seed", "3"), "--seed"),
    (("--freeze", "w1"), "--freeze was none, got w1"), (("--validation", "@held.npz"), "--validation"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "told"), OTHER, ids=[" ".join(f) for f, _ in OTHER])
def test_another_training_is_refused_by_name(folder: Path, flags: tuple[str, ...], told: str) -> None:
    assert train(folder, "--checkpoint", "@run.ckpt", epochs=1).exit_code == 0
    before = (folder / "run.ckpt").read_bytes()
    refused = train(folder, "--checkpoint", "@run.ckpt", "--resume", *flags, "--json")
    assert refused.exit_code == 3
    error = json.loads(refused.stdout)
    assert error["code"] == "SX381" and told in error["message"]
    assert (folder / "run.ckpt").read_bytes() == before


def test_strings_are_compared_by_value() -> None:
    one, same, other = (np.array([text], object) for text in ("".join(["a", "b"]), "".join(["a", "b"]), "b"))
    assert digest([one]) == digest([same]) != digest([other])


def test_other_data_and_another_model_are_refused_by_name(folder: Path) -> None:
    assert train(folder, "--checkpoint", "@run.ckpt", epochs=1).exit_code == 0
    resume = ("--checkpoint", "@run.ckpt", "--resume")
    other = train(folder, *resume, data="other")
    assert other.exit_code == 3 and "[SX381]" in other.stderr and "--data differs" in other.stderr
    changed = model()
    next(n for n in changed.graph.node if n.op_type == "Relu").op_type = "Tanh"
    onnx.save(changed, folder / "m.onnx")
    other = train(folder, *resume)
    assert other.exit_code == 3 and "MODEL differs" in other.stderr
    for t in changed.graph.initializer:
        if t.name == "b2":
            t.name = "b3"
    changed.graph.node[-1].input[1] = "b3"
    onnx.save(changed, folder / "m.onnx")
    other = train(folder, *resume)
    assert other.exit_code == 3 and "[SX381]" in other.stderr and "b3" in other.stderr
    onnx.save(model(seed=5), folder / "m.onnx")  # other weights: they are in the checkpoint
    assert train(folder, *resume, epochs=2).exit_code == 0


def test_epochs_and_rates_may_change(folder: Path) -> None:
    assert train(folder, "--checkpoint", "@run.ckpt", epochs=2).exit_code == 0
    more = train(folder, "--checkpoint", "@run.ckpt", "--resume", "--lr", "0.5", "--json", epochs=3)
    assert more.exit_code == 0 and len(json.loads(more.stdout)["losses"]) == 3 * STEPS
    assert "--lr was 0.01, is 0.5" in more.stderr
    fewer = train(folder, "--checkpoint", "@run.ckpt", "--resume", epochs=2)
    assert fewer.exit_code == 2 and "--epochs 2" in fewer.stderr
    done = train(folder, "--checkpoint", "@run.ckpt", "--resume", "-o", "@o.onnx", "--lr", "0.5", epochs=3)  # nothing is left
    assert done.exit_code == 0 and (folder / "o.onnx").exists()


def rewritten(path: Path, change: Any) -> None:
    """Write a checkpoint again with other arrays."""
    with zipfile.ZipFile(path) as pack:
        attributes = json.loads(pack.read("states_attr.json"))
        with pack.open("tensor_dict.npz") as inner:
            arrays = dict(np.load(inner))
    change(arrays, attributes)
    for n, a in arrays.items():
        attributes.setdefault(n, {"state_type": 1, "dtype": 106 if a.dtype == np.int32 else 6})["shape"] = list(a.shape)
    with zipfile.ZipFile(path, "w") as pack:
        with pack.open("tensor_dict.npz", "w") as inner:
            np.savez(inner, **arrays)
        pack.writestr("states_attr.json", json.dumps(attributes))


def settings(arrays: dict[str, Any], change: Any) -> None:
    run = json.loads(arrays["fit.run"].tobytes())
    change(run)
    arrays["fit.run"] = np.frombuffer(json.dumps(run).encode(), np.uint8)


DAMAGE = {
    "no settings": lambda a, t: a.pop("fit.run"),
    "settings that are not JSON": lambda a, t: a.update({"fit.run": np.frombuffer(b"[[[", np.uint8)}),
    "nested settings": lambda a, t: a.update({"fit.run": np.frombuffer(b"[" * 200_000, np.uint8)}),
    "settings of another form": lambda a, t: a.update({"fit.run": np.frombuffer(b"[1]", np.uint8)}),
    "a negative epoch": lambda a, t: settings(a, lambda r: r.update(epoch=-1)),
    "an epoch that is text": lambda a, t: settings(a, lambda r: r.update(epoch="1")),
    "a later batch": lambda a, t: settings(a, lambda r: r.update(batch=10**9)),
    "another generator": lambda a, t: settings(a, lambda r: r["rng"].update(bit_generator="MT19937")),
    "no generator": lambda a, t: settings(a, lambda r: r.update(rng={})),
    "fewer losses": lambda a, t: a.update({"fit.losses": a["fit.losses"][:-1]}),
    "an order of other samples": lambda a, t: a.update({"fit.order": a["fit.order"] + 1}),
    "no order": lambda a, t: a.pop("fit.order"),
    "a random state of another shape": lambda a, t: a.update({"fit.random_state": np.zeros(3, np.int64)}),
    "no states of the optimizer": lambda a, t: [a.pop(n) for n in list(a) if n.startswith("optimizer.")],
    "a state of the optimizer is missing": lambda a, t: a.pop("optimizer.moments.w1"),
    "another shape": lambda a, t: a.update({"optimizer.moments.w1": np.zeros((2, 2), F)}),
    "a state of no parameter": lambda a, t: a.update({"optimizer.moments.other": a["optimizer.moments.w1"]}),
}


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint in the middle of an epoch."""
    made = fill(tmp_path_factory.mktemp("part"))
    with killed_after(1):
        train(made, "--checkpoint", "@part.ckpt", "--every", "3")
    return made


def refused_checkpoint(folder: Path) -> str:
    refused = train(folder, "--checkpoint", "@damaged.ckpt", "--resume", "-o", "@o.onnx")
    assert refused.exit_code == 3 and not (folder / "o.onnx").exists(), refused.output
    return refused.stderr


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_refused(part: Path, how: str) -> None:
    (part / "damaged.ckpt").write_bytes((part / "part.ckpt").read_bytes())

    def damaged(arrays: dict[str, Any], attributes: dict[str, Any]) -> None:
        DAMAGE[how](arrays, attributes)
        for n in attributes.keys() - arrays.keys():
            del attributes[n]
        for n in arrays.keys() - attributes.keys():
            attributes[n] = {"state_type": 1, "dtype": 0}

    rewritten(part / "damaged.ckpt", damaged)
    told = refused_checkpoint(part)
    assert "[SX380]" in told or "[SX381]" in told


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.999])
def test_a_cut_checkpoint_is_refused(part: Path, kept: float) -> None:
    data = (part / "part.ckpt").read_bytes()
    (part / "damaged.ckpt").write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    assert "[SX340]" in refused_checkpoint(part)


# --- losses that are not finite


def losses(path: Path) -> list[float]:
    """Those in a checkpoint."""
    with zipfile.ZipFile(path) as pack, pack.open("tensor_dict.npz") as inner:
        return list(np.load(inner)["fit.losses"])


def test_a_loss_that_is_not_finite_ends_the_training_and_keeps_the_checkpoint(folder: Path) -> None:
    (folder / "out.onnx").write_bytes(b"old")
    stored = dict(np.load(folder / "data.npz"))
    stored["x"][np.random.default_rng(0).permutation(14)[-1]] = np.nan  # in the last batch
    np.savez(folder / "data.npz", **stored)
    step = STEPS
    failed = train(folder, "--checkpoint", "@run.ckpt", "--every", "1", "-o", "@out.onnx", "--json", "--plot", "@loss.html")
    error = json.loads(failed.stdout)
    assert failed.exit_code == 3 and error["code"] == "SX343" and f"step {step} " in error["message"]
    assert f"run.ckpt holds step {step - 1}" in error["hint"]
    assert len(losses(folder / "run.ckpt")) == step - 1 and np.isfinite(losses(folder / "run.ckpt")).all()
    assert (folder / "out.onnx").read_bytes() == b"old"
    assert "nan" not in (folder / "loss.html").read_text().lower()
    assert train(folder, "-o", "@out.onnx").exit_code == 3 and (folder / "out.onnx").read_bytes() == b"old"


def test_parameters_that_are_not_finite_are_not_kept(folder: Path) -> None:
    assert train(folder, "--checkpoint", "@run.ckpt", epochs=1).exit_code == 0
    good = (folder / "run.ckpt").read_bytes()
    failed = train(folder, "--checkpoint", "@run.ckpt", "--resume", "--every", "1", "--lr", "1e39", "--json")
    error = json.loads(failed.stdout)
    assert failed.exit_code == 3 and error["code"] == "SX343" and "after step 5" in error["message"] and "w1" in error["message"]
    assert (folder / "run.ckpt").read_bytes() == good
    assert train(folder, "--checkpoint", "@run.ckpt", "--resume", "-o", "@out.onnx").exit_code == 0


def test_a_failed_write_of_the_checkpoint_keeps_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(folder, "--checkpoint", "@run.ckpt", epochs=1).exit_code == 0
    good = (folder / "run.ckpt").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        failed = train(folder, "--checkpoint", "@run.ckpt", "--resume", epochs=2)
    assert failed.exit_code == 3 and "[SX351]" in failed.stderr
    assert (folder / "run.ckpt").read_bytes() == good and not [p for p in folder.iterdir() if p.name.startswith(".run")]


# --- the result


@pytest.mark.parametrize("suffix", [".html", ".png"])
@pytest.mark.parametrize("title", ["a$\\frac$b.onnx", "a\udcff.onnx", "<b>&\x1b[2J", "x" * 100_000])
def test_a_plot_of_a_model_of_any_name(title: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".png":
        pytest.importorskip("matplotlib")
    write_plot(tmp_path / f"p{suffix}", {"training": [(1, 2.0), (2, 1.0)]}, title)
    data = (tmp_path / f"p{suffix}").read_bytes()
    assert len(data) < 200_000 and b"\x1b[2J" not in data and b"<b>" not in data


def test_the_curves_are_drawn(folder: Path) -> None:
    done = train(folder, "-o", "@o.onnx", "--validation", "@held.npz", "--plot", "@loss.html")
    assert done.exit_code == 0
    page = (folder / "loss.html").read_text()
    assert page.count("<polyline") == 2 and "validation: 3 values" in page and "training: 12 values" in page
    rows = [r for r in done.stdout.splitlines() if "training" in r or "validation" in r]
    assert any("training" in r and any(b in r for b in "▁█_@") for r in rows)
    assert any("validation" in r and any(b in r for b in "▁█_@") for r in rows)


@pytest.mark.parametrize("sparse", [False, True])
def test_weights_outside_the_initializers_are_written(tmp_path: Path, sparse: bool) -> None:
    """Old exporters write weights as Constant nodes; a sparse initializer trains as well."""
    made = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 2] y) { y = MatMul(x, w) }'
    )
    weight = np.array([[1, 0], [0, 2]], F)
    if sparse:
        values, places = numpy_helper.from_array(np.array([1, 2], F), "w"), numpy_helper.from_array(np.array([0, 3]), "w_places")
        made.graph.sparse_initializer.add(values=values, indices=places, dims=[2, 2])
    else:
        made.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight, "any")))
    onnx.save(made, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((14, 2), F), y=np.zeros((14, 2), F))
    done = train(tmp_path, "-o", "@o.onnx", "--loss", "mse_loss")
    assert done.exit_code == 0, done.output
    after = SONNXModel(str(tmp_path / "o.onnx")).get_params()["w"].data
    assert not np.array_equal(after, weight)
    onnx.checker.check_model(onnx.load(tmp_path / "o.onnx"), full_check=True)


def test_the_model_is_not_read_again_after_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be gone after hours."""

    def deletes(*args: Any, **kwargs: Any) -> Any:
        (folder / "m.onnx").unlink(missing_ok=True)
        return fit(*args, **kwargs)

    monkeypatch.setattr("singa._training.fit.fit", deletes)
    assert train(folder, "-o", "@o.onnx").exit_code == 0
    assert states(folder / "o.onnx").keys() == {t.name for t in model().graph.initializer}
