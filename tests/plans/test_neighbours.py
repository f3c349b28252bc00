"""Plans next to others in one process: forks, threads, other plans, onnxruntime, OpenBLAS; and under pytest-xdist.

Each script runs in a child process, which may hang or die; a time limit only ends a test that has failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.kernels import onednn

PATIENCE = 120

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def model(seed: int = 0, size: int = 14) -> onnx.ModelProto:
    """Convolutions and a product of matrices, large enough for several threads."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 3, 3, 3), "v": (16, 16, 3, 3), "m": (16 * size * size, 10)}
    weights = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32) / 20, n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "m"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, 3, size, size]), ("y", [2, 10])))
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(size: int = 14) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(2, 3, size, size)).astype(np.float32)


PRELUDE = """
import os, sys, threading
import numpy as np
from singa_backend import SingaBackend
from singa_backend.kernels import onednn

path, x, expected = sys.argv[1], np.load(sys.argv[2]), np.load(sys.argv[3])

def check(rep):
    found = rep.run([x])[0]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()

def in_thread(function):
    failures = []
    def run():
        try:
            function()
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures

def fork(work):
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

rep = SingaBackend.prepare(path, threads=2)
check(rep), check(rep)
"""


def runs(script: str, folder: Path, **environment: str) -> None:
    """Run a script in a child process with a model, its input and the output of the definitions."""
    onnx.save(model(), folder / "m.onnx")
    np.save(folder / "x.npy", feeds())
    np.save(folder / "y.npy", SingaBackend.prepare(model(), optimize=0).run([feeds()])[0])
    command = [sys.executable, "-c", PRELUDE + script, *(str(folder / n) for n in ("m.onnx", "x.npy", "y.npy"))]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        told, _ = child.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # forks that hang too
    assert child.returncode == 0, f"exit code {child.returncode}\n{told}"


FORKS = {
    "with the plans of the parent": "fork(lambda: check(rep))",
    "with plans that the child makes": "fork(lambda: check(SingaBackend.prepare(path, threads=2)))",
    "from a thread that has run nothing": "in_thread(lambda: fork(lambda: check(rep)))",
    "that runs in a thread": "fork(lambda: in_thread(lambda: check(rep)))",
    "that forks": "fork(lambda: (check(rep), fork(lambda: check(rep)), check(rep)))",
    "twice, and the parent runs on": "fork(lambda: check(rep)); check(rep); fork(lambda: check(rep)); check(rep)",
}


@needs_fork
@pytest.mark.parametrize("how", FORKS)
def test_a_forked_child_runs(how: str, tmp_path: Path) -> None:
    runs(FORKS[how], tmp_path)


@needs_fork
def test_a_forked_child_runs_whatever_another_thread_was_doing(tmp_path: Path) -> None:
    """The thread holds every lock at the fork; the child has no such thread."""
    runs(
        """
from singa_backend.kernels.onednn import loading
planner = rep._session._planner
locks = [planner.lock, planner.tracing, loading._lock, *(plan.turn.lock for plan in planner.plans.values())]
held, done = threading.Event(), threading.Event()
def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    done.wait()
    for lock in locks:
        lock.release()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
def work():
    check(rep)
    rep.run([x[:, :, ::-1].copy()])
    onednn.reset()
    check(SingaBackend.prepare(path))
fork(work)
done.set()
holder.join()
check(rep)
""",
        tmp_path,
    )


@needs_fork
def test_a_pool_of_forked_processes(tmp_path: Path) -> None:
    runs(
        """
import multiprocessing
def part(i):
    check(rep)
    return i
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(part, range(6)) == list(range(6))
check(rep)
""",
        tmp_path,
    )


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
def test_onnxruntime_in_the_same_process(tmp_path: Path) -> None:
    runs(
        """
import onnxruntime
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
for _ in range(5):
    found = session.run(None, {"x": x})[0]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    check(rep)
threads = [threading.Thread(target=lambda: [session.run(None, {"x": x}) for _ in range(20)]) for _ in range(2)]
for t in threads: t.start()
for _ in range(20): check(rep)
for t in threads: t.join()
""",
        tmp_path,
    )


def test_openblas_between_runs(tmp_path: Path) -> None:
    runs(
        """
a = np.random.default_rng(0).normal(size=(400, 400)).astype(np.float32)
product = a @ a
for _ in range(5):
    check(rep)
    assert np.array_equal(a @ a, product) or np.allclose(a @ a, product, rtol=1e-3, atol=1e-3)
threads = [threading.Thread(target=lambda: [a @ a for _ in range(20)]) for _ in range(2)]
for t in threads: t.start()
for _ in range(20): check(rep)
for t in threads: t.join()
""",
        tmp_path,
        OPENBLAS_NUM_THREADS="2",
    )


def test_several_plans_in_several_threads_have_the_bits_of_each_alone() -> None:
    """Plans of one model and of others, of one shape and of several, with different numbers of threads."""
    reps = [SingaBackend.prepare(model(seed), threads=threads) for seed, threads in ((0, 1), (1, 2), (2, 3))]
    alone = [SingaBackend.prepare(model(seed), threads=threads) for seed, threads in ((0, 1), (1, 2), (2, 3))]
    inputs = [feeds(), feeds()[:, :, ::-1].copy()]
    expected = [[(rep.run([x]), rep.run([x]))[1][0].tobytes() for x in inputs] for rep in alone]
    barrier = threading.Barrier(6, timeout=PATIENCE)
    before = onednn.threads()

    def work(k: int) -> list[bool]:
        barrier.wait()
        good = []
        for i in range(12):
            which, case = (k + i) % 3, i % 2
            good.append(reps[which].run([inputs[case]])[0].tobytes() == expected[which][case])
        return good

    with ThreadPoolExecutor(6) as pool:
        assert all(all(good) for good in pool.map(work, range(6)))
    assert onednn.threads() == before


def test_pytest_xdist(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    onnx.save(model(), tmp_path / "m.onnx")
    (tmp_path / "test_runs.py").write_text(
        "import numpy as np, pytest\n"
        "from singa_backend import SingaBackend\n"
        "@pytest.mark.parametrize('i', range(4))\n"
        "def test_run(i):\n"
        f"    rep = SingaBackend.prepare({str(tmp_path / 'm.onnx')!r}, threads=2)\n"
        "    x = np.full((2, 3, 14, 14), i, np.float32)\n"
        "    assert rep.run([x])[0].tobytes() == rep.run([x])[0].tobytes()\n"
    )
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_runs.py"]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
