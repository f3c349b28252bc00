"""Training in several processes under mpiexec: sums of every dtype, and no death of a process that loses a training.

SONNX_FAULTS=all kills at twenty random moments (tox -e faults).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from tests.helpers.paths import HELPERS, MPIEXEC, PROJECT

from singa.cli._workers import _environment, _judged, check_launcher
from singa_backend.collectives.local_job import LocalJob, use_shared_memory
from singa_backend.errors import MissingDependency
from singa_backend.io.processes import ENDED, Lifeline

pytestmark = pytest.mark.skipif(not MPIEXEC, reason="mpi4py and mpiexec are not installed: pip install 'sonnx[mpi]'")

F = np.float32
RANKS = HELPERS / "mpi_ranks.py"
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


@pytest.mark.parametrize(("how", "told"), [("imported", "the start of rank 0 made no progress in 2 s"), ("not", "Timeout")])
def test_a_rank_that_ends_before_the_start_ends_the_job(how: str, told: str) -> None:
    done = job(2, "before", how)
    assert done.returncode == 1 and told in done.stderr and "a fault of this rank" in done.stderr


def test_the_end_of_a_rank_does_not_end_the_work_of_another() -> None:
    done = job(2, "late")
    assert done.returncode == 0 and done.stdout == "saved\n"
    assert "rank 1 has ended, and waits for the end of the other ranks" in done.stderr


@pytest.mark.parametrize("what", ["several", "unfinished", "forked"])
def test_programs_end(what: str) -> None:
    done = job(2, what)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("what", ["size", "dtype", "kind", "root"])
def test_ranks_with_different_operations_are_told(what: str) -> None:
    done = job(2, "different", what)
    assert "AssertionError" not in done.stderr and "TimeoutExpired" not in done.stderr
    assert done.returncode in (0, 1), done.stderr[-3000:]


def test_the_launcher_of_another_mpi_is_refused() -> None:
    """Each process would train alone, and write the same files."""
    environment = {**ENVIRONMENT, "OMPI_COMM_WORLD_SIZE": "2"}
    command = [sys.executable, str(RANKS), "operations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment, check=False)
    assert done.returncode == 1 and "has started 2 processes, but the MPI library of mpi4py sees 1" in done.stderr


def test_the_example() -> None:
    program = PROJECT / "examples" / "train_distributed.py"
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


UNBROKEN: dict[tuple[str, ...], bytes] = {}


def unbroken(folder: Path, *mode: str) -> bytes:
    if mode not in UNBROKEN:
        target = folder / f"whole-{len(UNBROKEN)}.onnx"
        done = train(folder, folder / "whole.ckpt", "-o", str(target), "--dist-option", *mode)
        assert done.returncode == 0, done.stderr
        (folder / "whole.ckpt").unlink()
        UNBROKEN[mode] = target.read_bytes()
    return UNBROKEN[mode]


def arguments(folder: Path, checkpoint: Path, *more: str) -> list[str]:
    fixed = ["train", str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--batch-size", "4", "--epochs", "6"]
    return [*fixed, "--every", "1", "--checkpoint", str(checkpoint), *more]


def train(folder: Path, checkpoint: Path, *more: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "singa.cli", *arguments(folder, checkpoint, "--workers", str(workers), *more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)


def resumes(folder: Path, checkpoint: Path, *mode: str) -> None:
    """A training that was cut continues to the bits of the unbroken one."""
    target = checkpoint.with_suffix(".onnx")
    resume = ["--resume"] * checkpoint.exists()
    done = train(folder, checkpoint, *resume, "-o", str(target), "--dist-option", *mode)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == unbroken(folder, *mode)


ALL = os.environ.get("SONNX_FAULTS") == "all"
"""Whether every kill and way is tried (`tox -e faults`), or one of each kind."""

KILLS = [
    ("save", "7", "sparseThreshold"), ("update", "30", "partialUpdate"),
    ("reduce", "40", "plain"), ("wait", "55", "sparseTopK"), ("gather", "9", "half"),
]  # fmt: skip
"""Where a rank is killed: at which call of an operation."""


@pytest.mark.parametrize(("point", "number", "mode"), KILLS if ALL else KILLS[:1])
def test_a_rank_that_is_killed_leaves_a_checkpoint(point: str, number: str, mode: str, folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    tape = ["--no-graph"] * (point == "update")  # a graph does not call the optimizer
    done = job(2, "sonnx", point, number, *arguments(folder, checkpoint, "--dist-option", mode, *tape))
    assert done.returncode == 9 and checkpoint.exists()
    resumes(folder, checkpoint, mode, *tape)


def test_a_rank_that_is_killed_between_updates_leaves_the_last_one(folder: Path, tmp_path: Path) -> None:
    """With all options together: accumulation, statistics of all workers, batches that are shared unequally."""
    more = ("plain", "--batch-size", "5", "--accumulate", "2", "--sync-batch-norm", "--clip-norm", "1", "--optimizer", "adamw")
    checkpoint = tmp_path / "run.ckpt"
    done = job(2, "sonnx", "wait", "60", *arguments(folder, checkpoint, "--dist-option", *more))
    assert done.returncode == 9 and checkpoint.exists()
    resumes(folder, checkpoint, *more)


BATCHES = """
import numpy as np
stored = np.load(PATH)
def epochs(epoch):
    order = np.random.default_rng(epoch).permutation(22)
    return [{"x": stored["x"][order[i:i + 4]], "y": stored["y"][order[i:i + 4]]} for i in range(0, 22, 4)]
