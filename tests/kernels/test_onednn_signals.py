"""Signals do not interrupt oneDNN's code while its stack pointer is in the heap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import MemoryDesc, loading
from singa_backend.kernels.onednn.signals import SignalBlock, moves_stack
from singa_backend.plans.contention import single_step

pytestmark = [
    pytest.mark.skipif(dnn.library() is None, reason="there is no oneDNN"),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not show the signals of threads"),
]

TASKS = Path("/proc/self/task")


def blocked(task: Path, number: int) -> bool:
    """Whether a thread blocks a signal."""
    (line,) = [one for one in (task / "status").read_text().splitlines() if one.startswith("SigBlk:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def products(names: str) -> Any:
    """A recurrent layer of two threads, bound to no memory."""
    src, state = MemoryDesc.of(np.float32, (4, 3, 8)), MemoryDesc.of(np.float32, (1, 1, 3, 8))
    weights, bias = MemoryDesc.any(np.float32, (1, 1, 8, 4, 8)), MemoryDesc.of(np.float32, (1, 1, 4, 8))
    return dnn.lstm(src, state, state, weights, weights, bias, src, state, state, direction=names)


@pytest.mark.parametrize(
    ("kind", "implementation", "moves"),
    [
        ("lstm_forward", "ref", True),
        ("lstm_backward", "brgemm:avx512_core", True),
        ("gru_backward", "ref", True),
        ("lbr_gru_forward", "ref", True),
        ("vanilla_rnn_forward", "ref", True),
        ("matmul", "gemm:jit", True),
        ("convolution_forward", "x64:gemm:jit", True),
        ("matmul", "brg:avx512_core", False),
        ("convolution_forward", "brgconv:avx512_core", False),
        ("eltwise_forward", "jit:avx512_core", False),
    ],
)
def test_primitives_that_move_the_stack_are_known(kind: str, implementation: str, moves: bool) -> None:
    """Those of versions that keep the stack pointer do not."""
    assert moves_stack(kind, implementation, (3, 2, 0)) == moves_stack(kind, implementation, (3, 11, 1)) == moves
    assert not moves_stack(kind, implementation, (3, 11, 2))
    assert not moves_stack(kind, implementation, (3, 12, 0))


def test_threads_block_signals_during_an_execution() -> None:
    """The caller and the threads of OpenMP; errors are reported, and the caller's own set returns, also after a failure."""
    library = loading.needed()
    seen: list[tuple[int, bool]] = []

    def execute(*arguments: Any) -> int:
        assert arguments == ("a", 1)
        own = TASKS / str(os.gettid() if hasattr(os, "gettid") else os.getpid())
        waiting = [signal.SIGPROF, signal.SIGINT, signal.SIGUSR1, signal.SIGRTMIN]
        errors = [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT]
        seen.append((sum(blocked(t, signal.SIGPROF) for t in TASKS.iterdir()), all(blocked(own, n) for n in waiting)))
        assert not any(blocked(t, n) for t in TASKS.iterdir() for n in errors)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return 5

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        call = SignalBlock(execute, loading.ctypes.CDLL(library.path), library._max_threads)
        with dnn.using_threads(2):
            parallel = dnn.threads() == 2
            assert call(2, "a", 1) == 5
            with pytest.raises(KeyboardInterrupt):
                call(1, "a", 1)
        assert all(count >= 1 + parallel and own for count, own in seen)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGUSR2}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_steps_of_recurrent_layers_block_signals() -> None:
    """Also those that continue on one thread."""
    library = loading.needed()
    md = MemoryDesc.of(np.float32, (4, 4))
    for threads in (1, 2):
        with dnn.using_threads(threads):
            layer, plain = products("left2right"), dnn.eltwise(md, md, algorithm="relu")
        call = dnn.BoundPrimitive(layer, {})
        moves = moves_stack(layer.kind, layer.implementation, library.version)
        assert moves == (library.version < (3, 11, 2))
        for function in (call.execute, single_step(call.execute, call.args)[0]):
            assert (getattr(function, "func", None) is library.execute_blocking) == moves
        other = dnn.BoundPrimitive(plain, {})
        assert other.execute is library.execute is single_step(other.execute, other.args)[0]


PROGRAM = """
import signal, sys, time
import numpy as np
from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import MemoryDesc, backward

time_steps, batch, size = 16, 32, 128
of, f = MemoryDesc.of, np.float32
src, state, bias = of(f, (time_steps, batch, size)), of(f, (1, 1, batch, size)), of(f, (1, 1, 4, size))
weights = MemoryDesc.any(f, (1, 1, size, 4, size))
given = [src, state, state, weights, weights, bias, src, state, state]
dnn.set_threads(2)
forward = dnn.lstm(*given, direction="left2right", prop="training")
gradient = backward.lstm_backward(given, given, hint=forward)
kept, memories = [], {}
a = dnn.args
numbers = [n for n in vars(a).values() if isinstance(n, int) and n not in (a.WORKSPACE, a.SCRATCHPAD)]
descriptors = {}
for n in numbers:
    try:
        descriptors[n] = gradient.query("argument", n)
    except dnn.OneDnnError:
        continue
descriptors[a.WORKSPACE] = forward.query("workspace")
if gradient.scratchpad_nbytes:
    descriptors[a.SCRATCHPAD] = gradient.query("scratchpad")
for n, md in descriptors.items():
    if md.nbytes:
        kept.append(np.zeros(md.nbytes + 64, np.uint8))
        memories[n] = (md, -(-kept[-1].ctypes.data // 64) * 64)
call = dnn.bind(gradient, memories)
call.run()
handled = []
signal.signal(signal.SIGPROF, lambda *_: handled.append(1))
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
end, runs = time.perf_counter() + 2, 0
while runs < 40 or time.perf_counter() < end:
    call.run()
    runs += 1
    if time.perf_counter() > end + 30:
        break
signal.setitimer(signal.ITIMER_PROF, 0)
print(bool(handled))
"""


def test_a_sampler_does_not_corrupt_the_heap() -> None:
    """The gradient of an LSTM under SIGPROF, in a process whose buffers follow what the C library keeps of them."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")
