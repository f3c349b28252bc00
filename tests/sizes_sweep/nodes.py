"""The operators of drawn models: each function adds calls that read a value, or nothing if the value does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, parser

from .models import REQUESTS, Dim, Drawn, Model, broadcast, greatest, least, mapped

Step = Callable[[Model, Drawn], object]

STEPS: list[Step] = []
"""The functions; those that occur often in models several times."""

F32, F16, F64, I64, I32, I8, U8, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32, TensorProto.INT8,
    TensorProto.UINT8, TensorProto.BOOL,
)  # fmt: skip
FLOAT = (F32, F16, F64)
ANY = (*FLOAT, I64, I32)


def step(times: int = 1, *, dtypes: tuple[int, ...] = FLOAT, rank: tuple[int, int] = (1, 5)) -> Callable[[Step], Step]:
    """Add a function to `STEPS`, for values of these types and ranks."""

    def add(function: Step) -> Step:
        def applied(m: Model, x: Drawn) -> None:
            if x.dtype in dtypes and rank[0] <= x.rank <= rank[1]:
                function(m, x)

        STEPS.extend([applied] * times)
        return applied

    return add


def total(*sizes: Dim) -> Dim:
    """The product of sizes."""
    made: Dim = 1
    for s in sizes:
        made = mapped(lambda a, b: a * b, made, s)
    return made


def scaled(size: Dim, by: int, add: int = 0) -> Dim:
    return mapped(lambda n: n * by + add, size)


def added(*sizes: Dim) -> Dim:
    made = sizes[0]
    for s in sizes[1:]:
        made = mapped(lambda a, b: a + b, made, s)
    return made


# --- elementwise operators

UNARY = (
    "Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "HardSwish", "Softplus", "LeakyRelu", "Elu", "Gelu", "Sin", "Cos", "Atan",
    "HardSigmoid", "Selu", "Softsign", "Mish",
)  # fmt: skip


@step(6)
def unary(m: Model, x: Drawn) -> None:
    for _ in range(m.d.one(1, 1, 2, 3)):
        kind = m.d.one(*UNARY, "Clip", "exp", "sqrt", *["Celu"] * (x.dtype == F32))
        if kind == "exp":
            y = m.call("Exp", m.call("Tanh", x))
        elif kind == "sqrt":
            y = m.call("Sqrt", m.call("Add", m.call("Mul", x, x), m.constant(0.1, x.dtype)))
        elif kind == "Clip":
            y = m.call("Clip", x, m.constant(-0.7, x.dtype), m.constant(1.2, x.dtype))
        else:
            y = m.call(kind, x)
        x = m.keep(y, x.shape, x.dtype, x.is_exact and kind in ("Relu", "Neg", "Abs", "Clip"))


@step(2, dtypes=(I64, I32, I8, U8))
def whole(m: Model, x: Drawn) -> None:
    kind = m.d.one("Abs", "Add", "Mul", "cast", "cast", "Max")
    if kind == "cast":
        m.keep(m.call("Cast", x, to=m.float), x.shape, m.float, True)
        return
    y = m.call("Abs", x) if kind == "Abs" else m.call(kind, x, m.constant(m.d.size(5), x.dtype))
    m.like(x, y)


@step(6, dtypes=ANY)
def with_constant(m: Model, x: Drawn) -> None:
    """The constant is a number, or has an axis or several."""
    numbers = [i for i, s in enumerate(x.shape) if isinstance(s, int)]
    shape = [x.shape[i] if i in numbers and m.chance(0.6) else 1 for i in range(x.rank)]
    if m.chance(0.4):
        shape = []
    while shape and shape[0] == 1 and m.chance(0.5):
        shape = shape[1:]
    kind = m.d.one("Add", "Mul", "Sub", "Max", "Min", "Div") if x.dtype in FLOAT else m.d.one("Add", "Sub", "Max")
    value = m.d.rng.standard_normal(shape) if x.dtype in FLOAT else m.d.rng.integers(-3, 9, shape)  # type: ignore[arg-type]
    c = m.constant(np.abs(value) + 0.5 if kind == "Div" else value, x.dtype)
    swap = kind in ("Add", "Mul", "Sub") and m.chance(0.3)
    m.keep(m.call(kind, *((c, x) if swap else (x, c))), x.shape, x.dtype, x.dtype not in FLOAT or kind in ("Max", "Min"))


@step(7, dtypes=ANY)
def with_value(m: Model, x: Drawn) -> None:
    other = m.alike(x, lambda v: broadcast(v.shape, x.shape) is not None)
    if other is None:
        return
    kind = m.d.one("Add", "Mul", "Sub", "Max", "Min", "Where", "Mean", "Less")
    shape = broadcast(other.shape, x.shape)
    assert shape is not None
    pair = (x, other) if m.chance(0.5) else (other, x)
    exact = x.is_exact and other.is_exact
    if kind in ("Where", "Less"):
        if exact:
            mask = m.call(m.d.one("Greater", "Less"), *pair)
            m.keep(m.call("Where", mask, x, other), shape, x.dtype, True)
        return
    if kind == "Mean" and x.dtype not in FLOAT:
        kind = "Add"
    m.keep(m.call(kind, *pair), shape, x.dtype, exact and (x.dtype not in FLOAT or kind in ("Max", "Min")))


@step(2)
def masked(m: Model, x: Drawn) -> None:
    """A mask of the lower triangle, or of the length, by sizes."""
    if x.rank < 2:
        return
    if x.shape[-1] == x.shape[-2] and m.chance(0.7):
        mask = m.call("Trilu", m.call("ConstantOfShape", m.call("Shape", x), value=_one(F32)), upper=0)
    else:
        size = m.call("Range", m.constant(0, I64), m.size_of(x, x.rank - 1, False), m.constant(1, I64))
        mask = m.call("Less", size, m.constant(m.d.size(9), I64))
    mask = m.call("Cast", mask, to=BOOL)
    m.like(x, m.call("Where", mask, x, m.constant(m.d.one(0.0, -1e4, 1.5), x.dtype)))


def _one(dtype: int) -> Any:
    return helper.make_tensor("one", dtype, [1], [1])


@step(1, dtypes=(*ANY, BOOL))
def cast(m: Model, x: Drawn) -> None:
    to = m.d.one(F32, F64, F16)
    if x.dtype != BOOL and x.is_exact and m.chance(0.3):
        to = m.d.one(I32, I64)
    m.keep(m.call("Cast", x, to=to), x.shape, to, x.is_exact and (to in (F32, F64) or x.dtype not in FLOAT))


@step(1)
def positions(m: Model, x: Drawn) -> None:
    """Adds the numbers of the places along an axis."""
    axis = m.d.one(*range(x.rank))
    y = m.call("Range", m.constant(0, I64), m.size_of(x, axis, False), m.constant(1, I64))
    y = m.call("Cast", y, to=x.dtype)
    if x.rank - axis > 1:
        y = m.call("Unsqueeze", y, m.ints(*range(1, x.rank - axis)))
    y = m.call("Mul", y, m.constant(0.01, x.dtype))
    m.keep(m.call("Add", x, y), x.shape, x.dtype)


# --- rows


@step(4)
def softmax(m: Model, x: Drawn) -> None:
    m.keep(m.call(m.d.one("Softmax", "Softmax", "LogSoftmax"), x, axis=m.d.one(-1, -1, *range(x.rank))), x.shape, x.dtype)


@step(6, dtypes=ANY)
def reduce(m: Model, x: Drawn) -> None:
    kinds = ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean"]
    kinds += ["ReduceL2", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp"] if x.dtype in FLOAT else ["ReduceSum"]
    kind = m.d.one(*(kinds if x.dtype in FLOAT else ["ReduceSum", "ReduceMax", "ReduceMin"]))
    count = int(m.d.rng.integers(1, x.rank + 1))
    axes = sorted(int(a) for a in m.d.rng.permutation(x.rank)[:count])
    keep = m.d.one(0, 1)
    shape = [1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes]
    given = [a - x.rank if m.chance(0.3) else a for a in axes]
    axes_of = (m.ints(*given),) if len(axes) < x.rank or m.chance(0.5) else ()
    m.keep(
        m.call(kind, x, *axes_of, keepdims=keep),
        shape,
        x.dtype,
        x.is_exact and (x.dtype not in FLOAT or kind in ("ReduceMax", "ReduceMin")),
    )


@step(1, dtypes=ANY)
def extreme(m: Model, x: Drawn) -> None:
    if x.is_exact:
        axis, keep = m.d.one(*range(x.rank)), m.d.one(0, 1)
        shape = [1 if i == axis else s for i, s in enumerate(x.shape) if keep or i != axis]
        m.keep(m.call(m.d.one("ArgMax", "ArgMin"), x, axis=axis, keepdims=keep), shape, I64, True)


@step(4)
def norm(m: Model, x: Drawn) -> None:
    d, last = m.d, x.shape[-1]
    kind = d.one("layer", "layer", "rms", "instance", "batch", "group", "lp", "mean")
    if kind in ("layer", "rms") and isinstance(last, int) and x.dtype == m.float:
        if kind == "layer":
            y = m.call("LayerNormalization", x, m.weights([last]), m.weights([last]), axis=-1)
        else:
            y = m.call("ReduceMean", m.call("Mul", x, x), m.ints(-1), keepdims=1)
            y = m.call("Sqrt", m.call("Add", y, m.constant(1e-3, x.dtype)))
            y = m.call("Mul", m.call("Div", x, y), m.weights([last], dtype=x.dtype))
        if x.dtype != m.float:
            return
    elif (
        kind in ("instance", "batch", "group")
        and x.rank > 2
        and isinstance(x.shape[1], int)
        and x.shape[1] > 0
        and x.dtype == m.float
    ):
        c = x.shape[1]
        if kind == "group":
            groups = d.one(*(g for g in range(1, c + 1) if c % g == 0))
            y = m.call("GroupNormalization", x, m.weights([c]), m.weights([c]), num_groups=groups)
        elif kind == "instance":
            y = m.call("InstanceNormalization", x, m.weights([c]), m.weights([c]), epsilon=1e-2)
        else:
            variance = m.constant(d.rng.random(c) + 0.5, m.float)
            y = m.call("BatchNormalization", x, m.weights([c]), m.weights([c]), m.weights([c]), variance)
    elif kind == "lp" and x.dtype == F32:
        y = m.call("LpNormalization", x, axis=d.one(*range(x.rank)), p=d.one(1, 2))
    elif kind == "mean":
        y = m.call("Sub", x, m.call("ReduceMean", x, m.ints(d.one(*range(x.rank))), keepdims=1))
    else:
        return
    m.keep(y, x.shape, x.dtype)


@step(1, dtypes=ANY)
def cumulated(m: Model, x: Drawn) -> None:
    y = m.call("CumSum", x, m.constant(m.d.one(*range(x.rank)), I64), reverse=m.d.one(0, 1), exclusive=m.d.one(0, 1))
    m.keep(y, x.shape, x.dtype, x.dtype not in FLOAT)


# --- products


@step(6)
def matmul(m: Model, x: Drawn) -> None:
    k, n = x.shape[-1], m.d.one(1, 4, 8, 17, 24)
    if isinstance(k, int) and x.dtype == m.float:
        y = m.call("MatMul", x, m.weights([k, n], k))
        if m.chance(0.5):
            y = m.call("Add", y, m.weights([n]))
        if m.chance(0.3):
            y = m.call(m.d.one("Relu", "Tanh", "Gelu"), y)
        m.keep(y, [*x.shape[:-1], n], x.dtype)


@step(2, rank=(2, 2))
def gemm(m: Model, x: Drawn) -> None:
    turn, n = m.d.one(0, 0, 1), m.d.one(1, 5, 16)
    k, rows = x.shape[1 - turn], x.shape[turn]
    if not isinstance(k, int) or x.dtype != m.float:
        return
    b = m.d.one(0, 1)
    c = [m.weights(m.d.one([n], [1, n], [1], []))] if m.chance(0.7) else []
    y = m.call(
        "Gemm",
        x,
        m.weights([n, k] if b else [k, n], k),
        *c,
        transA=turn,
        transB=b,
        alpha=m.d.one(1.0, 0.5),
        beta=m.d.one(1.0, 2.0),
    )
    m.keep(y, [rows, n], x.dtype)


@step(4, rank=(2, 4))
def self_product(m: Model, x: Drawn) -> None:
    """x times the transposed x, or another value, often as attention."""
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    turned = m.call("Transpose", x, perm=perm)
    lead, s, d = x.shape[:-2], x.shape[-2], x.shape[-1]
    if m.chance(0.3):
        m.keep(m.call("MatMul", turned, x), [*lead, d, d], x.dtype)
        return
    y = m.call("MatMul", x, turned)
    if m.chance(0.7):
        y = m.call("Mul", y, m.constant(0.3, x.dtype))
    if m.chance(0.3):
        y = m.call(
            "Where",
            m.call("Cast", m.call("Trilu", m.call("ConstantOfShape", m.call("Shape", y), value=_one(F32)), upper=0), to=BOOL),
            y,
            m.constant(-1e4, x.dtype),
        )
    if m.chance(0.7):
        y = m.call("Softmax", y, axis=-1)
        if m.chance(0.7):
            m.keep(m.call("MatMul", y, x), x.shape, x.dtype)
            return
    m.keep(y, [*lead, s, s], x.dtype)


@step(2)
def product_of_two(m: Model, x: Drawn) -> None:
    other = m.alike(x, lambda v: v.rank > 1 and v.shape[-2] == x.shape[-1] and broadcast(v.shape[:-2], x.shape[:-2]) is not None)
    if other is not None and x.rank > 1:
        lead = broadcast(other.shape[:-2], x.shape[:-2])
        assert lead is not None
        m.keep(m.call("MatMul", x, other), [*lead, x.shape[-2], other.shape[-1]], x.dtype)


@step(3, rank=(3, 3))
def heads(m: Model, x: Drawn) -> None:
    """Attention of several heads with projections."""
    d = x.shape[-1]
    if not isinstance(d, int) or d % 2 or x.dtype != m.float:
        return
    h = m.d.one(1, 2, 2) if d < 8 else m.d.one(2, 4)
    form = m.d.one("zeros", "sizes", "sizes")
    parts = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        y = m.call("MatMul", x, m.weights([d, d], d))
        if m.chance(0.5):
            y = m.call("Add", y, m.weights([d]))
        if form == "zeros":
            shape = m.ints(0, 0, h, d // h)
        else:
            shape = m.call("Concat", m.size_of(x, 0), m.size_of(x, 1), m.ints(h), m.ints(m.d.one(-1, d // h)), axis=0)
        parts.append(m.call("Transpose", m.call("Reshape", y, shape), perm=perm))
    scores = m.call("MatMul", *parts[:2])
    scores = m.call("Div", scores, m.constant((d / h) ** 0.5, x.dtype))
    y = m.call("Transpose", m.call("MatMul", m.call("Softmax", scores, axis=-1), parts[2]), perm=[0, 2, 1, 3])
    last = m.ints(0, 0, d) if form == "zeros" else m.call("Concat", m.size_of(x, 0), m.size_of(x, 1), m.ints(d), axis=0)
    m.keep(m.call("Reshape", y, last), x.shape, x.dtype)


@step(1, rank=(3, 3))
def attention(m: Model, x: Drawn) -> None:
    """Attention as one call, of ONNX or of onnxruntime."""
    d = x.shape[-1]
    if isinstance(d, int) and d % 2 == 0 and x.dtype == m.float == F32:
        kind = m.d.one("Attention", "MultiHeadAttention", "onnx", "onnx")
        if kind == "onnx":
            parts = [m.call("MatMul", x, m.weights([d, d], d)) for _ in range(3)]
            y = m.call("Attention", *parts, q_num_heads=2, kv_num_heads=2, is_causal=m.d.one(0, 1))
        elif kind == "Attention":
            y = m.call(
                kind,
                x,
                m.weights([d, 3 * d], d),
                m.weights([3 * d]),
                domain="com.microsoft",
                num_heads=2,
                unidirectional=m.d.one(0, 1),
            )
        else:
            y = m.call(kind, *[m.call("MatMul", x, m.weights([d, d], d)) for _ in range(3)], domain="com.microsoft", num_heads=2)
        m.keep(y, x.shape, x.dtype)


@step(1, rank=(3, 3))
def with_skip(m: Model, x: Drawn) -> None:
    other, last = m.alike(x, lambda v: v.shape == x.shape), x.shape[-1]
    if other is not None and isinstance(last, int) and x.dtype == m.float == F32:
        kind, further = m.d.one(("SkipLayerNormalization", 1), ("SkipSimplifiedLayerNormalization", 0))
        weights = [m.weights([last]) for _ in range(1 + further)]
        m.keep(m.call(kind, x, other, *weights, domain="com.microsoft"), x.shape, F32)


@step(1, rank=(3, 3))
def einsum_of_two(m: Model, x: Drawn) -> None:
    other = m.alike(x, lambda v: v.rank == 3 and v.shape[0] == x.shape[0] and v.shape[2] == x.shape[2])
    if other is not None:
        m.keep(m.call("Einsum", x, other, equation="bsd,btd->bst"), [x.shape[0], x.shape[1], other.shape[1]], x.dtype)


@step(1, rank=(2, 3))
def einsum(m: Model, x: Drawn) -> None:
    k = x.shape[-1]
    if isinstance(k, int) and x.dtype == m.float:
        lead = "abc"[: x.rank - 1]
        y = m.call("Einsum", x, m.weights([k, 3, 2], k), equation=f"{lead}k,khd->{lead}hd")
        m.keep(y, [*x.shape[:-1], 3, 2], x.dtype)


@step(2)
def quantized_product(m: Model, x: Drawn) -> None:
    k, n = x.shape[-1], m.d.one(4, 9, 16)
    if not (isinstance(k, int) and x.is_exact and x.dtype == F32 == m.float and x.rank > 1):
        return
    rng, kind = m.d.rng, m.d.one("integer", "dynamic", "linear", "dequantized", "bits")
    w = m.constant(rng.integers(-127, 128, (k, n)), I8)
    scale, zero = m.constant(0.05, F32), m.constant(m.d.one(0, 128, 117), U8)
    if kind in ("integer", "linear", "dequantized"):
        q = m.call("QuantizeLinear", x, scale, zero)
    if kind == "integer":
        y = m.call("MatMulInteger", q, w, *([zero] if m.chance(0.7) else []))
        m.keep(m.call("Mul", m.call("Cast", y, to=F32), scale), [*x.shape[:-1], n], F32)
    elif kind == "dynamic":
        q, s, z = m.call("DynamicQuantizeLinear", x, outputs=3)
        y = m.call("Cast", m.call("MatMulInteger", q, w, z), to=F32)
        m.keep(m.call("Mul", y, m.call("Mul", s, m.constant(0.01, F32))), [*x.shape[:-1], n], F32)
    elif kind == "linear":
        y = m.call("QLinearMatMul", q, scale, zero, w, m.constant(0.01, F32), m.constant(0, I8), m.constant(0.1, F32), zero)
        m.keep(m.call("DequantizeLinear", y, m.constant(0.1, F32), zero), [*x.shape[:-1], n], F32, True)
    elif kind == "dequantized":
        both = m.call("DequantizeLinear", w, m.constant(rng.random(n) * 0.02 + 0.001, F32), m.constant(np.zeros(n), I8), axis=1)
        m.keep(m.call("MatMul", m.call("DequantizeLinear", q, scale, zero), both), [*x.shape[:-1], n], F32)
    else:
        blocks = -(-k // 16)
        packed = m.constant(rng.integers(0, 256, (n, blocks, 8)), U8)
        y = m.call(
            "MatMulNBits",
            x,
            packed,
            m.constant(rng.random(n * blocks) * 0.1, F32),
            domain="com.microsoft",
            K=k,
            N=n,
            bits=4,
            block_size=16,
        )
        m.keep(y, [*x.shape[:-1], n], F32)


# --- images


def window(m: Model, x: Drawn, kernel: list[int], pool: bool = False) -> tuple[dict[str, Any], list[Dim]]:
    """Attributes of a window on the last axes, and the sizes of the result."""
    rank, d = x.rank - 2, m.d
    strides, dilations = d.each(rank, 1, 1, 2, 3), d.each(rank, 1, 1, 1, 2)
    made: dict[str, Any] = {"strides": strides, "dilations": dilations, "kernel_shape": kernel}
    spans = [(k - 1) * e + 1 for k, e in zip(kernel, dilations, strict=True)]
    auto = d.one("", "", "", "", "SAME_UPPER", "SAME_LOWER", "VALID")
    if auto.startswith("SAME"):
        return made | {"auto_pad": auto}, [
            mapped(lambda n, t=t: -(-n // t), s) for s, t in zip(x.shape[2:], strides, strict=True)
        ]
    pads = [0] * 2 * rank if auto else [int(d.rng.integers(0, kernel[i % rank])) for i in range(2 * rank)]
    if not auto and m.chance(0.4):
        pads = [k // 2 for k in kernel] * 2
    ceil = pool and m.chance(0.3)
    sizes = []
    for i, s in enumerate(x.shape[2:]):
        both, span, t = pads[i] + pads[i + rank], spans[i], strides[i]
        if ceil:
            sizes.append(mapped(lambda n, p=pads[i], b=both, e=span, t=t: _ceiled(n, p, b, e, t), s))
        else:
            sizes.append(mapped(lambda n, b=both, e=span, t=t: (n + b - e) // t + 1, s))
    made |= {"auto_pad": "VALID"} if auto else {"pads": pads}
    return made | ({"ceil_mode": 1} if ceil else {}), sizes


def _ceiled(n: int, begin: int, both: int, span: int, stride: int) -> int:
    count = -(-(n + both - span) // stride) + 1
    return count - 1 if (count - 1) * stride >= n + begin else count


@step(9, rank=(3, 4))
def convolution(m: Model, x: Drawn) -> None:
    c, d = x.shape[1], m.d
    if not isinstance(c, int) or c < 1 or x.dtype != m.float:
        return
    groups = d.one(1, 1, 1, c, *(g for g in (2, 3, 4) if c % g == 0))
    outputs = groups * d.one(1, 1, 2, 3, 4 if groups < 4 else 1) if groups > 1 else d.one(1, 3, 8, 16, 5)
    kernel = d.each(x.rank - 2, 1, 3, 3, 2, 5)
    attributes, sizes = window(m, x, kernel)
    if any(isinstance(s, int) and s < 1 for s in sizes):
        return
    fan = c // groups * int(np.prod(kernel))
    bias = [m.weights([outputs])] if m.chance(0.6) else []
    y = m.call("Conv", x, m.weights([outputs, c // groups, *kernel], fan), *bias, group=groups, **attributes)
    if m.chance(0.4):
        y = m.call(d.one("Relu", "Sigmoid", "LeakyRelu", "HardSwish", "Clip"), y)
    m.keep(y, [x.shape[0], outputs, *sizes], x.dtype)


@step(2, rank=(3, 4))
def transposed_convolution(m: Model, x: Drawn) -> None:
    c, d, rank = x.shape[1], m.d, x.rank - 2
    if not isinstance(c, int) or c < 1 or x.dtype != m.float:
        return
    groups, n = d.one(1, 1, c), d.one(1, 2, 3)
    kernel, strides = d.each(rank, 2, 3, 4), d.each(rank, 1, 2, 3)
    pads = [int(d.rng.integers(0, (kernel[i % rank] + 1) // 2)) for i in range(2 * rank)]
    extra = [int(d.rng.integers(0, t)) if m.chance(0.3) else 0 for t in strides]
    sizes = [
        scaled(s, t, k - t - pads[i] - pads[i + rank] + extra[i])
        for i, (s, t, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    if any(isinstance(s, int) and s < 1 for s in sizes):
        return
    w = m.weights([c, n, *kernel], c)
    y = m.call("ConvTranspose", x, w, group=groups, strides=strides, pads=pads, output_padding=extra)
    m.keep(y, [x.shape[0], n * groups, *sizes], x.dtype)


@step(5, rank=(3, 4))
def pool(m: Model, x: Drawn) -> None:
    d, rank = m.d, x.rank - 2
    kind = d.one("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "Global")
    if kind == "Global":
        y = m.call(d.one("GlobalAveragePool", "GlobalMaxPool"), x)
        m.keep(y, [*x.shape[:2], *[1] * rank], x.dtype)
        return
    attributes, sizes = window(m, x, d.each(rank, 1, 2, 3, 3), pool=True)
    if any(isinstance(s, int) and s < 1 for s in sizes):
        return
    if kind == "AveragePool":
        attributes["count_include_pad"] = d.one(0, 1)
    m.keep(m.call(kind, x, **attributes), [*x.shape[:2], *sizes], x.dtype, x.is_exact and kind == "MaxPool")


@step(4, rank=(3, 4))
def resize(m: Model, x: Drawn) -> None:
    d, rank = m.d, x.rank - 2
    mode = d.one("nearest", "nearest", "linear", "linear", "cubic")
    if mode != "nearest" and max(map(greatest, x.shape[2:])) > 100:
        return  # oneDNN computes the places in float32, which is less exact for long axes than the tolerance
    coordinates = d.one("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attributes |= {
            "nearest_mode": d.one("floor", "round_prefer_floor", "ceil"),
            "coordinate_transformation_mode": "asymmetric",
        }
    if m.chance(0.5):
        by = [d.one(1.0, 2.0, 2.0, 3.0, 0.5, 1.5) for _ in range(rank)]
        y = m.call("Resize", x, "", m.constant([1, 1, *by], F32), **attributes)
        sizes = [mapped(lambda n, f=f: int(n * f), s) for s, f in zip(x.shape[2:], by, strict=True)]
    else:
        other = d.one(*m.values)
        if other.rank == x.rank and m.chance(0.5):  # to the sizes of another value, as nets of pyramids do
            shape, sizes = [m.size_of(other, a) for a in range(2, x.rank)], list(other.shape[2:])
        else:
            shape, sizes = [], []
            for a in range(2, x.rank):
                f = d.one(2, 2, 3)
                shape.append(m.call("Mul", m.size_of(x, a), m.ints(f)))
                sizes.append(scaled(x.shape[a], f))
        lead = [m.size_of(x, a) for a in range(2)]
        y = m.call("Resize", x, "", "", m.call("Concat", *lead, *shape, axis=0), **attributes)
    m.keep(y, [*x.shape[:2], *sizes], x.dtype, x.is_exact and mode == "nearest")


@step(2, rank=(3, 4))
def quantized_convolution(m: Model, x: Drawn) -> None:
    c, d = x.shape[1], m.d
    if not (isinstance(c, int) and c > 0 and x.is_exact and x.dtype == F32 == m.float):
        return
    groups = d.one(1, 1, c)
    outputs, kernel = groups * d.one(1, 2, 4), d.each(x.rank - 2, 1, 3, 2)
    attributes, sizes = window(m, x, kernel)
    if any(isinstance(s, int) and s < 1 for s in sizes):
        return
    w = m.constant(d.rng.integers(-127, 128, (outputs, c // groups, *kernel)), I8)
    scale, zero = m.constant(0.04, F32), m.constant(d.one(0, 128, 100), U8)
    q = m.call("QuantizeLinear", x, scale, zero)
    shape, kind = [x.shape[0], outputs, *sizes], d.one("linear", "linear", "integer", "dequantized")
    if kind == "linear":
        bias = [m.constant(d.rng.integers(-300, 300, outputs), I32)] if m.chance(0.5) else []
        s = m.constant(d.rng.random(outputs) * 0.02 + 0.001 if m.chance(0.5) else 0.01, F32)
        zeros = m.constant(np.zeros(outputs) if m.constants[-1].dims else 0, I8)
        y = m.call("QLinearConv", q, scale, zero, w, s, zeros, m.constant(0.1, F32), zero, *bias, group=groups, **attributes)
        m.keep(m.call("DequantizeLinear", y, m.constant(0.1, F32), zero), shape, F32, True)
    elif kind == "integer":
        y = m.call("ConvInteger", q, w, zero, group=groups, **attributes)
        m.keep(m.call("Mul", m.call("Cast", y, to=F32), m.constant(0.001, F32)), shape, F32)
    else:
        wide = m.call("DequantizeLinear", w, m.constant(0.01, F32), m.constant(0, I8))
        m.keep(m.call("Conv", m.call("DequantizeLinear", q, scale, zero), wide, group=groups, **attributes), shape, F32)


@step(1, rank=(4, 4))
def blocks(m: Model, x: Drawn) -> None:
    n, c, h, w = x.shape
    if isinstance(c, int) and c % 4 == 0:
        y = m.call("DepthToSpace", x, blocksize=2, mode=m.d.one("DCR", "CRD"))
        m.like(x, y, [n, c // 4, scaled(h, 2), scaled(w, 2)])
    elif isinstance(c, int):
        m.like(x, m.call("SpaceToDepth", x, blocksize=2), [n, 4 * c, *[mapped(lambda s: s // 2, s) for s in (h, w)]])


# --- recurrent layers


@step(2, rank=(3, 3))
def recurrent(m: Model, x: Drawn) -> None:
    d, k = m.d, x.shape[-1]
    if not isinstance(k, int) or x.dtype != m.float or x.dtype == F16:
        return
    kind, h, dirs = d.one("LSTM", "LSTM", "GRU", "GRU", "RNN"), d.one(1, 3, 8, 16), d.one(1, 1, 2)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * h
    attributes: dict[str, Any] = {"hidden_size": h, "direction": d.one("forward", "reverse") if dirs == 1 else "bidirectional"}
    if kind == "GRU":
        attributes["linear_before_reset"] = d.one(0, 1)
    turned = m.chance(0.5)
    given, (t, b) = (m.call("Transpose", x, perm=[1, 0, 2]), (x.shape[1], x.shape[0])) if turned else (x, x.shape[:2])
    weights = [m.weights([dirs, gates, k], k), m.weights([dirs, gates, h], h)]
    weights += [m.weights([dirs, 2 * gates])] if m.chance(0.6) else []
    y, last = m.call(kind, given, *weights, outputs=2, **attributes)
    m.keep(last, [dirs, b, h], x.dtype)
    if m.chance(0.6):
        y = m.call("Reshape", m.call("Transpose", y, perm=[0, 2, 1, 3]), m.ints(0, 0, -1))
        m.keep(y, [t, b, dirs * h], x.dtype)
    else:
        m.keep(y, [t, dirs, b, h], x.dtype)


# --- movement

MOVED = (*ANY, BOOL, I8, U8)


@step(4, dtypes=MOVED)
def concat(m: Model, x: Drawn) -> None:
    axis = m.d.one(*range(x.rank))
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    other = m.alike(x, lambda v: v.rank == x.rank and (*v.shape[:axis], *v.shape[axis + 1 :]) == rest)
    parts = [x, other or x] if m.chance(0.5) else [other or x, x]
    parts += [x] if m.chance(0.2) else []
    size = added(*(p.shape[axis] for p in parts))
    y = m.call("Concat", *parts, axis=axis - x.rank if m.chance(0.3) else axis)
    shape = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
    m.keep(y, shape, x.dtype, all(p.is_exact for p in parts))


@step(3, dtypes=MOVED)
def split(m: Model, x: Drawn) -> None:
    axis = m.d.one(*range(x.rank))
    size = x.shape[axis]
    if isinstance(size, int) and size > 1:
        first = m.d.size(size - 1)
        sizes: list[Dim] = [first, size - first]
        parts = m.call("Split", x, m.ints(first, size - first), outputs=2, axis=axis)
    else:
        count = m.d.one(2, 3)
        block = mapped(lambda n: -(-n // count), size)
        sizes = [block] * (count - 1) + [mapped(lambda n, b: n - (count - 1) * b, size, block)]
        parts = m.call("Split", x, outputs=count, axis=axis, num_outputs=count)
    for y, s in zip(parts, sizes, strict=True):
        m.like(x, y, [*x.shape[:axis], s, *x.shape[axis + 1 :]])


@step(4, dtypes=MOVED)
def slices(m: Model, x: Drawn) -> None:
    axis, d = m.d.one(*range(x.rank)), m.d
    size, start, stop = x.shape[axis], int(d.rng.integers(-4, 4)), int(d.rng.integers(-4, 9))
    hop = d.one(1, 1, 1, 2, 3, -1, -2)
    if m.chance(0.3):
        start, stop = (0, 1 << 62) if hop > 0 else (-1, -(1 << 62))
    new = mapped(lambda n: len(range(*slice(start, stop, hop).indices(n))), size)
    ends = m.ints(stop)
    if m.chance(0.35) and hop > 0:  # the end is half of a size
        other = d.one(*(v for v in m.values if v.rank))
        place = d.one(*range(other.rank))
        ends = m.call("Div", m.size_of(other, place), m.ints(2))
        new = mapped(lambda n, o: len(range(*slice(start, o // 2, hop).indices(n))), size, other.shape[place])
    y = m.call("Slice", x, m.ints(start), ends, m.ints(axis), m.ints(hop))
    m.like(x, y, [*x.shape[:axis], new, *x.shape[axis + 1 :]])


@step(3, dtypes=ANY)
def pad(m: Model, x: Drawn) -> None:
    mode = m.d.one("constant", "constant", "constant", "reflect", "edge", "wrap")
    lowest = -1 if mode == "constant" else 0
    pads = [int(p) * int(m.chance(0.5)) for p in m.d.rng.integers(lowest, 3, 2 * x.rank)]
    if mode != "constant":
        pads = [p if least(x.shape[i % x.rank]) != 1 else 0 for i, p in enumerate(pads)]
    given: str | Drawn = m.ints(*pads)
    sizes = [scaled(s, 1, pads[i] + pads[i + x.rank]) for i, s in enumerate(x.shape)]
    if mode == "constant" and m.chance(0.3):  # to a multiple of 4
        axis = m.d.one(*range(x.rank))
        size = m.size_of(x, axis)
        more = m.call("Mod", m.call("Neg", size), m.ints(4))
        zeros = [m.ints(*[0] * (x.rank + axis))] if x.rank + axis else []
        after = [m.ints(*[0] * (x.rank - axis - 1))] if x.rank - axis - 1 else []
        given = m.call("Concat", *zeros, more, *after, axis=0)
        sizes = [mapped(lambda n: -(-n // 4) * 4, s) if i == axis else s for i, s in enumerate(x.shape)]
    if any(isinstance(s, int) and s < 1 for s in sizes):
        return
    value = [m.constant(m.d.one(0, 1, 3), x.dtype)] if mode == "constant" and m.chance(0.5) else []
    m.like(x, m.call("Pad", x, given, *value, mode=mode), sizes)


@step(4, dtypes=MOVED, rank=(2, 5))
def transpose(m: Model, x: Drawn) -> None:
    perm = [int(i) for i in m.d.rng.permutation(x.rank)]
    m.like(x, m.call("Transpose", x, perm=perm), [x.shape[i] for i in perm])


@step(6, dtypes=MOVED)
def reshape(m: Model, x: Drawn) -> None:
    """Axes are joined, divided, removed or added."""
    d, rank = m.d, x.rank
    kind = d.one("join", "join", "divide", "divide", "flatten", "unsqueeze", "squeeze", "other")
    axis = d.one(*range(rank))
    if kind == "join" and rank > 1:
        axis = min(axis, rank - 2)
        shape = [*x.shape[:axis], total(*x.shape[axis : axis + 2]), *x.shape[axis + 2 :]]
        parts = [m.size_of(x, i) for i in range(rank)]
        both = m.ints(-1) if m.chance(0.5) else m.call("Mul", parts[axis], parts[axis + 1])
        to = m.call("Concat", *parts[:axis], both, *parts[axis + 2 :], axis=0)
    elif kind == "divide" and isinstance(x.shape[axis], int) and x.shape[axis] > 1 and rank < 5:
        size = x.shape[axis]
        assert isinstance(size, int)
        part = d.one(*(k for k in range(1, size + 1) if size % k == 0))
        shape = [*x.shape[:axis], part, size // part, *x.shape[axis + 1 :]]
        if m.chance(0.4):
            to = m.ints(*(0 if i < axis else s if isinstance(s, int) else -1 for i, s in enumerate(shape)))
            if sum(not isinstance(s, int) for s in shape[axis:]) > 1:
                return
        else:
            after = [m.size_of(x, i) for i in range(axis + 1, rank)]
            to = m.call("Concat", *[m.size_of(x, i) for i in range(axis)], m.ints(part, size // part), *after, axis=0)
    elif kind == "flatten":
        m.like(x, m.call("Flatten", x, axis=axis), [total(*x.shape[:axis]), total(*x.shape[axis:])])
        return
    elif kind == "unsqueeze" and rank < 5:
        m.like(x, m.call("Unsqueeze", x, m.ints(axis)), [*x.shape[:axis], 1, *x.shape[axis:]])
        return
    elif kind == "squeeze" and x.shape[axis] == 1 and rank > 1:
        m.like(x, m.call("Squeeze", x, m.ints(axis)), [*x.shape[:axis], *x.shape[axis + 1 :]])
        return
    elif kind == "other":
        other = m.alike(x, lambda v: v.rank > 0 and sorted(map(str, v.shape)) == sorted(map(str, x.shape)))
        if other is None:
            return
        shape, to = list(other.shape), m.call("Shape", other)
    else:
        return
    m.like(x, m.call("Reshape", x, to), shape)


@step(3, dtypes=MOVED)
def expand(m: Model, x: Drawn) -> None:
    d, ones = m.d, [i for i, s in enumerate(x.shape) if s == 1]
    other = d.one(*m.values)
    shape = broadcast(x.shape, other.shape)
    if shape is not None and other.rank and other is not x and m.chance(0.6):
        to = m.call("Shape", other)
    elif ones:
        axis = d.one(*ones)
        source = d.one(*(v for v in m.values if v.rank))
        place = d.one(*range(source.rank))
        shape = (*x.shape[:axis], source.shape[place], *x.shape[axis + 1 :])
        parts = [m.size_of(source, place) if i == axis else m.ints(1) for i in range(x.rank)]
        to = m.call("Concat", *parts, axis=0)
    else:
        shape, to = (3, *x.shape), m.call("Concat", m.ints(3), *[m.ints(1)] * x.rank, axis=0)
    if len(shape) < 6:
        m.like(x, m.call("Expand", x, to), shape)


@step(1, dtypes=MOVED)
def tile(m: Model, x: Drawn) -> None:
    times = [m.d.one(1, 1, 2, 3) for _ in x.shape]
    m.like(x, m.call("Tile", x, m.ints(*times)), [scaled(s, t) for s, t in zip(x.shape, times, strict=True)])


@step(3, dtypes=MOVED)
def gather(m: Model, x: Drawn) -> None:
    axis, d = m.d.one(*range(x.rank)), m.d
    if m.chance(0.2):
        m.like(x, m.call("Gather", x, m.constant(d.one(0, -1), I64), axis=axis), [*x.shape[:axis], *x.shape[axis + 1 :]])
        return
    ids = [v for v in m.inputs if v.name in m.limits]
    if ids and m.chance(0.5):  # as of an embedding
        v, size = d.one(*ids), d.one(3, 8, 16)
        m.keep(m.call("Gather", m.weights([7, size]), v), [*v.shape, size], m.float, True)
        return
    if m.chance(0.3):  # in the other order, by a Range
        last = m.call("Sub", m.size_of(x, axis, False), m.constant(1, I64))
        where = m.call("Range", last, m.constant(-1, I64), m.constant(-1, I64))
        m.like(x, m.call("Gather", x, where, axis=axis))
        return
    count = d.size(4)
    where = m.ints(*(int(i) for i in d.rng.integers(-1, 1, count)))
    m.like(x, m.call("Gather", x, where, axis=axis), [*x.shape[:axis], count, *x.shape[axis + 1 :]])


@step(1, dtypes=ANY)
def scattered(m: Model, x: Drawn) -> None:
    if m.chance(0.5):
        rows = m.call("Gather", x, m.ints(0), axis=0)
        m.like(x, m.call("ScatterND", x, m.constant([[0]], I64), rows))
    else:
        axis = m.d.one(*range(x.rank))
        where = m.call("Expand", m.constant(0, I64), m.call("Shape", x))
        m.like(x, m.call("GatherElements", x, where, axis=axis))


# --- sizes that data decide


@step(1, dtypes=ANY)
def nonzero(m: Model, x: Drawn) -> None:
    if not x.is_exact:
        return
    places = m.call("NonZero", m.call("Greater", x, m.constant(m.d.one(0, 0, 1, 100), x.dtype)))
    places = m.keep(places, [x.rank, f"data {len(m.nodes)}"], I64, True)
    if m.chance(0.7):
        rows = m.call("GatherND", x, m.call("Transpose", places, perm=[1, 0]))
        m.like(x, rows, [places.shape[1]])


@step(2, dtypes=ANY)
def top(m: Model, x: Drawn) -> None:
    if not x.is_exact or x.dtype in (F16, I32, I64):  # no draws
        return
    axis = m.d.one(*range(x.rank))
    size, most = x.shape[axis], m.d.size(9)
    k = m.call("Min", m.size_of(x, axis), m.ints(most)) if m.chance(0.7) else m.size_of(x, axis)
    new = mapped(lambda n: min(n, most), size) if m.nodes[-1].op_type == "Min" else size
    shape = [*x.shape[:axis], new, *x.shape[axis + 1 :]]
    values, places = m.call("TopK", x, k, outputs=2, axis=axis, largest=m.d.one(0, 1))
    m.keep(values, shape, x.dtype, True)
    m.keep(places, shape, I64, True)


@step(1, dtypes=ANY)
def compress(m: Model, x: Drawn) -> None:
    if x.is_exact:
        flat = m.call("Reshape", x, m.ints(-1))
        size = f"data {len(m.nodes)}"
        if m.chance(0.6):
            mask = m.call("Greater", flat, m.constant(0, x.dtype))
            m.like(x, m.call("Compress", flat, mask, axis=0), [size])
        else:
            m.like(x, m.call("Unique", flat, sorted=1), [size])


@step(2, rank=(3, 3))
def suppression(m: Model, x: Drawn) -> None:
    """Boxes of the first four elements of rows, with scores of others."""
    if x.dtype != F32 or not x.is_exact or not isinstance(x.shape[-1], int) or x.shape[-1] < 6:
        return
    start = m.call("Slice", x, m.ints(0), m.ints(2), m.ints(2))
    extent = m.call("Add", m.call("Abs", m.call("Slice", x, m.ints(2), m.ints(4), m.ints(2))), m.constant(0.1, F32))
    boxes = m.call("Concat", start, m.call("Add", start, extent), axis=2)
    scores = m.call("Transpose", m.call("Slice", x, m.ints(4), m.ints(6), m.ints(2)), perm=[0, 2, 1])
    limits = [m.constant(m.d.one(2, 5, 100), I64), m.constant(m.d.one(0.3, 0.5), F32), m.constant(m.d.one(0.1, 0.9, 9.0), F32)]
    found = m.keep(m.call("NonMaxSuppression", boxes, scores, *limits), [f"data {len(m.nodes)}", 3], I64, True)
    if m.chance(0.5):
        rows = m.call("Concat", *[m.call("Gather", found, m.ints(i), axis=1) for i in (0, 2)], axis=1)
        m.like(x, m.call("GatherND", x, rows), [found.shape[0], x.shape[-1]])


@step(1)
def branch(m: Model, x: Drawn) -> None:
    """A branch that a size decides."""
    axis = m.d.one(*range(x.rank))
    c = m.call("Greater", m.size_of(x, axis, False), m.constant(m.d.size(12), I64))
    kind = {F32: "float", F64: "double", F16: "float16"}[x.dtype]
    count, name = len(m.nodes), x.name
    bodies = {
        f"{which}_branch": parser.parse_graph(f"g () => ({kind} b{count}{which}) {{ b{count}{which} = {op}({name}) }}")
        for which, op in (("then", m.d.one("Relu", "Neg")), ("else", m.d.one("Abs", "Tanh")))
    }
    m.used.add(name)
    m.keep(m.call("If", c, **bodies), x.shape, x.dtype)


@step(1, rank=(2, 4))
def scanned(m: Model, x: Drawn) -> None:
    """A Scan along the first axis, whose body has the other sizes, or a Loop that repeats an operation."""
    kind = {F32: "float", F64: "double", F16: "float16"}[x.dtype]
    if m.chance(0.5):
        names = ", ".join("abcd"[: x.rank - 1])
        body = f"g ({kind}[{names}] s, {kind}[{names}] e) => ({kind}[{names}] t, {kind}[{names}] o) {{"
        body += " h = Mul(s, s) i = Tanh(h) t = Add(i, e) o = Relu(t) }"
        first = m.call("Gather", x, m.constant(0, I64), axis=0)
        last, y = m.call("Scan", first, x, outputs=2, num_scan_inputs=1, body=parser.parse_graph(body))
        m.keep(last, x.shape[1:], x.dtype)
    else:
        body = f"g (int64 i, bool c, {kind}[a, b] s) => (bool d, {kind}[e, f] t) {{ d = Identity(c) h = Tanh(s) t = Add(h, s) }}"
        body = body.replace("[a, b]", f"[{', '.join('abcd'[: x.rank])}]").replace("[e, f]", "")
        turns = m.constant(2, I64) if m.chance(0.5) else m.call("Min", m.size_of(x, 0, False), m.constant(3, I64))
        y = m.call("Loop", turns, m.constant(True, BOOL), x, body=parser.parse_graph(body))
    m.keep(y, x.shape, x.dtype)


# --- models


LARGEST = 1 << 18
"""The most elements of a value in a request."""


def largest(x: Drawn) -> int:
    """The elements of a value in the largest request."""
    sizes = [[s] * REQUESTS if isinstance(s, int) else [1] * REQUESTS if isinstance(s, str) else s for s in x.shape]
    return max(map(math.prod, zip(*sizes, strict=True)), default=1)


def drawn(seed: int, most: int = 10) -> Model:
    """A model of 2 to 10 drawn operators, or calls of several nodes."""
    for turn in range(100):
        m = Model([seed, turn])
        d = m.d
        kinds = [d.one("image", "image", "signal", "rows", "rows", "rows", "matrix", "vector")]
        kinds += [d.one("image", "rows", "matrix", "vector", "ids") for _ in range(d.one(0, 0, 1, 1, 2))]
        for kind in kinds:
            m.input(kind)
        target, tries = int(d.rng.integers(2, most + 1)), 0
        while len(m.nodes) < target and tries < 60:
            tries += 1
            add, count = d.one(*STEPS), len(m.nodes)
            for x in (m.values[-1], d.one(*m.values), d.one(*m.values), d.one(*m.values)):
                if len(m.nodes) == count and max(map(greatest, x.shape), default=1) < 5000:
                    add(m, x)
        if len(m.nodes) >= 2 and m.names and m.outputs() and max(map(largest, m.values)) <= LARGEST:
            return m
    raise ValueError(f"no model has the seed {seed}")
