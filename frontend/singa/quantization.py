"""Training that knows of 8 bits: values are rounded to what a quantized model can hold, and gradients pass as if they were not.

    self.act = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver())      affine, one scale for a tensor
    self.w = quantization.FakeQuantize(quantization.MinMaxObserver(symmetric=True, axis=0))   one for each filter
    def forward(self, x):
        return op.Conv(self.act(x), self.w(self.conv.W), ...)

An export is QuantizeLinear and DequantizeLinear by constants: what was observed is folded into a scale and a zero point.
Opset 10 has them for a tensor, opset 13 for channels, opset 21 for 4 and 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.eager import Eager
from singa_backend.operators.cast import limits

from ._core import provenance, tape, trace
from ._core.tensor import DTypeLike, Tensor, dtype_of, op
from ._layers.base import Layer

_TINY = float(np.finfo(np.float32).tiny)
"""The least scale: what was observed may be nothing but zeros."""

_INTEGERS = {np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16)} | dtypes.SUB_BYTE_INTS


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int = 1) -> Tensor:
    """x rounded to what integers can hold: (saturate(round(x / scale) + zero_point) - zero_point) scale.

    x: a float tensor.  scale: float32, zero_point: of the integers' dtype, both () or (size of the axis,).
    The gradient of x is that of the result where nothing was saturated, else 0; scale and zero_point have none.
    """
    with tape.no_tape():
        y: Tensor = _there_and_back(op, x, scale, zero_point, axis)
    if tape.training and x.requires_grad:
        # What follows is 0 in numbers, and 1 or 0 in gradients.
        with tape.no_tape():
            inside = _inside(op, x, scale, zero_point, axis)
            fixed = op.Where(inside, x, 0)
        with provenance.suspended:
            y = op.Add(y, op.Sub(op.Where(inside, x, 0), fixed))

    def replay(xs: list[Any], training: bool) -> Sequence[Any]:
        return [_there_and_back(op, xs[0], xs[1], xs[2], axis)]

    provenance.record([y], "FakeQuantize", replay, [x, scale, zero_point])
    return y


def _there_and_back(op: Any, x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
    """The two operators; they take float32 in every opset."""
    narrow = op.dtype(x) == np.float32
    wide = x if narrow else op.Cast(x, to=dtypes.onnx_code(np.float32))
    how = {"axis": axis} if op.rank(scale) else {}
    y = op.DequantizeLinear(op.QuantizeLinear(wide, scale, zero_point, **how), scale, zero_point, **how)
    return y if narrow else op.cast(y, x)


def _inside(op: Any, x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
    """Where a value, rounded, lies within the bounds of the integers; NaN does not."""
    bounds = limits(op.dtype(zero_point))
    code = dtypes.onnx_code(np.float32)
    zero = op.Cast(zero_point, to=code)
    if op.rank(scale):
        behind = op.rank(x) - 1 - axis % op.rank(x)
        scale, zero = (op.Unsqueeze(v, list(range(1, 1 + behind))) if behind else v for v in (scale, zero))
    rounded = op.Add(op.Round(op.Div(op.Cast(x, to=code), scale)), zero)
    low, high = (np.float32(b) for b in bounds)
    return op.And(op.GreaterOrEqual(rounded, low), op.LessOrEqual(rounded, high))


class Observer(Layer):
    """What a range of values is gathered by, and what scale and zero point follow from it.

    dtype: of the integers: int8, uint8, or 16, 4 and 2 bits of either.
    symmetric: zero lies in the middle of the integers, and the scale is the greatest magnitude over their half (int8: 127);
        else the range from the least to the greatest value is spread over all of them.  0 always has an integer of its own.
    axis: of the channels, each with a range of its own; None: one range.
    States low, high, float32: the range, () or (channels,); seen, (): whether there is any.  NaN and infinities are passed over.
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, dtype: DTypeLike = np.int8, symmetric: bool = False, axis: int | None = None) -> None:
        super().__init__()
        self.dtype = dtype_of(dtype)
        if self.dtype not in _INTEGERS:
            names = ", ".join(sorted(map(dtypes.onnx_name, _INTEGERS)))
            raise InvalidInput(f"values are quantized to {names}, not to {dtypes.onnx_name(self.dtype)}", code="SX365")
        self.symmetric, self.axis = symmetric, axis

    def initialize(self, x: Tensor) -> None:
        shape: Sequence[int] = ()
        if self.axis is not None:
            rank = op.rank(x)
            if not -rank <= self.axis < rank:
                raise InvalidInput(f"there is no axis {self.axis} of channels in shape {op.shape(x)}", code="SX365")
            shape = (x.shape[self.axis],)
        for name, sizes in (("low", shape), ("high", shape), ("seen", ())):
            t = Tensor(tuple(sizes), x.device, np.float32, requires_grad=False)
            setattr(self, name, t)
            t.name = self._path(name)

    def forward(self, x: Tensor) -> Tensor:
        """x; in training its range is gathered.  Raises InvalidInput for another number of channels."""
        if tape.training:
            self._follow(x)
            with tape.no_tape():
                low, high = self.joined(x)
                for state, new in ((self.low, low), (self.high, high), (self.seen, op.full_like(self.seen, 1))):
                    trace.assign(state, new.raw)
        return x

    def joined(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range with that of x, which is not noted."""
        count = x.shape[self.axis] if self.axis is not None else None
        if isinstance(count, int) and count != self.low.shape[0]:
            raise InvalidInput(
                f"{self._path() or type(self).__name__} knows {self.low.shape[0]} channels; {count} were given", code="SX365"
            )
        wide = op.Cast(x, to=dtypes.onnx_code(np.float32))
        known = op.Where(op.Or(op.IsNaN(wide), op.IsInf(wide)), 0, wide)  # 0 is in every range
        axes = None if self.axis is None else op.axes_but(x, self.axis)
        low = op.Min(op.ReduceMin(known, axes, keepdims=0), 0)
        high = op.Max(op.ReduceMax(known, axes, keepdims=0), 0)
        return self._merged(self.low, low), self._merged(self.high, high)

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how ranges are joined")

    @property
    def knows(self) -> bool:
        """Whether anything was seen."""
        return self._initialized and bool(self.seen.device.backend.get(self.seen._data))

    def scale_and_zero_point(self) -> tuple[Any, Any]:
        """The scale, float32, and the zero point, in the integers' dtype, as arrays.

        Raises InvalidInput where nothing was seen.
        """
        if not self.knows:
            raise InvalidInput(
                f"{self._path() or type(self).__name__} has seen no values",
                code="SX366",
                hint="run the model on some data in training mode: model.train()",
            )
        low, high = (t.device.backend.get(t._data) for t in (self.low, self.high))
        return self.by_range(Eager(), low, high)

    def by_range(self, op: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """The scale and the zero point of a range, in some vocabulary."""
        least, most = limits(self.dtype)
        code = dtypes.onnx_code(self.dtype)
        if self.symmetric:
            half = (most - least) // 2
            scale = op.Max(op.Div(op.Max(op.Neg(low), high), float(half)), _TINY)
            return scale, op.Cast(op.Add(op.Mul(scale, 0.0), float(most - half)), to=code)
        steps = float(most - least)
        scale = op.Max(op.Sub(op.Div(high, steps), op.Div(low, steps)), _TINY)  # their difference may be beyond float32
        zero = op.Clip(op.Round(op.Sub(float(least), op.Div(low, scale))), float(least), float(most))
        return scale, op.Cast(zero, to=code)


class MinMaxObserver(Observer):
    """The least and the greatest value ever seen."""

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        return op.Min(old, new) if old is self.low else op.Max(old, new)


class MovingAverageMinMaxObserver(Observer):
    """Moving averages of the least and the greatest value of each batch: momentum old + (1 - momentum) new."""

    def __init__(
        self, dtype: DTypeLike = np.int8, symmetric: bool = False, axis: int | None = None, momentum: float = 0.95
    ) -> None:
        super().__init__(dtype, symmetric, axis)
        if not 0 <= momentum < 1:
            raise InvalidInput(f"the momentum of an observer lies in [0, 1); it is {momentum}", code="SX365")
        self.momentum = momentum

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        trace.depends(self, lambda: self.momentum)
        kept = op.Mul(self.seen, self.momentum)  # the first range counts as a whole
        return op.Add(op.Mul(old, kept), op.Mul(new, op.Sub(1.0, kept)))


class FakeQuantize(Layer):
    """Values rounded to what integers can hold, by a range that an observer gathers in training; see `fake_quantize`.

    observer: MinMaxObserver() where absent.  observing: whether training goes on gathering; set it to False to freeze the range.
    Before anything was seen, values stay as they are, and an export raises InvalidInput.
    An export in its training form gathers too, from the range of the day; that of inference has constants.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self.observer = observer or MinMaxObserver()
        self.observing = True

    def forward(self, x: Tensor) -> Tensor:
        trace.depends(self, lambda: self.observing)
        if self.observing:
            self.observer(x)
        self.observer._follow(x)
        with provenance.suspended:
            y = self._rounded(x) if trace.current() is not None or self.observer.knows else op.Identity(x)
        provenance.record([y], "FakeQuantize", self._again, [x])
        return y

    @property
    def _axis(self) -> int:
        return 1 if self.observer.axis is None else self.observer.axis

    def _rounded(self, x: Tensor) -> Tensor:
        """By constants, or in a step that is recorded by what follows from the range that it reads."""
        with tape.no_tape():
            if trace.current() is not None and self.observer._initialized:
                scale, zero_point = self.observer.by_range(op, self.observer.low, self.observer.high)
            else:
                scale, zero_point = (op.constant(v) for v in self.observer.scale_and_zero_point())
        return fake_quantize(x, scale, zero_point, axis=self._axis)

    def _again(self, xs: list[Any], training: bool) -> Sequence[Any]:
        if training and self.observing:
            scale, zero_point = self.observer.by_range(op, *self.observer.joined(xs[0]))
        else:
            scale, zero_point = (op.constant(v) for v in self.observer.scale_and_zero_point())
        return [_there_and_back(op, xs[0], scale, zero_point, self._axis)]
