"""Support vector machines of ai.onnx.ml: kernels with all supports, and decisions of all pairs of classes, are two products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .scores import ML, Labels, labels_of, matrix_of, transform_of, transformed, two_scores
from .table import Site, kernel
from .values import NAN, Bound, Value
from .vectors import Distances, block_of, product

_FEW = 12
"""The number of rows up to which probabilities are computed row by row, by numbers of Python."""

_ZERO = np.zeros(1)


@dataclass(eq=False)
class Machines:
    """What all rows are multiplied by.

    Attributes:
        kind: the kernel.
        distances: from the supports, for RBF.
        supports: [features, supports] for POLY and SIGMOID; None for a linear model.
        gamma: the factor, the summand and the exponent of the kernel.
        coefficients: [supports or features, decisions].
        rho: what is added to the decisions.
    """

    kind: str
    distances: Distances | None
    supports: np.ndarray | None
    gamma: tuple[float, float, float]
    coefficients: np.ndarray
    rho: np.ndarray


def _parameters(site: Site) -> tuple[str, tuple[float, float, float]]:
    kind = site.attributes.get("kernel_type") or "LINEAR"
    site.require(kind in ("LINEAR", "POLY", "RBF", "SIGMOID"), "the kernel is unknown")
    gamma, coef0, degree = (*(site.attributes.get("kernel_params") or ()), 0.0, 0.0, 0.0)[:3]
    site.require(kind != "RBF" or gamma >= 0, "the factor of RBF is negative")
    return kind, (gamma, coef0, degree)


def _values(site: Site, name: str, rows: int, columns: int) -> np.ndarray:
    """An attribute as a matrix of finite values."""
    given = site.attributes.get(name) or ()
    site.require(rows > 0 and len(given) == rows * columns and columns, f"{name} has another length")
    made = np.array(given, np.float64).reshape(rows, columns)
    site.require(np.isfinite(made).all(), f"{name} has values that are not finite")
    return made


def _machines(site: Site, count: int, features: int, coefficients: np.ndarray, rho: np.ndarray) -> Machines:
    kind, gamma = _parameters(site)
    vectors = _values(site, "support_vectors", count, features)
    if kind == "RBF":
        return Machines(kind, Distances(vectors, -gamma[0]), None, gamma, coefficients, rho)
    if kind == "LINEAR":  # the product of both
        return Machines(kind, None, None, gamma, np.ascontiguousarray(vectors.T @ coefficients), rho)
    return Machines(kind, None, np.ascontiguousarray(vectors.T), gamma, coefficients, rho)


def _decisions(site: Site, x: Value, rows: int, features: int, held: Machines) -> Value:
    """The decisions, float64 [rows, decisions]."""
    site.require_finite(x)
    supports, count = held.coefficients.shape
    z = site.new((rows, count), np.float64, finiteness=NAN)
    block = rows if held.distances is None and held.supports is None else block_of(rows, supports)
    room = site.new((block, features + 2), np.float64, finiteness=NAN)
    k = site.new((block, supports), np.float64, finiteness=NAN)

    def bind() -> Bound:
        source = x.array.reshape(rows, features)
        if block == rows:
            return _decide(held, source, room.array, k.array, z.array)
        return [(_blocks, (held, source, room.array, k.array, z.array))]

    site.emit(bind, reads=(x,), writes=(room, k, z), kernel="numpy.svm", keeps=(held,))
    return z


def _blocks(held: Machines, x: np.ndarray, room: np.ndarray, k: np.ndarray, z: np.ndarray) -> None:
    rows, block = len(x), len(room)
    for start in range(0, rows, block):
        n = min(block, rows - start)
        for function, arguments in _decide(held, x[start : start + n], room[:n], k[:n], z[start : start + n]):
            function(*arguments)


def _decide(held: Machines, x: np.ndarray, room: np.ndarray, k: np.ndarray, z: np.ndarray) -> Bound:
    gamma, coef0, degree = held.gamma
    calls: list[Any]
    if held.distances is not None:
        calls = [*held.distances.calls(x, room, k), (partial(np.minimum, k, _ZERO, out=k), ()), (np.exp, (k, k))]
    else:
        wide = room[:, : x.shape[1]] if held.supports is not None else k
        calls = [(np.copyto, (wide, x))]
        if held.supports is not None:
            calls += [*product(wide, held.supports, k), (np.multiply, (k, gamma, k)), (np.add, (k, coef0, k))]
            calls.append((np.power, (k, degree, k)) if held.kind == "POLY" else (np.tanh, (k, k)))
    return [*calls, *product(k, held.coefficients, z), (np.add, (z, held.rho, z))]


@kernel("SVMRegressor", 1, on="numpy", domain=ML)
def svm_regressor(site: Site, x: Value) -> Value:
    given, name = site.attributes, transform_of(site)
    rows, features = matrix_of(site, x)
    count = given.get("n_supports") or 0
    rho = np.array((given.get("rho") or (0.0,))[:1])

    def make() -> Machines:
        coefficients = _values(site, "coefficients", 1, count if count > 0 else features).T.copy()
        if count > 0:
            return _machines(site, count, features, coefficients, rho)
        return Machines("LINEAR", None, None, (0, 0, 0), coefficients, rho)

    z = _decisions(site, x, rows, features, site.once(("machines", features), make))
    y = site.new(z.shape, np.float32, finiteness=NAN)
    if given.get("one_class"):
        inside = site.new(z.shape, bool)

        def bind() -> Bound:
            return [(np.greater, (z.array, _ZERO, inside.array)), (_SIGNS.take, (inside.array, None, y.array, "wrap"))]

        site.emit(bind, reads=(z,), writes=(inside, y), kernel="numpy.svm inside")
        return y
    return transformed(site, z, name, y)


_SIGNS = np.array([-1, 1], np.float32)


@kernel("SVMClassifier", 1, on="numpy", domain=ML)
def svm_classifier(site: Site, x: Value) -> tuple[Any, Value]:
    given, name = site.attributes, transform_of(site)
    site.require(not (given.get("classlabels_ints") and given.get("classlabels_strings")), "there are labels of both kinds")
    labels = labels_of(given, "classlabels_ints", "classlabels_strings")
    rows, features = matrix_of(site, x)
    sizes = np.array(given.get("vectors_per_class") or (), np.int64)
    machines = bool(sizes.sum() > 0)
    classes = len(sizes) if machines else max(1, 0 if labels is None else len(labels))
    site.require(labels is None or len(labels) == classes, "the number of labels is another")
    site.require(not machines or (sizes.min() >= 0 and classes > 1), "a number of vectors is negative, or there is one class")
    pairs = classes * (classes - 1) // 2
    a, b = given.get("prob_a") or (), given.get("prob_b") or ()
    site.require(not a or not machines or len(a) == len(b) == pairs, "prob_a and prob_b have another length")

    def make() -> Machines:
        rho = np.array(given.get("rho") or (), np.float64)
        if not machines:
            coefficients = np.ascontiguousarray(_values(site, "coefficients", classes, features).T)
            return Machines("LINEAR", None, None, (0, 0, 0), coefficients, rho[:1] if len(rho) else _ZERO)
        site.require(len(rho) >= pairs, "rho has another length")
        coefficients = _of_pairs(_values(site, "coefficients", classes - 1, int(sizes.sum())), sizes)
        return _machines(site, int(sizes.sum()), features, coefficients, rho[:pairs])

    z = _decisions(site, x, rows, features, site.once(("machines", features), make))
    made = Labels(site, np.arange(classes) if labels is None else labels, rows)
    chosen = site.new((rows,), np.int64)
    if machines:
        _elect(site, z, classes, made, chosen)
    else:
        site.emit(lambda: made.largest(z, chosen), reads=(z,), writes=(chosen, *made.writes()), kernel="numpy.svm labels")
    scores = z
    if machines and a:
        platt = site.once("platt", lambda: Platt(classes, np.array(a), np.array(b)))
        p = site.new((rows, classes), np.float64, finiteness=NAN)
        site.emit(lambda: [(platt.probabilities, (z.array, p.array))], reads=(z,), writes=(p,), kernel="numpy.svm probabilities")
        scores = p
    elif z.shape[1] == 1 and classes == 2:
        scores = two_scores(site, z, name == "PROBIT")
    return made.result, transformed(site, scores, name, site.new(scores.shape, np.float32, finiteness=NAN))


def _of_pairs(coefficients: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The coefficients of the supports for each pair of classes i < j: [supports, pairs]."""
    ends = np.cumsum(sizes)
    part = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    first, second = np.triu_indices(len(sizes), 1)
    made = np.zeros((int(ends[-1]), len(first)))
    for p, (i, j) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        made[part[i], p] = coefficients[j - 1, part[i]]
        made[part[j], p] = coefficients[i, part[j]]
    return made


