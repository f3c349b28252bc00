"""Compares classical models of scikit-learn, LightGBM and XGBoost with onnxruntime, on one thread, in turns in one process.

    tox -e classical                                        # all models, a table
    tox -e classical -- --models svc neighbours --batch 1   # some
    tox -e classical -- --held-out --report reports         # the held-out models too, and reports/benchmark-classical.md

The models are trained here on drawn data, and written by skl2onnx and onnxmltools.  Every model is checked first: labels must be
those of onnxruntime, scores within 2e-5, or it fails.  Each turn has untimed runs, then timed ones; a figure is the CPU time of
the process per run, the median over the turns, and a ratio is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from singa_backend import SingaBackend
from singa_backend.doctor import processor
from singa_backend.io.files import write_text

Run = Callable[[], Any]
Feeds = dict[str, np.ndarray]
BATCHES = (1, 100, 5000)
FEATURES, SAMPLES, TURNS, SECONDS = 30, 2000, 9, 0.06
APART = 2e-5
"""How far apart scores may be: onnxruntime computes support vectors in float32, which differ by 1e-5."""

MEAN, WORST, FOREST = 1.3, 2.5, 1.3
"""The goals: of the geometric mean, of every ratio, and of forests at batch 100 and more."""

HELD_OUT = ("extra-trees-10", "svr", "hist-gradient-boosting", "mlp")
"""Named before any kernel was tuned, and measured at the end."""

ROWS = tuple(f"{w}" for w in ("red", "green", "blue", "black", "white", "grey", "pink", "brown", "cyan", "gold", "lime", "navy"))


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        title: what it is.
        build: returns the file's bytes, and a function that draws inputs of so many rows.
        forest: whether the goal of forests holds.
    """

    title: str
    build: Callable[[], tuple[bytes, Callable[[int], Feeds]]]
    forest: bool = False


# --- data and conversion


def _samples(seed: int, rows: int, features: int = FEATURES) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, features)).astype(np.float32)


def _classes(x: np.ndarray, classes: int) -> np.ndarray:
    """Labels that depend on some features, with noise."""
    z = x[:, 0] + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) + 0.3 * np.random.default_rng(3).standard_normal(len(x))
    return np.digitize(z, np.quantile(z, np.linspace(0, 1, classes + 1)[1:-1]))


def _numbers(rows: int) -> Feeds:
    return {"x": _samples(77, rows)}


