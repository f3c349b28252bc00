"""T5 and MT5: encoder and decoder with biases by relative position in place of position embeddings."""

from __future__ import annotations

import math

import numpy as np

from singa import autograd, layer, model
from singa._core.ops import op
from singa._core.tensor import Tensor

FAR = -1e9
"""What is added to the scores of places that must not be seen."""


class RMSNorm(layer.Layer):
    """x / sqrt(mean(x^2) + 1e-6) * scale along the last axis; no mean is taken away, no bias added."""

    def initialize(self, x: Tensor) -> None:
        self.scale = Tensor((x.shape[-1],), x.device, requires_grad=True, stores_grad=True).set_value(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return op.RMSNormalization(x, self.scale, axis=-1, epsilon=1e-6)  # type: ignore[no-any-return]


class PositionBias(layer.Layer):
    """What a head adds to a score for the distance between two places: (1, heads, queries, keys).

    Half of the buckets hold one distance each, the others ranges that grow with it up to `farthest`.  An encoder has its own
    buckets for what lies behind (`both`), a decoder sees none of it.
    """

    def __init__(self, heads: int, both: bool, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.table = layer.Embedding(buckets, heads)
        self.both, self.buckets, self.farthest = both, buckets, farthest

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, places, d); only its length counts."""
        distance = _distance(x)
        count = self.buckets // 2 if self.both else self.buckets
        bucket = op.Mul(op.Cast(op.Greater(distance, 0.0), to=1), float(count)) if self.both else op.Mul(distance, 0.0)
        n = op.Abs(distance) if self.both else op.Relu(op.Neg(distance))
        exact = count // 2
        growth = (count - exact) / math.log(self.farthest / exact)
        far = op.Floor(op.Mul(op.Log(op.Div(op.Max(n, 1.0), float(exact))), growth))
        far = op.Min(op.Add(far, float(exact)), float(count - 1))
        bucket = op.Add(bucket, op.Where(op.Less(n, float(exact)), n, far))
        return op.Unsqueeze(op.Transpose(self.table(bucket), perm=[2, 0, 1]), [0])  # type: ignore[no-any-return]


def _distance(x: Tensor) -> Tensor:
    """Key minus query, (places, places), as floats, for the places of x (N, places, d)."""
    places = op.Range(0.0, op.Cast(op.Squeeze(op.Shape(x, start=1, end=2), [0]), to=1), 1.0)
    return op.Sub(op.Unsqueeze(places, [0]), op.Unsqueeze(places, [1]))  # type: ignore[no-any-return]


class Attention(layer.Layer):
    """Heads side by side, unscaled scores, no biases.  x: (N, T, d); memory, where keys come from elsewhere: (N, S, d)."""

    def __init__(self, d: int, heads: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (layer.Linear(heads * size, bias=False) for _ in range(3))
        self.o = layer.Linear(d, bias=False)
        self.heads, self.size = heads, size

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = self._split(self.q(x)), self._split(self.k(source)), self._split(self.v(source))
        scores = op.Add(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), bias)
        y = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.o(op.Reshape(y, [0, 0, self.heads * self.size]))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, heads * size) to (N, heads, T, size)."""
        return op.Transpose(op.Reshape(x, [0, 0, self.heads, self.size]), perm=[0, 2, 1, 3])  # type: ignore[no-any-return]


class Dense(layer.Layer):
    """relu(x W) V; gated, gelu(x W) * (x U) V."""

    def __init__(self, d: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.wi = layer.Linear(inner, bias=False)
        self.gate = layer.Linear(inner, bias=False) if gated else None
        self.wo = layer.Linear(d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wi(x)
        y = autograd.relu(y) if self.gate is None else op.Mul(op.Gelu(y, approximate="tanh"), self.gate(x))
        return self.wo(y)  # type: ignore[no-any-return]


class Block(layer.Layer):
    """Attention to itself, to the encoder where there is one, and a dense layer; each normalized before and added after."""

    def __init__(self, d: int, heads: int, size: int, inner: int, gated: bool, cross: bool, ratio: float) -> None:
        super().__init__()
        self.norm1, self.own = RMSNorm(), Attention(d, heads, size)
        self.cross = Attention(d, heads, size) if cross else None
        self.norm2 = RMSNorm() if cross else None
        self.norm3, self.dense = RMSNorm(), Dense(d, inner, gated)
        self.drop = layer.Dropout(ratio)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        x = autograd.add(x, self.drop(self.own(self.norm1(x), bias)))
        if self.cross is not None and self.norm2 is not None:
            x = autograd.add(x, self.drop(self.cross(self.norm2(x), seen, memory)))
        return autograd.add(x, self.drop(self.dense(self.norm3(x))))  # type: ignore[no-any-return]


class Stack(layer.Layer):
    """Blocks that share the biases of the first, and a last normalization."""

    def __init__(self, layers: int, d: int, heads: int, size: int, inner: int, gated: bool, decodes: bool, ratio: float,
                 buckets: int, farthest: int) -> None:  # fmt: skip
        super().__init__()
        self.blocks = [Block(d, heads, size, inner, gated, decodes, ratio) for _ in range(layers)]
        self.register_layers({f"block{i}": b for i, b in enumerate(self.blocks)})
        self.position = PositionBias(heads, not decodes, buckets, farthest)
        self.norm = RMSNorm()
        self.drop = layer.Dropout(ratio)

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """hidden: what is added to the scores of this stack's own places; seen: to those of the memory."""
        x = self.drop(x)
        bias = op.Add(self.position(x), hidden)
        for block in self.blocks:
            x = block(x, bias, memory, seen)
        return self.drop(self.norm(x))


class T5(model.Model):
    """Raffel et al. 2019: one embedding for both stacks and for the scores, ReLU in the dense layers.

    ids: (N, S) of the source; mask: (N, S), 1 where a place holds a word; targets: (N, T).  y: (N, T, vocabulary) scores.
    """

    gated, tied = False, True

    def __init__(self, vocabulary: int = 32128, d: int = 512, layers: int = 6, heads: int = 8, size: int = 64, inner: int = 2048,
                 ratio: float = 0.1, buckets: int = 32, farthest: int = 128) -> None:  # fmt: skip
        super().__init__()
        self.d = d
        self.shared = layer.Embedding(vocabulary, d)
        self.encoder, self.decoder = (
            Stack(layers, d, heads, size, inner, self.gated, decodes, ratio, buckets, farthest) for decodes in (False, True)
        )
        self.head = None if self.tied else layer.Linear(vocabulary, bias=False)

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        seen = op.Unsqueeze(op.Mul(op.Sub(1.0, op.Cast(mask, to=1)), FAR), [1, 2])  # (N, 1, 1, S)
        memory = self.encoder(self.shared(ids), seen)
        words = self.shared(targets)
        future = op.Mul(op.Cast(op.Greater(_distance(words), 0.0), to=1), FAR)  # (T, T)
        y = self.decoder(words, future, memory, seen)
        if self.head is not None:
            return self.head(y)  # type: ignore[no-any-return]
        return op.MatMul(op.Mul(y, float(1 / np.sqrt(self.d))), op.Transpose(self.shared.W, perm=[1, 0]))  # type: ignore[no-any-return]


class MT5(T5):
    """Xue et al. 2020, as T5 1.1: dense layers gated by gelu, and scores by weights of their own."""

    gated, tied = True, False
