"""Random tensors: uniform, normal, Bernoulli and multinomial samples; Dropout.

Numbers are drawn on the host, so that every device returns the same ones.  A node with a `seed` draws from a new
`RandomState(seed)` in each run (MT19937, which ONNX's test cases for Dropout require); a node without one draws from a
generator that is seeded by the system.  A seed that is not an integer in [0, 2**32) is converted to one: an integer
modulo 2**32, a float by its float32 bits, so that 0.25 and 0.5 differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..devices.random_streams import random_stream
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Wanted, operator
from ..ir.shapes import KnownShapes, Shape, Unsure
from ._api import Array

Draw = Callable[[Any, Ints], np.ndarray]  # (stream, shape) -> float64 values


def _uniform(low: float, high: float) -> Draw:
    return lambda stream, shape: np.asarray(stream.uniform(low, high, shape))


def _normal(mean: float, scale: float) -> Draw:
    return lambda stream, shape: mean + scale * np.asarray(stream.standard_normal(shape))


def _floats(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype not in (np.float32, np.float64, *dtypes.HALVES):
        raise OperatorError(f"dtype must be float, double, float16 or bfloat16, got {dtypes.onnx_name(dtype)}", code="SX404")
    return dtype


def _drawn(xp: Xp, draw: Draw, shape: Ints, dtype: np.dtype[Any], seed: float | None) -> Array:
    if any(n < 0 for n in shape):
        raise OperatorError(f"the shape must not have negative sizes, got {tuple(shape)}", code="SX404")
    limits.admit(shape, np.float64)
    return xp.from_host(draw(random_stream(seed), tuple(shape)).astype(dtype))


@operator("RandomUniform", 1, 22, traits=("random",))
def random_uniform(
    xp: Xp, *, shape: Ints, low: float = 0.0, high: float = 1.0, dtype: int = TensorProto.FLOAT, seed: float | None = None
) -> Array:
    return _drawn(xp, _uniform(low, high), shape, _floats(dtypes.numpy_dtype(dtype)), seed)


random_uniform.no_gradient("random")


@operator("RandomNormal", 1, 22, traits=("random",))
def random_normal(
    xp: Xp, *, shape: Ints, mean: float = 0.0, scale: float = 1.0, dtype: int = TensorProto.FLOAT, seed: float | None = None
) -> Array:
    return _drawn(xp, _normal(mean, scale), shape, _floats(dtypes.numpy_dtype(dtype)), seed)


random_normal.no_gradient("random")


@operator("RandomUniformLike", 1, 22, widen=False, traits=("random",))
def random_uniform_like(
    xp: Xp, x: Array, *, low: float = 0.0, high: float = 1.0, dtype: int | None = None, seed: float | None = None
) -> Array:
    """Draw a tensor of x's shape, and of its dtype if the attribute dtype is absent."""
    return _drawn(xp, _uniform(low, high), x.shape, _floats(dtypes.numpy_dtype(dtype) if dtype else x.dtype), seed)


random_uniform_like.no_gradient("random")


@operator("RandomNormalLike", 1, 22, widen=False, traits=("random",))
def random_normal_like(
    xp: Xp, x: Array, *, mean: float = 0.0, scale: float = 1.0, dtype: int | None = None, seed: float | None = None
) -> Array:
    """Draw a tensor of x's shape, and of its dtype if the attribute dtype is absent."""
    return _drawn(xp, _normal(mean, scale), x.shape, _floats(dtypes.numpy_dtype(dtype) if dtype else x.dtype), seed)


random_normal_like.no_gradient("random")


@operator("Bernoulli", 15, 22, widen=False, traits=("random",))
def bernoulli(xp: Xp, x: Array, *, dtype: int | None = None, seed: float | None = None) -> Array:
    """Return 1 with probability x, otherwise 0: whether a uniform number in [0, 1) is below x."""
    draws = xp.from_host(_uniform(0.0, 1.0)(random_stream(seed), x.shape))
    return (draws < x.astype(np.float64)).astype(dtypes.numpy_dtype(dtype) if dtype else x.dtype)


bernoulli.no_gradient("random")