def _skl(model: Any, y: np.ndarray | None, **options: Any) -> tuple[bytes, Callable[[int], Feeds]]:
    """Fit an estimator on drawn samples, and write it by skl2onnx."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn import ensemble

    from singa._importers._sklearn_boosting import converters

    x = _samples(1, SAMPLES)
    model.fit(x) if y is None else model.fit(x, y)
    given = {id(model): options} if options else None
    opset = {"": 21, "ai.onnx.ml": 3}
    types = [("x", FloatTensorType([None, FEATURES]))]
    proto = convert_sklearn(
        model, initial_types=types, options=given, target_opset=opset, custom_conversion_functions=converters(ensemble)
    )
    return proto.SerializeToString(), _numbers


def _target(noise: float = 0.1) -> np.ndarray:
    x = _samples(1, SAMPLES)
    y: np.ndarray = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + noise * np.random.default_rng(5).standard_normal(len(x))
    return y


def _labels(classes: int) -> np.ndarray:
    return _classes(_samples(1, SAMPLES), classes)


def _forest() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import RandomForestClassifier

    return _skl(RandomForestClassifier(100, max_depth=10, random_state=0), _labels(3), zipmap=False)


def _boosting() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import GradientBoostingRegressor

    return _skl(GradientBoostingRegressor(n_estimators=100, max_depth=4, random_state=0), _target())


def _isolation() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import IsolationForest

    return _skl(IsolationForest(n_estimators=20, random_state=0), None)


def _extra() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import ExtraTreesRegressor

    return _skl(ExtraTreesRegressor(100, max_depth=8, random_state=0), _target())


def _tree() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.tree import DecisionTreeClassifier

    return _skl(DecisionTreeClassifier(max_depth=6, random_state=0), _labels(2), zipmap=False)


def _svc() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.svm import SVC

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _skl(SVC(probability=True, random_state=0), _labels(4), zipmap=False)


def _linear_svc() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.svm import SVC

    return _skl(SVC(kernel="linear", C=0.01), _labels(2), zipmap=False)


def _neighbours() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.neighbors import KNeighborsClassifier

    return _skl(KNeighborsClassifier(5), _labels(3), zipmap=False)


def _neighbours_cdist() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.neighbors import KNeighborsRegressor

    return _skl(KNeighborsRegressor(5), _target(), optim="cdist")


def _logistic() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return _skl(make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)), _labels(3), zipmap=False)


def _logistic_maps() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    return _skl(make_pipeline(Normalizer(), LogisticRegression(max_iter=500)), np.array(["no", "yes"])[_labels(2)])


def _ridge() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    return _skl(make_pipeline(SimpleImputer(), MinMaxScaler(), Ridge()), _target())


def _columns() -> tuple[bytes, Callable[[int], Feeds]]:
    """Categories of strings as one-hot vectors next to scaled numbers, and a linear classifier."""
    import pandas
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    def draw(rows: int, seed: int = 78) -> Feeds:
        rng = np.random.default_rng(seed)
        text = {n: np.array(rng.choice(ROWS, (rows, 1)), object) for n in ("a", "b")}
        return text | {n: rng.standard_normal((rows, 1)).astype(np.float32) for n in ("u", "v", "w")}

    feeds = draw(SAMPLES, 2)
    frame = pandas.DataFrame({n: v[:, 0] for n, v in feeds.items()})
    y = ((frame["a"] == "red") | (frame["u"] > 0.5)).astype(int)
    parts = [("one", OneHotEncoder(handle_unknown="ignore"), ["a", "b"]), ("scale", StandardScaler(), ["u", "v", "w"])]
    model = make_pipeline(ColumnTransformer(parts), LogisticRegression()).fit(frame, y)
    types = [(n, StringTensorType([None, 1]) if v.dtype == object else FloatTensorType([None, 1])) for n, v in feeds.items()]
    proto = convert_sklearn(model, initial_types=types, options={id(model): {"zipmap": False}}, target_opset=17)
    return proto.SerializeToString(), draw


def _texts() -> tuple[bytes, Callable[[int], Feeds]]:
    """Words and pairs of words, weighted by TF-IDF, and a linear classifier."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vocabulary = [f"{a}{b}" for a in ROWS for b in ("", "ish", "er", "ness", "ly")]

    def draw(rows: int, seed: int = 79) -> Feeds:
        rng = np.random.default_rng(seed)
        texts = [" ".join(rng.choice(vocabulary, int(rng.integers(5, 25)))) for _ in range(rows)]
        return {"x": np.array(texts, object).reshape(-1, 1)}

    x = draw(400, 2)["x"][:, 0]
    y = np.array(["red" in t for t in x]).astype(int)
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), max_features=500), LogisticRegression()).fit(x, y)
    options = {id(model): {"zipmap": False}}
    proto = convert_sklearn(model, initial_types=[("x", StringTensorType([None, 1]))], options=options, target_opset=17)
    for node in proto.graph.node:
        if node.op_type == "StringNormalizer":  # skl2onnx writes en_US, which need not be installed
            node.attribute.append(onnx.helper.make_attribute("locale", "C"))
    return proto.SerializeToString(), draw


def _lightgbm() -> tuple[bytes, Callable[[int], Feeds]]:
    import lightgbm
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = lightgbm.LGBMClassifier(n_estimators=100, num_leaves=31, verbose=-1, random_state=0, n_jobs=1)
    model.fit(_samples(1, SAMPLES), _labels(3))
    proto = onnxmltools.convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, FEATURES]))], zipmap=False,
                                         target_opset=15)  # fmt: skip
    return proto.SerializeToString(), _numbers


def _xgboost() -> tuple[bytes, Callable[[int], Feeds]]:
    import onnxmltools
    import xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = xgboost.XGBRegressor(n_estimators=100, max_depth=6, n_jobs=1).fit(_samples(1, SAMPLES), _target())
    proto = onnxmltools.convert_xgboost(model, initial_types=[("x", FloatTensorType([None, FEATURES]))], target_opset=15)
    return proto.SerializeToString(), _numbers


def _held_extra() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import ExtraTreesClassifier

    return _skl(ExtraTreesClassifier(100, max_depth=12, random_state=0), _labels(10), zipmap=False)


def _held_svr() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.svm import SVR

    return _skl(SVR(), _target())


