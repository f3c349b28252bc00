"""Tree ensembles of ai.onnx.ml: all trees of a block of rows take one step towards their leaves at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .forests import Forest, ReadTrees, forest, named_trees, numbered_trees, numbers
from .scores import ML, TRANSFORMS, Labels, labels_of, transform, transform_of
from .table import Site, kernel
from .values import ALIGNMENT, FINITE, NAN, Bound, Value

_BLOCK = 1 << 15
"""The number of paths, one for each tree and row, that are followed together: their memory fits a cache."""

_SMALL = 1 << 12
"""The number of votes up to which BLAS adds them: it uses one thread."""

_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""The aggregates by their numbers in TreeEnsemble."""


def _matrix(site: Site, x: Value) -> tuple[int, int]:
    """The numbers of rows and features."""
    site.require(isinstance(x, Value) and x.ndim in (1, 2) and x.size, "x is not a matrix, or empty")
    site.require(x.dtype.kind in "iu" or x.dtype in (np.float32, np.float64), "elements of other types")
    return (1, x.shape[0]) if x.ndim == 1 else (x.shape[0], x.shape[1])


def _aggregated(site: Site, x: Value, read: Callable[[], ReadTrees], targets: int, how: str) -> tuple[Value, bool]:
    """The aggregates of the votes for each target, float64 [rows, targets], and whether all weights are finite."""
    rows, features = _matrix(site, x)
    site.require(targets > 0, "there are no targets")
    trees = site.once("trees", read)
    wide = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    dtype = np.result_type(wide, trees.value)
    reduced = "SUM" if how == "AVERAGE" else how
    held = site.once(("forest", dtype, features, targets), lambda: forest(trees, dtype, features, targets, reduced))
    z = site.new((rows, targets), np.float64, finiteness=NAN)
    _walk(site, x, rows, features, held, reduced, z)
    if how == "AVERAGE":
        site.emit(
            lambda: [(np.divide, (z.array, len(trees.roots), z.array))], reads=(z,), writes=(z,), kernel="numpy.trees average"
        )
    return z, bool(np.isfinite(trees.weight).all())


