"""Attention, and the encoder layer of transformers, from ONNX's MatMul and Softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape, trace
from .._core.tensor import Tensor, op
from .base import Layer
from .norm import LayerNorm


class _Dense(Layer):
    """Computes y = x W + b; W is drawn from U(-sqrt(6 / (in + out)), sqrt(6 / (in + out))), b is zeros."""

    W: Tensor
    b: Tensor

    def __init__(self, features: int, bias: bool) -> None:
        super().__init__()
        self.features, self.bias = features, bias

    def initialize(self, x: Tensor) -> None:
        inputs = int(x.shape[-1])
        self._param("W", (inputs, self.features), x, bound=math.sqrt(6 / (inputs + self.features)))
        if self.bias:
            self._param("b", (self.features,), x)

    def forward(self, x: Tensor) -> Tensor:
        self._follow(x)
        y: Tensor = op.MatMul(x, self.W)
        return op.Add(y, self.b) if self.bias else y


class MultiHeadAttention(Layer):
    """Computes softmax(Q K^T / sqrt(d)) V for each head, and projects the joined heads (Vaswani et al., 2017).

    Q, K and V are projections of the inputs; d is embed_dim / num_heads. Inputs and outputs are (N, length, features). Each of
    the layers `q`, `k`, `v` and `out` has the parameters W of shape (in, embed_dim), drawn from U(-a, a) with a = sqrt(6 / (in +
    embed_dim)), and b of shape (embed_dim,), zeros.

    Args:
        embed_dim: Number of features of the output, a multiple of `num_heads`.
        num_heads: Number of heads.
        dropout: Probability that a weight of the attention is set to 0 in training.
        bias: Whether the projections add a bias.

    Raises:
        ValueError: If `num_heads` does not divide `embed_dim`, or one of them is below 1.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, both at least 1, got {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.q, self.k, self.v, self.out = (_Dense(embed_dim, bias) for _ in range(4))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Any = None,
        key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply the layer.

        Args:
            query: Float input of shape (N, L, features).
            key: Input of shape (N, S, features); None for `query`.
            value: Input of shape (N, S, features); None for `key`.
            attn_mask: Tensor or array that broadcasts to (N, heads, L, S): bools, true where a query must not attend to a key, or
                floats that are added to the scores; None for no mask.
            key_padding_mask: Bools of shape (N, S), true for keys that no query attends to; None if there are none. The result
                of a query that attends to no key is NaN.
            is_causal: Whether a query attends only to keys at its own position and before it.

        Returns:
            Output of shape (N, L, embed_dim).

        Raises:
            InvalidInput: If an input does not have rank 3 (SX325).
        """
        key = query if key is None else key
        value = key if value is None else value
        for x in (query, key, value):
            if op.rank(x) != 3:
                what = f"inputs of {self._path() or type(self).__name__} must have shape (N, length, features), got {op.shape(x)}"
                raise InvalidInput(what, code="SX325")
        trace.depends(self, lambda: self.dropout)
        size = self.embed_dim // self.num_heads
        q, k, v = (
            op.Transpose(op.Reshape(project(x), [0, 0, self.num_heads, size]), perm=perm)
            for project, x, perm in ((self.q, query, [0, 2, 1, 3]), (self.k, key, [0, 2, 3, 1]), (self.v, value, [0, 2, 1, 3]))
        )
        scores = op.Mul(op.MatMul(q, k), 1.0 / math.sqrt(size))
        if attn_mask is not None:
            scores = _masked(scores, attn_mask)
        if key_padding_mask is not None:
            mask = key_padding_mask if isinstance(key_padding_mask, Tensor) else op.constant(np.asarray(key_padding_mask, bool))
            scores = _masked(scores, op.Unsqueeze(mask, [1, 2]))
        if is_causal:
            lengths = op.Concat(op.Shape(query, start=1, end=2), op.Shape(key, start=1, end=2), axis=0)
            ones = op.Expand(op.constant(1, np.float32), lengths)
            scores = _masked(scores, op.Cast(op.Trilu(ones, 1, upper=1), to=dtypes.onnx_code(np.bool_)))
        weights = op.Softmax(scores, axis=-1)
        if self.dropout and tape.training:
            weights, _ = random.dropout(weights, self.dropout)
        joined = op.Reshape(op.Transpose(op.MatMul(weights, v), perm=[0, 2, 1, 3]), [0, 0, self.embed_dim])
        y: Tensor = self.out(joined)
        return y


def _masked(scores: Tensor, mask: Any) -> Tensor:
    """Scores of -inf where a mask of bools is true, or the sum with a mask of floats."""
    mask = mask if isinstance(mask, Tensor) else op.constant(np.asarray(mask))
    if op.dtype(mask) == np.bool_:
        masked: Tensor = op.Where(mask, op.full_like(scores, -math.inf), scores)
        return masked
    return op.Add(scores, op.cast(mask, scores))


class TransformerEncoderLayer(Layer):
    """Attends to its input sequence, then applies two dense layers, each with a residual connection and a LayerNorm.

    y = norm1(x + attention(x)), then norm2(y + linear2(f(linear1(y)))); with `norm_first`, y = x + attention(norm1(x)), then y +
    linear2(f(linear1(norm2(y)))). Inputs and outputs are (N, length, d_model). The parameters are those of the layers
    `attention`, `linear1`, `linear2`, `norm1` and `norm2`.

    Args:
        d_model: Number of features.
        nhead: Number of heads of the attention.
        dim_feedforward: Number of features between the two dense layers.
        dropout: Probability that an element is set to 0 in training: of the attention's weights, of f, and of both results
            before the residual connection.
        activation: The function f: "relu" or "gelu".
        layer_norm_eps: Number added to the variance in the normalizations.
        norm_first: Whether the normalizations are applied to the inputs of the two parts; otherwise to the sums.
        bias: Whether the dense layers add a bias.

    Raises:
        ValueError: If `nhead` does not divide `d_model`, or `activation` is unknown.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ("relu", "gelu"):
            raise ValueError(f"activation must be 'relu' or 'gelu', got {activation!r}")
        self.attention = MultiHeadAttention(d_model, nhead, dropout, bias)
        self.linear1, self.linear2 = _Dense(dim_feedforward, bias), _Dense(d_model, bias)
        self.norm1, self.norm2 = LayerNorm(epsilon=layer_norm_eps), LayerNorm(epsilon=layer_norm_eps)
        self.dropout, self.activation, self.norm_first = dropout, activation, norm_first

    def forward(self, x: Tensor, attn_mask: Any = None, key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        """Apply the layer.

        Args:
            x: Float input of shape (N, length, d_model).
            attn_mask: As for `MultiHeadAttention`.
            key_padding_mask: As for `MultiHeadAttention`.
            is_causal: As for `MultiHeadAttention`.

        Returns:
            Output of the shape and dtype of x.

        Raises:
            InvalidInput: If x does not have rank 3 (SX325).
        """
        trace.depends(self, lambda: (self.dropout, self.norm_first, self.activation))

        def attend(x: Tensor) -> Tensor:
            return self._dropped(self.attention(x, None, None, attn_mask, key_padding_mask, is_causal))

        def dense(x: Tensor) -> Tensor:
            h = self.linear1(x)
            h = op.Relu(h) if self.activation == "relu" else op.Gelu(h)
            return self._dropped(self.linear2(self._dropped(h)))

        if self.norm_first:
            x = op.Add(x, attend(self.norm1(x)))
            return op.Add(x, dense(self.norm2(x)))
        x = self.norm1(op.Add(x, attend(x)))
        y: Tensor = self.norm2(op.Add(x, dense(x)))
        return y

    def _dropped(self, x: Tensor) -> Tensor:
        return random.dropout(x, self.dropout)[0] if self.dropout and tape.training else x
