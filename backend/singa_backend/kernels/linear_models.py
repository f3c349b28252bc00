"""Linear models of ai.onnx.ml: one product, and the scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from .scores import ML, Labels, labels_of, matrix_of, transform_of, transformed, two_scores
from .table import Site, kernel
from .values import NAN, Bound, Value
from .vectors import product


def _scores(site: Site, x: Value, count: int) -> Value:
    """The scores before the transform, [rows, count], in the float type of x."""
    rows, features = matrix_of(site, x)
    given, bias = site.attributes.get("coefficients") or (), site.attributes.get("intercepts") or ()
    site.require(count > 0 and len(given) == count * features and len(bias) in (0, count), "a number of coefficients is another")
    dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    right = site.once(("right", dtype), lambda: np.array(given, dtype).reshape(count, -1).T.copy())
    start = np.array(bias, dtype)
    z = site.new((rows, count), dtype, finiteness=NAN)
    wide = x if x.dtype == dtype and x.contiguous else site.new((rows, features), dtype, finiteness=NAN)

    def bind() -> Bound:
        a = wide.array.reshape(rows, features)
        calls: list[Any] = [] if wide is x else [(np.copyto, (a, x.array.reshape(rows, features)))]
        calls += product(a, right, z.array)
        return [*calls, (np.add, (z.array, start, z.array))] if bias else calls

    writes = (z,) if wide is x else (z, wide)
    site.emit(bind, reads=(x,), writes=writes, kernel="numpy.linear", keeps=(right, start))
    return z


@kernel("LinearRegressor", 1, on="numpy", domain=ML)
def linear_regressor(site: Site, x: Value) -> Value:
    name = transform_of(site)
    z = _scores(site, x, site.attributes["targets"])
    if name == "NONE" and z.dtype == np.float32:
        return z
    return transformed(site, z, name, site.new(z.shape, np.float32, finiteness=NAN))


@kernel("LinearClassifier", 1, on="numpy", domain=ML)
def linear_classifier(site: Site, x: Value) -> tuple[Any, Value]:
    given, name = site.attributes, transform_of(site)
    site.require(not (given.get("classlabels_ints") and given.get("classlabels_strings")), "there are labels of both kinds")
    labels = labels_of(given, "classlabels_ints", "classlabels_strings")
    _, features = matrix_of(site, x)
    count = len(given.get("intercepts") or ()) or max(len(given["coefficients"]) // features, 1)
    z = _scores(site, x, count)
    rows = z.shape[0]
    chosen = site.new((rows,), np.int64)
    scores = z
    if count == 1 and (labels is None or len(labels) == 2):
        made = Labels(site, np.array([0, 1]) if labels is None else labels, rows)
        zero = np.zeros(1, z.dtype)
        site.emit(lambda: made.above(z.array[:, 0], zero, chosen), reads=(z,), writes=(chosen, *made.writes()),
                  kernel="numpy.scores labels")  # fmt: skip
        if labels is not None:
            scores = two_scores(site, z, name in ("NONE", "PROBIT"))
    else:
        site.require(labels is not None and len(labels) == count, "the number of labels is another")
        assert labels is not None
        made = Labels(site, labels, rows)
        site.emit(lambda: made.largest(z, chosen), reads=(z,), writes=(chosen, *made.writes()), kernel="numpy.scores labels")
    if name == "NONE" and scores.dtype == np.float32:
        return made.result, scores
    return made.result, transformed(site, scores, name, site.new(scores.shape, np.float32, finiteness=NAN))
