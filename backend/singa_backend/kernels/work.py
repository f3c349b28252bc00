"""The work of a call: floating point operations by operator and shapes, and the rates that this machine reaches."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..ir.declaration import WorkShape, newest_declaration
from . import onednn as dnn
from .onednn import MemoryDesc
from .rounding import BF16, COPIES, rounding

SELECTS = frozenset(["Gather", "GatherElements", "GatherND", "Slice"])
"""Operators that read at most as many bytes of their first input as they write, however large it is."""


def flops(
    domain: str, name: str, attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]
) -> int | None:
    """Count the floating point operations of a call: a product and a sum are two.

    Args:
        domain: of the operator.
        name: the operator.
        attributes: its attributes, defaults included.
        inputs: the shapes of the inputs; None for an absent one and for one that is not a tensor.
        output: the shape of the first output.

    Returns:
        By the operator's rule: the exact number of products and sums for products of matrices, convolutions and recurrent
        operators, an approximate one for norms and pools; 0 for the trait `moves`; one for each element of the output of other
        operators of ONNX's domain.  None if it is not known.
    """
    declaration = newest_declaration(domain, name)
    if declaration is None:
        return None
    if "moves" in declaration.traits:
        return 0
    if domain and declaration.flops_rule is None:
        return None
    try:
        return math.prod(output) if declaration.flops_rule is None else declaration.flops_rule(attributes, inputs, output)
    except (IndexError, TypeError, KeyError, ValueError):  # not the usual inputs: the definition decides what they mean
        return None


def moved(names: Sequence[str], read: int, written: int) -> int:
    """Count the bytes that a step reads and writes.

    Args:
        names: the operators that it computes.
        read: the sizes of the values that it reads.
        written: the sizes of the values that it writes.

    Returns:
        Their sum; of a table from which rows are selected, only the rows count.
    """
    return (min(read, written) if all(n in SELECTS for n in names) else read) + written


@dataclass(frozen=True)
class Rates:
    """The rates that this machine reaches, as measured in this process.

    Attributes:
        gflops: floating point operations in a product of matrices, in 10^9 per second.
        gbytes: bytes read and written by copies of memory, in 10^9 per second.
        threads: the number of threads.
        precision: "float32" or "bf16".
        by: the library that computed the product.
        caches: (bytes, rate) of copies of less memory, which caches hold: the bytes that are read and written in all, and the
            rate as of `gbytes`; ascending bytes.
    """

    gflops: float
    gbytes: float
    threads: int
    precision: str
    by: str
    caches: tuple[tuple[int, float], ...] = ()

    def seconds(self, flops: int | None, nbytes: int) -> float:
        """The minimum time for some work.

        Args:
            flops: floating point operations; None if their number is not known.
            nbytes: the bytes that are read and written.

        Returns:
            The seconds.
        """
        rate = max([self.gbytes, *(gbytes for size, gbytes in self.caches if size >= nbytes)])
        return max((flops or 0) / self.gflops, nbytes / rate) / 1e9

    def reached(self, flops: int | None, nbytes: int, seconds: float) -> float | None:
        """The part of the rates that some work has reached.

        Args:
            flops: floating point operations; None if their number is not known.
            nbytes: the bytes that were read and written.
            seconds: the time that it took.

        Returns:
            A number of at most 1, which it may exceed by a quarter before it is cut, because rates are measured; None if there
            is nothing to compute it from, or if the work was faster still, so that these rates do not bound it.
        """
        minimum = self.seconds(flops, nbytes)
        part = minimum / seconds if seconds > 0 and minimum > 0 else None
        return None if part is None or part > SLACK else min(part, 1.0)


SLACK = 1.25
"""How many times faster than a measured rate some work may be before the rate is not its bound."""

BUDGET, PATIENCE = 0.1, 0.4
"""Seconds for each of the two measurements, and if other programs keep the machine busy."""


@cache
def rates(threads: int, precision: str = "float32") -> Rates:
    """Measure the rates of this machine, once in a process.

    Args:
        threads: the number of threads.
        precision: "float32" or "bf16".

    Returns:
        The rates.
    """
    found = []
    for count in {1, threads}:  # other programs may leave no time in which several threads run at once
        with dnn.using_threads(count):
            found += [_product_rate(n, precision) for n in _PRODUCTS]  # short ones also finish where others take turns
    gflops, by = max(found)
    caches = tuple((2 * threads * n, _copy_rate(n, threads)) for n in _COPIES)
    return Rates(gflops, _copy_rate(1 << 24, threads), threads, precision, by, caches)


_PRODUCTS = (192, 512)
"""The sizes of the products that are measured."""

_COPIES = (1 << 14, 1 << 18, 1 << 21)
"""The bytes of copies that caches hold, for each thread."""


def _copy_rate(nbytes: int, threads: int) -> float:
    """Return the rate of copies of so many bytes in each thread, by one thread if that is faster, in 10^9 bytes per second."""
    rates = []
    for count in {1, threads}:
        sources = [np.ones(nbytes * threads // count, np.uint8) for _ in range(count)]
        targets = [np.zeros_like(s) for s in sources]
        rates.append(2 * nbytes * threads / _best(lambda s=sources, t=targets: _copy(s, t)) / 1e9)  # type: ignore[misc]  # a lambda with defaults
    return max(rates)


def _copy(sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    others = [threading.Thread(target=np.copyto, args=pair) for pair in zip(targets[1:], sources[1:], strict=True)]
    for thread in others:
        thread.start()
    np.copyto(targets[0], sources[0])
    for thread in others:
        thread.join()


def _best(run: Callable[[], object]) -> float:
    """The shortest time of a call, after one that warms up."""
    run()
    shortest, count, begin = math.inf, 0, time.perf_counter()
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        shortest, count = min(shortest, now - start), count + 1
        if now - begin > (BUDGET if count >= 20 else PATIENCE):
            return max(shortest, 1e-9)


def _product_rate(n: int, precision: str) -> tuple[float, str]:
    """The rate of a product of matrices with packed weights, and the library that computes it."""
    x, w, y = np.ones((n, n), np.float32), np.ones((n, n), np.float32), np.empty((n, n), np.float32)
    work = 2 * n**3 / 1e9
    library = dnn.library()
    if library is None:
        return work / _best(lambda: np.matmul(x, w, y)), "NumPy"
    plain = MemoryDesc.of(np.float32, (n, n))
    attributes = dnn.Attributes(fpmath="bf16" if precision == "bf16" else "strict")
    factors, source = x.dtype, plain
    if precision == "bf16" and rounding() == COPIES:
        factors, source, x = BF16, MemoryDesc.of(BF16, (n, n)), x.astype(BF16)
    primitive = dnn.matmul(source, MemoryDesc.any(factors, (n, n)), None, plain, attributes)
    packed = primitive.query("weights")
    weights, scratch = np.empty(packed.nbytes, np.uint8), np.empty(max(primitive.scratchpad_nbytes, 1), np.uint8)
    dnn.bind(
        dnn.reorder(plain, packed), {dnn.args.FROM: (plain, w.ctypes.data), dnn.args.TO: (packed, weights.ctypes.data)}
    ).run()
    memories = {
        dnn.args.SRC: (source, x.ctypes.data),
        dnn.args.WEIGHTS: (packed, weights.ctypes.data),
        dnn.args.DST: (plain, y.ctypes.data),
    }
    if primitive.scratchpad_nbytes:
        memories[dnn.args.SCRATCHPAD] = (primitive.query("scratchpad"), scratch.ctypes.data)
    return work / _best(dnn.bind(primitive, memories).run), f"oneDNN {'.'.join(map(str, library.version))}"
