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

from . import onednn
from .onednn import DST, FROM, SCRATCHPAD, SRC, TO, WEIGHTS, MemoryDesc

Shape = tuple[int, ...] | None
Rule = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[int]], int]

MOVES = frozenset(
    [
        *("Reshape", "Transpose", "Concat", "Slice", "Gather", "GatherElements", "GatherND", "Squeeze", "Unsqueeze", "Flatten"),
        *("Split", "Identity", "Expand", "Tile", "Pad", "CenterCropPad", "Where", "ScatterElements", "ScatterND", "DepthToSpace"),
        *("SpaceToDepth", "Cast", "CastLike", "BitCast", "Shape", "Size", "Constant", "ConstantOfShape", "EyeLike", "NonZero"),
        *(
            "Compress",
            "OneHot",
            "ReverseSequence",
            "TensorScatter",
            "MaxUnpool",
            "Range",
            "Dropout",
            "Trilu",
            "Upsample",
            "Unique",
        ),
    ]
)
"""Operators that compute no numbers."""

SELECTS = frozenset(["Gather", "GatherElements", "GatherND", "Slice"])
"""Operators that read at most as many bytes of their first input as they write, however large it is."""

UNKNOWN = frozenset(["If", "Loop", "Scan", "SequenceMap", "NonMaxSuppression", "StringConcat", "StringSplit", "RegexFullMatch"])
"""Operators whose work does not depend on shapes alone."""

PRODUCTS = frozenset(
    [
        *(
            "Conv",
            "ConvInteger",
            "QLinearConv",
            "ConvTranspose",
            "DeformConv",
            "MatMul",
            "MatMulInteger",
            "QLinearMatMul",
            "Gemm",
        ),
        *("Einsum", "RNN", "GRU", "LSTM", "Attention"),
    ]
)
"""Operators whose work is in products of matrices: the main one of a fused step."""


def flops(domain: str, name: str, attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int | None:
    """Count the floating point operations of a call: a product and a sum are two.

    Args:
        domain: of the operator.
        name: the operator.
        attributes: its attributes, defaults included.
        inputs: the shapes of the inputs; None for an absent one and for one that is not a tensor.
        output: the shape of the first output.

    Returns:
        The exact number of products and sums for products of matrices, convolutions and recurrent operators; an approximate one
        for norms and pools; one for each element of the output of other operators; 0 for those that only move data.  None if
        it is not known.
    """
    if domain or name in UNKNOWN:
        return None
    if name in MOVES:
        return 0
    try:
        return _RULES.get(name, _elementwise)(attributes, inputs, output)
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


def _size(shape: Shape) -> int:
    if shape is None:
        raise TypeError
    return math.prod(shape)


def _elementwise(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    return math.prod(output)


def _each_input(factor: int) -> Rule:
    return lambda attributes, inputs, output: factor * _size(inputs[0])


def _window(weights: int) -> Rule:
    """A sum over the weights of one output channel for each element of the output."""
    return lambda attributes, inputs, output: 2 * math.prod(output) * _size((inputs[weights] or ())[1:])


def _transposed(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    return 2 * _size(inputs[0]) * _size((inputs[1] or ())[1:])


def _product(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    return 2 * math.prod(output) * (inputs[0] or ())[-1]


def _gemm(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    return 2 * math.prod(output) * (inputs[0] or ())[0 if attributes.get("transA") else 1]


def _recurrent(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    first, second = (inputs[0] or ())[:2]  # the length and the batch, in either order
    return 2 * first * second * (_size(inputs[1]) + _size(inputs[2]))


def _attention(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    keys = (inputs[1] or ())[-2]
    if len(inputs) > 4 and inputs[4] is not None:
        keys += inputs[4][-2]
    return 2 * keys * (_size(inputs[0]) + math.prod(output))


def _einsum(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    equation = attributes["equation"]
    text = equation.decode() if isinstance(equation, bytes) else equation
    sizes: dict[str, int] = {}
    for term, shape in zip(text.replace(" ", "").partition("->")[0].split(","), inputs, strict=True):
        if "..." in term:
            raise TypeError
        sizes |= zip(term, shape or (), strict=True)
    return max(len(inputs), 1) * math.prod(sizes.values())


def _pool(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    return math.prod(output) * int(math.prod(attributes["kernel_shape"]))


def _resize(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Sequence[int]) -> int:
    mode = attributes.get("mode") or "nearest"
    mode = mode.decode() if isinstance(mode, bytes) else mode
    taps = {"nearest": 0, "linear": 2, "cubic": 4}.get(mode, 0)
    scaled = sum(a != b for a, b in zip(inputs[0] or (), output, strict=False))
    return math.prod(output) * 2 * taps * scaled


_RULES: dict[str, Rule] = {
    "Conv": _window(1), "ConvInteger": _window(1), "QLinearConv": _window(3), "DeformConv": _window(1),
    "ConvTranspose": _transposed, "MatMul": _product, "MatMulInteger": _product, "QLinearMatMul": _product, "Gemm": _gemm,
    "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent, "Attention": _attention, "Einsum": _einsum,
    "AveragePool": _pool, "MaxPool": _pool, "LpPool": _pool, "Resize": _resize,
    "BatchNormalization": _each_input(2), "LRN": lambda a, inputs, output: _size(inputs[0]) * (2 * int(a["size"]) + 3),
}  # fmt: skip

_REDUCTIONS = (
    *("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"),
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "ArgMax", "ArgMin", "CumSum", "TopK"),
)
_NORMS = (
    *("LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "MeanVarianceNormalization"),
    *("LpNormalization", "Softmax", "LogSoftmax", "Hardmax"),
)
_RULES |= dict.fromkeys(_REDUCTIONS, _each_input(1)) | dict.fromkeys(_NORMS, _each_input(8))


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
        with onednn.using_threads(count):
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
    library = onednn.library()
    if library is None:
        return work / _best(lambda: np.matmul(x, w, y)), "NumPy"
    plain = MemoryDesc.of(np.float32, (n, n))
    attributes = onednn.Attributes(fpmath="bf16" if precision == "bf16" else "strict")
    primitive = onednn.matmul(plain, MemoryDesc.any(np.float32, (n, n)), None, plain, attributes)
    packed = primitive.query("weights")
    weights, scratch = np.empty(packed.nbytes, np.uint8), np.empty(max(primitive.scratchpad_nbytes, 1), np.uint8)
    onednn.bind(onednn.reorder(plain, packed), {FROM: (plain, w.ctypes.data), TO: (packed, weights.ctypes.data)}).run()
    memories = {SRC: (plain, x.ctypes.data), WEIGHTS: (packed, weights.ctypes.data), DST: (plain, y.ctypes.data)}
    if primitive.scratchpad_nbytes:
        memories[SCRATCHPAD] = (primitive.query("scratchpad"), scratch.ctypes.data)
    return work / _best(onednn.bind(primitive, memories).run), f"oneDNN {'.'.join(map(str, library.version))}"