"""


@pytest.mark.parametrize("batches", [False, True] if ALL else [True])
def test_all_options_continue_with_workers(batches: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed while it writes a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_in_order.py").write_text(BATCHES.replace("PATH", repr(str(folder / "data.npz"))))

    def given(name: str, *more: str) -> list[str]:
        line = arguments(folder, tmp_path / f"{name}.ckpt")
        if batches:
            at = line.index("--data")
            line[at : at + 4] = ["--data", "rows_in_order:epochs"]
        options = ["--head", "4", "--validation", str(folder / "data.npz"), "--keep-best", "loss", "--keep", "2", "--lr", "0.3"]
        files = ["--metrics", f"{name}.csv", *(["--tensorboard", f"{name}-events"] if find_spec("tensorboardX") else [])]
        return [*line, *options, *files, "-o", f"{name}.onnx", *more]

    def trained(name: str, *more: str) -> None:
        command = [sys.executable, "-m", "singa.cli", *given(name, "--workers", "2", *more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr

    def table(name: str) -> list[str]:
        return [line.rpartition(",")[0] for line in Path(f"{name}.csv").read_text().splitlines()]  # without the speed

    trained("whole")
    assert job(2, "sonnx", "save", "9", *given("run")).returncode == 9 and Path("run.ckpt").exists()
    trained("run", "--resume")
    assert Path("run.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    assert table("run") == table("whole") and len(table("run")) == 1 + 6 * 7
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == [
        "run.ckpt", "run.step-000035.ckpt", "whole.ckpt", "whole.step-000035.ckpt",
    ]  # fmt: skip


def test_a_worker_that_is_stuck_at_the_end_ends_the_job(folder: Path, tmp_path: Path) -> None:
    """After the last gradient, while it writes the result."""
    checkpoint = tmp_path / "run.ckpt"
    done = job(2, "sonnx", "result", "1", *arguments(folder, checkpoint, "-o", str(tmp_path / "o.onnx"), "--timeout", "5"))
    assert done.returncode and "made no progress in 5 s; waiting for rank 0" in done.stderr and not (tmp_path / "o.onnx").exists()
    resumes(folder, checkpoint, "plain")


def workers_of(checkpoint: Path) -> list[int]:
    """The processes of a training, without their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            own = entry.name.isdecimal() and os.fsencode(checkpoint) in (entry / "cmdline").read_bytes().split(b"\0")
            if own and b"PMI_RANK=" in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes are found in /proc")
