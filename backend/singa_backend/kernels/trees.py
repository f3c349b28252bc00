"""Tree ensembles of ai.onnx.ml: all trees of a block of rows take one step towards their leaves at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .few_paths import Form, Heaps, Lists, calls_of, constants_of, form_of, room_of, tables_of
from .forests import Forest, ReadTrees, forest, named_trees, numbered_trees, numbers, values_of
from .scores import ML, TRANSFORMS, Labels, labels_of, matrix_of, pairs, transform_of, transformed
from .table import Site, kernel
from .values import ALIGNMENT, FINITE, NAN, Bound, Buffer, Value

_BLOCK = 1 << 15
"""The number of paths, one for each tree and row, that are followed together: their memory fits a cache."""

_SMALL = 1 << 12
"""The number of votes up to which BLAS adds them: it uses one thread."""

_LOWEST = {np.dtype(t): np.array(-np.inf, t) for t in (np.float32, np.float64)}

_REDUCE = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""The aggregates by their numbers in TreeEnsemble."""


def _aggregated(
    site: Site, x: Value, read: Callable[[], ReadTrees], values: np.dtype[Any], targets: int, how: str, base: np.ndarray | None
) -> tuple[Value, bool]:
    """The aggregates of the votes for each target and the base values, float64 [rows, targets], and whether all are finite.

    What `read` returns is not kept: the tables of a forest have all of it; `values` is the dtype of the thresholds.
    """
    rows, features = matrix_of(site, x)
    site.require(targets > 0, "there are no targets")
    dtype = np.result_type(x.dtype if x.dtype.kind == "f" else np.float64, values)
    reduced = "SUM" if how == "AVERAGE" else how
    wide = None if base is None else base.astype(np.float64)
    exact = wide if how == "SUM" else None
    held = site.once(("forest", dtype, features, targets), lambda: forest(read(), dtype, features, targets, reduced, exact))
    z = site.new((rows, targets), np.float64, finiteness=NAN)
    _walk(site, x, rows, features, held, reduced, z)
    if how == "AVERAGE":
        trees = np.array(float(held.trees))
        site.emit(lambda: [(np.divide, (z.array, trees, z.array))], reads=(z,), writes=(z,), kernel="numpy.trees average")
    if wide is None:
        return z, held.finite
    if not held.based:
        _add_base(site, z, wide)
    return z, held.finite and bool(np.isfinite(wide).all())


