"""Quantization-aware training: values are rounded to those of a quantized model, and gradients pass through the rounding.

    self.act = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver())      asymmetric, one scale per tensor
    self.w = quantization.FakeQuantize(quantization.MinMaxObserver(symmetric=True, axis=0))   one scale per filter
    def forward(self, x):
        return op.Conv(self.act(x), self.w(self.conv.W), ...)

An export contains QuantizeLinear and DequantizeLinear with a constant scale and zero point, computed from the observed range.
It needs opset 10 for one scale per tensor, opset 13 for one per channel, and opset 21 for 4 and 16 bits.
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
from ._core.conversions import DTypeLike, dtype_of
from ._core.tensor import Tensor, op
from ._layers.base import Layer

__all__ = ["FakeQuantize", "MinMaxObserver", "MovingAverageMinMaxObserver", "Observer", "fake_quantize"]

_TINY = float(np.finfo(np.float32).tiny)
"""The minimum scale, for values that are all zero."""

_INTEGERS = {np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16)} | dtypes.SUB_BYTE_INTS


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int = 1) -> Tensor:
    """Round values to those that integers represent: (saturate(round(x / scale) + zero_point) - zero_point) * scale.

    The operators are ONNX's QuantizeLinear and DequantizeLinear, in float32. The gradient of x is that of the result where the
    value was not saturated, otherwise 0 (the straight-through estimator); scale and zero_point have no gradient.

    Args:
        x: Float tensor of any shape.
        scale: float32 tensor of shape () or (size of the axis,).
        zero_point: Tensor of the integers' dtype and of the shape of `scale`.
        axis: Axis of the channels if `scale` has shape (size of the axis,).

    Returns:
        Tensor of the shape and dtype of x.
    """
    with tape.no_tape():
        y: Tensor = _quantize_dequantize(op, x, scale, zero_point, axis)
    if tape.training and x.requires_grad:
        # The added difference has the value 0 and the gradient 1 or 0.
        with tape.no_tape():
            inside = _in_range(op, x, scale, zero_point, axis)
            fixed = op.Where(inside, x, 0)
        with provenance.suspended:
            y = op.Add(y, op.Sub(op.Where(inside, x, 0), fixed))

    def replay(xs: list[Any], training: bool) -> Sequence[Any]:
        return [_quantize_dequantize(op, xs[0], xs[1], xs[2], axis)]

    provenance.record([y], "FakeQuantize", replay, [x, scale, zero_point])
    return y


def _quantize_dequantize(op: Any, x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
    """Quantize and dequantize; the operators take float32 in every opset."""
    narrow = op.dtype(x) == np.float32
    wide = x if narrow else op.Cast(x, to=dtypes.onnx_code(np.float32))
    how = {"axis": axis} if op.rank(scale) else {}
    y = op.DequantizeLinear(op.QuantizeLinear(wide, scale, zero_point, **how), scale, zero_point, **how)
    return y if narrow else op.cast(y, x)


def _in_range(op: Any, x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
    """Whether a rounded value is within the bounds of the integers; False for NaN."""
    bounds = limits(op.dtype(zero_point))
    code = dtypes.onnx_code(np.float32)
    zero = op.Cast(zero_point, to=code)
    if op.rank(scale):
        after = op.rank(x) - 1 - axis % op.rank(x)
        scale, zero = (op.Unsqueeze(v, list(range(1, 1 + after))) if after else v for v in (scale, zero))
    rounded = op.Add(op.Round(op.Div(op.Cast(x, to=code), scale)), zero)
    low, high = (np.float32(b) for b in bounds)
    return op.And(op.GreaterOrEqual(rounded, low), op.LessOrEqual(rounded, high))


class Observer(Layer):
    """The base class of observers: it gathers the range of values and computes a scale and a zero point from it.

    States, float32: `low` and `high`, the range, of shape () or (channels,); `seen`, of shape (), 1 after the first value. NaN
    and infinite values are ignored.

    Args:
        dtype: Dtype of the integers: int8, uint8, or 16, 4 or 2 bits, signed or unsigned.
        symmetric: Whether 0 is the middle of the integers and the scale is the maximum magnitude divided by half their range
            (int8: 127). Otherwise the range from the minimum to the maximum value is mapped to all integers. 0 is always exact.
        axis: Axis of the channels, each of which has its own range; one range for the tensor if None.

    Raises:
        InvalidInput: If the dtype is not one of these integers (SX365).
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, dtype: DTypeLike = np.int8, symmetric: bool = False, axis: int | None = None) -> None:
        super().__init__()
        self.dtype = dtype_of(dtype)
        if self.dtype not in _INTEGERS:
            names = ", ".join(sorted(map(dtypes.onnx_name, _INTEGERS)))
            raise InvalidInput(f"dtype of an observer must be one of {names}, got {dtypes.onnx_name(self.dtype)}", code="SX365")
        self.symmetric, self.axis = symmetric, axis

    def initialize(self, x: Tensor) -> None:
        """Create the states.

        Args:
            x: Values whose shape has the axis.

        Raises:
            InvalidInput: If x does not have the axis (SX365).
        """
        shape: Sequence[int] = ()
        if self.axis is not None:
            rank = op.rank(x)
            if not -rank <= self.axis < rank:
                raise InvalidInput(f"axis of an observer must be in the shape {op.shape(x)}, got {self.axis}", code="SX365")
            shape = (x.shape[self.axis],)
        for name, sizes in (("low", shape), ("high", shape), ("seen", ())):
            t = Tensor(tuple(sizes), x.device, np.float32, requires_grad=False)
            setattr(self, name, t)
            t.name = self._path(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged; in training, extend the range by its values.

        Args:
            x: Float tensor of any shape.

        Returns:
            x.

        Raises:
            InvalidInput: If x has another number of channels than the range (SX365).
        """
        if tape.training:
            self._follow(x)
            with tape.no_tape():
                low, high = self.joined(x)
                for state, new in ((self.low, low), (self.high, high), (self.seen, op.full_like(self.seen, 1))):
                    trace.assign(state, new.raw)
        return x

    def joined(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the range extended by the values of x, without changing the states.

        Args:
            x: Float tensor of any shape.

        Returns:
            The new `low` and `high`, float32, of shape () or (channels,).

        Raises:
            InvalidInput: If x has another number of channels than the range (SX365).
        """
        count = x.shape[self.axis] if self.axis is not None else None
        if isinstance(count, int) and count != self.low.shape[0]:
            raise InvalidInput(
                f"inputs of {self._path() or type(self).__name__} must have {self.low.shape[0]} channels, got {count}",
                code="SX365",
            )
        wide = op.Cast(x, to=dtypes.onnx_code(np.float32))
        known = op.Where(op.Or(op.IsNaN(wide), op.IsInf(wide)), 0, wide)  # 0 is in every range
        axes = None if self.axis is None else op.axes_but(x, self.axis)
        low = op.Min(op.ReduceMin(known, axes, keepdims=0), 0)
        high = op.Max(op.ReduceMax(known, axes, keepdims=0), 0)
        return self._merged(self.low, low), self._merged(self.high, high)

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _merged")

    @property
    def knows(self) -> bool:
        """Whether any values were observed."""
        return self._initialized and bool(self.seen.device.backend.get(self.seen._data))

    def scale_and_zero_point(self) -> tuple[Any, Any]:
        """Compute the scale and the zero point of the observed range.

        Returns:
            The scale, a float32 array, and the zero point, an array of the integers' dtype, both of shape () or (channels,).

        Raises:
            InvalidInput: If no values were observed (SX366).
        """
        if not self.knows:
            raise InvalidInput(
                f"{self._path() or type(self).__name__} has not observed any values",
                code="SX366",
                hint="run the model on some data in training mode: model.train()",
            )
        low, high = (t.device.backend.get(t._data) for t in (self.low, self.high))
        return self.by_range(Eager(), low, high)

    def by_range(self, op: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """Compute the scale and the zero point of a range with the operators of an interpreter.

        Args:
            op: The interpreter: `Eager` for arrays, `tensor.op` for Tensors.
            low: Minimum of the range, at most 0, float32.
            high: Maximum of the range, at least 0, float32.

        Returns:
            The scale, float32, and the zero point, of the integers' dtype, in the shape of the range.
        """
        lowest, highest = limits(self.dtype)
        code = dtypes.onnx_code(self.dtype)
        if self.symmetric:
            half = (highest - lowest) // 2
            scale = op.Max(op.Div(op.Max(op.Neg(low), high), float(half)), _TINY)
            return scale, op.Cast(op.Add(op.Mul(scale, 0.0), float(highest - half)), to=code)
        steps = float(highest - lowest)
        scale = op.Max(op.Sub(op.Div(high, steps), op.Div(low, steps)), _TINY)  # high - low may overflow float32
        zero = op.Clip(op.Round(op.Sub(float(lowest), op.Div(low, scale))), float(lowest), float(highest))
        return scale, op.Cast(zero, to=code)


class MinMaxObserver(Observer):
    """Observes the minimum and the maximum of all values.

    The arguments are those of Observer.
    """

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        return op.Min(old, new) if old is self.low else op.Max(old, new)


class MovingAverageMinMaxObserver(Observer):
    """Observes moving averages of each batch's minimum and maximum: momentum * old + (1 - momentum) * new.

    Args:
        dtype: Dtype of the integers, as for Observer.
        symmetric: Whether 0 is the middle of the integers, as for Observer.
        axis: Axis of the channels; one range for the tensor if None.
        momentum: Weight of the old range, in [0, 1).

    Raises:
        InvalidInput: If the dtype is not supported or the momentum is outside [0, 1) (SX365).
    """

    def __init__(
        self, dtype: DTypeLike = np.int8, symmetric: bool = False, axis: int | None = None, momentum: float = 0.95
    ) -> None:
        super().__init__(dtype, symmetric, axis)
        if not 0 <= momentum < 1:
            raise InvalidInput(f"momentum of an observer must be in [0, 1), got {momentum}", code="SX365")
        self.momentum = momentum

    def _merged(self, old: Tensor, new: Tensor) -> Tensor:
        trace.depends(self, lambda: self.momentum)
        kept = op.Mul(self.seen, self.momentum)  # the first range is taken unchanged
        return op.Add(op.Mul(old, kept), op.Mul(new, op.Sub(1.0, kept)))


class FakeQuantize(Layer):
    """Rounds values to those that integers represent, with the range that an observer gathers in training; see `fake_quantize`.

    Before any values are observed, the layer returns them unchanged, and an export raises InvalidInput (SX366). An export of the
    training form gathers the range too, starting from the current one; an export for inference contains constants.

    Args:
        observer: The observer; MinMaxObserver() if None.

    Attributes:
        observing: Whether training extends the range; set it to False to freeze the range.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self.observer = observer or MinMaxObserver()
        self.observing = True

    def forward(self, x: Tensor) -> Tensor:
        """Round x; in training, extend the observed range first.

        Args:
            x: Float tensor of any shape.

        Returns:
            Tensor of the shape and dtype of x.

        Raises:
            InvalidInput: If x has another number of channels than the range (SX365).
        """
        trace.depends(self, lambda: self.observing)
        if self.observing:
            self.observer(x)
        self.observer._follow(x)
        with provenance.suspended:
            y = self._rounded(x) if trace.current() is not None or self.observer.knows else op.Identity(x)
        provenance.record([y], "FakeQuantize", self._replay, [x])
        return y

    @property
    def _axis(self) -> int:
        return 1 if self.observer.axis is None else self.observer.axis

    def _rounded(self, x: Tensor) -> Tensor:
        """Round by constants; in a step recorded as a graph, by operators on the range that the step reads."""
        with tape.no_tape():
            if trace.current() is not None and self.observer._initialized:
                scale, zero_point = self.observer.by_range(op, self.observer.low, self.observer.high)
            else:
                scale, zero_point = (op.constant(v) for v in self.observer.scale_and_zero_point())
        return fake_quantize(x, scale, zero_point, axis=self._axis)

    def _replay(self, xs: list[Any], training: bool) -> Sequence[Any]:
        if training and self.observing:
            scale, zero_point = self.observer.by_range(op, *self.observer.joined(xs[0]))
        else:
            scale, zero_point = (op.constant(v) for v in self.observer.scale_and_zero_point())
        return [_quantize_dequantize(op, xs[0], scale, zero_point, self._axis)]
