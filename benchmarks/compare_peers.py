"""The runtimes that benchmarks/compare.py compares, each in a process that runs this file.

    python compare_peers.py PEER THREADS        # started by `Peer`, which commands it over pipes

This file needs only the standard library, NumPy and the one runtime, so that each peer can run in another environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

Feeds = Mapping[str, np.ndarray]
Run = Callable[[], Sequence[Any]]
Open = Callable[[str, str], Callable[[Feeds], Run]]
"""Take a file and the model's name, and prepare it; the result takes inputs and returns a function that runs it once."""

TURN, LIMIT = 0.2, 400
"""Seconds of timed runs in a turn, and the maximum number of runs."""


class Absent(Exception):
    """A peer cannot run here; the message names what is missing."""


def need(module: str, distribution: str = "") -> str:
    """Return the version of a distribution, otherwise the `__version__` of its module; raises Absent without the module."""
    from importlib import metadata

    if importlib.util.find_spec(module) is None:
        raise Absent(f"{distribution or module} is not installed in {sys.prefix}")
    try:
        return metadata.version(distribution or module)
    except metadata.PackageNotFoundError:  # such as sonnx in a checkout
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))


def _sonnx(threads: int) -> tuple[str, Open]:
    version = need("singa", "sonnx")
    from singa_backend import SingaBackend

    def prepare(path: str, name: str) -> Callable[[Feeds], Run]:
        rep = SingaBackend.prepare(path, threads=threads or None)
        return lambda feeds: lambda: rep.run(feeds)

    return version, prepare


def _onnxruntime(threads: int) -> tuple[str, Open]:
    version = need("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3

    def prepare(path: str, name: str) -> Callable[[Feeds], Run]:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda feeds: lambda: session.run(None, feeds)

    return version, prepare


def _openvino(threads: int) -> tuple[str, Open]:
    version = need("openvino")
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}

    def prepare(path: str, name: str) -> Callable[[Feeds], Run]:
        compiled = core.compile_model(path, "CPU", settings)
        request = compiled.create_infer_request()
        count = range(len(compiled.outputs))

        def bind(feeds: Feeds) -> Run:
            def run() -> Sequence[Any]:
                found = request.infer(feeds, share_inputs=True, share_outputs=True)
                return [found[i] for i in count]

            return run

        return bind

    return version, prepare


def _torch(threads: int, compiled: bool = False) -> tuple[str, Open]:
    version = need("torch")
    if compiled and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Absent("torch.compile needs a C++ compiler")
    import compare_nets
    import torch

    torch.set_num_threads(threads)
    mode = torch.inference_mode()
    mode.__enter__()  # for the life of this process

    def prepare(path: str, name: str) -> Callable[[Feeds], Run]:
        assert mode is not None  # without a reference to it the mode ends
        net: Any = compare_nets.build(name)
        net = torch.compile(net) if compiled else net

        def bind(feeds: Feeds) -> Run:
            inputs = [torch.from_numpy(np.array(feeds[n])) for n in compare_nets.examples(name, 1)]

            def run() -> Sequence[Any]:
                found = net(*inputs)
                return found if isinstance(found, tuple) else (found,)

            return run

        return bind

    return version, prepare


def _torch_compile(threads: int) -> tuple[str, Open]:
    return _torch(threads, compiled=True)


def _reference(threads: int) -> tuple[str, Open]:
    version = need("onnx")
    from onnx.reference import ReferenceEvaluator

    def prepare(path: str, name: str) -> Callable[[Feeds], Run]:
        evaluator = ReferenceEvaluator(path)
        return lambda feeds: lambda: evaluator.run(None, dict(feeds))

    return version, prepare


PEERS: dict[str, Callable[[int], tuple[str, Open]]] = {
    "sonnx": _sonnx, "onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch, "torch-compile": _torch_compile,
    "reference": _reference,
}  # fmt: skip
"""The peers by name.  A function of the number of threads that returns a version and an `Open`, or raises Absent."""


# --- in the child


