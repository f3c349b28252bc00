"""The cases of the sweep: a family draws one, a dictionary of numbers, and builds its primitive and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import Attributes, MemoryDesc, Primitive, args, backward

from . import definitions as the
from .running import Layout, Problem

Case = dict[str, Any]
"""A case: the family, the kind of the primitive, sizes, layouts, post-ops, the number of threads and the seed of the data."""

F32 = np.dtype(np.float32)
DTYPES = {
    "f32": F32, "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8), "s32": np.dtype(np.int32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}  # fmt: skip
CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 17, 20, 23, 24, 25, 31, 32, 33, 40, 48, 64)
MOST = 2_000_000
"""The highest number of products of a case."""

PARAMETERS = {
    "linear": (2.0, 1.0), "clip": (-1.0, 6.0), "clip_v2": (-1.0, 6.0), "swish": (1.0, 0.0), "relu": (0.5, 0.0), "elu": (1.0, 0.0),
    "hardsigmoid": (0.25, 0.5), "hardswish": (1 / 6, 0.5), "soft_relu": (1.0, 0.0), "pow": (1.0, 2.0),
}  # fmt: skip
"""The parameters of functions of elements."""

KINKS = (-3.0, -2.0, -1.0, 0.0, 2.0, 3.0, 6.0, *np.arange(-9, 10) + 0.5)
"""Where such a function has no derivative, or `round` is half-way."""


class Impossible(Exception):
    """The numbers of a case do not fit each other, or the product does not ask for them."""


def require(holds: Any, reason: str) -> None:
    """Give up a case."""
    if not holds:
        raise Impossible(reason)


class Draw:
    """Draws numbers."""

    def __init__(self, seed: Sequence[int]) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def size(self, most: int) -> int:
        return int(self.rng.integers(1, most + 1))

    def shape(self, least: int, most: int, top: int) -> list[int]:
        return [self.size(self.one(2, top, top)) for _ in range(int(self.rng.integers(least, most + 1)))]

    def each(self, rank: int, *values: Any) -> list[Any]:
        """A value for each axis, often one for all."""
        return [self.one(*values)] * rank if self.rng.random() < 0.7 else [self.one(*values) for _ in range(rank)]

    def gap(self) -> int:
        return int(self.one(0, 0, 0, 0, 0, 0, 0, 3))

    def prop(self, kind: str) -> str:
        return str(self.one("inference", "training")) if kind.endswith("forward") else "training"

    def post(self, rank: int, *functions: str, slopes: bool = False) -> list[Any]:
        """Post-ops: a function, the previous content, a second operand, and slopes, which plans use in convolutions only."""
        functions = functions or ("relu", "linear", "clip", "logistic", "tanh", "gelu_erf", "swish")
        made: list[Any] = []
        for _ in range(self.one(0, 0, 1, 1, 2, 3)):
            kind = self.one("eltwise", "eltwise", "sum", "binary", "binary", "prelu")
            if kind == "eltwise":
                made.append([kind, self.one(*functions)])
            elif kind == "binary":
                keep = self.one([], [1], [1], [*range(rank)], [*range(rank)], [rank - 1], [0])
                made.append([kind, self.one("add", "add", "mul", "sub", "max", "min"), keep, self.one(0, 0, 0, 0, 3)])
            elif kind not in [one[0] for one in made] and (kind == "sum" or slopes):
                made.append([kind])
        return made


class Data:
    """The contents of the tensors of a case: whole numbers, so that sums of products are exact, or normal ones."""

    def __init__(self, case: Case) -> None:
        self.rng = np.random.default_rng(case["seed"])

    def whole(self, shape: Sequence[int], dtype: Any = F32, low: int = -3, high: int = 3) -> np.ndarray:
        low = 0 if np.dtype(dtype) == np.uint8 else low
        return self.rng.integers(low, high + 1, tuple(shape)).astype(dtype)

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(tuple(shape)) * scale).astype(F32)

    def powers(self, shape: Sequence[int]) -> np.ndarray:
        """Powers of 2, by which products are exact."""
        return (2.0 ** self.whole(shape, low=-3, high=0)).astype(F32)

    def distinct(self, shape: Sequence[int], dtype: Any = F32) -> np.ndarray:
        numbers = self.rng.permutation(math.prod(shape)) - math.prod(shape) // 2
        if np.dtype(dtype).kind in "iu":
            numbers = np.clip(numbers, np.iinfo(dtype).min, np.iinfo(dtype).max)
        return numbers.reshape(shape).astype(dtype)


def described(shape: Sequence[int], layout: Any, dtype: Any = F32, gap: int = 0) -> MemoryDesc:
    """A description: "any", "plain", "last" (channels innermost), "block8", "block16", or an order of the axes, outermost first.

    Args:
        shape: the sizes.
        layout: the layout.
        dtype: the element type.
        gap: elements without meaning after each row, the innermost axis.
    """
    rank = len(shape)
    if layout == "any":
        return MemoryDesc.any(dtype, shape)
    if isinstance(layout, str) and layout.startswith("block"):
        require(rank >= 3, "blocks need channels")
        return MemoryDesc.tagged(dtype, shape, f"aB{'cdefg'[: rank - 2]}{layout[5:]}b")
    order = [0, *range(2, rank), *range(1, min(rank, 2))] if layout == "last" else [*range(rank)] if layout == "plain" else layout
    require(sorted(order) == [*range(rank)], "the order is not one of these axes")
    strides, step = [0] * rank, 1
    for n, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= shape[axis] + (gap if n == 0 and rank > 1 else 0)
    return MemoryDesc.of(dtype, shape, strides)


@dataclass
class Post:
    """The post-ops of a case, scales and zero points: their attributes, the arguments that they read, and what they compute.

    Args:
        case: the case, whose "post" lists them.
        data: draws operands.
        shape: of the result.
        layout: of the result and of operands of the same shape.
        dtype: of the result.
    """

    case: Case
    data: Data
    shape: Sequence[int]
    layout: Any = "plain"
    dtype: np.dtype[Any] = F32
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    layouts: dict[int, MemoryDesc] = field(default_factory=dict)
    exact: bool = True

    def __post_init__(self) -> None:
        self.attributes = Attributes(fpmath=self.case.get("fpmath", "strict"))
        self.steps: list[Callable[[np.ndarray], np.ndarray]] = []
        for index, (kind, *rest) in enumerate(self.case.get("post", [])):
            getattr(self, f"_{kind}")(index, *rest)

    def read(self, arg: int, array: np.ndarray, md: MemoryDesc | None = None) -> np.ndarray:
        """Note an argument that the primitive does not tell; return it in float64."""
        self.inputs[arg] = array
        self.layouts[arg] = md or MemoryDesc.of(array.dtype, array.shape)
        return array.astype(np.float64)

    def zero_point(self, arg: int, zero: int) -> None:
        if zero:
            self.attributes.set_zero_points(arg, 0)
            self.read(args.zero_points(arg), np.array([zero], np.int32))

    def scales(self, arg: int, count: int, mask: int) -> np.ndarray:
        self.attributes.set_scales(arg, mask)
        return self.read(args.scales(arg), self.data.powers([count]))

    def _wide(self, keep: Sequence[int]) -> list[int]:
        return [size if axis in keep else 1 for axis, size in enumerate(self.shape)]

    def _eltwise(self, index: int, name: str) -> None:
        a, b = PARAMETERS.get(name, (0.0, 0.0))
        self.attributes.append_eltwise(name, a, b)
        self.exact &= name in ("relu", "linear", "clip", "round", "abs")
        self.steps.append(lambda y: the.FUNCTIONS[name](y, a, b))

    def _sum(self, index: int) -> None:
        self.attributes.append_sum()
        before = self.inputs[args.DST] = self.data.whole(self.shape, self.dtype)
        self.steps.append(lambda y: y + before)

    def _binary(self, index: int, name: str, keep: Sequence[int], gap: int) -> None:
        shape = self._wide(keep)
        whole = shape == list(self.shape)
        md = described(shape, self.layout if whole and self.layout != "any" else "plain", gap=gap * whole)
        if gap and keep == [1] and len(shape) > 1:
            md = MemoryDesc.of(F32, shape, [4 * shape[1], 4, *[1] * (len(shape) - 2)])
        self.attributes.append_binary(name, md)
        other = self.read(args.post_op(index), self.data.whole(shape), md)
        self.steps.append(lambda y: the.PAIRS[name](y, other))

    def _scale(self, index: int, keep: Sequence[int]) -> None:
        """A product with factors, as that of quantized results."""
        md = described(self._wide(keep), "plain")
        self.attributes.append_binary("mul", md)
        factor = self.read(args.post_op(index), self.data.powers(md.shape), md)
        self.steps.append(lambda y: y * factor)

    def _prelu(self, index: int) -> None:
        self.attributes.append_prelu(2)
        slope = self.read(args.post_op(index, args.WEIGHTS), self.data.whole([self.shape[1]]))
        wide = slope.reshape([-1 if axis == 1 else 1 for axis in range(len(self.shape))])
        self.steps.append(lambda y: np.where(y > 0, y, y * wide))

    def apply(self, y: np.ndarray) -> np.ndarray:
        """The result after all post-ops, as the destination stores it."""
        for step in self.steps:
            y = step(y)
        if self.dtype.kind in "iu":
            return np.clip(np.rint(y), np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
        return np.asarray(y, np.float64)

    def problem(
        self,
        create: Callable[..., Primitive],
        inputs: Mapping[int, np.ndarray],
        y: np.ndarray,
        tolerance: float = 0.0,
        **further: Any,
    ) -> Problem:
        """The problem of a forward primitive whose result before the post-ops is `y`."""
        made = partial(create, attributes=self.attributes, allow_reference=True)
        tolerance = tolerance if self.exact else max(tolerance, 1e-5)
        return Problem(made, {**inputs, **self.inputs}, {args.DST: self.apply(y)}, tolerance, self.layouts, **further)


@dataclass(frozen=True)
class Family:
    """How to draw and to build the cases of some kinds of primitives."""

    kinds: tuple[str, ...]
    draw: Callable[[Draw, str], Case]
    build: Callable[[Case, Data], Problem]
    weight: int


FAMILIES: dict[str, Family] = {}


def family(draw: Callable[[Draw, str], Case], *kinds: str, weight: int = 2) -> Callable[[Any], Any]:
    """Register a function that builds cases; a kind that is listed twice is drawn twice as often."""

    def add(build: Callable[[Case, Data], Problem]) -> Callable[[Case, Data], Problem]:
        FAMILIES[build.__name__] = Family(kinds, draw, build, weight)
        return build

    return add


def draw(seed: int, index: int, only: Sequence[str] = ()) -> Case:
    """The case of a seed and an index."""
    d = Draw([seed, index])
    names = [n for n in FAMILIES if not only or n in only]
    weights = np.array([FAMILIES[n].weight for n in names], float)
    name = str(d.rng.choice(names, p=weights / weights.sum()))
    kind = d.one(*FAMILIES[name].kinds)
    drawn = FAMILIES[name].draw(d, kind)
    return {"family": name, "kind": kind, **drawn, "threads": d.one(1, 1, 1, 1, 1, 2, 2, 4), "seed": int(d.rng.integers(1 << 30))}


def build(case: Case) -> Problem:
    """The primitive and the data of a case."""
    return FAMILIES[case["family"]].build(case, Data(case))


def forward_run(primitive: Primitive, inputs: Mapping[int, np.ndarray], outputs: Sequence[int]) -> dict[int, Any]:
    """The results of a forward primitive, and the bytes of its workspace."""
    spaces = {args.WORKSPACE: primitive.workspace_nbytes, args.SCRATCHPAD: primitive.scratchpad_nbytes}
    numbers = [*inputs, *outputs, *[arg for arg, nbytes in spaces.items() if nbytes]]
    layouts = {arg: Layout(primitive.query("argument", arg)) for arg in numbers}
    memory = {arg: np.zeros(layout.md.nbytes, np.uint8) for arg, layout in layouts.items()}
    for arg, array in inputs.items():
        layouts[arg].pack(array, memory[arg][: layouts[arg].nbytes])
    dnn.bind(primitive, {arg: (layouts[arg].md, memory[arg].ctypes.data) for arg in numbers}).run()
    results: dict[int, Any] = {arg: layouts[arg].unpack(memory[arg][: layouts[arg].nbytes]) for arg in outputs}
    return results | {arg: m.tobytes() for arg, m in memory.items() if arg == args.WORKSPACE}


# --- convolutions


def _draw_convolution(d: Draw, kind: str) -> Case:
    rank = d.one(1, 2, 2, 2, 2, 2, 3)
    kernel = [1] * rank if d.rng.random() < 0.35 else d.each(rank, 1, 2, 3, 3, 3, 5, 7)
    strides, size = d.each(rank, 1, 1, 2, 3), [d.size({1: 33, 2: 17, 3: 7}[rank]) for _ in range(rank)]
    begin = end = [k // 2 for k in kernel]
    if d.rng.random() < 0.5:
        begin, end = ([0] * rank, [0] * rank) if d.one(0, 1, 1) else (d.each(rank, 0, 1, 2, 3, 9), d.each(rank, 0, 1, 2, 3, 9))
    groups = d.one(0, 0, 0, 1, 2)
    g, ic, oc = [
        (0, d.one(*CHANNELS), d.one(*CHANNELS)), (d.one(*CHANNELS), 1, d.one(1, 1, 1, 2)),
        (d.one(1, 2, 3, 4), d.one(*CHANNELS[:14]), d.one(*CHANNELS[:14])),
    ][groups]  # fmt: skip
    if d.rng.random() < 0.12:  # a window of one element with a stride that divides the sizes
        kernel, strides, begin, end, g = [1] * rank, [d.one(2, 2, 3)] * rank, [0] * rank, [0] * rank, 0
        size = [-(-n // s) * s for n, s in zip(size, strides, strict=True)]
    case = {
        "prop": d.prop(kind), "n": d.one(1, 1, 2, 5), "g": g, "ic": ic, "oc": oc, "size": size, "kernel": kernel,
        "strides": strides,
        "dilations": d.each(rank, 1, 1, 1, 2, 3), "begin": begin, "end": end,
        "layout": d.one("last", "last", "last", "plain", "any"),
        "weights": d.one("any", "any", "any", "plain"), "gap": d.gap(), "bias": d.one(0, 1), "dtypes": ["f32"] * 3, "zero": 0,
        "post": [],
        "fpmath": d.one("strict", "strict", "strict", "bf16"),
    }  # fmt: skip
    if kind.endswith("forward") and d.rng.random() < 0.2:
        tails = [], [["scale", [1]]], [["scale", []], ["eltwise", "relu"]], [["binary", "add", [1], 0]]
        case |= {
            "prop": "inference",
            "dtypes": [d.one("u8", "s8"), "s8", d.one("s32", "f32", "u8", "s8")],
            "zero": d.one(0, 0, 2),
        }
        case |= {"post": d.one(*tails)}
    elif case["prop"] == "inference":
        case["post"] = d.post(rank + 2, slopes=True)
    return case


def _window_of(case: Case) -> the.Window:
    names = ("kernel", "strides", "dilations", "begin", "end")
    require(len({len(case[n]) for n in (*names, "size")}) == 1, "the ranks differ")
    return the.Window(*(tuple(case[n]) for n in names))


def _numbers(at: the.Window) -> dict[str, Any]:
    return {"strides": at.strides, "dilations": [d - 1 for d in at.dilations], "pads_begin": at.begin, "pads_end": at.end}


@family(
    _draw_convolution, "convolution_forward", "convolution_backward_data", "convolution_backward_weights",
    "convolution_backward_weights", "deconvolution_forward", "deconvolution_backward_data", "deconvolution_backward_weights",
    weight=16,
)  # fmt: skip
def convolution(case: Case, data: Data) -> Problem:
    """A convolution or a transposed one: both are one bilinear form, with the roles of its tensors exchanged."""
    kind, at, g, n = case["kind"], _window_of(case), max(case["g"], 1), case["n"]
    turned = kind.startswith("de")
    sizes = at.sizes(case["size"]) if turned else at.counts(case["size"])
    require(min(sizes) >= 1, "there is no result")
    src, dst = (n, g * case["ic"], *case["size"]), (n, g * case["oc"], *sizes)
    filters = (*([g] if case["g"] else []), case["oc"], case["ic"], *at.kernel)
    require(math.prod(filters) * n * math.prod(case["size"] if turned else sizes) <= MOST, "too much work")
    types, layout, gap = [DTYPES[t] for t in case["dtypes"]], case["layout"], case["gap"]
    post = Post(case, data, dst, layout, types[2])
    post.zero_point(args.SRC, case["zero"])
    x, w, dy, b = data.whole(src, types[0]), data.whole(filters, types[1]), data.whole(dst), data.whole([dst[1]])
    has_bias = bool(case["bias"]) and not kind.endswith("data")
    bias = MemoryDesc.of(F32, b.shape) if has_bias else None
    a, f, c = (described(s, *how) for s, how in zip((src, filters, dst), ((layout, types[0], gap), (case["weights"], types[1]),
               (layout, types[2], gap)), strict=True))  # fmt: skip
    make = partial(dnn.deconvolution if turned else dnn.convolution, a, f, bias, c, prop=case["prop"], **_numbers(at))
    outer, inner = (dy, x) if turned else (x, dy)  # that which the window moves over, and that of its places
    outer, inner = (t.astype(np.float64) - (case["zero"] if t is x else 0) for t in (outer, inner))
    outer, inner = (t.reshape(n, g, -1, *t.shape[2:]) for t in (outer, inner))
    kernel = w.astype(np.float64).reshape(g, *filters[-2 - len(at.kernel) :])
    kernel = kernel.swapaxes(1, 2) if turned else kernel
    if kind.endswith("forward"):
        y = the.convolution_data(inner, kernel, at, sizes) if turned else the.convolution(outer, kernel, at)
        y = y.reshape(dst) + (b.reshape(-1, *[1] * len(sizes)) if has_bias else 0)
        return post.problem(make, {args.SRC: x, args.WEIGHTS: w} | ({args.BIAS: b} if has_bias else {}), y)
    options: dict[str, Any] = {**_numbers(at), "attributes": post.attributes, "allow_reference": True}
    options["hint"] = make(attributes=post.attributes, allow_reference=True)
    function = getattr(backward, kind)
    if kind.endswith("data"):
        dx = the.convolution(outer, kernel, at) if turned else the.convolution_data(inner, kernel, at, case["size"])
        return Problem(
            partial(function, a, f, c, **options), {args.DIFF_DST: dy, args.WEIGHTS: w}, {args.DIFF_SRC: dx.reshape(src)}
        )
    dw = the.convolution_weights(outer, inner, at)
    expected: dict[int, Any] = {args.DIFF_WEIGHTS: (dw.swapaxes(1, 2) if turned else dw).reshape(filters)}
    if has_bias:
        expected[args.DIFF_BIAS] = dy.astype(np.float64).sum((0, *range(2, len(dst))))
    return Problem(partial(function, a, f, bias, c, **options), {args.SRC: x, args.DIFF_DST: dy}, expected)


# --- products of matrices


def _draw_matmul(d: Draw, kind: str) -> Case:
    batch = d.one([], [], [], [1], [3], [2, 3])
    m, k, n = (d.size(d.one(10, 40, 70, 200)) for _ in range(3))
    case = {
        "batch": batch, "broadcast": d.one("", "", "left", "right"), "m": m, "k": k, "n": n, "left": d.one(0, 0, 1),
        "right": d.one("plain", "turned", "any", "any"), "bias": d.one(0, 1), "gaps": [d.gap(), d.gap(), d.gap()],
        "open": d.one("", "", "", "", "columns", "depth"), "dtypes": ["f32"] * 3, "zeros": [0, 0], "scaled": 0,
        "post": d.post(len(batch) + 2), "fpmath": d.one("strict", "strict", "bf16"),
    }  # fmt: skip
    if case["open"]:
        case |= {"post": [], "bias": 0, "left": 0, "broadcast": "", "right": "plain", "gaps": [0, 0, 0]}
    elif d.rng.random() < 0.2:
        tails = [], [["scale", []]], [["scale", [len(batch) + 1]], ["eltwise", "round"]]
        case |= {"dtypes": [d.one("u8", "u8", "s8"), "s8", d.one("s32", "f32", "u8")], "zeros": [d.one(0, 2), d.one(0, 0, 1)]}
        case |= {"gaps": [0, 0, 0], "scaled": d.one(0, 1), "post": d.one(*tails), "high": d.one([3, 3], [255, 63])}
    elif d.rng.random() < 0.05:
        case["dtypes"] = ["bf16", "bf16", "f32"]
    return case


@family(_draw_matmul, "matmul", weight=5)
def matmul(case: Case, data: Data) -> Problem:
    """A product of matrices or of batches, also with sizes that are known only at run time."""
    batch, m, k, n = case["batch"], case["m"], case["k"], case["n"]
    rank, ones, dst = len(batch) + 2, [1] * len(batch), (*batch, m, n)
    require(math.prod(dst) * k <= MOST, "too much work")
    types = [DTYPES[t] for t in case["dtypes"]]
    most = case.get("high", [3, 3])
    most = [min(high, 255 if t == np.uint8 else 127) for high, t in zip(most, types, strict=False)]
    a = data.whole((*(ones if case["broadcast"] == "left" else batch), m, k), types[0], -most[0], most[0])
    b = data.whole((*(ones if case["broadcast"] == "right" else batch), k, n), types[1], -most[1], most[1])
    post = Post(case, data, dst, "plain", types[2])
    turned = [*range(rank - 2), rank - 1, rank - 2]
    left = described(a.shape, turned if case["left"] else "plain", types[0], case["gaps"][0])
    right = described(b.shape, turned if case["right"] == "turned" else case["right"], types[1], case["gaps"][1])
    into = described(dst, "plain", types[2], case["gaps"][2])
    if case["open"]:
        require(len(batch) < 2, "several axes of batches have no common step")
        right = described(b.shape, turned) if case["open"] == "columns" else right
        post.layouts.update({args.SRC: left, args.WEIGHTS: right, args.DST: into})
        left, right, into = _opened(case, left, into)
    for arg, zero in zip((args.SRC, args.WEIGHTS), case["zeros"], strict=True):
        post.zero_point(arg, zero)
    y = (a.astype(np.float64) - case["zeros"][0]) @ (b.astype(np.float64) - case["zeros"][1])
    y = y * post.scales(args.WEIGHTS, n, 1 << (rank - 1)) if case["scaled"] else y
    inputs, bias = {args.SRC: a, args.WEIGHTS: b}, None
    if case["bias"]:
        bias = MemoryDesc.of(F32, (*ones, 1, n))
        inputs[args.BIAS] = data.whole(bias.shape)
        y = y + inputs[args.BIAS]
    return post.problem(partial(dnn.matmul, left, right, bias, into), inputs, y)


def _opened(case: Case, left: MemoryDesc, into: MemoryDesc) -> tuple[MemoryDesc, MemoryDesc, MemoryDesc]:
    """The descriptions with the columns, or the inner size, unknown."""
    unknown, batch, m, k, n = dnn.RUNTIME_DIM, case["batch"], case["m"], case["k"], case["n"]
    outer = [unknown] * len(batch)
    rows = MemoryDesc.of(F32, [*batch, m, unknown], [*outer, unknown, 1])
    if case["open"] == "columns":
        return left, MemoryDesc.of(F32, [*batch, k, unknown], [*outer, 1, k]), rows
    return rows, MemoryDesc.of(F32, [*batch, unknown, n], [*outer, n, 1]), into


# --- windows


def _draw_pooling(d: Draw, kind: str) -> Case:
    rank = d.one(1, 2, 2, 2, 3)
    return {
        "prop": d.prop(kind), "algorithm": d.one("max", "avg_include_padding", "avg_exclude_padding"), "n": d.one(1, 2, 5),
        "ic": d.one(*CHANNELS), "size": [d.size({1: 33, 2: 18, 3: 8}[rank]) for _ in range(rank)],
        "kernel": d.each(rank, 1, 2, 3, 3, 5, 7), "strides": d.each(rank, 1, 2, 3), "dilations": d.each(rank, 1, 1, 1, 2),
        "begin": d.each(rank, 0, 0, 1, 2), "end": d.each(rank, 0, 0, 1, 2), "gap": d.gap(),
        "layout": d.one("last", "last", "last", "plain", "block8"), "dtype": d.one("f32", "f32", "f32", "s8", "u8"),
    }  # fmt: skip


@family(_draw_pooling, "pooling_forward", "pooling_backward", weight=4)
def pooling(case: Case, data: Data) -> Problem:
    """A pooling or its gradient; the maximum passes its workspace to it."""
    at, algorithm, forward = _window_of(case), case["algorithm"], case["kind"].endswith("forward")
    dtype = DTYPES[case["dtype"]] if algorithm == "max" and forward else F32
    src, counts = (case["n"], case["ic"], *case["size"]), at.counts(case["size"])
    reach = at.reach()
    require(
        min(counts) >= 1 and all(p < r for p, r in zip((*at.begin, *at.end), reach * 2, strict=True)),
        "a window is in the padding",
    )
    ones = at.padded(np.ones((1, 1, *src[2:])))
    require(np.all(sum(ones[where] for _, where in at.taps(counts))), "a window contains only padding")
    require(math.prod(src) * math.prod(at.kernel) <= MOST, "too much work")
    dst = (*src[:2], *counts)
    a, c = (described(s, case["layout"], dtype, case["gap"]) for s in (src, dst))
    options: dict[str, Any] = {**_numbers(at), "kernel": at.kernel, "algorithm": algorithm, "allow_reference": True}
    make = partial(dnn.pooling, a, c, prop=case["prop"], **options)
    x, tolerance = data.distinct(src, dtype), 0.0 if algorithm == "max" else 1e-5
    if forward:
        expected: dict[int, Any] = {args.DST: the.pooled(x.astype(np.float64), at, algorithm)}
        if case["prop"] == "training" and algorithm == "max":
            expected[args.WORKSPACE] = None
        return Problem(make, {args.SRC: x}, expected, tolerance)
    hint, dy = make(), data.normal(dst)
    inputs: dict[int, Any] = {args.DIFF_DST: dy}
    if algorithm == "max":
        inputs[args.WORKSPACE] = forward_run(hint, {args.SRC: x}, [args.DST])[args.WORKSPACE]
    expected = {args.DIFF_SRC: the.pooled_gradient(dy.astype(np.float64), x, at, algorithm)}
    return Problem(partial(backward.pooling_backward, a, c, hint=hint, **options), inputs, expected, 1e-5)


def _draw_resampling(d: Draw, kind: str) -> Case:
    rank = d.one(1, 2, 2, 3)
    size, to = ([d.size({1: 33, 2: 14, 3: 7}[rank]) for _ in range(rank)] for _ in range(2))
    return {
        "n": d.one(1, 2), "ic": d.one(*CHANNELS), "size": size, "to": to, "algorithm": d.one("nearest", "linear"),
        "layout": d.one("last", "last", "plain", "block8"), "gap": d.gap(), "dtype": d.one("f32", "f32", "s8", "u8"),
        "post": d.one([], [], [], [["eltwise", "relu"]], [["sum"]]),
    }  # fmt: skip


@family(_draw_resampling, "resampling_forward")
def resampling(case: Case, data: Data) -> Problem:
    """A resize with half pixels."""
    require(len(case["size"]) == len(case["to"]), "the ranks differ")
    nearest = case["algorithm"] == "nearest"
    for old, new in zip(case["size"], case["to"], strict=True):
        at = (np.arange(new) + 0.5) * old / new - 0.5
        require(not nearest or (np.abs(at - np.floor(at) - 0.5) > 1e-3).all(), "a place is half-way between two elements")
    dtype = DTYPES[case["dtype"]] if nearest and not case["post"] else F32
    src, dst = (case["n"], case["ic"], *case["size"]), (case["n"], case["ic"], *case["to"])
    post = Post(case, data, dst, case["layout"], dtype)
    a, c = (described(s, case["layout"], dtype, case["gap"]) for s in (src, dst))
    x = data.whole(src, dtype, -9, 9)
    y = the.resampled(x.astype(np.float64), case["to"], case["algorithm"])
    return post.problem(partial(dnn.resampling, a, c, algorithm=case["algorithm"]), {args.SRC: x}, y, 0.0 if nearest else 1e-5)


def _draw_reduction(d: Draw, kind: str) -> Case:
    shape = d.shape(1, 4, 16)
    norms = ("norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum")
    return {
        "shape": shape, "axes": [i for i in range(len(shape)) if d.one(0, 1)] or [0], "algorithm": d.one("max", "min", "sum",
        "mul", "mean", *norms),
        "layout": d.one("plain", "plain", "last", "block8"), "gap": d.gap(),
        "post": d.one([], [], [["eltwise", "relu"]], [["sum"]]),
    }  # fmt: skip


@family(_draw_reduction, "reduction")
def reduction(case: Case, data: Data) -> Problem:
    """A reduction of some axes."""
    shape, axes, name = case["shape"], tuple(a for a in case["axes"] if a < len(case["shape"])), case["algorithm"]
    into = [1 if i in axes else s for i, s in enumerate(shape)]
    require(into != shape, "no axis is reduced")
    x = data.normal(shape)
    x = np.sign(x) * data.rng.choice(np.float32([1, 1, 1, 2, 0.5]), shape) if name == "mul" else x
    post = Post(case, data, into, case["layout"])
    a, c = described(shape, case["layout"], gap=case["gap"]), described(into, case["layout"])
    y = the.reduced(x.astype(np.float64), axes, name, 2.0, 1e-3)
    return post.problem(partial(dnn.reduction, a, c, algorithm=name, p=2.0, epsilon=1e-3), {args.SRC: x}, y, 1e-5)


# --- normalizations


def _draw_normalization(d: Draw, kind: str) -> Case:
    forward = kind.endswith("forward")
    case = {"prop": d.prop(kind), "flags": d.one(0, 1, 2, 6, 6, 6, 6, 3, 7), "gap": d.gap(), "shared": d.one(0, 1), "relu": 0}
    if kind.startswith("layer"):
        rows, count = d.one([d.size(40)], [d.size(40)], d.shape(1, 3, 12)), d.one(d.one(*CHANNELS), d.size(300))
        return {**case, "shape": [*rows, count + 1], "layout": d.one("plain", "plain", "plain", [1, 0, *range(2, len(rows) + 1)])}
    rank = d.one(0, 1, 2, 2, 3)
    size = [d.size({1: 33, 2: 14, 3: 7}[rank]) for _ in range(rank)]
    case |= {"shape": [d.one(1, 2, 5, 8), d.one(*CHANNELS), *size], "relu": d.one(0, 0, 1) if forward else 0}
    return {**case, "layout": d.one("last", "last", "last", "plain", "block8", "block16")}


@family(
    _draw_normalization, "batch_normalization_forward", "batch_normalization_backward", "layer_normalization_forward",
    "layer_normalization_backward", weight=7,
)  # fmt: skip
def normalization(case: Case, data: Data) -> Problem:
    """A normalization of channels or of rows, by their own moments or by given ones, or its gradient."""
    kind, shape, flags = case["kind"], case["shape"], case["flags"]
    forward, batch, rank = kind.endswith("forward"), kind.startswith("batch"), len(case["shape"])
    fixed, scaled, shifted = (bool(flags & bit) for bit in (dnn.USE_GLOBAL_STATS, dnn.USE_SCALE, dnn.USE_SHIFT))
    require(rank >= 2 and (batch or shape[-1] > 2), "the gradient of two features is a cancellation")
    require(rank > 2 or not batch or case["layout"] == "plain", "there are no channels apart")
    axes = (0, *range(2, rank)) if batch else (rank - 1,)
    features = tuple(a for a in range(rank) if a not in axes) if batch else axes
    md = described(shape, case["layout"], gap=case["gap"])
    x, dy = data.normal(shape) + F32.type(0.5), data.normal(shape)
    scale, shift = (data.normal([shape[1] if batch else shape[-1]]) for _ in range(2))
    spread = partial(np.reshape, shape=[s if a in features else 1 for a, s in enumerate(shape)])
    wide = x.astype(np.float64)
    moments = [m.astype(F32) if fixed or not forward else m for m in (wide.mean(axes), wide.var(axes))]
    own = [np.expand_dims(m.astype(np.float64), axes) for m in moments] if fixed else []
    norm = the.Normalization(wide, axes, 1e-3, spread(scale) if scaled else 1.0, spread(shift) if shifted else 0.0, *own)
    relu = bool(case["relu"]) and case["prop"] == "inference"
    name = "batch_normalization" if batch else "layer_normalization"
    options: dict[str, Any] = {"epsilon": 1e-3, "allow_reference": True}
    make = partial(getattr(dnn, name), md, md, flags=flags | (dnn.FUSE_NORM_RELU if relu else 0), prop=case["prop"], **options)
    inputs = {args.SRC: x} | ({args.SCALE: scale} if scaled else {})
    statistics = dict(zip((args.MEAN, args.VARIANCE), moments, strict=True))
    if forward:
        expected: dict[int, Any] = {args.DST: np.maximum(norm.result(), 0) if relu else norm.result()}
        expected |= statistics if case["prop"] == "training" and not fixed else {}
        inputs |= ({args.SHIFT: shift} if shifted else {}) | (statistics if fixed else {})
        return Problem(make, inputs, expected, 2e-5, shared={args.DST: args.SRC} if case["shared"] else {})
    over = tuple(a for a in range(rank) if a not in features)
    expected = {args.DIFF_SRC: norm.gradient(dy.astype(np.float64))}
    expected |= {args.DIFF_SCALE: (dy * norm.z).sum(over)} if scaled else {}
    expected |= {args.DIFF_SHIFT: dy.astype(np.float64).sum(over)} if shifted else {}
    inputs |= {args.SHIFT: shift} if shifted and not batch else {}
    create = partial(getattr(backward, kind), md, md, md, hint=make(), flags=flags, parameters=scaled or shifted, **options)
    shared = {args.DIFF_SRC: args.DIFF_DST} if case["shared"] and not batch else {}
    return Problem(create, inputs | statistics | {args.DIFF_DST: dy}, expected, 1e-4, shared=shared)


def _draw_softmax(d: Draw, kind: str) -> Case:
    shape = d.one([d.size(40), d.size(300)], [d.size(9), d.size(40)], d.shape(1, 4, 20))
    return {
        "prop": d.prop(kind), "shape": shape, "axis": d.one(len(shape) - 1, int(d.rng.integers(len(shape)))), "log": d.one(0, 1),
        "layout": d.one("plain", "plain", "plain", "last", "block8"), "gap": d.gap(), "shared": d.one(0, 1),
    }  # fmt: skip


@family(_draw_softmax, "softmax_forward", "softmax_backward", weight=3)
def softmax(case: Case, data: Data) -> Problem:
    """A softmax or its logarithm, or the gradient."""
    shape, axis, log = case["shape"], case["axis"], bool(case["log"])
    require(axis < len(shape), "there is no such axis")
    md, options = described(shape, case["layout"], gap=case["gap"]), {"axis": axis, "log": log, "allow_reference": True}
    x, dy = data.normal(shape, 3), data.normal(shape)
    y = the.softmax(x.astype(np.float64), axis, log)
    make = partial(dnn.softmax, md, md, prop=case["prop"], **options)
    if case["kind"].endswith("forward"):
        return Problem(make, {args.SRC: x}, {args.DST: y}, 2e-5, shared={args.DST: args.SRC} if case["shared"] else {})
    result = y.astype(F32)
    dx = the.softmax_gradient(dy.astype(np.float64), result.astype(np.float64), axis, log)
    require(np.abs(dx).max(initial=0) > 1e-3 * np.abs(dy * (1 if log else result)).max(initial=0), "all terms cancel")
    create = partial(backward.softmax_backward, md, md, md, hint=make(), **options)
    shared = {args.DIFF_SRC: args.DIFF_DST} if case["shared"] else {}
    return Problem(create, {args.DST: result, args.DIFF_DST: dy}, {args.DIFF_SRC: dx}, 1e-4, shared=shared)


def _draw_lrn(d: Draw, kind: str) -> Case:
    return {
        "shape": [d.one(1, 2), d.one(*CHANNELS), *d.shape(1, 3, 9)], "window": d.one(1, 3, 5, 5, 7), "beta": d.one(0.75, 0.5,
        1.0),
        "layout": d.one("last", "last", "plain", "block8"), "gap": d.gap(),
    }  # fmt: skip


@family(_draw_lrn, "lrn_forward")
def lrn(case: Case, data: Data) -> Problem:
    """A normalization by neighbouring channels."""
    md, x = described(case["shape"], case["layout"], gap=case["gap"]), data.normal(case["shape"])
    numbers = {"size": case["window"], "alpha": 0.1, "beta": case["beta"], "k": 1.0}
    y = the.lrn(x.astype(np.float64), **numbers)
    return Problem(partial(dnn.lrn, md, md, **numbers, allow_reference=True), {args.SRC: x}, {args.DST: y}, 2e-5)


# --- elements


def _draw_eltwise(d: Draw, kind: str) -> Case:
    forward = kind.endswith("forward")
    by_result = not forward and d.rng.random() < 0.4
    shape = d.one([d.size(500)], d.shape(1, 4, 12))
    named = ("relu", "tanh", "elu", "sqrt", "logistic", "exp", "clip_v2") if by_result else tuple(the.FUNCTIONS)
    return {
        "algorithm": d.one(*named), "by_result": int(by_result), "shape": shape,
        "layout": d.one("plain", "plain", "last", "block8"),
        "gap": d.gap(), "shared": d.one(0, 1), "post": d.post(len(shape), "relu", "linear", "clip",
        "logistic") if forward else [],
    }  # fmt: skip


@family(_draw_eltwise, "eltwise_forward", "eltwise_backward", weight=4)
def eltwise(case: Case, data: Data) -> Problem:
    """A function of each element, or its gradient from the input or from the result."""
    name, shape = case["algorithm"], case["shape"]
    a, b = PARAMETERS.get(name, (0.0, 0.0))
    md, x, dy = described(shape, case["layout"], gap=case["gap"]), data.normal(shape, 2), data.normal(shape)
    x = np.abs(x) + F32.type(0.25) if name in ("sqrt", "log", "pow") else x
    for kink in KINKS:
        x = np.where(np.abs(x - kink) < 0.01, F32.type(kink + 0.02), x)
    options: dict[str, Any] = {"alpha": a, "beta": b, "allow_reference": True}
    wide = x.astype(np.float64)
    y = the.FUNCTIONS[name](wide, a, b)
    if case["kind"].endswith("forward"):
        post = Post(case, data, shape, case["layout"])
        shared = {args.DST: args.SRC} if case["shared"] and not post.inputs else {}
        return post.problem(partial(dnn.eltwise, md, md, algorithm=name, **options), {args.SRC: x}, y, 2e-5, shared=shared)
    require(name != "round", "it has no gradient")
    options["algorithm"] = f"{name}_use_dst_for_bwd" if case["by_result"] else name
    hint = dnn.eltwise(md, md, prop="training", **options)
    read = {args.DST: y.astype(F32)} if case["by_result"] else {args.SRC: x}
    shared = {args.DIFF_SRC: args.DIFF_DST} if case["shared"] else {}
    create = partial(backward.eltwise_backward, md, md, md, hint=hint, **options)
    return Problem(create, {**read, args.DIFF_DST: dy}, {args.DIFF_SRC: dy * the.slope(name, wide, a, b)}, 1e-4, shared=shared)


def _draw_binary(d: Draw, kind: str) -> Case:
    shape = d.one([d.size(400)], [1, d.size(400)], d.shape(1, 5, 12), [d.size(4), d.one(*CHANNELS), d.size(9), d.size(9)])
    rank = len(shape)
    return {
        "algorithm": d.one("add", "mul", "sub", *the.PAIRS), "shape": shape, "layout": d.one("plain", "plain", "last"),
        "keep": d.one([*range(rank)], [*range(rank)], [1], [rank - 1], [], [i for i in range(rank) if d.one(0, 1)]),
        "gaps": [d.gap(), d.gap()], "dtype": d.one("f32", "f32", "f32", "u8", "s8"), "shared": d.one("", "", "first", "post"),
        "post": d.post(rank, "relu", "linear", "clip", "logistic", "round"),
    }  # fmt: skip


@family(_draw_binary, "binary", weight=5)
def binary(case: Case, data: Data) -> Problem:
    """A function of two tensors; the result may be in the place of the first, or of the operand of the last post-op."""
    shape, name, dtype, layout = case["shape"], case["algorithm"], DTYPES[case["dtype"]], case["layout"]
    other = [s if i in case["keep"] else 1 for i, s in enumerate(shape)]
    post = Post(case, data, shape, layout, dtype)
    a, c = (described(shape, layout, t, case["gaps"][0]) for t in (F32, dtype))
    b = described(other, layout if other == shape else "plain", gap=case["gaps"][1] * (other == shape))
    x = data.whole(shape, low=-6, high=6)
    y = data.rng.choice(np.float32([1, 2, 4, -2, 0.5]), other) if name == "div" else data.whole(other)
    if dtype.kind in "iu" and (name == "div" or not post.exact):
        x = x + F32.type(0.25)  # so that no result is half-way between two whole numbers
    free = {"": [], "first": [args.SRC], "post": [arg for arg, md in post.layouts.items() if md == c]}[case["shared"]]
    shared = {args.DST: free[-1]} if free and dtype == F32 and args.DST not in post.inputs else {}
    result = the.PAIRS[name](x.astype(np.float64), y.astype(np.float64)).astype(np.float64)
    create = partial(dnn.binary, a, b, c, algorithm=name)
    return post.problem(create, {args.SRC: x, args.SRC_1: y}, result, 0.0 if dtype == F32 else 1e-9, shared=shared)


def _draw_prelu(d: Draw, kind: str) -> Case:
    shape = d.shape(2, 4, 14)
    keep = d.one([1], [1], [*range(len(shape))], [], [0], [len(shape) - 1])
    return {"shape": shape, "keep": keep, "layout": d.one("plain", "last", "block8")}


@family(_draw_prelu, "prelu_forward")
def prelu(case: Case, data: Data) -> Problem:
    """Negative elements multiplied with slopes."""
    md, x = described(case["shape"], case["layout"]), data.whole(case["shape"], low=-9, high=9)
    slopes = data.whole([s if i in case["keep"] else 1 for i, s in enumerate(case["shape"])])
    create = partial(dnn.prelu, md, described(slopes.shape, "plain"), md, allow_reference=True)
    return Problem(create, {args.SRC: x, args.WEIGHTS: slopes}, {args.DST: np.where(x > 0, x, x * slopes).astype(np.float64)})


# --- copies


def _draw_several(d: Draw, kind: str) -> Case:
    shape = d.shape(1, 5, 10)
    return {
        "shape": shape, "axis": int(d.rng.integers(len(shape))), "sizes": [d.size(19) for _ in range(d.size(6))],
        "layout": d.one("plain", "last", "last", "block8"), "gap": d.gap(),
        "dtype": d.one("f32", "f32", "s8", "u8", "s32", "f16", "bf16"),
    }  # fmt: skip


@family(_draw_several, "concat", "sum", weight=3)
def several(case: Case, data: Data) -> Problem:
    """Tensors that are joined along an axis, or added."""
    shape, axis, dtype, layout = case["shape"], case["axis"], DTYPES[case["dtype"]], case["layout"]
    require(axis < len(shape), "there is no such axis")
    joins = case["kind"] == "concat"
    require(joins or dtype in (F32, np.int8), "the sum may not be exact")
    xs = [data.whole([n if joins and i == axis else s for i, s in enumerate(shape)], dtype) for n in case["sizes"]]
    mds = [described(x.shape, layout, dtype, case["gap"]) for x in xs]
    wide, scales = [x.astype(np.float64) for x in xs], [float(1 + i % 2) for i in range(len(xs))]
    y = np.concatenate(wide, axis) if joins else sum(s * x for s, x in zip(scales, wide, strict=True))
    into = described(y.shape, layout, dtype, 0 if joins else case["gap"])
    create = partial(dnn.concat, into, axis, mds) if joins else partial(dnn.sum_, into, scales, mds)
    return Problem(partial(create, allow_reference=True), {args.MULTIPLE_SRC + i: x for i, x in enumerate(xs)}, {args.DST: y})


def _draw_shuffle(d: Draw, kind: str) -> Case:
    return {
        "n": d.one(1, 2), "groups": d.one(1, 2, 3, 4, 8), "rest": d.one(1, 2, 3, 5, 8), "size": d.shape(1, 3, 9),
        "layout": d.one("plain", "last", "block8"),
    }  # fmt: skip


@family(_draw_shuffle, "shuffle_forward", weight=1)
def shuffle(case: Case, data: Data) -> Problem:
    """Channels as a matrix, transposed."""
    n, g, rest = case["n"], case["groups"], case["rest"]
    x = data.whole((n, g * rest, *case["size"]))
    md, y = described(x.shape, case["layout"]), x.reshape(n, rest, g, -1).swapaxes(1, 2).reshape(x.shape).astype(np.float64)
    return Problem(partial(dnn.shuffle, md, md, axis=1, group_size=g, allow_reference=True), {args.SRC: x}, {args.DST: y})


def _draw_reorder(d: Draw, kind: str) -> Case:
    shape = d.shape(1, 6, 12)
    layouts: list[Any] = [[int(i) for i in d.rng.permutation(len(shape))] for _ in range(2)]
    if d.rng.random() < 0.4 and len(shape) > 2:
        layouts = [d.one("plain", "last"), d.one("block8", "block16", "block4")]
    copies = [[t, t] for t in ("f32", "f32", "f32", "s8", "u8", "f16", "s32")]
    return {
        "shape": shape, "layouts": layouts[:: d.one(1, -1)], "gaps": [d.gap(), d.gap()], "axis": int(d.rng.integers(len(shape))),
        "dtypes": d.one(*copies, ["s8", "f32"], ["u8", "f32"], ["s32", "f32"], ["f32", "bf16"], ["f32", "s8"]),
        "scaled": d.one("", "", "all", "axis"), "zero": d.one(0, 0, 3),
    }  # fmt: skip


@family(_draw_reorder, "reorder", weight=4)
def reorder(case: Case, data: Data) -> Problem:
    """A copy into another layout or type; with scales and a zero point from integers to float32."""
    shape, axis, (source, target) = case["shape"], case["axis"], (DTYPES[t] for t in case["dtypes"])
    require(axis < len(shape), "there is no such axis")
    a, c = (described(shape, lay, t, gap) for lay, t, gap in zip(case["layouts"], (source, target), case["gaps"], strict=True))
    x, post = data.whole(shape, source, -9, 9), Post(case, data, shape, dtype=target)
    y = x.astype(np.float64)
    if case["scaled"] and source.kind in "iu" and target == F32:
        by_axis = case["scaled"] == "axis"
        if case["zero"] and not by_axis and source.itemsize == 1:
            post.zero_point(args.SRC, case["zero"])
            y = y - case["zero"]
        factors = post.scales(args.SRC, shape[axis] if by_axis else 1, 1 << axis if by_axis else 0)
        y = y * factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return post.problem(partial(dnn.reorder, a, c), {args.FROM: x}, y)


# --- recurrent layers

_CELLS = {"lstm": "lstm", "gru": "gru", "lbr_gru": "gru", "vanilla_rnn": "rnn"}


def _draw_recurrent(d: Draw, kind: str) -> Case:
    forward = kind.endswith("forward")
    return {
        "prop": d.prop(kind), "t": d.one(1, 2, 3, 7), "n": d.one(1, 2, 3, 5, 16), "i": d.one(1, 3, 7, 8, 16, 17, 33),
        "h": d.one(1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 64), "weights": d.one("any", "any", "plain"),
        "bias": d.one(0, 1, 1, 1),
        "direction": d.one("left2right", "left2right", "right2left", "bidirectional_concat"), "state": d.one(0,
        1) if forward else 1,
        "last": d.one(0, 1) if forward else 1, "order": d.one("plain", "plain", [1, 0, 2]) if forward else "plain",
        "activation": d.one("tanh", "relu", "logistic"), "peephole": d.one(0, 0, 1) if kind == "lstm_forward" else 0,
    }  # fmt: skip


@family(
    _draw_recurrent, "lstm_forward", "gru_forward", "lbr_gru_forward", "vanilla_rnn_forward", "lstm_backward", "gru_backward",
    "lbr_gru_backward", weight=4,
)  # fmt: skip
def recurrent(case: Case, data: Data) -> Problem:
    """A layer with all its time steps, or its gradients, by the differences along drawn directions."""
    cell, forward = case["kind"].rpartition("_")[0], case["kind"].endswith("forward")
    gates, t, n, i, h, lstm = the.GATES[cell], case["t"], case["n"], case["i"], case["h"], cell == "lstm"
    dirs = 2 if case["direction"].startswith("bi") else 1
    state = (1, dirs, n, h)
    shapes = {args.SRC_LAYER: (t, n, i), args.WEIGHTS_LAYER: (1, dirs, i, gates, h), args.WEIGHTS_ITER: (1, dirs, h, gates, h)}
    shapes |= {a: state for a in (args.SRC_ITER, args.SRC_ITER_C)[: 1 + lstm] if case["state"]}
    shapes |= {args.BIAS: (1, dirs, gates + (cell == "lbr_gru"), h)} if case["bias"] else {}
    shapes |= {args.WEIGHTS_PEEPHOLE: (1, dirs, 3, h)} if case["peephole"] else {}
    results = {args.DST_LAYER: (t, n, dirs * h)} | {
        a: state for a in (args.DST_ITER, args.DST_ITER_C)[: 1 + lstm] if case["last"]
    }
    layouts = {args.SRC_LAYER: case["order"], args.DST_LAYER: case["order"]}
    layouts |= dict.fromkeys((args.WEIGHTS_LAYER, args.WEIGHTS_ITER), case["weights"])
    mds = {a: described(s, layouts.get(a, "plain")) for a, s in (shapes | results).items()}
    states, lasts = (mds.get(args.SRC_ITER_C),) * lstm, (mds.get(args.DST_ITER_C),) * lstm
    given = [mds[args.SRC_LAYER], mds.get(args.SRC_ITER), *states, mds[args.WEIGHTS_LAYER], mds[args.WEIGHTS_ITER],
    mds.get(args.BIAS),
             mds[args.DST_LAYER], mds.get(args.DST_ITER), *lasts]  # fmt: skip
    options: dict[str, Any] = {"direction": case["direction"]}
    options |= {"linear_before_reset": cell == "lbr_gru"} if cell.endswith("gru") else {}
    further = {"activation": case["activation"]} if cell == "vanilla_rnn" else {}
    further |= {"peephole": mds[args.WEIGHTS_PEEPHOLE]} if case["peephole"] else {}
    make = partial(getattr(dnn, _CELLS[cell]), *given, prop=case["prop"], **options, **further)
    inputs: dict[int, Any] = {a: data.normal(s, 0.5) for a, s in shapes.items()}
    wide = {a: v.astype(np.float64) for a, v in inputs.items()}

    def computed(values: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        zeros = {
            args.SRC_ITER: state,
            args.SRC_ITER_C: state,
            args.BIAS: (1, dirs, gates + 1, h),
            args.WEIGHTS_PEEPHOLE: (1, dirs, 3, h),
        }
        first, cells, bias, peephole = (values[a][0] if a in values else np.zeros(s[1:]) for a, s in zeros.items())
        weights = [values[a][0] for a in (args.WEIGHTS_LAYER, args.WEIGHTS_ITER)]
        layer = the.Recurrent(cell, case["direction"], *weights, bias, peephole, case["activation"] if further else "tanh")
        y, last, end = layer.result(values[args.SRC_LAYER], first, cells)
        return {args.DST_LAYER: y, args.DST_ITER: last[None], args.DST_ITER_C: end[None]}

    if forward:
        y = computed(wide)
        return Problem(
            make, inputs, {a: y[a] for a in results} | ({args.WORKSPACE: None} if case["prop"] == "training" else {}), 1e-4
        )
    hint = make()
    inputs |= forward_run(hint, inputs, [*results])
    diffs = {a + 128: data.normal(s) for a, s in results.items()}

    def judge(results_of_run: Mapping[int, np.ndarray]) -> str:
        for a, x in wide.items():
            direction, got = (
                np.random.default_rng(case["seed"] + a).standard_normal(x.shape),
                results_of_run[a + 128].astype(np.float64),
            )
            up, down = (computed({**wide, a: x + step * direction}) for step in (1e-5, -1e-5))
            want = sum(((up[o] - down[o]) / 2e-5 * diffs[o + 128]).sum() for o in results)
            along, size = float((got * direction).sum()), float(np.sqrt((got**2).sum())) + 1e-3
            if not abs(want - along) < 1e-3 * max(size, abs(want)):
                return f"argument {a + 128} along a direction is {along:.7g} instead of {want:.7g}"
        return ""

    create = partial(getattr(backward, f"{_CELLS[cell]}_backward"), given, given, hint=hint, **options)
    overwritten = frozenset([args.WORKSPACE])  # a gradient needs another forward run each time
    return Problem(create, inputs | diffs, dict.fromkeys([a + 128 for a in shapes]), judge=judge, overwritten=overwritten)
