"""Machine code as a step of a plan: whether there is some for an expression, and the frame with its sizes and addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..elementwise.compile import Compiled, NotCompiled, compiled, kept, waits
from ..elementwise.expression import Term, order
from ..elementwise.machine_code import MachineCode, emit
from ..elementwise.primitives import NotEmitted
from . import onednn
from .table import Site
from .values import Bound, Buffer, Value, address_of

MISSING = "its machine code is not made yet"
"""Why machine code does not compute a step in a first run."""

WORTH = 1 << 12
"""The work of a step, in elements times primitives, from which machine code is compiled; code that is kept is used for less.
Deterministic sessions, and runs that wait for code, compile for any work: what they compute does not depend on the cache."""

TOGETHER = 1 << 16
"""The work of all steps of an expression in this process from which its code is compiled while the program runs."""

PARALLEL = 1 << 19
"""The work from which several threads compute a step."""

CHUNK = 1 << 14
"""The elements that a thread claims at a time."""


def movements(steps: Sequence[int], values: Sequence[Value]) -> tuple[str, ...]:
    """How machine code reads values that have these steps along the inner axis."""
    return tuple(
        "scalar" if s == 0 else "row" if s == v.dtype.itemsize else "strided" for s, v in zip(steps, values, strict=True)
    )


def framed(
    function: Compiled,
    threads: int,
    chunk: int,
    sizes: Sequence[int],
    steps: Sequence[Sequence[int]],
    values: Sequence[Value],
    scratch: Buffer | None = None,
    places: Sequence[int] = (),
) -> Callable[[], Bound]:
    """The function that binds machine code to the present addresses; see elementwise/machine_code.py for the frame.

    Args:
        function: the code.
        threads: the number of threads.
        chunk: what a thread claims at a time.
        sizes: the inner, the outer and the middle size.
        steps: for each pointer the steps along the outer, the middle and the inner axis.
        values: the inputs and the results.
        scratch: temporary memory.
        places: the first byte of each array in it.
    """
    region = onednn.parallel_region() if threads > 1 else 0
    numbers = [chunk, *sizes, *(n for s in steps for n in s), *[0] * (len(values) + len(places))]
    frames = np.array([[0, threads if region else 1, region, *numbers], [0, 1, 0, *numbers]], np.int64)
    start, address = frames.shape[1] - len(values) - len(places), FrameAddress(frames)

    def bind() -> Bound:
        base = 0 if scratch is None or scratch.memory is None else address_of(scratch.memory)
        frames[:, start:] = [*(v.address for v in values), *(base + p for p in places)]
        return [(function.call, (address,))]

    return bind


class FrameAddress(int):
    """The address of a frame, which it keeps.

    Attributes:
        frames: the frame, and the same one for one thread.
        threads: the number of threads.
        single: the address of the one for one thread.
    """

    frames: np.ndarray
    threads: int
    single: int

    def __new__(cls, frames: np.ndarray) -> FrameAddress:
        made = super().__new__(cls, frames.ctypes.data)
        made.frames, made.threads, made.single = frames, int(frames[0, 1]), int(frames[1].ctypes.data)
        return made


Code = tuple[Compiled, tuple[int, ...], tuple[np.dtype[Any], ...]]
"""A function; the place of each input, or ~i for the size that is term i of `order`; the dtypes of its rows of scratch."""

_KNOWN: dict[str, Code | str] = {}
"""The code of each key, or why there is none."""

_ASKED: Counter[str] = Counter()
"""The work of the steps that have asked for code that is not there."""


def machine_code(site: Site, results: tuple[Term, ...], classes: tuple[str, ...], work: int) -> Code | None:
    """The machine code of terms; None if there is none, or not yet.

    Args:
        site: the place.
        results: the terms.
        classes: how each input moves along the inner axis.
        work: of the step.
    """
    key = f"{_key(results)} {classes}"
    found = _KNOWN.get(key)
    if found is None:
        try:
            function = None if key in _ASKED else kept(key, "k")
            waited = site.options.deterministic or waits()
            if function is None:
                _ASKED[key] += work
                if not waited and work < WORTH and _ASKED[key] < TOGETHER:
                    return None
            code = emit("k", results, dict(enumerate(classes)))
        except (NotEmitted, NotCompiled) as reason:
            _KNOWN[key] = str(reason)
            return None
        terms = {id(t): i for i, t in enumerate(order(results))}
        inputs = tuple(t.extra if t.op == "input" else ~terms[id(t)] for t in code.inputs)
        if function is not None:
            found = _KNOWN[key] = (function, inputs, code.scratch)
        elif waited:
            found = _made(key, code, inputs)
        else:
            site.wanted[key] = partial(_made, key, code, inputs)
            return None
    return None if isinstance(found, str) else found


def _made(key: str, code: MachineCode, inputs: tuple[int, ...]) -> Code | str:
    """Compile machine code; what is known of it from now on."""
    found: Code | str = "it cannot be made"
    try:
        found = (compiled(key, "k", lambda: code.text), inputs, code.scratch)
    except (NotEmitted, NotCompiled) as reason:
        found = str(reason)
    finally:
        _KNOWN[key] = found
    return found


@lru_cache(maxsize=1024)
def _key(results: tuple[Term, ...]) -> str:
    """All on which the code of an expression depends."""
    places: dict[Term, int] = {}
    rows = []
    for t in order(results):
        places[t] = len(places)
        shape = (len(t.shape), t.shape[-1:] == t.args[0].shape[-1:]) if t.op in ("reduce", "expand") else None
        rows.append((t.op, tuple(places[a] for a in t.args), t.dtype.str, t.extra, shape))
    return repr((rows, [places[r] for r in results]))
