"""Training in several processes under mpiexec: sums of every dtype, and no death of a process that loses a training.

SONNX_FAULTS=all kills at twenty random moments (tox -e faults).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from singa.cli._workers import _environment, _mpiexec
from singa_backend.errors import MissingDependency

try:
    MPIEXEC = _mpiexec()
except MissingDependency:
    MPIEXEC = ""
pytestmark = pytest.mark.skipif(not MPIEXEC, reason="mpi4py and mpiexec are not installed: pip install 'sonnx[mpi]'")

F = np.float32
RANKS = Path(__file__).with_name("mpi_ranks.py")
LONGEST = 120.0
"""Seconds after which a job counts as hanging; it takes two."""

ENVIRONMENT = {n: v for n, v in os.environ.items() if not n.startswith(("PMI", "OMPI", "HYDRA"))} | {
    "OPENBLAS_NUM_THREADS": "1", "SONNX_NUM_THREADS": "1", "COLUMNS": "500",
}  # fmt: skip


def job(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [MPIEXEC, "-n", str(ranks), sys.executable, str(RANKS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("what", ["training", "operations"])
def test_ranks(what: str, ranks: int) -> None:
    done = job(ranks, what)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("how", "code", "told"), [
    ("kill", 9, ""),
    ("raise", 1, "a fault of this rank\nrank 1 of 3 ends the training: ZeroDivisionError"),
    ("exit", 1, "cannot end: rank 1 has exited"),
    ("return", 1, "cannot end: rank 1 has exited"),
    ("stop", 1, "made no progress in 2 s; waiting for rank 1"),
    ("sleep", 1, "made no progress in 2 s; waiting for rank 1"),
])  # fmt: skip
def test_a_rank_that_ends_or_is_stuck_ends_the_job(how: str, code: int, told: str) -> None:
    done = job(3, "ends", how)
    assert done.returncode == code and told in done.stderr


def test_the_example() -> None:
    program = Path(__file__).parents[1] / "examples" / "train_distributed.py"
    for ranks, more in ((1, ()), (2, ()), (2, ("--dist-option", "sparseTopK"))):
        start = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
        command = [*start, sys.executable, str(program), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr
        told = re.findall(r"(\d) processes, loss ([\d.]+) -> ([\d.]+), accuracy ([\d.]+)", done.stdout)
        assert len(told) == 1
        size, first, last, accuracy = map(float, told[0])
        assert size == ranks and last < 0.3 * first and accuracy > 0.9


# --- sonnx train --workers

TEXT = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y)'
    "{ h = MatMul(x, w1) \n b = BatchNormalization(h, scale, bias, mean, var) \n r = Relu(b) \n d = Dropout(r, ratio, training)"
    "\n p = MatMul(d, w2) \n y = Add(p, b2) }"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout and batch statistics, data, and the result of an unbroken training of two workers."""
    made = tmp_path_factory.mktemp("workers")
    rng = np.random.default_rng(0)
    model = parser.parse_model(TEXT)
    states = {
        "w1": rng.normal(size=(6, 8)), "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8),
        "w2": rng.normal(size=(8, 3)) * 0.3, "b2": np.zeros(3), "ratio": np.float32(0.4),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in states.items())
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    onnx.save(model, made / "m.onnx")
    np.savez(made / "data.npz", x=rng.normal(size=(22, 6)).astype(F), y=rng.integers(0, 3, 22))
    return made


UNBROKEN: dict[str, bytes] = {}


def unbroken(folder: Path, mode: str) -> bytes:
    if mode not in UNBROKEN:
        done = train(folder, folder / "whole.ckpt", "-o", f"{folder}/whole-{mode}.onnx", "--dist-option", mode)
        assert done.returncode == 0, done.stderr
        (folder / "whole.ckpt").unlink()
        UNBROKEN[mode] = (folder / f"whole-{mode}.onnx").read_bytes()
    return UNBROKEN[mode]


