"""RotaryEmbedding: positions encoded as rotations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ..ir.shapes import KnownShapes, Shape, Unsure
from ._api import Array


@operator("RotaryEmbedding", 23)
def rotary_embedding(
    xp: Xp,
    x: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Rotate pairs of features by an angle that depends on their position; `cos` and `sin` are those of the angles.

    A pair is features i and i + dim/2 or, interleaved, features 2i and 2i + 1.
    """
    shape = x.shape
    if x.ndim == 3:  # batch x sequence x (heads x features)
        if not num_heads or num_heads < 0 or shape[2] % num_heads:
            raise OperatorError(f"num_heads must divide the hidden size {shape[2]}, got {num_heads}", code="SX404")
        x = x.reshape(shape[0], shape[1], num_heads, shape[2] // num_heads)
        heads = 2
    elif x.ndim == 4:  # batch x heads x sequence x features
        heads = 1
    else:
        raise OperatorError(f"x must have 3 or 4 axes, got {x.ndim}", code="SX404")
    batch, sequence, size = x.shape[0], x.shape[3 - heads], x.shape[3]
    dim = rotary_embedding_dim or size
    if not 0 <= dim <= size or dim % 2:
        raise OperatorError(f"the number of rotated features must be even and at most {size}, got {dim}", code="SX404")
    if position_ids is not None:
        if cos.ndim != 2 or cos.shape[0] != sin.shape[0] or position_ids.shape != (batch, sequence):
            shapes = f"{tuple(cos.shape)}, {tuple(sin.shape)} and {tuple(position_ids.shape)}"
            raise OperatorError(
                f"with position_ids, the caches must have shape positions x {dim // 2}, got shapes {shapes}", code="SX404"
            )
        index = xp.indices(position_ids, cos.shape[0], negative=False)
        cos, sin = cos[index], sin[index]
    want = (batch, sequence, dim // 2)
    cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]  # the test cases of onnx 1.18 have caches for all features
    if cos.shape != want or sin.shape != want:
        raise OperatorError(f"the caches must have shape {want}, got {cos.shape} and {sin.shape}", code="SX404")
    cos, sin = xp.expand_dims(cos, heads), xp.expand_dims(sin, heads)
    turning, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., : dim // 2], turning[..., dim // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        turned = xp.stack([real, imaginary], axis=-1).reshape(turning.shape)
    else:
        turned = xp.concatenate([real, imaginary], axis=-1)
    return xp.concatenate([turned, rest], axis=-1).reshape(shape)


@rotary_embedding.shapes
def rotary_embedding_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    if shape is not None and len(shape) != 4 and (len(shape) != 3 or not known.attribute(call, "num_heads")):
        raise Unsure
    return shape


@rotary_embedding.decomposition
def rotary_embedding_decomposition(
    op: Op, x: V, cos: V, sin: V, position_ids: V, interleaved: int, num_heads: int | None, rotary_embedding_dim: int
) -> V:
    shape, heads = op.Shape(x), 1
    if op.rank(x) == 3:
        heads = 2
        x = op.Reshape(
            x, op.Concat(op.Shape(x, end=2), [num_heads], op.Div(op.Shape(x, start=2), num_heads), axis=0), allowzero=1
        )
    dim = op.constant([rotary_embedding_dim], np.int64) if rotary_embedding_dim else op.Shape(x, start=3)
    half = op.Div(dim, 2)
    if position_ids is not None:
        cos, sin = op.Gather(cos, position_ids, axis=0), op.Gather(sin, position_ids, axis=0)
    cos, sin = (op.Unsqueeze(op.Slice(c, [0], half, [-1]), [heads]) for c in (cos, sin))
    turning, rest = op.Slice(x, [0], dim, [3]), op.Slice(x, dim, [2**62], [3])
    if interleaved:
        a, b = op.Slice(turning, [0], [2**62], [3], [2]), op.Slice(turning, [1], [2**62], [3], [2])
    else:
        a, b = op.Slice(turning, [0], half, [3]), op.Slice(turning, half, [2**62], [3])
    real, imaginary = op.Sub(op.Mul(cos, a), op.Mul(sin, b)), op.Add(op.Mul(sin, a), op.Mul(cos, b))
    if interleaved:
        turned = op.Reshape(
            op.Concat(op.Unsqueeze(real, [4]), op.Unsqueeze(imaginary, [4]), axis=4), op.Shape(turning), allowzero=1
        )
    else:
        turned = op.Concat(real, imaginary, axis=3)
    return op.Reshape(op.Concat(turned, rest, axis=3), shape, allowzero=1)
