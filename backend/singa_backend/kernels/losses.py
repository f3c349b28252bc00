"""Losses of class numbers and their gradients: SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss.

The scores are a tensor (outer, classes, inner) in memory, and a row is what one target chooses from.  With few classes that are
innermost in memory they are copied, so that the classes are outermost: NumPy then walks along the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..elementwise.compile import available
from ..elementwise.expression import ExpressionTrace
from ..ir.sizes import settled
from .elementwise import FLOATS, order_of
from .expressions import compute
from .lowering import copy
from .sums import Sum
from .table import Invalid, Site, gradient, kernel, training, worst
from .values import FINITE, NAN, REACHED, Bound, Value, last_order, strides_of

WIDE = 48
"""The number of classes from which rows of classes are computed as they are, and not copied."""

INNER = 32
"""The number of rows that are next to each other in memory from which NumPy walks along them."""

Order = list[int] | None


class Targets:
    """The class numbers of a loss and their weights.

    Attributes:
        places: the position in memory of the score that each target chooses, in elements; written by `bind`'s call.
        factors: the factor of each target's loss in the gradient, or one factor if they are equal; also written by `bind`'s call.
    """

    def __init__(self, site: Site, scores: Value, labels: Value, weights: Value | None, steps: Sequence[int]) -> None:
        site.require(scores.dtype in FLOATS and scores.ndim > 1 and scores.size, "the scores are not floats, or are empty")
        site.require(labels.shape == (scores.shape[0], *scores.shape[2:]), "the shapes do not match")
        site.require(labels.dtype in (np.int32, np.int64), f"targets of {labels.dtype}")
        fits = weights is None or (weights.shape == scores.shape[1:2] and weights.dtype == scores.dtype)
        site.require(fits, "the weights are not one number of the type of the scores for each class")
        self.labels, self.weights, self.classes, self.step = labels, weights, scores.shape[1], steps[1]
        self.ignored, self.reduction = site.attributes["ignore_index"], site.attributes["reduction"]
        site.require(self.reduction in ("none", "sum", "mean"), "not a valid reduction")
        self.steps = (steps[0], *steps[2:])
        self.places = site.new(labels.shape, np.int64, None, FINITE)
        self.equal = weights is None and self.ignored is None
        self.factors = site.new(
            () if self.equal else labels.shape, scores.dtype, None, FINITE if weights is None else weights.finiteness
        )

    def bind(self) -> Bound:
        """The call that writes the places and the factors."""
        base = np.zeros(settled(self.labels.shape), np.int64)
        for k, (size, step) in enumerate(zip(base.shape, settled(self.steps), strict=True)):
            base += (np.arange(size) * step).reshape((-1,) + (1,) * (base.ndim - k - 1))
        return [(self._find, (self.labels.array, self.places.array, base))]

    def _find(self, t: np.ndarray, places: np.ndarray, base: np.ndarray) -> None:
        """Write the places and the factors; raise Invalid if a target is out of range, or a mean is of nothing.

        Args:
            t: the targets.
            places: receives the places.
            base: the place of the first class of each target.
        """
        counted: Any = None
        if self.ignored is not None:
            counted = t != self.ignored
            t = np.where(counted, t, 0)
        if np.maximum.reduce(t.view(f"u{t.dtype.itemsize}"), None) >= self.classes:  # a negative one is above every size
            raise Invalid("a target is out of range")
        np.multiply(t, self.step, places)
        np.add(places, base, places)
        factors = self.factors.array
        if self.equal:
            factors.fill(1 / t.size if self.reduction == "mean" else 1)
            return
        if self.weights is None:
            np.copyto(factors, counted)
        else:
            self.weights.array.take(t, None, factors, "clip")
            if counted is not None:
                np.multiply(factors, counted, factors)
        if self.reduction == "mean":
            total = np.add.reduce(factors, None)
            if not total:
                raise Invalid("the sum of the weights of the targets is 0")
            np.divide(factors, total, factors)

    def reduce(self, each: np.ndarray, loss: np.ndarray) -> None:
        """Write the loss, given that of each target without its weight."""
        if not self.equal:
            held = self.factors.array
            np.multiply(each, held, each)
            if self.ignored is not None:
                each[self.labels.array == self.ignored] = 0  # also where a score is not finite
        if self.reduction == "none":
            np.copyto(loss, each)
        else:
            np.add.reduce(each, None, out=loss)
            if self.equal and self.reduction == "mean":
                np.divide(loss, each.size, loss)

    def loss(self, site: Site, scores: Value) -> Value:
        """The value of the loss."""
        known = FINITE if worst(scores, self.weights) == FINITE else NAN
        return site.new(self.labels.shape if self.reduction == "none" else (), scores.dtype, None, known)


def _flat(x: Value) -> np.ndarray:
    """The memory of a value without gaps, in its order."""
    return x.view((x.size,), (x.dtype.itemsize,)).array


def _blocks(x: Value) -> tuple[int, int, int]:
    """The shape (outer, classes, inner) of a value without gaps."""
    inner = x.steps[1]
    return x.size // (x.shape[1] * inner), x.shape[1], inner


def _walked(x: Value) -> Order:
    """The memory order in which NumPy computes scores."""
    last = x.channels_last if x.ndim > 2 else x.contiguous
    if last and x.shape[1] >= WIDE:
        return last_order(x.ndim)
    if x.contiguous and x.ndim > 2 and x.size >= INNER * x.shape[0] * x.shape[1]:
        return None
    return [1, 0, *range(2, x.ndim)]


SoftmaxLoss = tuple[Value, Value | None, Value | None, Targets]
"""The loss, the logarithm of the softmax if it is an output, the softmax if it is needed, and the targets."""


def _by_machine(site: Site, x: Value, labels: Value, weights: Value | None, trains: bool) -> SoftmaxLoss:
    """The rows by machine code, in the order of the scores in memory."""
    site.require(not available(), available())
    order = order_of(x)
    orders = (list(range(x.ndim)), last_order(x.ndim), [1, 0, *range(2, x.ndim)])
    site.require(x.ndim > 1 and x.size and order in orders, "the scores are empty, or in another order in memory")
    held = Targets(site, x, labels, weights, x.steps)
    loss, each = held.loss(site, x), site.new(labels.shape, x.dtype)
    first = (each, held.places, held.factors)
    site.emit(
        lambda: [*held.bind(), (_flat(x).take, (held.places.array, None, each.array, "clip"))],
        reads=(x, labels, weights), writes=first, kernel="numpy.targets",
    )  # fmt: skip
    rows = ExpressionTrace()
    scores = rows.input(x.dtype, x.shape)
    top = scores.max(1, keepdims=True)
    shifted = scores - top
    powers = np.exp(shifted)
    total = powers.sum(1, keepdims=True)
    log = np.log(total)
    results = [top, log, *[shifted - log] * _is_log_wanted(site), *[powers / total] * trains]
    made = compute(site, [r.term for r in results], [x], "loss", lambda v: site.reusable(0), engine="machine")
    largest, sums = (v.view(labels.shape, (v.strides[0], *v.strides[2:])) for v in made[:2])

    def bind() -> Bound:
        chosen = each.array
        calls = [(np.subtract, (largest.array, chosen, chosen)), (np.add, (chosen, sums.array, chosen))]
        return [*calls, (held.reduce, (chosen, loss.array))]

    site.emit(bind, reads=(labels, *first, largest, sums), writes=(loss, each), kernel="numpy.loss")
    p = made[-1] if trains else None
    if p is not None and x.low == REACHED:
        p.finiteness = FINITE
    return loss, made[2] if _is_log_wanted(site) else None, p, held


def _is_log_wanted(site: Site) -> bool:
    return len(site.outputs) > 1 and site.outputs[1]


def _by_numpy(site: Site, x: Value, labels: Value, weights: Value | None) -> SoftmaxLoss:
    """The definition's functions, in the same order."""
    site.require(x.ndim > 1 and x.size, "the scores are empty, or have no axis of classes")
    order = _walked(x)
    if site.reusable(0) and not _is_log_wanted(site) and order_of(x) == (order or list(range(x.ndim))):
        p = x.view(x.shape, strides_of(x.shape, x.dtype.itemsize, order))
    else:
        p = site.new(x.shape, x.dtype, order)
    p.finiteness, p.low = FINITE if x.finiteness == FINITE or x.low == REACHED else NAN, 0
    log = site.new(x.shape, x.dtype, order) if _is_log_wanted(site) else None
    if log is not None and x.finiteness != FINITE:
        log.finiteness = NAN
    held = Targets(site, x, labels, weights, p.steps)
    loss = held.loss(site, x)
    largest, each = (site.new(labels.shape, x.dtype) for _ in range(2))
    if p.buffer is not x.buffer:
        copy(site, x, p)
    outer, _, inner = blocks = _blocks(p)
    total = Sum(blocks, strides_of(blocks, p.dtype.itemsize), p.dtype, (1,))
    scratch = total.scratch(site)

    def bind() -> Bound:
        z, most, chosen = _flat(p).reshape(blocks), largest.array.reshape(outer, 1, inner), each.array
        calls: list[Any] = [
            *held.bind(), (np.maximum.reduce, (z, 1, None, most, True)), (np.subtract, (z, most, z)),
            (_flat(p).take, (held.places.array, None, chosen, "clip")),
        ]  # fmt: skip
        if log is not None:
            calls.append((np.copyto, (_flat(log), _flat(p))))
        calls += [(np.exp, (z, z)), *total.calls(z, most.reshape(outer, inner), scratch)]
        calls += [(np.divide, (z, most, z)), (np.log, (most, most))]
        if log is not None:
            wide = _flat(log).reshape(blocks)
            calls.append((np.subtract, (wide, most, wide)))
        calls += [(np.subtract, (largest.array, chosen, chosen)), (held.reduce, (chosen, loss.array))]
        return calls

    found = (p, log, loss, largest, each, held.places, held.factors)
    writes = tuple(v for v in found if v is not None)
    site.emit(bind, reads=(x, labels, weights, p), writes=writes, kernel="numpy.loss", scratch=scratch)
    return loss, log, p, held


