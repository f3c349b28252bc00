"""`sonnx train`: --head, --keep-best, --keep, --metrics, --tensorboard, --data module:function, and all of them with --resume."""

from __future__ import annotations

import csv
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa import autograd, opt, sonnx, tensor
from singa._training.checkpoint import Checkpoint
from singa.cli import main
from singa.device import default_device

F = np.float32
TEXT = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y)'
    "{ h = MatMul(x, w1) \n b = BatchNormalization(h, scale, bias, mean, var) \n r = Relu(b) \n d = Dropout(r, ratio, training)"
    "\n p = MatMul(d, w2) \n y = Add(p, b2) }"
)
STEPS = 4  # of an epoch: 14 samples in batches of 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    made = parser.parse_model(TEXT)
    states = {
        "w1": rng.normal(size=(6, 8)), "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8),
        "w2": rng.normal(size=(8, 3)) * 0.3, "b2": np.zeros(3), "ratio": np.float32(0.4),
    }  # fmt: skip
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in states.items())
    made.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    onnx.save(made, tmp_path / "m.onnx")
    for name in ("data", "held", "other"):
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(size=(14, 6)).astype(F), y=rng.integers(0, 3, 14))
    return tmp_path


def train(
    folder: Path, *more: str, epochs: int = 3, data: str = "@data.npz", batch: tuple[str, ...] = ("--batch-size", "4")
) -> Result:
    given = ["train", "@m.onnx", "--data", data, *batch, "--epochs", str(epochs), *more]
    return CliRunner().invoke(main, [a.replace("@", f"{folder}/") for a in given])


def fine(done: Result) -> Result:
    assert done.exit_code == 0, done.output
    return done