def _walk(site: Site, x: Value, rows: int, features: int, held: Forest, how: str, z: Value) -> None:
    """Emit the step that follows the paths of all rows, and aggregates the votes of their leaves."""
    trees, targets = held.trees, z.shape[1]
    block = min(rows, max(1, _BLOCK // trees))
    dtype, columns = held.threshold.dtype, features * (1 + held.copies)
    single = held.weights.ndim == 1
    parts: list[tuple[tuple[int, ...], Any]] = [
        ((trees, block), np.int64), ((trees, block), np.int64), ((trees, block), dtype), ((trees, block), dtype),
        ((trees, block), np.bool_), ((trees, block), np.int32), ((block, columns), dtype),
        ((trees, block) if single else (trees, block, targets), np.float64),
        ((block, targets), np.float64), ((block, features), np.bool_), ((trees, block, targets), np.bool_),
    ]  # fmt: skip
    if held.voted is None:
        parts.pop()
    sizes = [-(-int(np.prod(shape)) * np.dtype(t).itemsize // ALIGNMENT) * ALIGNMENT for shape, t in parts]
    scratch = site.scratch(sum(sizes))
    steps = np.arange(block) * columns

    def bind() -> Bound:
        starts = np.cumsum([0, *sizes])
        memory = [np.ndarray(shape, t, scratch.memory, int(at)) for (shape, t), at in zip(parts, starts, strict=False)]
        source = x.array.reshape(rows, features)
        target = z.array if block == rows else memory[8]
        calls = [*_begin(held, memory, steps), *_descend(held, memory, steps), *_collect(held, how, memory, target)]
        if block == rows:
            return [*_load(held, source, memory[6], memory[9]), *calls]
        return [(_blocks, (held, source, z.array, block, memory, calls))]

    site.emit(bind, reads=(x,), writes=(z,), kernel="numpy.trees", scratch=scratch, keeps=(held, steps))


def _blocks(held: Forest, source: np.ndarray, z: np.ndarray, block: int, memory: Sequence[np.ndarray], calls: Bound) -> None:
    """Run the calls for each block of rows; the last one overlaps the block before it."""
    rows = len(source)
    for start in [*range(0, rows - block, block), rows - block]:
        for function, arguments in _load(held, source[start : start + block], memory[6], memory[9]):
            function(*arguments)
        for function, arguments in calls:
            function(*arguments)
        z[start : start + block] = memory[8]


def _load(held: Forest, source: np.ndarray, x: np.ndarray, nan: np.ndarray) -> Bound:
    """Copy the features of a block; in the second copy, negative infinities replace NaNs."""
    if not held.copies:
        return [(np.copyto, (x, source))]
    first, second = x[:, : source.shape[1]], x[:, source.shape[1] :]
    return [
        (np.copyto, (first, source)),
        (np.copyto, (second, first)),
        (np.isnan, (first, nan)),
        (np.copyto, (second, -np.inf, "same_kind", nan)),
    ]


def _begin(held: Forest, memory: Sequence[np.ndarray], steps: np.ndarray) -> Bound:
    """The step from the roots, which are at the first places."""
    place, at, value, _, passed, _, x = memory[:7]
    roots = np.arange(held.trees)[:, None]
    if not held.active:
        return [(np.copyto, (place, roots))]
    n = held.active[0]
    feature, threshold = held.feature[:n, None], held.threshold[:n, None]
    calls: list[Any] = [
        (np.add, (feature, steps, at[:n])),
        (x.reshape(-1).take, (at[:n], None, value[:n], "wrap")),
        (np.less_equal, (value[:n], threshold, passed[:n])),
    ]
    if n < held.trees:
        calls.append((np.copyto, (place[n:], roots[n:])))
    if held.pairs:
        return [*calls, (np.add, (2 * roots[:n], passed[:n], at[:n])), (held.child.take, (at[:n], None, place[:n], "wrap"))]
    return [*calls, (np.add, (held.child[:n, None], passed[:n], place[:n]))]


def _descend(held: Forest, memory: Sequence[np.ndarray], steps: np.ndarray) -> Bound:
    """The steps after the first one."""
    place, at, value, threshold, passed, child, x = memory[:7]
    flat = x.reshape(-1)
    calls: list[Any] = []
    for n in held.active[1:]:
        i, f, v, t, p, c = place[:n], at[:n], value[:n], threshold[:n], passed[:n], child[:n]
        calls.append((held.feature.take, (i, None, f, "wrap")))
        if len(steps) > 1:
            calls.append((np.add, (f, steps, f)))
        calls += [(flat.take, (f, None, v, "wrap")), (held.threshold.take, (i, None, t, "wrap")), (np.less_equal, (v, t, p))]
        if held.pairs:
            calls += [(np.add, (i, i, f)), (np.add, (f, p, f)), (held.child.take, (f, None, i, "wrap"))]
        else:
            calls += [(held.child.take, (i, None, c, "wrap")), (np.add, (c, p, i))]
    return calls


def _collect(held: Forest, how: str, memory: Sequence[np.ndarray], target: np.ndarray) -> Bound:
    """Aggregate the votes at the present places into `target`, [rows, targets]."""
    place, votes = memory[0], memory[7]
    trees, block = place.shape
    if held.groups is not None:
        first, targets = held.groups
        return [(held.weights.take, (place, None, votes, "wrap")), (_grouped, (votes, first, targets, target))]
    if votes.ndim == 2:
        take: Any = (held.weights.take, (place, None, votes, "wrap"))
    else:
        take = (held.weights.take, (place, 0, votes, "clip"))
    flat = votes.reshape(trees, -1)
    if how == "SUM" and flat.size <= _SMALL and target.flags.c_contiguous:
        return [take, (np.dot, (np.ones(trees), flat, target.reshape(-1)))]
    calls = [take, (_REDUCE[how].reduce, (votes.reshape(trees, block, -1), 0, None, target))]
    if held.voted is not None:
        calls.append((_without_votes, (held.voted, place, memory[10], target)))
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
    z, finite = _aggregated(site, x, lambda: named_trees(given, "target"), count, how)
    return _regression(site, z, _base(site, count), transform_of(site), np.dtype(np.float32), finite)


@kernel("TreeEnsemble", 5, on="numpy", domain=ML)
def tree_ensemble(site: Site, x: Value) -> Value:
    given = site.attributes
    how, name = given["aggregate_function"], given["post_transform"]
    site.require(0 <= how < len(AGGREGATES) and 0 <= name < len(TRANSFORMS), "the aggregate or the transform is unknown")
    site.require(x.dtype.kind == "f", "elements of other types")
    count = given.get("n_targets")
    count = max(given["leaf_targetids"], default=0) + 1 if count is None else count
    z, finite = _aggregated(site, x, lambda: numbered_trees(given), count, AGGREGATES[how])
    return _regression(site, z, None, TRANSFORMS[name], x.dtype, finite)


def _regression(site: Site, z: Value, base: np.ndarray | None, name: str, dtype: np.dtype[Any], finite: bool) -> Value:
    finite = finite and name != "PROBIT" and (base is None or bool(np.isfinite(base).all()))
    y = site.new(z.shape, dtype, finiteness=FINITE if finite else NAN)

    def bind() -> Bound:
        calls: list[Any] = [] if base is None else [(np.add, (z.array, base, z.array))]
        if name == "NONE":
            return [*calls, (np.copyto, (y.array, z.array, "same_kind"))]
        return [*calls, (_transform, (z.array, name, y.array))]

    site.emit(bind, reads=(z,), writes=(z, y), kernel="numpy.trees scores")
    return y


def _transform(z: np.ndarray, name: str, y: np.ndarray) -> None:
    y[...] = transform(z, name)


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
    z, finite = _aggregated(site, x, lambda: named_trees(given, "class"), len(labels), "SUM")
    finite = finite and name != "PROBIT" and (base is None or bool(np.isfinite(base).all()))
    finiteness = FINITE if finite else NAN
    scores = site.new((len(z.array), 1 if len(labels) == 1 and binary else len(labels)), np.float32, finiteness=finiteness)
    names = labels if not binary or len(labels) == 2 else np.array([0, labels[0]])
    made = Labels(site, names, z.shape[0])
    if binary:
        weights = numbers(given, "class_weights")
        chances = weights is None or bool((weights >= 0).all())
        arguments = (voted[0], None if base is None else base[-1], name, chances)
        chosen = site.new((z.shape[0],), np.int64, finiteness=FINITE)
        site.emit(
            lambda: [(_binary, (z.array, *arguments, scores.array, chosen.array)), *made.calls(chosen.array)],
            reads=(z,),
            writes=(scores, chosen, *made.writes()),
            kernel="numpy.trees labels",
        )
        return made.result, scores
    chosen = site.new((z.shape[0],), np.int64, finiteness=FINITE)

    def bind() -> Bound:
        calls: list[Any] = [] if base is None else [(np.add, (z.array, base, z.array))]
        calls += made.largest(z, chosen)
        if name == "NONE":
            return [*calls, (np.copyto, (scores.array, z.array, "same_kind"))]
        return [*calls, (_transform, (z.array, name, scores.array))]

    site.emit(bind, reads=(z,), writes=(z, scores, chosen, *made.writes()), kernel="numpy.trees labels")
    return made.result, scores


def _binary(z: np.ndarray, voted: int, base: Any, name: str, chances: bool, scores: np.ndarray, chosen: np.ndarray) -> None:
    """Two classes of which one has votes: they decide above 1/2 as probabilities, above 0 as margins, which have both signs."""
    s = z[:, voted : voted + 1] if base is None else z[:, voted : voted + 1] + base
    if scores.shape[1] == 1:
        both = s
    elif voted == 1:
        both = np.concatenate([np.zeros_like(s), s], axis=1)
    elif name == "PROBIT" or (name == "NONE" and chances):
        both = np.concatenate([1 - s, s], axis=1)
    else:
        both, chances = np.concatenate([-s, s], axis=1), False
    chosen[...] = s[:, 0] > (0.5 if chances else 0)
    scores[...] = transform(both, name)
