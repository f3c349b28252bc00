"""What follows an integer product, as post-ops of its primitive: factors, rounding, and the calls after it.

All arithmetic after the exact int32 sums is in float32, each operation rounded once, as in the definitions:

    sum -> + bias (an exact float32) -> * factor -> round half to even -> saturate        QLinearConv, QLinearMatMul
    sum -> Cast -> Mul -> Add -> ...                                                       MatMulInteger, ConvInteger

oneDNN's own scales are not used: with several of them it rounds several times, and differs near ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dtypes import numpy_dtype
from . import onednn as dnn
from .epilogue import Epilogue, dense_layout, is_modern
from .lowering import F32, copy, dense_desc, derived, remark
from .onednn import Attributes, MemoryDesc, Primitive
from .table import Follower, Site
from .values import FINITE, Value, strides_of

INT8 = (np.dtype(np.uint8), np.dtype(np.int8))
INT32 = np.dtype(np.int32)

SUM, STEPS, FLOAT = "sum", "steps", "float"

Fold = Callable[[Value], Value | None]


def scalar(v: Value | None, kind: str = "") -> Any:
    """The only element of a constant of this kind of dtype; None for anything else."""
    if v is None or not v.constant or v.size != 1 or v.ndim > 1 or (kind and v.dtype.kind not in kind):
        return None
    return v.array.reshape(-1)[0]


@dataclass
class Tail:
    """Post-ops, and what the last of them returns.

    Attributes:
        site: where the kernel is used.
        shape: of the result, as the primitive has it.
        order: its axes, from the outermost in memory to the innermost.
        fold: makes the view of another operand that has the rank of `shape`; None if there is none.
        channels: the axis of the channels.
        kind: "sum" for the integers of the product, "steps" for a quantized type, "float" for float32.
        dtype: of the result.
        zero: the zero point of a quantized type: the post-ops return the steps without it.
        rounded: whether steps are rounded and in the range of their type.
        made: the post-ops and their operands.
        bound: the highest absolute sum of each channel.
        bias: float32, what is added to the sums.
        late: whether the bias is a post-op too, not an argument of the primitive.
        target: the quantized value whose memory becomes the result: what the result is added to.
        free: whether that memory may be overwritten.
    """

    site: Site
    shape: tuple[int, ...]
    order: tuple[int, ...]
    fold: Fold
    channels: int
    kind: str = SUM
    dtype: np.dtype[Any] = INT32
    zero: int = 0
    rounded: bool = False
    made: Epilogue = field(default_factory=lambda: Epilogue(Attributes(), exact=True))
    bound: np.ndarray | None = None
    bias: Value | None = None
    late: bool = False
    target: Value | None = None
    free: bool = False

    @property
    def term(self) -> MemoryDesc | None:
        """The description of the bias."""
        return None if self.bias is None else dense_desc(F32, self.bias.shape)

    def add(self, bias: Value) -> None:
        """Add a vector of float32 to the sums."""
        if self.late or self.channels != 1 or len(self.shape) == 2:
            wide = [1] * len(self.shape)
            wide[self.channels] = bias.size
            bias = bias.view(wide, strides_of(wide, 4))
        if self.late:
            self._operand("add", bias)
        else:
            self.bias = bias

    def multiply(self, w: Value, factor: np.ndarray, what: Any) -> None:
        """Multiply with one float32, or one for each channel, derived from the constant w."""
        factor = np.asarray(factor, np.float32).reshape(-1)
        self._operand("mul", derived(self.site, w, what, lambda: self._wide(factor)))

    def _wide(self, factor: np.ndarray) -> np.ndarray:
        shape = [1] * len(self.shape)
        shape[self.channels] = factor.size
        return factor.reshape(shape)

    def _operand(self, name: str, v: Value) -> None:
        md = dense_desc(v.dtype, v.shape)
        arg = dnn.args.post_op(len(self.made.attributes))
        self.made.attributes.append_binary(name, md)
        self.made.arguments[arg] = (md, v, None)

    def quantize(self, zero: int, dtype: np.dtype[Any]) -> None:
        """The result so far is in steps of a quantized type."""
        self.kind, self.zero, self.dtype, self.rounded = STEPS, zero, dtype, False

    def settle(self) -> None:
        """Round the steps, and saturate them."""
        if not self.rounded:
            self.made.attributes.append_eltwise("round")
            info = np.iinfo(self.dtype)
            self.made.attributes.append_eltwise("clip", float(info.min - self.zero), float(info.max - self.zero))
            self.rounded = True

    def finish(self) -> None:
        """Add the zero point; the primitive rounds and saturates when it stores."""
        if self.kind == STEPS and self.zero:
            if not self.rounded:
                self.made.attributes.append_eltwise("round")
            self.made.attributes.append_eltwise("linear", 1.0, float(self.zero))

    def follow(self, f: Follower) -> bool:
        """Add a follower; return whether it is possible."""
        if f.place < 0:
            done = f.name == "DequantizeLinear"
        elif self.kind == SUM:
            done = self._add_bias(f) or (f.name == "Cast" and f.place == 0 and numpy_dtype(f.attributes["to"]) == F32)
            if done and f.name == "Cast":
                self.kind, self.dtype = FLOAT, F32
        elif self.kind == STEPS:
            done = f.place == 0 and (self._dequantize(f) if f.name == "DequantizeLinear" else self._bound(f))
        else:
            done = self._quantize(f) if f.name == "QuantizeLinear" else self._float(f)
        self.made.count += done
        return done

    def _add_bias(self, f: Follower) -> bool:
        """Add integers for each channel to the sums, if float32 can add them exactly before the factor that follows."""
        after = list(self.site.followers)
        after = after[after.index(f) + 1 :]
        b, scaled = f.other, f.name == "Add" and len(after) > 1 and after[0].name == "Cast" and after[1].name == "Mul"
        factor = after[1].other if scaled else None
        if self.bias is not None or b is None or b.dtype != INT32 or factor is None or self.bound is None:
            return False
        channels = self.shape[self.channels]
        fits = all(v.constant and v.size in (1, channels) and self._varies(v) for v in (b, factor))
        if not fits or factor.dtype != F32 or numpy_dtype(after[0].attributes["to"]) != F32 or b.size != channels:
            return False
        if not exact_bias(self.bound, b.array.reshape(-1), factor.array.reshape(-1)):
            return False
        self.add(derived(self.site, b, "float", lambda: b.array.astype(np.float32).reshape(-1)))
        return True

    def _varies(self, v: Value) -> bool:
        """Whether a value has one element, or varies along the channels only."""
        if v.size == 1:
            return True
        axis = self.channels - len(self.shape) + v.ndim
        return axis >= 0 and v.shape[axis] == v.size

    def _bound(self, f: Follower) -> bool:
        """Relu, Max, Min and Clip of quantized values."""
        low, high = -np.inf, np.inf
        if f.name == "Relu":
            low = 0
        elif f.name in ("Max", "Min") and len(f.inputs) == 2:
            bound = scalar(f.other, "iu")
            if bound is None:
                return False
            low, high = (bound, high) if f.name == "Max" else (low, bound)
        elif f.name == "Clip" and f.version >= 12:
            bounds = [None if v is None else scalar(v, "iu") for v in [*f.inputs[1:], None, None][:2]]
            if any(v is not None and b is None for v, b in zip(f.inputs[1:], bounds, strict=False)):
                return False
            low, high = (low if bounds[0] is None else bounds[0]), (high if bounds[1] is None else bounds[1])
        else:
            return False
        if low > high:
            return False
        self.settle()
        self.made.attributes.append_eltwise("clip", float(low) - self.zero, float(high) - self.zero)
        return True

    def _dequantize(self, f: Follower) -> bool:
        found = parameters(f)
        if found is None or found[1] != self.zero:
            return False
        self.settle()
        self.made.attributes.append_eltwise("linear", found[0], 0.0)
        self.kind, self.dtype = FLOAT, F32
        return True

    def _quantize(self, f: Follower) -> bool:
        found = parameters(f)
        if found is None or f.place != 0 or self.made.finiteness != FINITE:
            return False
        scale, zero, dtype = found
        if dtype not in INT8:
            return False
        if scale != 1:
            self._operand("div", self.site.constant(np.full((1,) * len(self.shape), scale, np.float32)))
        self.quantize(zero, dtype)
        return True

    def _float(self, f: Follower) -> bool:
        if not is_modern(f.name, f.version):
            return False
        if f.sides:
            return self._add_quantized(f, next(iter(f.sides.values())))
        inputs: list[Value | None] = []
        for i, v in enumerate(f.inputs):
            folded = v if v is None or i == f.place or v.size == 1 else self.fold(v)
            if folded is None and v is not None:
                return False
            inputs.append(folded)
        return self.made.append(replace(f, inputs=inputs), dense_layout(self.shape, self.order, into=False))

    def _add_quantized(self, f: Follower, side: Follower) -> bool:
        """Add integers: a quantized value minus its zero point, read as it is."""
        found = parameters(side)
        v = side.inputs[0]
        if f.name != "Add" or found is None or found[0] != 1 or v is None or self.target is not None:
            return False
        v = self.fold(v)
        if v is None or v.shape != self.shape:
            return False
        self.made.attributes.append_sum(1.0, found[1], v.dtype)
        self.target, self.free = v, 0 in side.reusable
        return True


def parameters(f: Follower) -> tuple[float, int, np.dtype[Any]] | None:
    """Scale, zero point and quantized dtype of a QuantizeLinear or DequantizeLinear with constants for the whole tensor."""
    a = f.attributes
    scale = f.inputs[1] if f.inputs[1] is not None and f.inputs[1].dtype == F32 else None
    zero = f.inputs[2] if len(f.inputs) > 2 else None
    number, offset = scalar(scale), scalar(zero, "iu")
    if number is None or (zero is not None and offset is None) or a.get("precision") or a.get("block_size"):
        return None
    if not (np.isfinite(number) and number > 0):
        return None
    if f.name == "DequantizeLinear":
        known = zero is not None and zero.dtype in INT8 and not a.get("output_dtype")
        return (float(number), int(offset), zero.dtype) if known and zero is not None else None
    if a.get("output_dtype") and numpy_dtype(a["output_dtype"]) != (zero.dtype if zero is not None else None):
        return None
    return float(number), int(offset or 0), np.dtype(np.uint8) if zero is None else zero.dtype


def create(site: Site, start: Callable[[], Tail], build: Callable[[Tail], Primitive]) -> tuple[Primitive, Tail]:
    """Create a primitive with as many followers as it can compute.

    Args:
        site: where the kernel is used.
        start: returns the post-ops of the call itself.
        build: creates the primitive with these post-ops.

    Raises:
        Unimplemented: oneDNN has no fast and exact code, even without followers.
    """
    limit = len(site.followers)
    while True:
        tail = start()
        for f in site.followers[:limit]:
            if not tail.follow(f):
                break
        count = tail.made.count
        complete = tail.target is None or tail.kind == STEPS  # a result in the memory of 8-bit values has 8 bits
        complete = complete and (tail.kind != SUM or tail.bias is None)
        complete = complete and not (count and site.followers[count - 1].place < 0)
        if complete or not count:
            tail.finish()
            try:
                return build(tail), tail
            except dnn.Unimplemented as error:
                if not count:
                    raise
                remark(site, error)
        limit = count - 1


def result(
    tail: Tail, shape: tuple[int, ...], order: tuple[int, ...] | None
) -> tuple[Value, dict[int, tuple[MemoryDesc, Value]]]:
    """The value of the last follower, and the arguments of the post-ops.  To be called before the step is emitted."""
    site, made = tail.site, tail.made
    site.absorb(made.count)
    if made.finite:
        site.needs_finite()
    y = _memory(tail, shape, order)
    return y, made.operands(site)


def _memory(tail: Tail, shape: tuple[int, ...], order: tuple[int, ...] | None) -> Value:
    """The value that the primitive writes."""
    site, t = tail.site, tail.target
    finiteness = tail.made.finiteness if tail.kind == FLOAT else FINITE
    if t is None:
        return site.new(shape, tail.dtype, order, finiteness)
    strides = strides_of(shape, 1, order)
    same = t.size == math.prod(shape) and all(
        d == 1 or s == w for d, s, w in zip(t.shape, t.strides, strides_of(t.shape, 1, tail.order), strict=True)
    )
    if tail.free and same:
        return Value(t.buffer, shape, strides, tail.dtype, t.offset, False, finiteness)
    y = site.new(shape, tail.dtype, order, finiteness)
    copy(site, t, Value(y.buffer, t.shape, strides_of(t.shape, 1, tail.order), t.dtype, y.offset, False, finiteness))
    return y


def exact_bias(bound: np.ndarray, bias: np.ndarray, factor: np.ndarray) -> bool:
    """Whether float32(sum) + float32(bias) is float32(sum + bias) wherever the result is not saturated.

    Args:
        bound: the highest absolute sum of each channel.
        bias: int32, of each channel.
        factor: the steps of the result for each unit of the sum.
    """
    exact = np.float64(1 << 24)
    b = np.abs(bias.astype(np.float64))
    with np.errstate(all="ignore"):
        saturated = (exact - b) * np.abs(factor.astype(np.float64)) >= 512
    return bool((((bound <= exact) | saturated) & (b <= exact) | (bound == 0)).all())