def states(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def bits(path: Path) -> dict[str, bytes]:
    return {n: a.tobytes() for n, a in states(path).items()}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timeless(path: Path) -> list[dict[str, str]]:
    return [{n: v for n, v in row.items() if n != "samples_per_second"} for row in rows(path)]


class Killed(BaseException):
    """The process ends here."""


def killed_after(monkeypatch: pytest.MonkeyPatch, writes: int, *, before: bool = False) -> None:
    """The process dies right after, or right before, one of the checkpoints."""
    write, done = Checkpoint.write, []

    def dying(self: Checkpoint, place: Any) -> None:
        done.append(1)
        if before and len(done) == writes:
            raise Killed
        write(self, place)
        if len(done) == writes:
            raise Killed

    monkeypatch.setattr(Checkpoint, "write", dying)


def events(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars of a folder as a viewer shows them, read without tensorboardX: a new session removes what came later."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: list[tuple[int, str, float]] = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == SessionLog.START:
                found = [f for f in found if f[0] < event.step]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        assert at == len(data)
    return found


# --- --head -----------------------------------------------------------------------------------------------------------


def test_a_new_head_trains_on_more_classes(folder: Path) -> None:
    stored = dict(np.load(folder / "data.npz"))
    np.savez(folder / "five.npz", x=stored["x"], y=np.arange(14) % 5)
    done = fine(train(folder, "--head", "5", "--freeze", "*", "-o", "@o.onnx", data="@five.npz"))
    assert "new last layer: MatMul of 'p', 5 outputs in place of 3, from 8 values (w2, b2)" in done.stderr
    before, after = states(folder / "m.onnx"), states(folder / "o.onnx")
    assert after["w2"].shape == (8, 5) and after["b2"].shape == (5,)
    assert all(np.array_equal(before[n], after[n]) for n in ("w1", "scale", "bias"))  # --freeze '*' leaves the new head
    start = onnx.load(folder / "m.onnx")
    sonnx.replace_head(start, 5)
    assert not np.array_equal(after["w2"], numpy_helper.to_array(next(t for t in start.graph.initializer if t.name == "w2")))
    output = onnx.load(folder / "o.onnx").graph.output[0]
    assert [d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim] == ["n", 5]
    told = json.loads(fine(train(folder, "--head", "5", "-o", "@o.onnx", "--json", data="@five.npz")).stdout)["head"]
    assert told == {
        "node": "MatMul of 'p'",
        "weight": "w2",
        "bias": "b2",
        "features": 8,
        "before": 3,
        "outputs": 5,
        "activation": "",
        "at": "",
    }
    other = fine(train(folder, "--head", "5", "--seed", "1", "--lr", "0", "-o", "@p.onnx", data="@five.npz"))
    assert other.exit_code == 0 and not np.array_equal(states(folder / "p.onnx")["w2"], after["w2"])


def test_the_head_trains_as_a_program_trains_it(folder: Path) -> None:
    """The same model, replaced in Python, in the same batches."""
    fine(train(folder, "--head", "4", "--seed", "0", "-o", "@a.onnx"))
    proto = onnx.load(folder / "m.onnx")
    sonnx.replace_head(proto, 4, seed=0)
    onnx.save(proto, folder / "m.onnx")
    fine(train(folder, "--seed", "0", "-o", "@b.onnx"))
    assert bits(folder / "a.onnx") == bits(folder / "b.onnx")


def test_a_new_head_at_a_value_trains_as_a_program_trains_it(folder: Path) -> None:
    done = fine(train(folder, "--head", "4", "--at", "r", "--seed", "3", "-o", "@a.onnx"))
    assert "new last layer: Gemm_of_scores, 4 outputs at 'r', from 8 values (head.weight, head.bias)" in done.stderr
    proto = onnx.load(folder / "m.onnx")
    assert sonnx.replace_head(proto, 4, seed=3, at="r").at == "r"
    onnx.save(proto, folder / "m.onnx")
    fine(train(folder, "--seed", "3", "-o", "@b.onnx"))
    assert bits(folder / "a.onnx") == bits(folder / "b.onnx")
    assert not np.array_equal(states(folder / "a.onnx")["head.weight"], states(folder / "m.onnx")["head.weight"])


def test_a_training_with_a_cut_model_continues(folder: Path) -> None:
    run = ("--head", "4", "--at", "r", "--checkpoint", "@c.ckpt")
    fine(train(folder, *run, epochs=1))
    fine(train(folder, *run, "--resume", "-o", "@o.onnx"))
    fine(train(folder, "--head", "4", "--at", "r", "-o", "@p.onnx"))
    assert bits(folder / "o.onnx") == bits(folder / "p.onnx")
    assert train(folder, "--head", "4", "--at", "h", "--checkpoint", "@c.ckpt", "--resume").exit_code == 3


@pytest.mark.parametrize(("flags", "told"), [
    (("--at", "r"), "--at needs --head N"), (("--head", "4", "--at", "r", "--lora", "2"), "--at must be passed without --lora"),
])  # fmt: skip
def test_a_cut_needs_a_new_head_and_no_adapter(folder: Path, flags: tuple[str, ...], told: str) -> None:
    refused = train(folder, *flags, "-o", "@o.onnx")
    assert refused.exit_code == 2 and told in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("flags", "told"), [
    (("--head", "2"), "class numbers must be in [0, 2), as the output of the model, got 0 to 2"), (("--head", "0"), "--head"),
])  # fmt: skip
def test_targets_that_a_head_does_not_have_are_refused(folder: Path, flags: tuple[str, ...], told: str) -> None:
    refused = train(folder, *flags, "-o", "@o.onnx", "--metrics", "@run.csv")
    assert refused.exit_code in (2, 3) and told in refused.stderr and not (folder / "run.csv").exists()


def test_targets_that_the_model_does_not_have_are_refused_without_a_head(folder: Path) -> None:
    stored = dict(np.load(folder / "data.npz"))
    for y, told in ((np.arange(14), "--head 14"), (np.arange(14) - 1, "start at 0"), (np.eye(14, 5, dtype=F), "--head 5")):
        np.savez(folder / "wrong.npz", x=stored["x"], y=y)
        refused = train(folder, "-o", "@o.onnx", data="@wrong.npz")
        assert refused.exit_code == 3 and told in refused.stderr and "training:" not in refused.stderr
        refused = train(folder, "-o", "@o.onnx", "--validation", "@wrong.npz")
        assert refused.exit_code == 3 and "--validation" in refused.stderr


def test_a_head_that_is_not_found_is_refused(folder: Path) -> None:
    made = onnx.load(folder / "m.onnx")
    made.graph.output.append(onnx.helper.make_tensor_value_info("r", 1, ["n", 8]))
    onnx.save(made, folder / "m.onnx")
    refused = train(folder, "--head", "5", "-o", "@o.onnx", "--json")
    assert refused.exit_code == 3 and json.loads(refused.stdout)["code"] == "SX369" and "2 outputs" in refused.stdout


def test_a_softmax_in_front_of_a_softmax_is_told(folder: Path) -> None:
    made = onnx.load(folder / "m.onnx")
    made.graph.node[-1].output[0] = "s"
    made.graph.node.append(onnx.helper.make_node("Softmax", ["s"], ["y"]))
    onnx.save(made, folder / "m.onnx")
    for more in ((), ("--head", "4")):
        done = fine(train(folder, *more, "-o", "@o.onnx"))
        assert "applies a softmax to it once more" in done.stderr and "--loss cross_entropy" in done.stderr
    made.graph.node[-1].op_type = "LogSoftmax"  # of which a softmax is the same
    onnx.save(made, folder / "m.onnx")
    assert "once more" not in fine(train(folder, "-o", "@o.onnx")).stderr


# --- --keep-best, --keep ----------------------------------------------------------------------------------------------


def validated(folder: Path, kept: Path) -> tuple[dict[str, float], dict[str, bytes]]:
    """The validation of a checkpoint, computed by NumPy from the scores of its states, and the states."""
    net, held = sonnx.SONNXModel(str(folder / "m.onnx")), np.load(folder / "held.npz")
    net.load_states(kept)
    net.eval()
    scores = tensor.to_numpy(net.forward(tensor.from_numpy(held["x"]))[0]).astype(np.float64)
    logs = scores - scores.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    found = {"loss": -logs[np.arange(14), held["y"]].mean(), "accuracy": (scores.argmax(1) == held["y"]).mean()}
    return found, {n: np.asarray(t.data).tobytes() for n, t in net.get_states().items()}


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_epoch_is_written(folder: Path, metric: str) -> None:
    """It is that of the checkpoint with the best measurement, recomputed from each."""
    more = ("--keep-best", metric, "--checkpoint", "@run.ckpt", "--keep", "9", "-o", "@best.onnx", "--json")
    done = json.loads(fine(train(folder, "--validation", "@held.npz", "--lr", "0.6", *more, epochs=6)).stdout)
    found = [validated(folder, p) for p in (*sorted(folder.glob("run.step-*.ckpt")), folder / "run.ckpt")]
    each = [seen[metric] for seen, _ in found]
    wanted = int(np.argmin(each) if metric == "loss" else np.argmax(each)) + 1
    assert len(found) == 6 and wanted < 6 and done["best"]["epoch"] == wanted
    assert done["best"]["value"] == pytest.approx(each[wanted - 1], rel=1e-5)
    assert [seen[metric] for seen in done["validation"]] == pytest.approx(each, rel=1e-5)
    assert found[wanted - 1][1].items() <= bits(folder / "best.onnx").items()


def test_checkpoints_are_kept(folder: Path) -> None:
    run = ("--checkpoint", "@run.ckpt", "--every", "1", "--keep", "3")
    fine(train(folder, *run, epochs=1))
    assert sorted(p.name for p in folder.glob("*.ckpt")) == ["run.ckpt", "run.step-000002.ckpt", "run.step-000003.ckpt"]
    fine(train(folder, *run, "--resume", "-o", "@whole.onnx", epochs=2))
    names = ["run.ckpt", "run.step-000006.ckpt", "run.step-000007.ckpt"]
    assert sorted(p.name for p in folder.glob("*.ckpt")) == names
    # an earlier one continues: what was later is removed with the next checkpoint
    os.replace(folder / "run.step-000006.ckpt", folder / "run.ckpt")
    again = fine(train(folder, *run, "--resume", "-o", "@again.onnx", epochs=2))
    assert "at epoch 2, step 6" in again.stderr and bits(folder / "again.onnx") == bits(folder / "whole.onnx")
    assert sorted(p.name for p in folder.glob("*.ckpt")) == ["run.ckpt", "run.step-000006.ckpt", "run.step-000007.ckpt"]


def test_the_oldest_checkpoint_is_removed_after_the_newest_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("--checkpoint", "@run.ckpt", "--every", "1", "--keep", "2")
    fine(train(folder, *run, epochs=1))
    before = {p.name: p.read_bytes() for p in folder.glob("*.ckpt")}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("singa._training.state_files.zipfile.ZipFile", full)
        assert train(folder, *run, "--resume", epochs=2).exit_code == 3
    after = {p.name: p.read_bytes() for p in folder.glob("*.ckpt")}
    assert before.items() <= after.items()


def test_checkpoints_of_another_training_are_not_removed(folder: Path) -> None:
    (folder / "run.step-000004.ckpt").write_bytes(b"of another training")
    refused = train(folder, "--checkpoint", "@run.ckpt", "--keep", "2")
    assert refused.exit_code == 2 and "run.step-000004.ckpt exists" in refused.stderr
    fine(train(folder, "--checkpoint", "@run.ckpt"))
    assert (folder / "run.step-000004.ckpt").read_bytes() == b"of another training"


# --- --metrics, --tensorboard -----------------------------------------------------------------------------------------


def test_the_table_has_every_step_and_epoch(folder: Path) -> None:
    run = ("--validation", "@held.npz", "--optimizer", "adamw", "--schedule", "cosine", "--warmup", "2", "--lr", "0.1")
    done = fine(train(folder, *run, "--metrics", "@run.csv", "-o", "@o.onnx", "--json"))
    told, found = json.loads(done.stdout), rows(folder / "run.csv")
    steps, epochs = ([r for r in found if r["row"] == kind] for kind in ("step", "epoch"))
    assert [r["row"] for r in found] == [*["step"] * STEPS, "epoch"] * 3
    assert [float(r["loss"]) for r in steps] == told["losses"] and [int(r["step"]) for r in steps] == list(range(1, 13))
    assert [int(r["epoch"]) for r in steps] == [e for e in (1, 2, 3) for _ in range(STEPS)]
    assert [float(r["loss"]) for r in epochs] == pytest.approx(
        [np.average(told["losses"][i : i + 4], weights=[4, 4, 4, 2]) for i in (0, 4, 8)]
    )
    assert [{"loss": float(r["validation_loss"]), "accuracy": float(r["validation_accuracy"])} for r in epochs] == told[
        "validation"
    ]
    assert all(r["validation_loss"] == "" and float(r["samples_per_second"]) > 0 for r in steps)
    rates = [0.0, 0.05, *[0.05 * (1 + np.cos(np.pi * i / 10)) for i in range(10)]]
    assert [float(r["rate"]) for r in steps] == pytest.approx(rates, abs=1e-7)
    assert [float(r["accuracy"]) for r in epochs] == told["accuracy"]
    right = [round(float(r["accuracy"]) * n) for r, n in zip(steps, [4, 4, 4, 2] * 3, strict=True)]
    assert [sum(right[i : i + 4]) / 14 for i in (0, 4, 8)] == pytest.approx(told["accuracy"])


def test_the_accuracy_of_a_step_is_that_of_its_scores(folder: Path) -> None:
    """With a rate of 0 and without dropout, of the unchanged model in training mode."""
    made = onnx.load(folder / "m.onnx")
    kept = [n for n in made.graph.node if n.op_type != "Dropout"]
    next(n for n in kept if n.output[0] == "p").input[0] = "r"
    del made.graph.node[:]
    made.graph.node.extend(kept)
    onnx.save(made, folder / "m.onnx")
    done = fine(train(folder, "--lr", "0", "--momentum", "0", "-o", "@o.onnx", "--metrics", "@run.csv", epochs=1))
    assert "epoch 1: accuracy 0." in done.stdout  # without --validation too
    stored, order = np.load(folder / "data.npz"), np.random.default_rng(0).permutation(14)
    net = sonnx.SONNXModel(made)
    net.train()
    for i, row in enumerate(rows(folder / "run.csv")[:STEPS]):
        chosen = order[i * 4 : i * 4 + 4]
        scores = tensor.to_numpy(net.forward(tensor.from_numpy(stored["x"][chosen]))[0])
        assert float(row["accuracy"]) == (scores.argmax(1) == stored["y"][chosen]).mean()


def test_events_have_the_values_of_the_table(folder: Path) -> None:
    pytest.importorskip("tensorboardX")
    fine(train(folder, "--validation", "@held.npz", "--metrics", "@run.csv", "--tensorboard", "@runs/a", "-o", "@o.onnx"))
    wanted = []
    for row in rows(folder / "run.csv"):
        for name, value in row.items():
            if value and name not in ("row", "step", "epoch"):
                kind = "epoch" if row["row"] == "epoch" else "train"
                tag = name.replace("_", "/", 1) if name.startswith("validation") else f"{kind}/{name}"
                wanted.append((int(row["step"]), tag, float(F(value))))
    assert events(folder / "runs" / "a") == wanted and len(wanted) > 40


def test_a_file_of_another_training_is_refused(folder: Path) -> None:
    pytest.importorskip("tensorboardX")
    run = ("--metrics", "@run.csv", "--tensorboard", "@runs")
    fine(train(folder, *run, "-o", "@o.onnx", epochs=1))
    before = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for flags in (run[:2], run[2:]):
        refused = train(folder, *flags, "-o", "@o.onnx", "--json")
        assert refused.exit_code == 3 and json.loads(refused.stdout)["code"] == "SX395"
    fine(train(folder, "--checkpoint", "@run.ckpt", epochs=1))
    for flags in (run[:2], run[2:]):  # the checkpoint does not know them
        refused = train(folder, *flags, "--checkpoint", "@run.ckpt", "--resume", "--json", epochs=2)
        assert refused.exit_code == 3 and json.loads(refused.stdout)["code"] == "SX395"
    os.unlink(folder / "run.ckpt")
    assert {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    fine(train(folder, "--checkpoint", "@run.ckpt", "--metrics", "@b.csv", epochs=1))
    (folder / "b.csv").write_bytes((folder / "run.csv").read_bytes())  # as long, with other times
    refused = train(folder, "--checkpoint", "@run.ckpt", "--resume", "--metrics", "@b.csv", epochs=2)
    assert refused.exit_code == 3 and "SX395" in refused.stderr


def test_a_file_that_was_removed_begins_again(folder: Path) -> None:
    run = ("--checkpoint", "@run.ckpt", "--metrics", "@run.csv")
    fine(train(folder, *run, epochs=1))
    (folder / "run.csv").unlink()
    fine(train(folder, *run, "--resume", epochs=2))
    assert [r["step"] for r in rows(folder / "run.csv")] == ["5", "6", "7", "8", "8"]


def test_tensorboard_needs_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("tensorboardX")] + ["tensorboardX", "tensorboardX.proto"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    refused = train(folder, "--tensorboard", "@runs", "-o", "@o.onnx")
    assert refused.exit_code == 3 and "SX700" in refused.stderr and "sonnx[tensorboard]" in refused.stderr
    assert not (folder / "runs").exists()


# --- --data module:function -------------------------------------------------------------------------------------------

PROGRAM = """
    import numpy as np
    stored = np.load("data.npz")
    x, y = stored["x"], stored["y"]

    def arrays():
        return {"x": x, "y": y}

    def pair():
        return x, y

    def epochs(epoch):
        order = np.random.default_rng(epoch).permutation(14)
        for i in range(0, 14, 4):
            yield {"x": x[order[i:i + 4]], "y": y[order[i:i + 4]]}

    def listed():
        return [(x[i:i + 4], y[i:i + 4]) for i in range(0, 14, 4)]

    class Shuffled:  # as a DataLoader: each loop draws the next order
        def __init__(self):
            self.rng = np.random.default_rng(5)
        def __len__(self):
            return 4
        def __iter__(self):
            order = self.rng.permutation(14)
            for i in range(0, 14, 4):
                yield x[order[i:i + 4]], y[order[i:i + 4]]

    def loader():
        return Shuffled()

    def generator():
        yield from listed()

    def random(epoch):
        order = np.random.permutation(14)
        yield x[order[:4]], y[order[:4]]
        yield x[order[4:]], y[order[4:]]

    def wrong(epoch):
        yield x[:4], y[:4]
        raise KeyError("no such image")

    def fails():
        return {}["nothing"]

    def few():
        return [(x[:4],)]

    def empty():
        return []

    def number():
        return 3
"""


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "drawn_images.py").write_text(textwrap.dedent(PROGRAM))
    yield folder
    sys.modules.pop("drawn_images", None)


def test_functions_of_arrays_train_as_the_file(program: Path) -> None:
    fine(train(program, "-o", "@file.onnx"))
    for name in ("arrays", "pair"):
        fine(train(program, "-o", "@function.onnx", data=f"drawn_images:{name}"))
        assert bits(program / "function.onnx") == bits(program / "file.onnx")
    fine(train(program, "--checkpoint", "@run.ckpt", epochs=1))
    fine(
        train(program, "--checkpoint", "@run.ckpt", "--resume", "-o", "@again.onnx", data="drawn_images:arrays")
    )  # the same arrays
    assert bits(program / "again.onnx") == bits(program / "file.onnx")
    fine(train(program, "--validation", "drawn_images:listed", "-o", "@held.onnx", "--json"))


@pytest.mark.parametrize("name", ["epochs", "listed", "loader", "generator"])
def test_batches_train_as_a_loop_over_them(program: Path, name: str) -> None:
    """Written by hand, on the tape."""
    fine(train(program, "--no-graph", "--momentum", "0", "-o", "@o.onnx", data=f"drawn_images:{name}", batch=()))
    import drawn_images as images  # type: ignore[import-not-found]

    net = sonnx.SONNXModel(str(program / "m.onnx"))
    sgd = opt.SGD(lr=0.01)
    net.train()
    default_device.SetRandSeed(0)
    kept = images.loader()
    for epoch in range(3):
        source = {"epochs": lambda e=epoch: images.epochs(e), "loader": lambda: kept}.get(name, images.listed)()
        for batch in source:
            a, t = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            sgd(autograd.softmax_cross_entropy(net.forward(tensor.from_numpy(a))[0], tensor.from_numpy(t)))
    for n, value in net.get_states().items():
        assert states(program / "o.onnx")[n].tobytes() == np.asarray(value.data).tobytes(), n


@pytest.mark.parametrize("name", ["epochs", "listed", "loader", "generator"])
@pytest.mark.parametrize(("every", "writes"), [(1, 6), (2, 2), (None, 2)])
def test_batches_continue_to_the_bit(
    program: Path, name: str, every: int | None, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("--validation", "@held.npz", "--metrics")
    whole = fine(train(program, *run, "@whole.csv", "-o", "@whole.onnx", "--json", data=f"drawn_images:{name}", batch=()))
    more = ("--checkpoint", "@run.ckpt", *(("--every", str(every)) if every else ()))
    with monkeypatch.context() as patch:
        killed_after(patch, writes)
        with pytest.raises(Killed):
            train(program, *run, "@run.csv", *more, data=f"drawn_images:{name}", batch=())
    last = fine(
        train(program, *run, "@run.csv", *more, "--resume", "-o", "@o.onnx", "--json", data=f"drawn_images:{name}", batch=())
    )
    assert bits(program / "o.onnx") == bits(program / "whole.onnx") and json.loads(last.stdout) == json.loads(whole.stdout)
    assert timeless(program / "run.csv") == timeless(program / "whole.csv")


@pytest.mark.parametrize("writes", [2, 3])
def test_other_batches_are_refused(program: Path, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--checkpoint", "@run.ckpt", "--every", "1")
    with monkeypatch.context() as patch:
        killed_after(patch, writes)
        with pytest.raises(Killed):
            train(program, *more, data="drawn_images:random", batch=())
    refused = train(program, *more, "--resume", "--json", data="drawn_images:random", batch=())
    assert refused.exit_code == 3 and json.loads(refused.stdout)["code"] == "SX381" and "differ" in refused.stdout
    refused = train(program, *more, "--resume", data="drawn_images:listed", batch=())
    assert refused.exit_code == 3 and "--data" in refused.stderr


@pytest.mark.parametrize(("name", "told", "more"), [
    ("nothing", "has no function nothing", ()), ("few", "must return 2 arrays, x, y, got 1", ()),
    ("empty", "at least one batch", ()), ("number", "got a int", ()),
    ("listed", "--batch-size must be left out", ("--batch-size", "4")),
    ("generator", "--schedule cosine needs", ("--schedule", "cosine")),
])  # fmt: skip
def test_functions_without_batches_are_refused(program: Path, name: str, told: str, more: tuple[str, ...]) -> None:
    refused = train(program, *more, "-o", "@o.onnx", data=f"drawn_images:{name}", batch=())
    assert refused.exit_code in (2, 3) and told in refused.stderr.replace("\n", " "), refused.output


def test_a_module_that_does_not_exist_is_refused(program: Path) -> None:
    refused = train(program, "-o", "@o.onnx", data="imagse:epochs", batch=())
    assert refused.exit_code == 2 and "no module imagse" in refused.stderr.replace("\n", " ")
    (program / "drawn_images.py").write_text("import nowhere\n")
    refused = train(program, "-o", "@o.onnx", data="drawn_images:epochs", batch=())
    assert refused.exit_code == 3 and "import nowhere" in refused.stderr and "ModuleNotFoundError" in refused.stderr


@pytest.mark.parametrize(("name", "line"), [("wrong", 'raise KeyError("no such image")'), ("fails", 'return {}["nothing"]')])
def test_an_error_in_the_function_keeps_its_traceback(program: Path, name: str, line: str) -> None:
    refused = train(program, "--checkpoint", "@run.ckpt", "--every", "1", data=f"drawn_images:{name}", batch=())
    assert refused.exit_code == 3 and line in refused.stderr and "drawn_images.py" in refused.stderr and "SX331" in refused.stderr
    assert f"drawn_images:{name} raised KeyError" in refused.stderr and "_train_data.py" not in refused.stderr
    assert (program / "run.ckpt").exists() == (name == "wrong")


# --- all of them, with --resume ---------------------------------------------------------------------------------------

ALL = (
    "--head", "4", "--validation", "@held.npz", "--keep-best", "accuracy", "--keep", "3", "--optimizer", "adamw",
    "--schedule", "cosine", "--warmup", "2", "--clip-norm", "0.5", "--freeze", "w1", "--lr", "0.1",
)  # fmt: skip


def run(name: str) -> tuple[str, ...]:
    return ("--metrics", f"@{name}.csv", "--tensorboard", f"@{name}-events", "-o", f"@{name}.onnx")


def equal(folder: Path, first: str, second: str) -> None:
    assert bits(folder / f"{first}.onnx") == bits(folder / f"{second}.onnx")
    assert timeless(folder / f"{first}.csv") == timeless(folder / f"{second}.csv")
    found, wanted = ([e for e in events(folder / f"{n}-events") if not e[1].endswith("per_second")] for n in (first, second))
    assert found == wanted


def test_a_new_head_is_a_part_of_the_adapter(folder: Path) -> None:
    """The adapter alone, merged into the file, is the model that the same training writes."""
    given = ("--lora", "2", "--head", "5", "--lr", "0.1")
    adapter = fine(train(folder, *given, "-o", "@task.safetensors"))
    whole = fine(train(folder, *given, "-o", "@whole.onnx", "--json"))
    assert "new last layer" in adapter.stderr and "5 outputs in place of 3" in adapter.stderr
    fine(CliRunner().invoke(main, ["merge", *(str(folder / n) for n in ("m.onnx", "task.safetensors")), "-o",
                                   str(folder / "merged.onnx")]))  # fmt: skip
    assert bits(folder / "merged.onnx") == bits(folder / "whole.onnx")
    x = np.random.default_rng(1).normal(size=(7, 6)).astype(F)
    found, base = (sonnx.run_model(onnx.load(folder / n), {"x": x})[0] for n in ("whole.onnx", "m.onnx"))
    assert found.shape == (7, 5) and base.shape == (7, 3)
    trained = states(folder / "whole.onnx")
    assert trained["w2"].shape == (8, 5) and (states(folder / "m.onnx")["w1"] != trained["w1"]).any()
    document = json.loads(whole.stdout)
    assert document["trained"] == 2 * (6 + 8) + 8 * 5 + 5 and document["head"]["outputs"] == 5


KILLS = [
    ((), None, 2, True), (("--precision", "bf16"), 1, 5, True), (("--no-graph",), 1, 9, False), ((), 3, 2, False),
    (("--precision", "bf16"), 4, 2, True), (("--no-graph",), None, 1, False), (("--accumulate", "2"), None, 2, True),
    (("--accumulate", "3"), 1, 3, False), (("--lora", "2", "--accumulate", "2", "--lora-dropout", "0.2"), 1, 4, True),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "every", "writes", "before"), KILLS)
def test_a_killed_training_continues_with_all_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], every: int | None, writes: int, before: bool
) -> None:
    pytest.importorskip("tensorboardX")
    whole = fine(train(folder, *ALL[:6], *ALL[8:], *extra, *run("whole"), "--json"))
    more = (*ALL, *extra, "--checkpoint", "@run.ckpt", *(("--every", str(every)) if every else ()), *run("run"))
    with monkeypatch.context() as patch:
        killed_after(patch, writes, before=before)
        with pytest.raises(Killed):
            train(folder, *more)
    with monkeypatch.context() as patch:
        killed_after(patch, 1)
        with pytest.raises(Killed):
            train(folder, *more, "--resume")
    last = fine(train(folder, *more, "--resume", "--json"))
    equal(folder, "run", "whole")
    assert json.loads(last.stdout) == json.loads(whole.stdout)
    done = fine(train(folder, *more, "--resume", "--json"))  # nothing is left to do
    equal(folder, "run", "whole")
    assert json.loads(done.stdout) == json.loads(whole.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_continues_with_all_options(folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    pytest.importorskip("tensorboardX")
    fine(train(folder, *ALL[:6], *ALL[8:], *run("whole")))
    apply, calls = opt.Optimizer.apply, []

    def interrupted(*args: Any) -> None:
        apply(*args)
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)

    more = (*ALL, "--checkpoint", "@run.ckpt", *run("run"))
    with monkeypatch.context() as patch:
        patch.setattr(opt.Optimizer, "apply", interrupted)
        assert train(folder, *more).exit_code == 128 + number
    assert not (folder / "run.onnx").exists() and 1 <= len(rows(folder / "run.csv")) < 12
    fine(train(folder, *more, "--resume"))
    equal(folder, "run", "whole")


KILLER = """
import os, signal, sys
import tensorboardX.proto.event_pb2, tensorboardX.record_writer
import singa._training.checkpoint, singa._training.records, singa.autograd, singa.opt, singa.sonnx, singa.cli.train
from singa.cli import main

write, left = os.write, 0

def counted(real):
    def call(*args, **more):
        global left
        left -= 1
        if left == 0:
            if real is write and len(args[1]) > 1:
                real(args[0], args[1][:len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    return call

for name in ("write", "replace", "rename", "link", "unlink", "ftruncate", "fsync", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
for count in sys.argv[1].split(","):
    left = int(count)
    child = os.fork()
    if not child:
        main([*sys.argv[2:], *["--resume"] * os.path.exists("run.ckpt")])
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    if not os.path.exists("run.ckpt"):  # it starts again
        for path in ("run.csv", *(f"run-events/{n}" for n in (os.listdir("run-events") if os.path.exists("run-events") else ()))):
            if os.path.exists(path):
                os.remove(path)
"""


def test_a_sigkill_at_any_write_loses_nothing(folder: Path) -> None:
    """At operations on any file, in the middle of what is written."""
    pytest.importorskip("tensorboardX")
    fine(train(folder, *ALL[:6], *ALL[8:], *run("whole")))
    given = (*ALL, "--checkpoint", "@run.ckpt", "--every", "2", *run("run"))
    line = ["train", "m.onnx", "--data", "data.npz", "--batch-size", "4", "--epochs", "3", *(a.replace("@", "") for a in given)]
    counts = ",".join(map(str, np.random.default_rng(0).integers(5, 60, 9)))
    done = subprocess.run([sys.executable, "-c", KILLER, counts, *line], cwd=folder, timeout=240, capture_output=True, text=True,
                          check=False)  # fmt: skip
    codes = [line for line in done.stdout.splitlines() if line in ("0", str(-signal.SIGKILL))]
    assert len(codes) == 9 and codes.count(str(-signal.SIGKILL)) > 3, done.stderr[-3000:]
    fine(train(folder, *given, "--resume"))
    equal(folder, "run", "whole")
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []
