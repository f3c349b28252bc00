"""BERT for questions, RoBERTa for classes and GPT-2, without and with a cache of keys and values."""

from __future__ import annotations

from singa import layer, model
from singa._core.ops import op
from singa._core.tensor import Tensor

FAR = -1e4
"""What is added to the scores of places that must not be seen."""


class LayerNorm(layer.Layer):
    """Normalization along the last axis."""

    def initialize(self, x: Tensor) -> None:
        self.scale, self.bias = (
            Tensor((x.shape[-1],), x.device, requires_grad=True, stores_grad=True).set_value(v) for v in (1.0, 0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        return op.LayerNormalization(x, self.scale, self.bias, axis=-1, epsilon=1e-5)  # type: ignore[no-any-return]


def _places(x: Tensor, axis: int) -> Tensor:
    """0, 1, ... along an axis of x, without Range, which is newer than these files."""
    ones = op.Expand(op.constant([1], "int64"), op.Slice(op.Shape(x), [axis], [axis + 1]))
    return op.Squeeze(op.NonZero(ones), [0])  # type: ignore[no-any-return]


class Attention(layer.Layer):
    """Heads of one product each for queries, keys and values."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (layer.Linear(d) for _ in range(4))
        self.heads, self.size = heads, d // heads

    def forward(self, x: Tensor, mask: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: (N, T, d); past: (2, N, heads, P, size).  Returns y, and keys and values as a past."""
        q, k, v = (self._split(p(x)) for p in (self.q, self.k, self.v))
        if past is not None:
            k, v = (op.Concat(op.Squeeze(op.Slice(past, [i], [i + 1], [0]), [0]), new, axis=2) for i, new in ((0, k), (1, v)))
        scores = op.Add(op.Div(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), float(self.size**0.5)), mask)
        y = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
        present = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)
        return self.o(op.Reshape(y, [0, 0, self.heads * self.size])), present

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, heads * size) to (N, heads, T, size)."""
        return op.Transpose(op.Reshape(x, [0, 0, self.heads, self.size]), perm=[0, 2, 1, 3])  # type: ignore[no-any-return]


class Block(layer.Layer):
    """Attention and a dense layer, each added to its input; normalized before (GPT-2) or after (BERT)."""

    def __init__(self, d: int, heads: int, first: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = LayerNorm(), Attention(d, heads), LayerNorm()
        self.inner, self.outer = layer.Linear(4 * d), layer.Linear(d)
        self.first = first

    def forward(self, x: Tensor, mask: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, present = self.attention(self.norm1(x) if self.first else x, mask, past)
        x = op.Add(x, y)
        x = x if self.first else self.norm1(x)
        y = self.outer(op.Gelu(self.inner(self.norm2(x) if self.first else x), approximate="tanh"))
        return (op.Add(x, y) if self.first else self.norm2(op.Add(x, y))), present


class Stack(layer.Layer):
    """Blocks in series."""

    def __init__(self, d: int, heads: int = 12, layers: int = 12, first: bool = False) -> None:
        super().__init__()
        self.blocks = [Block(d, heads, first) for _ in range(layers)]
        self.register_layers({f"block{i}": b for i, b in enumerate(self.blocks)})

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        presents = []
        for block, p in zip(self.blocks, past or (None,) * len(self.blocks), strict=True):
            x, present = block(x, mask, p)
            presents.append(present)
        return x, presents


class BertSquad(model.Model):
    """Devlin et al. 2018, with the scores of begins and ends of answers; inputs and outputs as in the published file."""

    def __init__(self, vocabulary: int, d: int = 768, length: int = 256) -> None:
        super().__init__()
        self.words, self.places, self.segments = (layer.Embedding(n, d) for n in (vocabulary, length, 2))
        self.norm, self.stack, self.head = LayerNorm(), Stack(d), layer.Linear(2)

    def forward(self, number: Tensor, segments: Tensor, mask: Tensor, ids: Tensor) -> list[Tensor]:
        x = op.Add(op.Add(self.words(ids), self.segments(segments)), self.places(_places(ids, 1)))
        hidden = op.Mul(op.Sub(1.0, op.Cast(op.Unsqueeze(mask, [1, 2]), to=1)), FAR)
        y = self.head(self.stack(self.norm(x), hidden)[0])
        begin, end = (op.Squeeze(v, [2]) for v in op.Split(y, axis=2, num_outputs=2, outputs=2))
        return [end, begin, op.Identity(number)]


class RobertaClassifier(model.Model):
    """Liu et al. 2019: places count from 2; the classes come from the first token."""

    def __init__(self, vocabulary: int, d: int = 768, length: int = 514, classes: int = 2) -> None:
        super().__init__()
        self.words, self.places = layer.Embedding(vocabulary, d), layer.Embedding(length, d)
        self.norm, self.stack, self.dense, self.head = LayerNorm(), Stack(d), layer.Linear(d), layer.Linear(classes)

    def forward(self, ids: Tensor) -> Tensor:
        ids = op.Cast(ids, to=7)
        x = op.Add(self.words(ids), self.places(op.Add(_places(ids, 1), op.constant(2, "int64"))))
        y, _ = self.stack(self.norm(x), op.constant(0.0, "float32"))
        first = op.Squeeze(op.Slice(y, [0], [1], [1]), [1])
        return self.head(op.Tanh(self.dense(first)))  # type: ignore[no-any-return]


class GPT2(model.Model):
    """Radford et al. 2019, with its head: scores, then keys and values of each block.

    ids: (N, 1, T) as in the published file, or (N, T); past: (2, N, heads, P, size) for each block, if there is a cache.
    """

    def __init__(self, vocabulary: int, d: int = 768, length: int = 1024, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.words, self.places = layer.Embedding(vocabulary, d), layer.Embedding(length, d)
        self.stack, self.norm, self.d = Stack(d, heads, layers, first=True), LayerNorm(), d

    def forward(self, ids: Tensor, *past: Tensor) -> list[Tensor]:
        ranked = len(ids.shape) == 3
        ids = op.Cast(op.Squeeze(ids, [1]) if ranked else ids, to=7)
        own = _places(ids, 1)
        if past:
            own = op.Add(own, op.Slice(op.Shape(past[0]), [3], [4]))
            every = op.Concat(_places(past[0], 3), own, axis=0)
        else:
            every = own
        future = op.Mul(op.Cast(op.Greater(op.Unsqueeze(every, [0]), op.Unsqueeze(own, [1])), to=1), FAR)
        x, presents = self.stack(op.Add(self.words(ids), self.places(own)), future, past)
        scores = op.MatMul(self.norm(x), op.Transpose(self.words.W, perm=[1, 0]))
        return [op.Unsqueeze(scores, [1]) if ranked else scores, *presents]


class GPT2Pairs(GPT2):
    """The same network with the inputs of other exporters: a mask, places, and keys and values as separate inputs.

    ids: (N, T); mask: (N, P + T); places: (N, T); pairs: keys and values of each block in turn, (N, heads, P, size).
    """

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor, *pairs: Tensor) -> list[Tensor]:
        past = tuple(op.Concat(*(op.Unsqueeze(p, [0]) for p in pairs[i : i + 2]), axis=0) for i in range(0, len(pairs), 2))
        every = op.Sub(op.CumSum(mask, 1), op.constant(1, "int64"))
        future = op.Greater(op.Unsqueeze(every, [1]), op.Unsqueeze(places, [2]))
        hidden = op.Mul(op.Cast(op.Unsqueeze(future, [1]), to=1), FAR)
        x, presents = self.stack(op.Add(self.words(ids), self.places(places)), hidden, past)
        scores = op.MatMul(self.norm(x), op.Transpose(self.words.W, perm=[1, 0]))
        return [scores, *(op.Squeeze(op.Slice(p, [i], [i + 1], [0]), [0]) for p in presents for i in (0, 1))]