def memory(field: str) -> int:
    """Return a figure of this process's memory in bytes, 0 where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def _generate(bind: Callable[[Feeds], Run], feeds: Feeds, grows: Sequence[str]) -> tuple[Run, Callable[[], None]]:
    """Return a function whose every run takes the outputs of the run before as the inputs that grow, and one to begin again."""
    state = dict(feeds)

    def run() -> Sequence[Any]:
        found = bind(state)()
        state.update(zip(grows, list(found)[1:], strict=True))
        return found

    return run, lambda: state.update(feeds)


def _serve(name: str, threads: int, receive: Connection, send: Connection) -> None:
    run: Run | None = None
    begin: Callable[[], None] | None = None
    opened: Open | None = None

    def start() -> str:
        nonlocal opened
        version, opened = PEERS[name](threads)
        return version

    def load(path: str, model: str, feeds: Feeds, grows: Sequence[str]) -> dict[str, Any]:
        nonlocal run, begin
        assert opened is not None
        before, began = memory("VmRSS"), time.perf_counter()
        bind = opened(path, model)
        prepared, peak = time.perf_counter(), memory("VmHWM")
        run, begin = _generate(bind, feeds, grows) if grows else (bind(feeds), None)
        found = run()
        answered = time.perf_counter()
        outputs = [np.array(np.asarray(v)) for v in found]  # a copy: a later run may overwrite them
        return {
            "prepare": prepared - began, "answer": answered - began, "memory": max(0, peak - before),
            "held": max(1, memory("VmRSS") - before), "outputs": outputs,
        }  # fmt: skip

    def turn(untimed: int, seconds: float, most: int = LIMIT) -> list[float]:
        assert run is not None
        if begin is not None:
            begin()
        return timed(run, untimed, seconds, most)

    serve({"start": start, "load": load, "turn": turn}, receive, send)


def timed(
    run: Callable[[], object], untimed: int, seconds: float, most: int = LIMIT, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Run a function some times untimed, then timed until some seconds have passed, `most` times at most."""
    for _ in range(untimed):
        run()
    times: list[float] = []
    end = clock() + seconds
    while seconds and len(times) < most:
        began = clock()
        run()
        now = clock()
        times.append(now - began)
        if now >= end:
            break
    return times


def serve(actions: Mapping[str, Callable[..., Any]], receive: Connection, send: Connection) -> None:
    """Answer a `Child` until it closes the pipe; the message of an Absent and of other errors is the answer."""
    while True:
        try:
            action, arguments = receive.recv()
        except EOFError:
            return
        try:
            answer = ("done", actions[action](*arguments))
        except Absent as error:
            answer = ("absent", str(error))
        except Exception as error:  # the parent names it in its report
            answer = ("failed", f"{type(error).__name__}: {error}".splitlines()[0][:300])
        send.send(answer)


def connected(begin: Callable[[str, int, Connection, Connection], None]) -> None:
    """Begin what a `Child` has started, with its arguments and the pipes."""
    out = os.dup(1)
    os.dup2(2, 1)  # what a runtime prints must not enter the pipe
    begin(sys.argv[1], int(sys.argv[2]), Connection(os.dup(0), writable=False), Connection(out, readable=False))


# --- in the parent


class Failure(Exception):
    """A peer returned an error, died, or took too long."""


class Child:
    """A process that runs a file of this folder with a name and a number of threads, and answers over pipes.

    Args:
        file: the file, which calls `connected` and `serve`; the action "start" returns a version.
        name: its first argument.
        threads: how many threads it may use; 0 for its default.
        python: the interpreter of the environment in which the runtime is installed.
        timeout: seconds that an answer may take.
    """

    def __init__(self, file: str, name: str, threads: int, python: str = sys.executable, timeout: float = 600.0) -> None:
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SONNX_NUM_THREADS"), str(threads))
        environment = {**os.environ, **counts} if threads else {n: v for n, v in os.environ.items() if n not in counts}
        self.name, self.timeout = name, timeout
        self._process = subprocess.Popen(
            [python, file, name, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._send = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._receive = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self.version: str = self.ask("start")
        except BaseException:
            self.close()
            raise

    def ask(self, action: str, *arguments: Any) -> Any:
        """Return the answer of an action; raises Absent or Failure."""
        try:
            self._send.send((action, arguments))
            if not self._receive.poll(self.timeout):
                raise Failure(f"no answer within {self.timeout:.0f} s")
            how, answer = self._receive.recv()
        except (EOFError, OSError):
            raise Failure(f"the process ended with exit code {self._process.wait(10)}") from None
        if how == "absent":
            raise Absent(answer)
        if how == "failed":
            raise Failure(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self._send.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._receive.close()


class Peer(Child):
    """A runtime in a child process.

    Args:
        name: one of PEERS.
        threads: how many threads it may use; 0 for its default.
        python: the interpreter of the environment in which the runtime is installed.
        timeout: seconds that an answer may take.
    """

    def __init__(self, name: str, threads: int, python: str = sys.executable, timeout: float = 600.0) -> None:
        super().__init__(__file__, name, threads, python, timeout)

    def load(self, path: Path, model: str, feeds: Feeds, grows: Sequence[str] = ()) -> dict[str, Any]:
        """Prepare a model and run it once.

        Args:
            path: of the file.
            model: its name.
            feeds: the inputs.
            grows: inputs that later runs take from the outputs of the run before, after the first output in this order.

        Returns:
            "outputs", and the seconds until it was prepared ("prepare") and until it had answered ("answer"), by how many
            bytes preparing raised the peak of memory ("memory"), and what is resident after the answer ("held").
        """
        found: dict[str, Any] = self.ask("load", str(path), model, feeds, grows)
        return found

    def turn(self, untimed: int, seconds: float = TURN, most: int = LIMIT) -> list[float]:
        """Run the model some times untimed, then timed, `most` times at most; return the seconds of each timed run."""
        found: list[float] = self.ask("turn", untimed, seconds, most)
        return found


if __name__ == "__main__":
    connected(_serve)