@operator("Multinomial", 7, 22, traits=("random",))
def multinomial(
    xp: Xp, x: Host[np.ndarray], *, sample_size: int = 1, dtype: int = TensorProto.INT32, seed: float | None = None
) -> Array:
    """Draw `sample_size` class indices for each row of unnormalized log-probabilities.

    The index is the position of a uniform number among the running sums of the probabilities.
    """
    if x.ndim != 2 or sample_size < 0:
        raise OperatorError(f"x must be a matrix and sample_size at least 0, got shape {x.shape} and {sample_size}", code="SX404")
    if dtype not in (TensorProto.INT32, TensorProto.INT64):
        raise OperatorError(f"dtype must be int32 or int64, got {dtypes.onnx_name(dtypes.numpy_dtype(dtype))}", code="SX404")
    limits.admit((x.shape[0], sample_size), np.float64)
    draws = _uniform(0.0, 1.0)(random_stream(seed), (x.shape[0], sample_size))
    out = np.zeros(draws.shape, dtypes.numpy_dtype(dtype))
    for i, row in enumerate(x.astype(np.float64) if draws.size else ()):
        if not np.isfinite(row.max(initial=-np.inf)):
            raise OperatorError(f"the maximum log-probability of row {i} must be finite, got {row}", code="SX404")
        sums = np.cumsum(np.exp(row - row.max()))
        # A draw may be rounded up to the total: then select the last class with a nonzero probability.
        out[i] = np.minimum(np.searchsorted(sums, draws[i] * sums[-1], side="right"), np.searchsorted(sums, sums[-1]))
    return xp.from_host(out)


# --- Dropout


@operator("Dropout", 12, 13, 22,
          traits=("random_in_training", "finite", "moves", "keeps_weights"), settings=("ratio",))  # fmt: skip
def dropout(
    xp: Xp, x: Array, ratio: Host[float] = 0.5, training_mode: Host[bool] = False, *, seed: int | None = None, wanted: Wanted
) -> tuple[Array, Array | None]:
    """In opset 12 or later, the ratio is an input, and training mode is off by default."""
    if training_mode and ratio != 0:
        return _dropped(xp, x, ratio, seed)
    return x, xp.ones(x.shape, dtype=bool) if any(wanted[1:]) else None


@dropout.shapes
def dropout_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None]:
    if any(known.shape(i) not in ((), None) for i in call.inputs[1:]):
        raise Unsure
    return [known.shape(call.inputs[0])] * 2


@dropout.gradient
def dropout_gradient(op: Op, dy: V, ys: list[V], x: V, ratio: V, training_mode: V) -> V:
    """Scale dy where elements were kept; without the mask, those that are nonzero in y or zero in x."""
    if training_mode is False:
        return dy
    kept = ys[1] if len(ys) > 1 and ys[1] is not None else op.Or(op.Not(op.Equal(ys[0], 0)), op.Equal(x, 0))
    grown = op.Div(1, op.Sub(1, op.cast(ratio, x) if op.is_value(ratio) else op.constant(ratio, op.dtype(x))))
    return op.Where(training_mode, op.Mul(op.Mul(dy, op.cast(kept, x)), grown), dy)


def _dropped(xp: Xp, x: Array, ratio: float, seed: int | None) -> tuple[Array, Array]:
    """Set a fraction `ratio` of x to zero and scale the rest to preserve the mean."""
    if not 0 <= ratio < 1:
        raise OperatorError(f"ratio must be in [0, 1), got {ratio}", code="SX404")
    mask = xp.from_host(_uniform(0.0, 1.0)(random_stream(seed), x.shape) >= ratio)
    return x * mask * (1 / (1 - ratio)), mask


@operator("Dropout", 7, 10)
def dropout_7(xp: Xp, x: Array, *, ratio: float = 0.5, wanted: Wanted) -> tuple[Array, Array | None]:
    """Opsets 7 to 11 have inference only; the mask has the type of the data before opset 10 and is boolean after."""
    return x, xp.ones(x.shape, dtype=bool) if any(wanted[1:]) else None


@dropout_7.decomposition
def dropout_7_decomposition(op: Op, x: V, version: int) -> tuple[V, V]:
    return op.Identity(x), _kept(op, x, version)


def _kept(op: Op, x: V, version: int) -> V:
    """Return the mask of inference: ones, boolean in version 10 or later."""
    ones = op.full_like(x, 1)
    return ones if version < 10 else op.Cast(ones, to=9)


@operator("Dropout", 1, 6)
def dropout_1(xp: Xp, x: Array, *, ratio: float = 0.5, is_test: int = 0) -> tuple[Array, Array]:
    """Before opset 7 a node is in training mode by default; its mask has the type of the data."""
    if is_test:
        return x, xp.ones(x.shape, dtype=bool)
    return _dropped(xp, x, ratio, None)


@dropout_1.decomposition
def dropout_1_decomposition(op: Op, x: V, ratio: float, is_test: int, version: int) -> tuple[V, V]:
    if is_test:
        return op.Identity(x), _kept(op, x, version)
    y, mask = op.Dropout(x, op.constant(ratio, np.float32), True, outputs=2)
    return y, op.cast(mask, x)