@pytest.mark.parametrize("seed", range(20 if ALL else 1))
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
    """Without dropout, on batches of 5 that workers share unequally, with the statistics of all workers, and accumulation."""
    rng = np.random.default_rng(3)
    plain = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y) '
                               "{ h = MatMul(x, w1) \n b = BatchNormalization(h, scale, bias, mean, var)"
                               "\n r = Tanh(b) \n y = MatMul(r, w2) }")  # fmt: skip
    weights = {"w1": rng.normal(size=(6, 8)), "w2": rng.normal(size=(8, 3)), "scale": np.ones(8), "bias": np.zeros(8),
               "mean": np.zeros(8), "var": np.ones(8)}  # fmt: skip
    plain.graph.initializer.extend(numpy_helper.from_array(a.astype(F), n) for n, a in weights.items())
    onnx.save(plain, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 6)).astype(F), y=rng.integers(0, 3, 24))
    found = []
    for workers in (1, 2, 4):
        target = tmp_path / f"{workers}.onnx"
        command = [sys.executable, "-m", "singa.cli", "train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data.npz"),
                   "--batch-size", "5", "--accumulate", "2", "--epochs", "4", "--lr", "0.1", "-o", str(target), "--json",
                   "--sync-batch-norm", "--workers", str(workers)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr
        losses = json.loads(done.stdout)["losses"]  # of rank 0 only, and of the whole batch
        found.append([np.array(losses), *(numpy_helper.to_array(t) for t in onnx.load(target).graph.initializer)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize(("more", "code", "told"), [
    (["--sparsity", "2", "--dist-option", "sparseTopK"], 3, "spars must be in (0, 1] for topK, got 2.0"),
    (["--dist-option", "gossip"], 2, "'gossip' is not one of"),
])  # fmt: skip
def test_arguments_that_are_refused(more: list[str], code: int, told: str, folder: Path, tmp_path: Path) -> None:
    done = train(folder, tmp_path / "run.ckpt", *more)
    assert done.returncode == code and told in done.stderr.replace("\n", " ")


def test_errors_of_workers_are_one_json_document(folder: Path, tmp_path: Path) -> None:
    done = train(folder, tmp_path / "run.ckpt", "--sparsity", "2", "--dist-option", "sparseTopK", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["code"] == "SX386"


def test_usage_errors_are_told_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.ckpt").write_bytes(b"")
    done = train(folder, tmp_path / "run.ckpt")
    assert done.returncode == 2 and done.stderr.count("exists: pass --resume") == 1


@pytest.mark.parametrize(("codes", "code", "told"), [
    ([0, 0], 0, ""), ([], 0, ""), ([4, 3], 3, ""), ([2, 2], 2, ""), ([4, 4], 4, "a worker was lost"), ([143, 0], 143, ""),
    ([-9], 4, "a worker died: SIGKILL"), ([4, -11, 3], 4, "a worker died: SIGSEGV"), ([1], 4, "a worker died: exit code 1"),
    ([-64], 4, "a worker died: "),
])  # fmt: skip
def test_the_exit_code_of_workers(codes: list[int], code: int, told: str) -> None:
    found = _judged(codes)
    assert found[0] == code and found[1].startswith(told) and bool(found[1]) == bool(told)


def test_a_folder_with_the_name_of_a_package_is_not_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx.py").write_text("raise SystemExit(99)")
    command = [sys.executable, "-P", "-m", "singa.cli", *arguments(folder, tmp_path / "run.ckpt", "--workers", "2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


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
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="--workers needs mpi4py") as caught:
        check_launcher()
    assert "sonnx[mpi]" in caught.value.hint


# --- the network


def sockets_of(processes: Iterable[int]) -> list[tuple[str, int]]:
    """The address and the port of each socket of these processes on which another process can write to it."""
    numbers = set()
    for process in processes:
        with suppress(OSError):  # it has ended
            numbers |= {os.readlink(f.path) for f in os.scandir(f"/proc/{process}/fd")}
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if f"socket:[{words[9]}]" in numbers and (words[3] == "0A" or kind.startswith("udp")):
                found.append((address, int(port, 16)))
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
GARBAGE = b"cmd=abort exitcode=9\n" + bytes(range(256)) * 40


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sockets of a process are found in /proc")
def test_workers_of_one_machine_open_no_port_to_others(folder: Path, tmp_path: Path) -> None:
    """A stranger that writes to every port of theirs, if there is one, does not stop the training."""
    target, checkpoint = tmp_path / "curves.html", tmp_path / "run.ckpt"
    line = arguments(folder, checkpoint, "--workers", "2", "--plot", str(target), "--epochs", "9", "--every", "60")
    running = subprocess.Popen([sys.executable, "-m", "singa.cli", *line], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    seen, looks = set(), 0
    while running.poll() is None:
        group = group_of(target)
        looks += len(group) == 3
        for address, port in sockets_of(group):
            if (address, port) not in seen:
                seen.add((address, port))
                with suppress(OSError), socket.create_connection(("localhost", port), 1) as stranger:
                    stranger.sendall(GARBAGE)
        time.sleep(0.02)
    assert running.stderr is not None
    assert running.returncode == 0, running.stderr.read()
    running.stderr.close()
    assert looks > 3 and {address for address, _ in seen} <= LOOPBACK, seen


@pytest.mark.parametrize(("environment", "here"), [
    ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, True), ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False), ({}, False),
    ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "UCX_TLS": "all"}, False),
])  # fmt: skip
def test_only_ranks_of_one_machine_use_shared_memory(environment: dict[str, str], here: bool) -> None:
    assert bool(use_shared_memory(environment)) is here


LINES = """
import os, socket, sys, time
pmi = socket.socket(fileno=int(os.environ["PMI_FD"]))
rank = int(os.environ["PMI_RANK"])
def ask(line):
    pmi.sendall(line.encode() + b"\\n")
    answer = b""
    while not answer.endswith(b"\\n"):
        answer += pmi.recv(1)
    return dict(word.split("=", 1) for word in answer.decode().split())
assert ask("cmd=init pmi_version=1 pmi_subversion=1")["rc"] == "0"
assert ask("cmd=get_universe_size")["size"] == os.environ["PMI_SIZE"] == "3"
name = ask("cmd=get_my_kvsname")["kvsname"]
assert ask("cmd=nonsense")["rc"] == "-1" == ask(f"cmd=get kvsname={name} key=none")["rc"]
assert ask(f"cmd=put kvsname={name} key=k{rank} value=v=={rank}")["rc"] == "0"
assert ask("cmd=barrier_in")["cmd"] == "barrier_out"
assert ask(f"cmd=get kvsname={name} key=k{(rank + 1) % 3}")["value"] == f"v=={(rank + 1) % 3}"
assert ask("cmd=barrier_in")["cmd"] == "barrier_out"
END
"""


@pytest.mark.parametrize(("end", "codes"), [
    ('ask("cmd=finalize"); sys.exit(5 * rank)', [0, 5, 10]),
    ('ask("cmd=finalize"); time.sleep(0.1 * rank)', [0, 0, 0]),
    ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(1000)", [-9]),
    ('pmi.sendall(b"cmd=abort exitcode=1\\n") if rank == 1 else None; time.sleep(1000)', []),
    ('pmi.sendall(b"x" * (1 << 20)) if rank == 1 else ask("cmd=finalize")', [0, 0, 1]),
])  # fmt: skip
def test_a_job_answers_its_processes_and_ends_them_together(end: str, codes: list[int]) -> None:
    job = LocalJob([sys.executable, "-c", LINES.replace("END", end)], 3, ENVIRONMENT)
    job.wait()
    assert sorted(job.codes) == codes


# --- a group of processes ends together


def group_of(marker: Path) -> list[int]:
    """The processes whose command line names a file: the command, the launcher and the workers."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdecimal() and os.fsencode(marker) in (entry / "cmdline").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] * (state != "Z")
    return found


@contextmanager
def endless(folder: Path, target: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A training of three workers that has begun, and does not end by itself; whatever is left of it is killed."""
    fixed = [str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--batch-size", "3", "--epochs", "1000000"]
    command = [sys.executable, "-m", "singa.cli", "train", *fixed, "--workers", "3", "--plot", str(target), *more]
    begun = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, preexec_fn=listen_to_hangups
    )
    end = time.monotonic() + LONGEST
    while len(workers_of(target)) < 3 and begun.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    try:
        yield begun
    finally:
        for process in group_of(target):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        begun.communicate(timeout=LONGEST)


def stop(process: int) -> None:
    """Stop a process, and wait until none of its threads runs."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + LONGEST
    states = {""}
    while states != {"T"} and time.monotonic() < end:
        tasks = Path(f"/proc/{process}/task").glob("*/stat")
        states = {task.read_text().rpartition(")")[2].split()[0] for task in tasks}


def listen_to_hangups() -> None:
    """A test run that nohup began ignores them, and so would the command."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def none_left(target: Path) -> bool:
    end = time.monotonic() + LONGEST
    while group_of(target) and time.monotonic() < end:
        time.sleep(0.05)
    return not group_of(target)


ALL_SIGNALS = [(name, when) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL") for when in ("start", "steps")]
SIGNALS = [("SIGTERM", "steps"), ("SIGINT", "start"), ("SIGKILL", "steps")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes are found in /proc")
@pytest.mark.parametrize(("name", "when"), ALL_SIGNALS if ALL else SIGNALS)
def test_a_signal_ends_all_processes(name: str, when: str, folder: Path, tmp_path: Path) -> None:
    """Also one that the command cannot handle; while the workers start, and while they train."""
    target, checkpoint = tmp_path / "curves.html", tmp_path / "run.ckpt"
    with endless(folder, target, "--checkpoint", str(checkpoint)) as running:
        while when == "steps" and not checkpoint.exists() and running.poll() is None:
            time.sleep(0.01)
        assert len(group_of(target)) > 3
        running.send_signal(getattr(signal, name))
        assert none_left(target)
        running.wait(timeout=LONGEST)
    assert running.returncode == {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}[name]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes are found in /proc")
def test_a_second_signal_ends_workers_that_do_not_listen(folder: Path, tmp_path: Path) -> None:
    """A worker that is stopped cannot handle the first one; the end of the parent's pipe ends the others at once."""
    target = tmp_path / "curves.html"
    with endless(folder, target, "--checkpoint", str(tmp_path / "run.ckpt")) as running:
        stop(workers_of(target)[0])
        end = time.monotonic() + LONGEST
        while running.poll() is None and time.monotonic() < end:  # signals of one number that are not handled yet are one
            running.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert running.poll() is not None
        assert none_left(target)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such signal of a pipe")
def test_a_process_ends_with_its_parent_whatever_it_does() -> None:
    """Asleep, stopped, in C with the interpreter's lock; or not yet ready when the parent ends."""
    doings = ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)", "re.match('(a+)+$', 'a' * 60 + 'b')"]
    imports = "import os, re, signal, sys, time; from singa_backend.io.processes import Lifeline"
    begin = f"{imports}; h = int(os.environ['{Lifeline.VARIABLE}'])"
    for doing in (*doings, ""):
        lifeline = Lifeline()
        attach = f"sys.stdin.read() if {not doing} else None\nLifeline.attach(h)\nprint(flush=True)"
        code = f"{begin}\n{attach}\n{doing or 'time.sleep(1000)'}"
        with lifeline.passed():
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     pass_fds=[lifeline.theirs],
                                     env={**ENVIRONMENT, Lifeline.VARIABLE: str(lifeline.theirs)})  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        if doing:
            assert child.stdout.readline() == b"\n"
        lifeline.close()
        child.stdin.close()
        assert child.wait(LONGEST) == (-signal.SIGKILL if doing else ENDED)
        child.stdout.close()


def test_an_error_of_all_workers_is_printed_once(folder: Path, tmp_path: Path) -> None:
    """The parent cannot know it: the loss of a step is infinite."""
    done = train(folder, tmp_path / "run.ckpt", "--lr", "1e30", "--loss", "softmax_cross_entropy")
    assert done.returncode == 3 and done.stderr.count("InvalidInput") == 1, done.stderr


@pytest.mark.parametrize("count", ["5000", "100000"])
def test_too_many_workers_are_refused_by_the_parent(count: str, folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "singa.cli", *arguments(folder, tmp_path / "run.ckpt", "--workers", count)],
        capture_output=True, text=True, timeout=LONGEST, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 2 and "--workers" in done.stderr


def test_more_workers_than_cores_are_warned_of(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from singa.cli import main

    monkeypatch.setattr("singa_backend.machine.usable_cores", lambda: 1)
    monkeypatch.setattr("singa.cli.train.run_workers", lambda *_: 0)
    line = arguments(folder, tmp_path / "run.ckpt", "--workers")
    assert "4 processes share 1 usable cores" in CliRunner().invoke(main, [*line, "4"]).stderr
    refused = CliRunner().invoke(main, [*line, "12", "--batch-size", "12"])
    assert refused.exit_code == 2 and "must be at most 8" in refused.stderr
    assert CliRunner().invoke(main, [*line, "12", "--batch-size", "12", "--oversubscribe"]).exit_code == 0