@kernel("SoftmaxCrossEntropyLoss", 12, 13, on="machine")
def machine_loss(site: Site, x: Value, labels: Value, weights: Value | None = None) -> tuple[Value | None, ...]:
    """The loss, and the logarithm of the softmax if it is an output."""
    return _by_machine(site, x, labels, weights, False)[:2]


@kernel("SoftmaxCrossEntropyLoss", 12, 13, on="numpy")
def numpy_loss(site: Site, x: Value, labels: Value, weights: Value | None = None) -> tuple[Value | None, ...]:
    """The loss, and the logarithm of the softmax if it is an output."""
    return _by_numpy(site, x, labels, weights)[:2]


@training("SoftmaxCrossEntropyLoss", 12, 13, on="machine")
def machine_loss_training(site: Site, x: Value, labels: Value, weights: Value | None = None) -> tuple[Value | None, ...]:
    """The loss, and the softmax, the places of the targets and their factors for the gradient."""
    *results, held = _by_machine(site, x, labels, weights, True)
    return (*results, held.places, held.factors)


@training("SoftmaxCrossEntropyLoss", 12, 13, on="numpy")
def numpy_loss_training(site: Site, x: Value, labels: Value, weights: Value | None = None) -> tuple[Value | None, ...]:
    """The loss, and the softmax, the places of the targets and their factors for the gradient."""
    *results, held = _by_numpy(site, x, labels, weights)
    return (*results, held.places, held.factors)