def _elect(site: Site, z: Value, classes: int, made: Labels, chosen: Value) -> None:
    """Emit the step that sets the labels to those of the classes with most votes, the first one of several."""
    first, second = np.triu_indices(classes, 1)
    places = np.arange(len(first))
    turn, base = np.zeros((len(first), classes)), np.zeros(classes)
    turn[places, first], turn[places, second] = 1, -1
    np.add.at(base, second, 1)
    rows = z.shape[0]
    won, votes = site.new(z.shape, np.float64), site.new((rows, classes), np.float64)

    def bind() -> Bound:
        if classes == 2:  # the second class wins unless the first does
            return [(np.greater, (z.array[:, 0], _ZERO, won.array[:, 0])), (np.less, (won.array[:, 0], _HALF, chosen.array)),
                    *made.calls(chosen.array)]  # fmt: skip
        return [(np.greater, (z.array, _ZERO, won.array)), *product(won.array, turn, votes.array),
                (np.add, (votes.array, base, votes.array)), *made.largest(votes, chosen)]  # fmt: skip

    site.emit(bind, reads=(z,), writes=(won, votes, chosen, *made.writes()), kernel="numpy.svm labels", keeps=(turn, base))


_HALF = np.full(1, 0.5)


class Platt:
    """The probabilities of classes that fit those of the pairs best (Wu, Lin and Weng 2004), of rows that are still moving."""

    def __init__(self, classes: int, a: np.ndarray, b: np.ndarray) -> None:
        self.classes, self.a, self.b = classes, a, b
        self.pairs = list(zip(*(i.tolist() for i in np.triu_indices(classes, 1)), strict=True))
        self.rounds, self.limit = max(100, classes), 0.005 / classes

    def probabilities(self, z: np.ndarray, p: np.ndarray) -> None:
        """Set p, [rows, classes], from the decisions of the pairs."""
        t = z * self.a
        t += self.b
        np.exp(t, t)
        t += 1
        np.reciprocal(t, t)  # 1 - logistic of z a + b
        np.clip(t, 1e-7, 1 - 1e-7, t)
        if len(z) <= _FEW and self.classes <= 8:
            p[...] = [self._row(row) for row in t.tolist()]
        else:
            self._rows(np.ascontiguousarray(t.T), p)

    def _row(self, pair: list[float]) -> list[float]:
        """The probabilities of one row, in numbers of Python."""
        n = range(self.classes)
        r = [[0.0] * self.classes for _ in n]
        for (i, j), v in zip(self.pairs, pair, strict=True):
            r[i][j], r[j][i] = v, 1 - v
        q = [[-r[j][t] * r[t][j] for j in n] for t in n]
        for t in n:
            q[t][t] = sum([r[j][t] * r[j][t] for j in n])
        p = [1 / self.classes] * self.classes
        for _ in range(self.rounds):
            qp = [sum([a * b for a, b in zip(row, p, strict=True)]) for row in q]
            pqp = sum([a * b for a, b in zip(p, qp, strict=True)])
            if pqp != pqp or max(max(qp) - pqp, pqp - min(qp)) < self.limit:
                break
            for t in n:
                row = q[t]
                d = row[t]
                step = (pqp - qp[t]) / d
                whole = 1 + step
                pqp = (pqp + step * (step * d + 2 * qp[t])) / (whole * whole)
                qp = [(a + step * b) / whole for a, b in zip(qp, row, strict=True)]
                p[t] += step
                p = [v / whole for v in p]
        return p

    def _rows(self, pair: np.ndarray, result: np.ndarray) -> None:
        """The probabilities of many rows: every array has a column for each row that is still moving."""
        c, rows = self.classes, pair.shape[1]
        r = np.zeros((c, c, rows))
        for (i, j), v in zip(self.pairs, pair, strict=True):
            r[i, j] = v
            np.subtract(1, v, r[j, i])
        q = r.transpose(1, 0, 2) * r
        np.negative(q, q)
        for t in range(c):
            np.einsum("jn,jn->n", r[:, t], r[:, t], out=q[t, t])
        p = np.full((c, rows), 1 / c)
        at = np.arange(rows)
        for _ in range(self.rounds):
            qp = np.einsum("ijn,jn->in", q, p)
            pqp = np.einsum("in,in->n", p, qp)
            going = np.maximum(qp.max(0) - pqp, pqp - qp.min(0)) >= self.limit
            if not going.all():
                result[at[~going]] = p[:, ~going].T
                at, q, p, qp, pqp = at[going], q[:, :, going], p[:, going], qp[:, going], pqp[going]
                if not len(at):
                    return
            for t in range(c):
                d, own = q[t, t], qp[t]
                step = (pqp - own) / d
                whole = 1 + step
                pqp = (pqp + step * (step * d + 2 * own)) / (whole * whole)
                qp += step * q[t]
                qp /= whole
                p[t] += step
                p /= whole
        result[at] = p.T
