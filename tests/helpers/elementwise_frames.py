"""Runs machine code of expressions on arrays: the frame that a caller fills, axes merged where all arrays allow it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend.elementwise import compile as machine
from singa_backend.elementwise.expression import ExpressionTrace, Term, order
from singa_backend.elementwise.machine_code import MachineCode, emit


def traced(body: Callable[..., Any], *inputs: tuple[Any, tuple[int, ...]], **options: Any) -> list[Term]:
    """The terms of a function of (xp, arrays)."""
    trace = ExpressionTrace()
    results = body(trace.xp, *(trace.input(d, s) for d, s in inputs), **options)
    return [r.term for r in (results if isinstance(results, (tuple, list)) else [results])]


def layout(arrays: Sequence[np.ndarray], rows: bool = False) -> tuple[list[int], list[list[int]]]:
    """The outer, the middle and the inner size, and the steps of each array; with rows the last axis is alone."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays)) or (1,)
    steps = []
    for a in arrays:
        padded = (1,) * (len(shape) - a.ndim) + a.shape
        held = [0] * (len(shape) - a.ndim) + list(a.strides)
        steps.append([0 if d == 1 else s for d, s in zip(padded, held, strict=True)])
        if rows and shape[-1] < 2:
            steps[-1][-1] = a.itemsize
    sizes, merged = [shape[-1]], [[s[-1]] for s in steps]
    for i in range(len(shape) - 2, -1, -1):
        joins = all(s[i] == m[0] * sizes[0] for s, m in zip(steps, merged, strict=True))
        if (joins or shape[i] == 1) and not (rows and len(sizes) == 1 and shape[i] != 1):
            sizes[0] *= shape[i]
        else:
            sizes.insert(0, shape[i])
            for s, m in zip(steps, merged, strict=True):
                m.insert(0, s[i])
    pad = 3 - len(sizes)
    assert pad >= 0, "more than three axes"
    return [1] * pad + sizes, [[0] * pad + m for m in merged]


def gomp() -> int:
    """The address of GOMP_parallel, or 0."""
    try:
        return ctypes.cast(ctypes.CDLL("libgomp.so.1").GOMP_parallel, ctypes.c_void_p).value or 0
    except OSError:
        return 0


class Call:
    """A kernel with its frame; the arrays stay alive."""

    def __init__(
        self, results: Sequence[Term], arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray], *,
        threads: int = 1, chunk: int = 1 << 40, features: str | None = None, size: int | None = None,
    ) -> None:  # fmt: skip
        rows = any(t.op == "reduce" for t in order(results))
        used = [arrays[t.extra] for t in _inputs(results)]
        sizes, steps = layout([*used, *outs], rows)
        classes = {
            t.extra: "scalar" if s[2] == 0 else "row" if s[2] == a.itemsize else "strided"
            for t, a, s in zip(_inputs(results), used, steps, strict=False)
        }
        self.code: MachineCode = emit("kernel", results, classes)
        counts = [np.array([sizes[2] if size is None else size], t.dtype) for t in self.code.inputs if t.op == "size"]
        scratch = [np.empty((threads, sizes[2]), d) for d in self.code.scratch]
        steps[len(used) : len(used)] = [[0, 0, 0]] * len(counts)
        steps += [[s.strides[0], 0, s.itemsize] for s in scratch]
        steps = [[*s[:2], 0, s[2]] for s in steps]
        self.held = [*used, *counts, *outs, *scratch]
        numbers = [0, threads, gomp() if threads > 1 else 0, chunk, sizes[2], sizes[0], sizes[1], 1]
        self.frame = np.array([*numbers, *(n for s in steps for n in s), *(a.ctypes.data for a in self.held)], np.int64)
        self.function = machine.compiled(self.code.text, self.code.name, lambda: self.code.text, features)

    def __call__(self) -> None:
        self.function.call(self.frame.ctypes.data)


def _inputs(results: Sequence[Term]) -> list[Term]:
    """The inputs that are read, by their place; those of sizes only are not."""
    seen: dict[int, Term] = {}

    def visit(t: Term) -> None:
        if id(t) not in seen:
            seen[id(t)] = t
            for a in t.args if t.op != "size" else ():
                visit(a)

    for r in results:
        visit(r)
    return sorted((t for t in seen.values() if t.op == "input"), key=lambda t: t.extra)


def run(results: Sequence[Term], arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray], **options: Any) -> list[np.ndarray]:
    """Compute terms into arrays."""
    Call(results, arrays, outs, **options)()
    return list(outs)