def _held_hist() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return _skl(HistGradientBoostingClassifier(max_iter=100, random_state=0), _labels(2), zipmap=False)


def _held_mlp() -> tuple[bytes, Callable[[int], Feeds]]:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    net = MLPClassifier((64, 32), max_iter=30, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _skl(make_pipeline(StandardScaler(), net), _labels(3), zipmap=False)


CASES = {
    "random-forest": Case("random forest, 100 trees of depth 10", _forest, True),
    "gradient-boosting": Case("gradient boosting, 100 trees of depth 4", _boosting, True),
    "extra-trees": Case("extra trees, regression, 100 of depth 8", _extra, True),
    "isolation-forest": Case("isolation forest, 20 trees: 500 nodes", _isolation, True),
    "decision-tree": Case("one decision tree of depth 6", _tree),
    "svc": Case("SVC, RBF, 4 classes, with probabilities", _svc),
    "linear-svc": Case("SVC, linear kernel, 2 classes", _linear_svc),
    "neighbours": Case("nearest neighbours of 2,000 points", _neighbours),
    "neighbours-cdist": Case("the same, regression, by CDist", _neighbours_cdist),
    "logistic": Case("scaler and logistic regression", _logistic),
    "logistic-maps": Case("normalizer and logistic regression, maps of string labels", _logistic_maps),
    "ridge": Case("imputer, scaler and ridge regression", _ridge),
    "columns": Case("one-hot strings and scaled numbers, logistic regression", _columns),
    "texts": Case("TF-IDF of words and pairs, logistic regression", _texts),
    "lightgbm": Case("LightGBM, 3 classes of 100 trees", _lightgbm, True),
    "xgboost": Case("XGBoost, 100 trees of depth 6", _xgboost, True),
    "extra-trees-10": Case("extra trees, 10 classes, 100 of depth 12", _held_extra, True),
    "svr": Case("SVR, RBF", _held_svr),
    "hist-gradient-boosting": Case("histogram gradient boosting, 100 trees", _held_hist, True),
    "mlp": Case("scaler and a perceptron of 64 and 32 units", _held_mlp),
}


# --- measuring


def _differ(a: Any, b: Any) -> float:
    """How far apart two outputs are: of scores the largest difference, relative to values above 1; infinity for labels."""
    if isinstance(b, list):
        if len(a) != len(b) or any(x.keys() != y.keys() for x, y in zip(a, b, strict=True)):
            return math.inf
        a, b = (np.array([list(m.values()) for m in v], np.float32) for v in (a, b))
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return math.inf
    if b.dtype.kind != "f":
        return 0.0 if np.array_equal(a, b) else float(np.mean(a != b))
    return float((np.abs(a.astype(np.float64) - b) / np.maximum(np.abs(b), 1)).max(initial=0))


def _turn(run: Run, count: int) -> float:
    """The CPU seconds of a run: the minimum of the timed parts of a turn."""
    run()
    found = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(count):
            run()
        found.append((time.process_time() - start) / count)
    return min(found)


def measure(data: bytes, feeds: Feeds, turns: int) -> dict[str, float]:
    """Our CPU time, onnxruntime's (microseconds), the ratio, and how far apart the results are."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    rep = SingaBackend.prepare(data, threads=1)

    def ours() -> Any:
        return rep.run(feeds)

    def theirs() -> Any:
        return session.run(None, feeds)

    expected = theirs()
    apart = [max(_differ(a, b) for a, b in zip(ours(), expected, strict=True)) for _ in range(3)][-1]
    times: list[tuple[float, float]] = []
    counts = [max(1, round(SECONDS / 3 / max(_turn(run, 1), 1e-6))) for run in (ours, theirs)]
    for _ in range(turns):
        times.append((_turn(ours, counts[0]), _turn(theirs, counts[1])))
    own, other = (statistics.median(t) * 1e6 for t in zip(*times, strict=True))
    return {"ours": own, "theirs": other, "ratio": statistics.median(a / b for a, b in times), "apart": apart}


def definitions(data: bytes, feeds: Feeds) -> list[str]:
    """The operators that a definition computes."""
    rep = SingaBackend.prepare(data, threads=1)
    return sorted({o for s in rep.profile(feeds, runs=1).steps if s.kernel.startswith("definition") for o in s.operators})


# --- the report


def _mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def page(rows: dict[str, dict[int, dict[str, float]]], slow: dict[str, list[str]], absent: dict[str, str]) -> str:
    """The report in Markdown."""
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in _PACKAGES)
    lines = [
        "# Classical models against onnxruntime", "",
        "Written by `benchmarks/classical.py`; it is not checked for staleness, because times vary.", "",
        f"One thread of {processor()}; {versions}.",
        "CPU time, the two in turns in one process. Each figure is our time over onnxruntime's: below 1 we are faster.",
        f"What misses a goal is bold: a ratio of {WORST}, and {FOREST} for ensembles of trees at batch 100 and more.",
        "The column µs has our times. `difference` is the largest one of a score from onnxruntime's, relative to scores",
        "above 1; for labels it is the share that differs.", "",
    ]  # fmt: skip
    for title, names in (("Models", [n for n in rows if n not in HELD_OUT]), ("Held out", [n for n in rows if n in HELD_OUT])):
        if not names:
            continue
        batches = sorted({b for n in names for b in rows[n]})
        lines += [f"## {title}", "", "| model | " + " | ".join(f"batch {b}" for b in batches) + " | µs | difference |",
                  "|---" * (len(batches) + 3) + "|"]  # fmt: skip
        for n in names:
            cells = [_cell(rows[n].get(b), CASES[n].forest and b >= 100) for b in batches]
            own = ", ".join(f"{rows[n][b]['ours']:.0f}" for b in batches if b in rows[n])
            apart = max(r["apart"] for r in rows[n].values())
            lines.append(f"| {CASES[n].title} | {' | '.join(cells)} | {own} | {apart:.0e} |")
        for b in batches:
            lines += _line(f"batch {b}", [rows[n][b]["ratio"] for n in names if b in rows[n]])
        lines += [*_line("all batches", [r["ratio"] for n in names for r in rows[n].values()]), ""]
    held = {n: found for n, found in slow.items() if found}
    if held:
        lines += [
            "## Operators that a definition computes",
            "",
            *(f"* {CASES[n].title}: {', '.join(f)}" for n, f in held.items()),
            "",
        ]
    if absent:
        lines += ["## No result", "", *(f"* {CASES[n].title}: {why}" for n, why in absent.items()), ""]
    return "\n".join(lines)


def _cell(row: dict[str, float] | None, forest: bool) -> str:
    if row is None:
        return ""
    shown = f"{row['ratio']:.2f}"
    return f"**{shown}**" if row["ratio"] > (FOREST if forest else WORST) else shown


def _line(what: str, ratios: Sequence[float]) -> list[str]:
    return ["", f"Geometric mean, {what}: {_mean(ratios):.2f}; highest ratio {max(ratios):.2f}."]


_PACKAGES = ("onnxruntime", "scikit-learn", "skl2onnx", "onnxmltools", "lightgbm", "xgboost-cpu", "numpy")


def main() -> int:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), help="default: all that are not held out")
    parser.add_argument("--held-out", action="store_true", help="the held-out models too")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--report", type=Path, help="the folder in which benchmark-classical.md is written")
    given = parser.parse_args()
    names = given.models or [n for n in CASES if given.held_out or n not in HELD_OUT]
    rows: dict[str, dict[int, dict[str, float]]] = {}
    slow: dict[str, list[str]] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            data, draw = CASES[name].build()
        except (ImportError, ValueError) as error:  # such as a converter that does not know this version of scikit-learn
            absent[name] = (
                f"the file was not written: {type(error).__name__}: {str(error).splitlines()[0].split(' and attributes=')[0]}"
            )
            print(f"{name}: {absent[name]}", file=sys.stderr)
            continue
        rows[name] = {}
        for batch in given.batch:
            found = rows[name][batch] = measure(data, draw(batch), given.turns)
            times = f"{found['ours']:9.1f} / {found['theirs']:9.1f} µs"
            print(f"{name:24} {batch:5} {times} = {found['ratio']:5.2f}   {found['apart']:.0e}", file=sys.stderr)
        slow[name] = definitions(data, draw(7))
        if slow[name]:
            print(f"{name:24} by a definition: {', '.join(slow[name])}", file=sys.stderr)
    if not rows:
        return 1
    text = page(rows, slow, absent)
    if given.report is not None:
        write_text(given.report / "benchmark-classical.md", text)
    print(text)
    wrong = [f"{n} at batch {b}" for n, found in rows.items() for b, r in found.items() if not r["apart"] <= APART]
    if wrong:
        print(f"results differ from onnxruntime's: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