def arguments(folder: Path, checkpoint: Path, *more: str) -> list[str]:
    fixed = ["train", str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--batch-size", "4", "--epochs", "6"]
    return [*fixed, "--every", "1", "--checkpoint", str(checkpoint), *more]


def train(folder: Path, checkpoint: Path, *more: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "singa.cli", *arguments(folder, checkpoint, "--workers", str(workers), *more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)


def resumes(folder: Path, checkpoint: Path, mode: str) -> None:
    """A training that was cut continues to the bits of the unbroken one."""
    target = checkpoint.with_suffix(".onnx")
    resume = ["--resume"] * checkpoint.exists()
    done = train(folder, checkpoint, *resume, "-o", str(target), "--dist-option", mode)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == unbroken(folder, mode)


@pytest.mark.parametrize(("point", "number", "mode"), [
    ("reduce", "40", "plain"), ("wait", "55", "sparseTopK"), ("update", "30", "partialUpdate"), ("gather", "9", "half"),
    ("save", "7", "sparseThreshold"),
])  # fmt: skip
def test_a_rank_that_is_killed_leaves_a_checkpoint(point: str, number: str, mode: str, folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    tape = ["--no-graph"] * (point == "update")  # a graph does not call the optimizer
    done = job(2, "sonnx", point, number, *arguments(folder, checkpoint, "--dist-option", mode, *tape))
    assert done.returncode == 9 and checkpoint.exists()
    resumes(folder, checkpoint, mode)


def workers_of(checkpoint: Path) -> list[int]:
    """The processes of a training, without their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            own = entry.name.isdecimal() and os.fsencode(checkpoint) in (entry / "cmdline").read_bytes().split(b"\0")
            if own and b"PMI_RANK=" in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def moments() -> list[int]:
    return list(range(20 if os.environ.get("SONNX_FAULTS") == "all" else 2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes are found in /proc")
@pytest.mark.parametrize("seed", moments())
def test_a_kill_at_a_random_moment(seed: int, folder: Path, tmp_path: Path) -> None:
    """At any moment: the command ends with a message, and the training continues to the bit."""
    rng = random.Random(seed)
    mode = rng.choice(["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"])
    unbroken(folder, mode)
    checkpoint = tmp_path / "run.ckpt"
    command = [sys.executable, "-m", "singa.cli", *arguments(folder, checkpoint, "--workers", "2", "--dist-option", mode)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    if rng.random() < 0.8:  # during the training; otherwise at the start
        while not checkpoint.exists() and running.poll() is None:
            time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.5))
    victims = workers_of(checkpoint)
    for victim in rng.sample(victims, min(1, len(victims))):
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    _, told = running.communicate(timeout=LONGEST)
    assert not workers_of(checkpoint)
    assert running.returncode in (0, 4), told
    if running.returncode:
        assert "a worker died" in told and ("--resume" in told) == checkpoint.exists()
    resumes(folder, checkpoint, mode)


def test_ctrl_c_keeps_the_state_of_all_ranks(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    command = [sys.executable, "-m", "singa.cli", *arguments(folder, checkpoint, "--workers", "2")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while not checkpoint.exists() and running.poll() is None:
        time.sleep(0.002)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=LONGEST)
    assert running.returncode in (0, 130), told
    if running.returncode:
        assert told.count("continue with the same command and --resume") == 1
    resumes(folder, checkpoint, "plain")


def test_workers_equal_one_process(folder: Path, tmp_path: Path) -> None:
    """Without dropout and batch statistics, on batches that can be divided."""
    rng = np.random.default_rng(3)
    plain = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y) '
                               "{ h = MatMul(x, w1) \n r = Tanh(h) \n y = MatMul(r, w2) }")  # fmt: skip
    weights = {"w1": rng.normal(size=(6, 8)), "w2": rng.normal(size=(8, 3))}
    plain.graph.initializer.extend(numpy_helper.from_array(a.astype(F), n) for n, a in weights.items())
    onnx.save(plain, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 6)).astype(F), y=rng.integers(0, 3, 24))
    found = []
    for workers in (1, 2, 4):
        target = tmp_path / f"{workers}.onnx"
        command = [sys.executable, "-m", "singa.cli", "train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data.npz"),
                   "--batch-size", "8", "--epochs", "4", "--lr", "0.1", "-o", str(target), "--json",
                   "--workers", str(workers)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr
        losses = json.loads(done.stdout)["losses"]  # of rank 0 only, and of the whole batch
        found.append([np.array(losses), *(numpy_helper.to_array(t) for t in onnx.load(target).graph.initializer)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize(("more", "code", "told"), [
    (["--batch-size", "5"], 3, "batch_size must be a multiple of the number of workers, got 5 for 2"),
    (["--sparsity", "2", "--dist-option", "sparseTopK"], 3, "spars must be in (0, 1] for topK, got 2.0"),
    (["--dist-option", "gossip"], 2, "'gossip' is not one of"),
])  # fmt: skip
def test_arguments_that_are_refused(more: list[str], code: int, told: str, folder: Path, tmp_path: Path) -> None:
    done = train(folder, tmp_path / "run.ckpt", *more)
    assert done.returncode == code and told in done.stderr.replace("\n", " ")


def test_the_checkpoint_of_other_ranks_is_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    assert train(folder, checkpoint, "--epochs", "1").returncode == 0
    done = train(folder, checkpoint, "--resume", workers=1)
    assert done.returncode == 3 and "--workers was 2, got 1; --dist-option was plain, got none" in done.stderr
    done = train(folder, checkpoint, "--resume", "--dist-option", "half")
    assert done.returncode == 3 and "--dist-option was plain, got half" in done.stderr


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SONNX_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("singa_backend.machine.usable_cores", lambda: 7)
    given: Any = _environment(2)
    assert given["SONNX_NUM_THREADS"] == given["OMP_NUM_THREADS"] == "3"
    assert _environment(20)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _environment(2)["OMP_NUM_THREADS"] == "5" and "SONNX_NUM_THREADS" not in _environment(2)


def test_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingDependency, match="--workers needs mpiexec") as caught:
        _mpiexec()
    assert "sonnx[mpi]" in caught.value.hint
