"""Tree ensembles of ai.onnx.ml: all trees of a block of rows take one step towards their leaves at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .forests import EXITS, PACK, Forest, ReadTrees, Stages, forest, named_trees, numbered_trees, numbers, stages, values_of
from .scores import ML, TRANSFORMS, Labels, labels_of, matrix_of, transform_of, transformed
from .table import Site, kernel
from .values import ALIGNMENT, FINITE, NAN, Bound, Buffer, Value

_BLOCK = 1 << 15
"""The number of paths, one for each tree and row, that are followed together: their memory fits a cache."""

_PATHS = 256
"""The number of paths up to which they take three levels at once: fewer calls, and more tests."""

_SMALL = 1 << 12
"""The number of votes up to which BLAS adds them: it uses one thread."""

_TOP = np.array([56], np.uint64)
_PACK = np.array([PACK], np.uint64)
_THREE = np.array([3])
_ONE = np.array([1.0])

_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""The aggregates by their numbers in TreeEnsemble."""


def _aggregated(
    site: Site, x: Value, read: Callable[[], ReadTrees], values: np.dtype[Any], targets: int, how: str
) -> tuple[Value, bool]:
    """The aggregates of the votes for each target, float64 [rows, targets], and whether all weights are finite.

    What `read` returns is not kept: the tables of a forest have all of it; `values` is the dtype of the thresholds.
    """
    rows, features = matrix_of(site, x)
    site.require(targets > 0, "there are no targets")
    wide = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    dtype = np.result_type(wide, values)
    reduced = "SUM" if how == "AVERAGE" else how
    held = site.once(("forest", dtype, features, targets), lambda: forest(read(), dtype, features, targets, reduced))
    z = site.new((rows, targets), np.float64, finiteness=NAN)
    _walk(site, x, rows, features, held, reduced, z)
    if how == "AVERAGE":
        site.emit(lambda: [(np.divide, (z.array, held.trees, z.array))], reads=(z,), writes=(z,), kernel="numpy.trees average")
    return z, held.finite