def _takes_scores(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return not any(needs[1:])


@gradient("SoftmaxCrossEntropyLoss", 12, 13, reads=("dy0", "h0", "h1", "h2"), on="numpy", takes=_takes_scores, hidden=3)
def softmax_cross_entropy_loss_gradient(site: Site, dy: Value, p: Value, places: Value, factors: Value) -> Value:
    """The softmax minus 1 at the target, times the factor of the target and the gradient of its loss."""
    site.require(dy.dtype == p.dtype and dy.shape in ((), places.shape), "the gradient does not have the type of the loss")
    if site.reusable(1):
        dx = p.view(p.shape, p.strides)
        dx.finiteness = worst(dy, p, factors)
    else:
        order = order_of(p)
        assert order is not None
        dx = site.new(p.shape, p.dtype, order)
    equal = dy.shape == factors.shape == ()
    slopes = site.new(() if equal else places.shape, p.dtype)
    outer, _, inner = blocks = _blocks(p)

    def bind() -> Bound:
        one, all_scores = slopes.array, _flat(dx)
        wide = one if equal else one.reshape(outer, 1, inner)
        return [
            (np.multiply, (dy.array, factors.array, one)),
            (np.multiply, (_flat(p).reshape(blocks), wide, all_scores.reshape(blocks))),
            (_subtract_at, (all_scores, places.array, one)),
        ]

    site.emit(bind, reads=(dy, p, places, factors), writes=(dx, slopes), kernel="numpy.loss_gradient")
    return dx


def _subtract_at(x: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
    """Subtract values at places, each of which occurs once."""
    x[places] -= values


def _likelihood(site: Site, x: Value, labels: Value, weights: Value | None) -> tuple[Targets, Value]:
    """The steps of a NegativeLogLikelihoodLoss."""
    site.require(x.ndim > 1 and order_of(x) is not None, "the input has gaps in memory, or no axis of classes")
    held = Targets(site, x, labels, weights, x.steps)
    loss, each = held.loss(site, x), site.new(labels.shape, x.dtype)

    def bind() -> Bound:
        chosen = each.array
        calls: list[Any] = [*held.bind(), (_flat(x).take, (held.places.array, None, chosen, "clip"))]
        return [*calls, (np.negative, (chosen, chosen)), (held.reduce, (chosen, loss.array))]

    site.emit(bind, reads=(x, labels, weights), writes=(loss, each, held.places, held.factors), kernel="numpy.loss")
    return held, loss


@kernel("NegativeLogLikelihoodLoss", 12, 13, 22, on="numpy")
def negative_log_likelihood_loss(site: Site, x: Value, labels: Value, weights: Value | None = None) -> Value:
    return _likelihood(site, x, labels, weights)[1]


@training("NegativeLogLikelihoodLoss", 12, 13, 22, on="numpy")
def negative_log_likelihood_loss_training(site: Site, x: Value, labels: Value, weights: Value | None = None) -> tuple[Value, ...]:
    """The loss, and the places of the targets and their factors for the gradient."""
    held, loss = _likelihood(site, x, labels, weights)
    return loss, held.places, held.factors


@gradient("NegativeLogLikelihoodLoss", 12, 13, 22, reads=("dy0", "x0", "h0", "h1"), on="numpy", takes=_takes_scores, hidden=2)
def negative_log_likelihood_loss_gradient(site: Site, dy: Value, x: Value, places: Value, factors: Value) -> Value:
    """Minus the factor of the target and the gradient of its loss, at the target; 0 elsewhere."""
    site.require(dy.dtype == x.dtype and dy.shape in ((), places.shape), "the gradient does not have the type of the loss")
    known = worst(dy, factors)
    dx, slopes = site.new(x.shape, x.dtype, order_of(x), known), site.new(places.shape, x.dtype, None, known)

    def bind() -> Bound:
        one, flat = slopes.array, _flat(dx)
        calls: list[Any] = [(np.multiply, (dy.array, factors.array, one)), (np.negative, (one, one)), (flat.fill, (0,))]
        return [*calls, (flat.__setitem__, (places.array, one))]

    site.emit(bind, reads=(dy, places, factors), writes=(dx, slopes), kernel="numpy.loss_gradient")
    return dx
