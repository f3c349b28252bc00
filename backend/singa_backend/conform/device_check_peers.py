"""PyTorch's speed of what the stage `speed` of `sonnx device-check` measures.

It is measured eagerly, as a CUDA graph and compiled; products in float32 and in TF32.  Each of the three has a process with a
deadline, and what could not be measured is reported with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..io.processes import Child, ChildFailure

MODES = ("eager", "CUDA graph", "compiled")
"""How PyTorch runs a function."""

_PASSES = {"eager": 7, "CUDA graph": 7, "compiled": 2}
"""How often the chain reads or writes the memory of one array: compiled, it is one kernel."""

_NOT = "not measured: "
_CALLS = 10


def seconds(run: Callable[[], Any], wait: Callable[[], Any], calls: int = 1, repeats: int = 5) -> float:
    """Measure a function that issues work on a device.

    Args:
        run: The function.
        wait: Waits until the device has done the work.
        calls: The calls between two waits.
        repeats: How often that is repeated, after two others.

    Returns:
        The median time of a call and of its work.
    """
    times = []
    for i in range(repeats + 2):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        if i >= 2:
            times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def measure(where: str, copy: int, chain: int, side: int, deadline: float) -> dict[str, Any]:
    """Measure a copy, a chain of operators and a product in each mode.

    Args:
        where: PyTorch's name of the device.
        copy: The bytes of the array that is copied.
        chain: The bytes of the arrays of the chain.
        side: The rows of the square product.
        deadline: The seconds that a mode may take.

    Returns:
        The speeds by name; in their place, why a mode was not measured.
    """
    if find_spec("torch") is None:
        return {"PyTorch": f"{_NOT}it is not installed"}
    rates: dict[str, Any] = {}
    for mode in MODES:
        with Child(_peer, where, copy, chain, side) as child:
            try:
                answer = child.ask(mode, timeout=deadline)
            except ChildFailure as failure:
                answer = f"{_NOT}{failure}"
        if isinstance(answer, str):
            rates[f"PyTorch, {mode}"] = answer
        else:
            rates |= {f"PyTorch, {mode}: {name}": round(rate, 3) for name, rate in answer.items()}
    return rates


def _peer(where: str, copy: int, chain: int, side: int) -> Callable[[str], dict[str, float] | str]:
    """Return, in the child, the function that measures a mode."""

    def answer(mode: str) -> dict[str, float] | str:
        try:
            return _rates(import_module("torch"), mode, where, copy, chain, side)
        except Exception as error:
            return f"{_NOT}{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    return answer


def _rates(torch: Any, mode: str, where: str, copy: int, chain: int, side: int) -> dict[str, float]:
    set_precision(torch, tf32=False)
    wait = torch.cuda.synchronize if where.startswith("cuda") else (lambda: None)
    copied, x, a = (torch.ones(shape, device=where) for shape in ((copy // 4,), (chain // 4,), (side, side)))

    def speed(function: Callable[..., Any], *arguments: Any) -> float:
        return seconds(in_mode(torch, mode, function, *arguments), wait, _CALLS)

    rates = {"chain, GB/s": _PASSES[mode] * chain / speed(lambda x: torch.relu((x + x) * x), x) / 1e9}
    if mode == "eager":
        rates["copy, GB/s"] = 2 * copy / speed(torch.clone, copied) / 1e9
    for name, tf32 in (("product", False), ("product in TF32", True)):
        set_precision(torch, tf32=tf32)
        rates[f"{name}, TFLOP/s"] = 2 * side**3 / speed(torch.matmul, a, a) / 1e12
    return rates


def set_precision(torch: Any, *, tf32: bool) -> None:
    """Let PyTorch compute products and convolutions of float32 in float32, or in TF32.

    Args:
        torch: The module.
        tf32: Whether it may use TF32.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def in_mode(torch: Any, mode: str, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Prepare a function of PyTorch that is called again and again with the same arrays.

    Args:
        torch: The module.
        mode: One of `MODES`.
        function: The function, or the net.
        *arguments: Its arguments.

    Returns:
        A function without arguments, which has run before.
    """
    if mode == "compiled":
        function = torch.compile(function)

    def run() -> Any:
        with torch.inference_mode():
            return function(*arguments)

    if mode != "CUDA graph":
        run()
        return run
    other = torch.cuda.Stream()  # the default stream cannot be captured, and first calls make what no graph may contain
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], Any] = graph.replay
    return replay
