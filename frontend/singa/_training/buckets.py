"""Buckets of gradients, which ranks exchange as one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .._core.tensor import Tensor, op

THRESHOLD = 2097152
"""The number of elements above which a gradient is sent alone, and above which a bucket is complete."""

Pairs = list[tuple[Tensor, Tensor]]
"""Parameters, each with its gradient."""


class Bucket:
    """Parameters whose gradients are sent together as one vector.

    Args:
        pairs: Parameters and gradients, of one dtype.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.sizes = [math.prod(p.shape) for p, _ in pairs]
        self.size = sum(self.sizes)

    def flat(self) -> Tensor:
        """The gradients as one vector."""
        return joined([g for _, g in self.pairs])

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of a vector, in the shapes of the parameters."""
        if len(self.pairs) == 1:
            return [op.Reshape(flat, list(self.pairs[0][0].shape))]
        parts = op.Split(flat, self.sizes, axis=0, outputs=len(self.sizes))
        return [op.Reshape(part, list(p.shape)) for (p, _), part in zip(self.pairs, parts, strict=True)]


class Buckets:
    """Collects gradients into buckets, one for each dtype and device at a time.

    Args:
        threshold: A gradient with more elements is a bucket; a bucket of others is complete when it has more.

    Attributes:
        order: The parameters in the order in which they were added.
    """

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.order: list[Tensor] = []
        self._open: dict[Any, Pairs] = {}

    def add(self, p: Tensor, g: Tensor) -> list[Bucket]:
        """Add a gradient; return the buckets that it completes."""
        self.order.append(p)
        if math.prod(p.shape) > self.threshold:
            return [Bucket([(p, g)])]
        key = (op.dtype(g), id(p.device))
        pairs = self._open.setdefault(key, [])
        pairs.append((p, g))
        if sum(math.prod(q.shape) for q, _ in pairs) > self.threshold:
            return [Bucket(self._open.pop(key))]
        return []

    def rest(self) -> list[Bucket]:
        """The buckets that are not full."""
        made = [Bucket(pairs) for pairs in self._open.values()]
        self._open = {}
        return made


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors as one vector."""
    flat = [op.Reshape(t, [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else op.Concat(*flat, axis=0)


def partition_size(pairs: Pairs) -> int:
    """The default threshold of a partial update, at which the parameters form at least two partitions."""
    return min(THRESHOLD, max(0, sum(int(math.prod(p.shape)) for p, _ in pairs) - 1) // 2)