def _walk(site: Site, x: Value, rows: int, features: int, held: Forest, how: str, z: Value) -> None:
    """Emit the step that follows the paths of all rows, and aggregates the votes of their leaves."""
    trees, targets = held.trees, z.shape[1]
    block = min(rows, max(1, _BLOCK // trees))
    few = rows == 1 or trees * rows <= _PATHS
    staged = site.once(("stages", held.threshold.dtype, features, targets), lambda: stages(held)) if few else None
    room = _room(held, block, features, targets, 1 if staged is None else 8)
    scratch = site.scratch(room.nbytes)
    steps = np.arange(block) * features * (1 + held.copies)

    def bind() -> Bound:
        m = room.arrays(scratch)
        source = x.array.reshape(rows, features)
        target = z.array if block == rows else m["target"]
        if staged is not None:
            calls = _through(held, staged, m, steps)
        else:
            calls = [*_begin(held, m, steps), *_descend(held, m, steps)]
        calls += _collect(held, how, m, target)
        if block == rows:
            return [*_load(held, source, m), *calls]
        return [(_blocks, (held, source, z.array, block, m, calls))]

    site.emit(bind, reads=(x,), writes=(z,), kernel="numpy.trees", scratch=scratch, keeps=(held, staged, steps))


@dataclass(frozen=True)
class _Room:
    """Arrays that lie one after the other in memory: their shapes and dtypes by name."""

    parts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(self._size(n) for n in self.parts)

    def _size(self, name: str) -> int:
        shape, dtype = self.parts[name]
        return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def arrays(self, memory: Buffer) -> dict[str, np.ndarray]:
        """The arrays in a buffer."""
        made, at = {}, 0
        for name, (shape, dtype) in self.parts.items():
            made[name] = np.ndarray(shape, dtype, memory.memory, at)
            at += self._size(name)
        return made


def _room(held: Forest, block: int, features: int, targets: int, tests: int) -> _Room:
    """What the paths of a block need; `tests` is the number of tests that a path makes at once."""
    each = (held.trees, block)
    wide = each if tests == 1 else (*each, tests)
    dtype, whole = held.threshold.dtype, np.dtype(np.int64)
    parts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "place": (each, whole), "feature": (wide, whole), "value": (wide, dtype), "threshold": (wide, dtype),
        "passed": (wide, np.dtype(bool)), "child": (each, np.dtype(np.int32) if tests == 1 else whole),
        "x": ((block, features * (1 + held.copies)), dtype), "nan": ((block, features), np.dtype(bool)),
        "votes": (each if held.weights.ndim == 1 else (*each, targets), np.dtype(np.float64)),
        "target": ((block, targets), np.dtype(np.float64)),
    }  # fmt: skip
    if held.voted is not None:
        parts["voted"] = ((*each, targets), np.dtype(bool))
    return _Room(parts)


def _blocks(held: Forest, source: np.ndarray, z: np.ndarray, block: int, m: dict[str, np.ndarray], calls: Bound) -> None:
    """Run the calls for each block of rows; the last one overlaps the block before it."""
    rows = len(source)
    for start in [*range(0, rows - block, block), rows - block]:
        for function, arguments in _load(held, source[start : start + block], m):
            function(*arguments)
        for function, arguments in calls:
            function(*arguments)
        z[start : start + block] = m["target"]


def _load(held: Forest, source: np.ndarray, m: dict[str, np.ndarray]) -> list[Any]:
    """Copy the features of a block; in the second copy, negative infinities replace NaNs."""
    x, nan = m["x"], m["nan"]
    if not held.copies:
        return [(np.copyto, (x, source))]
    first, second = x[:, : source.shape[1]], x[:, source.shape[1] :]
    return [
        (np.copyto, (first, source)),
        (np.copyto, (second, first)),
        (np.isnan, (first, nan)),
        (np.copyto, (second, -np.inf, "same_kind", nan)),
    ]


def _begin(held: Forest, m: dict[str, np.ndarray], steps: np.ndarray) -> list[Any]:
    """The step from the roots, which are at the first places."""
    roots = np.arange(held.trees)[:, None]
    if not held.active:
        return [(np.copyto, (m["place"], roots))]
    n = held.active[0]
    place, at, value, passed = (m[name][:n] for name in ("place", "feature", "value", "passed"))
    calls: list[Any] = [
        (np.add, (held.feature[:n, None], steps, at)),
        (m["x"].reshape(-1).take, (at, None, value, "wrap")),
        (np.less_equal, (value, held.threshold[:n, None], passed)),
    ]
    if n < held.trees:
        calls.append((np.copyto, (m["place"][n:], roots[n:])))
    if held.pairs:
        return [*calls, (np.add, (2 * roots[:n], passed, at)), (held.child.take, (at, None, place, "wrap"))]
    return [*calls, (np.add, (held.child[:n, None], passed, place))]


def _descend(held: Forest, m: dict[str, np.ndarray], steps: np.ndarray) -> list[Any]:
    """The steps after the first one."""
    flat = m["x"].reshape(-1)
    calls: list[Any] = []
    for n in held.active[1:]:
        i, f, v, t, p, c = (m[name][:n] for name in ("place", "feature", "value", "threshold", "passed", "child"))
        calls.append((held.feature.take, (i, None, f, "wrap")))
        if len(steps) > 1:
            calls.append((np.add, (f, steps, f)))
        calls += [(flat.take, (f, None, v, "wrap")), (held.threshold.take, (i, None, t, "wrap")), (np.less_equal, (v, t, p))]
        if held.pairs:
            calls += [(np.add, (i, i, f)), (np.add, (f, p, f)), (held.child.take, (f, None, i, "wrap"))]
        else:
            calls += [(held.child.take, (i, None, c, "wrap")), (np.add, (c, p, i))]
    return calls


def _through(held: Forest, staged: Stages, m: dict[str, np.ndarray], steps: np.ndarray) -> list[Any]:
    """The stages of few paths."""
    n, rows = held.trees, len(steps)
    place, at = m["place"].reshape(-1), m["child"].reshape(-1)
    f, v, t, p = (m[name].reshape(n * rows, 8) for name in ("feature", "value", "threshold", "passed"))
    packed = p.view(np.uint64).reshape(-1)
    bits = m["feature"].reshape(-1)[: n * rows].view(np.uint64)
    x, each, step = m["x"].reshape(-1), f.reshape(n, rows, 8), steps[:, None]
    roots = np.repeat(8 * np.arange(n), rows)
    calls: list[Any] = []
    for stage in range(staged.count):
        if stage:
            calls += [
                (np.right_shift, (place, _THREE, at)),
                (staged.feature.take, (at, 0, f, "clip")),
                (staged.threshold.take, (at, 0, t, "clip")),
            ]
        first = staged.feature[:n]
        if rows > 1:
            calls.append((np.add, (each if stage else first[:, None], step, each)))
        calls.append((x.take, (f if stage or rows > 1 else first, None, v, "wrap")))
        if stage:
            calls.append((np.less_equal, (v, t, p)))
        else:
            calls.append((np.less_equal, (v.reshape(n, rows, 8), staged.threshold[:n, None], p.reshape(n, rows, 8))))
        calls += [
            (np.multiply, (packed, _PACK, bits)),
            (np.right_shift, (bits, _TOP, bits)),
            (EXITS.take, (bits.view(np.int64), None, at, "wrap")),
            (np.add, (place if stage else roots, at, at)),
            (staged.exits.take, (at, None, place, "wrap")),
        ]
    return [*calls, (np.subtract, (place, np.array([8 * (len(staged.feature) - 1)]), place))]


def _collect(held: Forest, how: str, m: dict[str, np.ndarray], target: np.ndarray) -> list[Any]:
    """Aggregate the votes at the present places into `target`, [rows, targets]."""
    place, votes = m["place"], m["votes"]
    trees, block = place.shape
    if held.groups is not None:
        first, targets = held.groups
        return [(held.weights.take, (place, None, votes, "wrap")), (_grouped, (votes, first, targets, target))]
    take: Any = (held.weights.take, (place, None, votes, "wrap") if votes.ndim == 2 else (place, 0, votes, "clip"))
    flat = votes.reshape(trees, -1)
    if how == "SUM" and flat.size <= _SMALL and target.flags.c_contiguous:
        return [take, (np.dot, (np.ones(trees), flat, target.reshape(-1)))]
    calls = [take, (_REDUCE[how].reduce, (votes.reshape(trees, block, -1), 0, None, target))]
    if held.voted is not None:
        calls.append((_without_votes, (held.voted, place, m["voted"], target)))
    return calls


def _grouped(votes: np.ndarray, first: np.ndarray, targets: np.ndarray, target: np.ndarray) -> None:
    """Sums of the votes of trees that are next to each other, each for one target."""
    if len(targets) < target.shape[1]:
        target[...] = 0
    target[:, targets] = np.add.reduceat(votes, first, axis=0).T


def _without_votes(voted: np.ndarray, place: np.ndarray, there: np.ndarray, target: np.ndarray) -> None:
    """Set to 0 the aggregates of no votes."""
    voted.take(place, 0, there, "clip")
    target[~np.logical_or.reduce(there, 0)] = 0


def _base(site: Site, count: int) -> np.ndarray | None:
    base = numbers(site.attributes, "base_values")
    site.require(base is None or len(base) == count, "base_values has another length")
    return base


@kernel("TreeEnsembleRegressor", 1, 3, 5, on="numpy", domain=ML)
def tree_ensemble_regressor(site: Site, x: Value) -> Value:
    given = site.attributes
    how = given.get("aggregate_function") or "SUM"
    site.require(how in AGGREGATES, "the aggregate is unknown")
    count = given.get("n_targets")
    count = max(given.get("target_ids") or (0,)) + 1 if count is None else count
    z, finite = _aggregated(site, x, lambda: named_trees(given, "target"), values_of(given), count, how)
    return _regression(site, z, _base(site, count), transform_of(site), np.dtype(np.float32), finite)


@kernel("TreeEnsemble", 5, on="numpy", domain=ML)
def tree_ensemble(site: Site, x: Value) -> Value:
    given = site.attributes
    how, name = given["aggregate_function"], given["post_transform"]
    site.require(0 <= how < len(AGGREGATES) and 0 <= name < len(TRANSFORMS), "the aggregate or the transform is unknown")
    site.require(x.dtype.kind == "f", "elements of other types")
    count = given.get("n_targets")
    count = max(given["leaf_targetids"], default=0) + 1 if count is None else count
    z, finite = _aggregated(site, x, lambda: numbered_trees(given), values_of(given), count, AGGREGATES[how])
    return _regression(site, z, None, TRANSFORMS[name], x.dtype, finite)


def _regression(site: Site, z: Value, base: np.ndarray | None, name: str, dtype: np.dtype[Any], finite: bool) -> Value:
    finite = finite and name != "PROBIT" and (base is None or bool(np.isfinite(base).all()))
    if base is not None:
        site.emit(lambda: [(np.add, (z.array, base, z.array))], reads=(z,), writes=(z,), kernel="numpy.trees base")
    return transformed(site, z, name, site.new(z.shape, dtype, finiteness=FINITE if finite else NAN))


@kernel("TreeEnsembleClassifier", 1, 3, 5, on="numpy", domain=ML)
def tree_ensemble_classifier(site: Site, x: Value) -> tuple[Any, Value]:
    given = site.attributes
    labels = labels_of(given, "classlabels_int64s", "classlabels_strings")
    site.require(labels is not None, "there are no labels")
    assert labels is not None
    site.require(not (given.get("classlabels_int64s") and given.get("classlabels_strings")), "there are labels of both kinds")
    name = transform_of(site)
    base = numbers(given, "base_values")
    voted = site.once("voted", lambda: sorted(set(given.get("class_ids") or ())))
    binary = len(labels) <= 2 and len(voted) == 1
    site.require(binary or base is None or len(base) == len(labels), "base_values has another length")
    site.require(not binary or len(labels) == 2 or not given.get("classlabels_strings"), "one string label")

    def read() -> ReadTrees:
        trees = named_trees(given, "class")
        return replace(trees, target=np.zeros_like(trees.target)) if binary else trees

    z, finite = _aggregated(site, x, read, values_of(given), 1 if binary else len(labels), "SUM")
    rows, count = z.shape[0], 1 if len(labels) == 1 and binary else len(labels)
    finite = finite and name != "PROBIT" and (base is None or bool(np.isfinite(base).all()))
    scores = site.new((rows, count), np.float32, finiteness=FINITE if finite else NAN)
    chosen = site.new((rows,), np.int64, finiteness=FINITE)
    made = Labels(site, labels if not binary or len(labels) == 2 else np.array([0, labels[0]]), rows)
    if base is not None:
        base = base[-1:] if binary else base
        site.emit(lambda: [(np.add, (z.array, base, z.array))], reads=(z,), writes=(z,), kernel="numpy.trees base")
    if not binary:
        site.emit(lambda: made.largest(z, chosen), reads=(z,), writes=(chosen, *made.writes()), kernel="numpy.trees labels")
        return made.result, transformed(site, z, name, scores)
    weights = numbers(given, "class_weights")
    chances = weights is None or bool((weights >= 0).all())
    margins = not (count == 1 or voted == [1] or name == "PROBIT" or (name == "NONE" and chances))
    both = z if count == 1 else site.new((rows, 2), np.float64, finiteness=NAN)
    limit = np.array([0.5 if chances and not margins else 0.0])

    def bind() -> Bound:
        s = z.array[:, 0]
        calls: list[Any] = []
        if count == 2:
            other, one = both.array.T
            if voted == [1]:
                calls.append((other.fill, (0,)))
            else:
                calls.append((np.negative, (s, other)) if margins else (np.subtract, (_ONE, s, other)))
            calls.append((np.copyto, (one, s)))
        return [*calls, *made.above(s, limit, chosen)]

    writes = (chosen, *made.writes(), *([both] if count == 2 else []))
    site.emit(bind, reads=(z,), writes=writes, kernel="numpy.trees labels")
    return made.result, transformed(site, both, name, scores)