def _walk(site: Site, x: Value, rows: int, features: int, held: Forest, how: str, z: Value) -> None:
    """Emit the step that follows the paths of all rows, and aggregates the votes of their leaves."""
    trees, targets = held.trees, z.shape[1]
    form = form_of(held, rows, features)
    block = rows if form is not None else min(rows, max(1, _BLOCK // trees))
    tables = None
    if form is not None:
        what = (form, held.threshold.dtype, features, targets)
        tables = site.once(what, lambda: tables_of(form, held, features))
    copies = held.copies and form is not Lists
    width = features * (1 + copies)
    direct = block == rows and not copies and x.dtype == held.threshold.dtype and x.contiguous
    room = _room(held, block, 0 if direct else width, targets, tables)
    scratch = site.scratch(room.nbytes)
    constants = _starts(held, block, width) if tables is None else constants_of(tables, rows, width)

    def bind() -> Bound:
        m = room.arrays(scratch) | constants
        source = x.array.reshape(rows, features)
        target = z.array if block == rows else m["target"]
        if direct:
            m["x"] = source
        if tables is not None:
            calls = [*calls_of(tables, held, m["x"], m["place"], m), *_collect_few(held, tables, how, m, target)]
        else:
            calls = [*_begin(held, m), *_descend(held, m), *_collect(held, how, m, target)]
        if block == rows:
            return [*(() if direct else _load(copies, source, m)), *calls]
        return [(_blocks, (held, source, z.array, block, m, calls))]

    site.emit(bind, reads=(x,), writes=(z,), kernel="numpy.trees", scratch=scratch, keeps=(held, tables, constants))


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


def _room(held: Forest, block: int, width: int, targets: int, tables: Form | None) -> _Room:
    """What the paths of a block need; `width` is the number of features, with the second copy."""
    each = (held.trees, block)
    dtype, whole, votes = held.threshold.dtype, np.dtype(np.int64), np.dtype(np.float64)
    parts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "x": ((block, width), dtype), "place": (each, whole), "target": ((block, targets), votes),
        "votes": (each if held.weights.ndim == 1 else (*each, targets), votes),
    }  # fmt: skip
    if tables is None:
        parts |= {
            "feature": (each, whole), "value": (each, dtype), "threshold": (each, dtype),
            "passed": (each, np.dtype(bool)), "child": (each, np.dtype(np.int32)),
        }  # fmt: skip
    elif isinstance(tables, Heaps):
        parts |= room_of(held, block)
    if held.voted is not None:
        parts["voted"] = ((*each, targets), np.dtype(bool))
    return _Room(parts)


def _blocks(held: Forest, source: np.ndarray, z: np.ndarray, block: int, m: dict[str, np.ndarray], calls: Bound) -> None:
    """Run the calls for each block of rows; the last one overlaps the block before it."""
    rows = len(source)
    for start in [*range(0, rows - block, block), rows - block]:
        for function, arguments in _load(held.copies, source[start : start + block], m):
            function(*arguments)
        for function, arguments in calls:
            function(*arguments)
        z[start : start + block] = m["target"]


def _load(copies: bool, source: np.ndarray, m: dict[str, np.ndarray]) -> list[Any]:
    """Copy the features of a block; in the second copy, negative infinities replace NaNs."""
    x = m["x"]
    if not copies:
        return [(np.copyto, (x, source))]
    first, second = x[:, : source.shape[1]], x[:, source.shape[1] :]
    return [(np.copyto, (first, source)), (np.fmax, (first, _LOWEST[x.dtype], second))]


def _starts(held: Forest, block: int, width: int) -> dict[str, np.ndarray]:
    """Where the row of each path begins, and the feature of its root: operands of equal shapes cost less than broadcast ones."""
    steps = np.tile(np.arange(block) * width, (held.trees, 1))
    return {"steps": steps, "first": held.feature[: held.trees, None] + steps}


def _begin(held: Forest, m: dict[str, np.ndarray]) -> list[Any]:
    """The step from the roots, which are at the first places."""
    roots = np.arange(held.trees)[:, None]
    if not held.active:
        return [(np.copyto, (m["place"], roots))]
    n = held.active[0]
    place, at, value, passed = (m[name][:n] for name in ("place", "feature", "value", "passed"))
    calls: list[Any] = [
        (m["x"].reshape(-1).take, (m["first"][:n], None, value, "wrap")),
        (np.less_equal, (value, held.threshold[:n, None], passed)),
    ]
    if n < held.trees:
        calls.append((np.copyto, (m["place"][n:], roots[n:])))
    if held.pairs:
        return [*calls, (np.add, (2 * roots[:n], passed, at)), (held.child.take, (at, None, place, "wrap"))]
    return [*calls, (np.add, (held.child[:n, None], passed, place))]


def _descend(held: Forest, m: dict[str, np.ndarray]) -> list[Any]:
    """The steps after the first one."""
    flat, steps = m["x"].reshape(-1), m["steps"]
    calls: list[Any] = []
    for n in held.active[1:]:
        i, f, v, t, p, c = (m[name][:n] for name in ("place", "feature", "value", "threshold", "passed", "child"))
        calls.append((held.feature.take, (i, None, f, "wrap")))
        if steps.shape[1] > 1:
            calls.append((np.add, (f, steps[:n], f)))
        calls += [(flat.take, (f, None, v, "wrap")), (held.threshold.take, (i, None, t, "wrap")), (np.less_equal, (v, t, p))]
        if held.pairs:
            calls += [(np.add, (i, i, f)), (np.add, (f, p, f)), (held.child.take, (f, None, i, "wrap"))]
        else:
            calls += [(held.child.take, (i, None, c, "wrap")), (np.add, (c, p, i))]
    return calls


def _collect_few(held: Forest, tables: Form, how: str, m: dict[str, np.ndarray], target: np.ndarray) -> list[Any]:
    """Aggregate the votes of few paths into `target`, [rows, targets]."""
    place, votes = m["place"], m["votes"]
    trees, rows = place.shape
    if held.groups is not None:
        first, targets = held.groups
        chosen = np.repeat(targets, np.diff(first, append=trees))
        if not isinstance(tables, Lists):
            chosen = chosen[tables.order]
        one = (chosen[:, None] == np.arange(target.shape[1])).astype(np.float64)
        flat = (votes.reshape(-1), one, target.reshape(-1)) if rows == 1 else (votes.T, one, target)
        return [(held.weights.take, (place, None, votes, "wrap")), (np.dot, flat)]
    if trees == 1 and held.voted is None:
        axis = None if held.weights.ndim == 1 else 0
        return [(held.weights.take, (place.reshape(-1) if axis == 0 else place.T, axis, target, "wrap"))]
    return _collect(held, how, m, target)


def _collect(held: Forest, how: str, m: dict[str, np.ndarray], target: np.ndarray) -> list[Any]:
    """Aggregate the votes at the present places into `target`, [rows, targets]."""
    place, votes = m["place"], m["votes"]
    trees, block = place.shape
    if held.groups is not None:
        first, targets = held.groups
        return [(held.weights.take, (place, None, votes, "wrap")), (_grouped, (votes, first, targets, target))]
    take: Any = (held.weights.take, (place, None, votes, "wrap") if votes.ndim == 2 else (place, 0, votes, "wrap"))
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
    voted.take(place, 0, there, "wrap")
    target[~np.logical_or.reduce(there, 0)] = 0


def _base(site: Site, count: int) -> np.ndarray | None:
    base = numbers(site.attributes, "base_values")
    site.require(base is None or len(base) == count, "base_values has another length")
    return base


def _add_base(site: Site, z: Value, base: np.ndarray) -> None:
    """Emit the addition of the base values, [targets], to the aggregates."""
    wide = base.reshape(() if len(base) == 1 else (1, -1) if z.shape[0] == 1 else -1)
    site.emit(lambda: [(np.add, (z.array, wide, z.array))], reads=(z,), writes=(z,), kernel="numpy.trees base")


@kernel("TreeEnsembleRegressor", 1, 3, 5, on="numpy", domain=ML)
def tree_ensemble_regressor(site: Site, x: Value) -> Value:
    given = site.attributes
    how = given.get("aggregate_function") or "SUM"
    site.require(how in AGGREGATES, "the aggregate is unknown")
    count = given.get("n_targets")
    count = max(given.get("target_ids") or (0,)) + 1 if count is None else count
    z, finite = _aggregated(site, x, lambda: named_trees(given, "target"), values_of(given), count, how, _base(site, count))
    return _regression(site, z, transform_of(site), np.dtype(np.float32), finite)


@kernel("TreeEnsemble", 5, on="numpy", domain=ML)
def tree_ensemble(site: Site, x: Value) -> Value:
    given = site.attributes
    how, name = given["aggregate_function"], given["post_transform"]
    site.require(0 <= how < len(AGGREGATES) and 0 <= name < len(TRANSFORMS), "the aggregate or the transform is unknown")
    site.require(x.dtype.kind == "f", "elements of other types")
    count = given.get("n_targets")
    count = max(given["leaf_targetids"], default=0) + 1 if count is None else count
    z, finite = _aggregated(site, x, lambda: numbered_trees(given), values_of(given), count, AGGREGATES[how], None)
    return _regression(site, z, TRANSFORMS[name], x.dtype, finite)


def _regression(site: Site, z: Value, name: str, dtype: np.dtype[Any], finite: bool) -> Value:
    finite = finite and name != "PROBIT"
    return transformed(site, z, name, site.new(z.shape, dtype, finiteness=FINITE if finite else NAN))


@kernel("TreeEnsembleClassifier", 1, 3, 5, on="numpy", domain=ML)
def tree_ensemble_classifier(site: Site, x: Value) -> tuple[Any, Value]:
    given = site.attributes
    labels = labels_of(given, "classlabels_int64s", "classlabels_strings")
    site.require(labels is not None, "there are no labels")
    assert labels is not None
    name = transform_of(site)
    base = numbers(given, "base_values")
    voted = site.once("voted", lambda: sorted(set(given.get("class_ids") or ())))
    binary = len(labels) <= 2 and len(voted) == 1
    site.require(binary or base is None or len(base) == len(labels), "base_values has another length")
    site.require(not binary or len(labels) == 2 or not given.get("classlabels_strings"), "one string label")

    def read() -> ReadTrees:
        trees = named_trees(given, "class")
        return replace(trees, target=np.zeros_like(trees.target)) if binary else trees

    base = base[-1:] if base is not None and binary else base
    z, finite = _aggregated(site, x, read, values_of(given), 1 if binary else len(labels), "SUM", base)
    rows, count = z.shape[0], 1 if len(labels) == 1 and binary else len(labels)
    finite = finite and name != "PROBIT"
    scores = site.new((rows, count), np.float32, finiteness=FINITE if finite else NAN)
    chosen = site.new((rows,), np.int64, finiteness=FINITE)
    made = Labels(site, labels if not binary or len(labels) == 2 else np.array([0, labels[0]]), rows)
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
        calls = pairs(s, both.array, "0" if voted == [1] else "-s" if margins else "1-s") if count == 2 else []
        return [*calls, *made.above(s, limit, chosen)]

    writes = (chosen, *made.writes(), *([both] if count == 2 else []))
    site.emit(bind, reads=(z,), writes=writes, kernel="numpy.trees labels")
    return made.result, transformed(site, both, name, scores)
