"""Makes tests/frameworks/sklearn: estimators and pipelines that were fitted to seeded data, exported by skl2onnx.

    tox -e frameworks-sklearn        # scikit-learn's exporter is needed here and nowhere else

Classifiers give labels and scores, regressors a column, transformers a matrix.  NAME-skl2onnx-12.onnx is in opset 12,
NAME-skl2onnx-21.onnx in opset 21; both in the version of ai.onnx.ml that the exporter takes.  NAME-byhand-21.onnx was changed
after the export: what the exporter needs for words, a Tokenizer of com.microsoft, is no operator of ONNX.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import BATCHES, export_all, keep, keep_data
from onnx import ModelProto
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn import (
    cluster,
    compose,
    decomposition,
    ensemble,
    feature_extraction,
    feature_selection,
    impute,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

ROWS, COLUMNS = 120, 5
WORDS = np.array(["ape", "bee", "cat", "dog", "eel"])
Fitted = tuple[Any, list[list[np.ndarray]], list[list[np.ndarray]]]
"""An estimator, and for each batch its inputs and its outputs for them."""


def data(classes: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of eighths (exact in any float), a smooth target, and classes that depend on the rows."""
    rng = np.random.default_rng(3)
    x = (rng.integers(-16, 17, (ROWS, COLUMNS)) / 8).astype(np.float32)
    target = x @ [1.0, -0.5, 0.25, 0, 0.75] + np.sin(2 * x[:, 3]) + x[:, 0] * x[:, 1]
    return x, target, np.digitize(target, np.quantile(target, np.arange(1, classes) / classes))


def words() -> np.ndarray:
    """Two columns of words."""
    return WORDS[np.random.default_rng(4).integers(0, len(WORDS), (ROWS, 2))]


def sentences() -> np.ndarray:
    """Lines of some words."""
    rng = np.random.default_rng(5)
    return np.array([" ".join(WORDS[rng.integers(0, len(WORDS), rng.integers(2, 7))]) for _ in range(ROWS)])


def batches(x: np.ndarray) -> list[np.ndarray]:
    """The first rows at each batch size, one after another; estimators are fitted to the others."""
    ends = np.cumsum(BATCHES)
    return [x[end - n : end] for n, end in zip(BATCHES, ends, strict=True)]


SEEN = sum(BATCHES)
"""The first row of those that estimators are fitted to."""


def classify(estimator: Any, scores: str = "predict_proba", classes: int = 3) -> Fitted:
    """A classifier: labels, and probabilities or raw scores."""
    x, _, y = data(classes)
    estimator.fit(x[SEEN:], y[SEEN:])
    outputs = [[estimator.predict(b), getattr(estimator, scores)(b).astype(np.float32)] for b in batches(x)]
    return estimator, [[b] for b in batches(x)], outputs


def regress(estimator: Any) -> Fitted:
    """A regressor: a column."""
    x, y, _ = data()
    estimator.fit(x[SEEN:], y[SEEN:])
    return estimator, [[b] for b in batches(x)], [[estimator.predict(b).reshape(-1, 1).astype(np.float32)] for b in batches(x)]


def transform(estimator: Any, x: np.ndarray | None = None) -> Fitted:
    """A transformer: a matrix."""
    rows, _, y = data()
    given = rows if x is None else x
    estimator.fit(given[SEEN:], y[SEEN:])
    found = [estimator.transform(b) for b in batches(given)]
    dense = [np.asarray(f.todense() if hasattr(f, "todense") else f, np.float32) for f in found]
    columns = [b.reshape(len(b), -1) for b in batches(given)]
    return estimator, [[c] for c in columns], [[d] for d in dense]


def holes() -> np.ndarray:
    """Rows of which some entries are missing."""
    x = data()[0].copy()
    x[np.random.default_rng(6).random(x.shape) < 0.2] = np.nan
    return x


def clusters() -> Fitted:
    """KMeans: the nearest centre, and the distances to all."""
    x = data()[0]
    estimator = cluster.KMeans(4, n_init=2, random_state=0).fit(x[SEEN:])
    outputs = [[estimator.predict(b).astype(np.int64), estimator.transform(b).astype(np.float32)] for b in batches(x)]
    return estimator, [[b] for b in batches(x)], outputs


def mixed() -> Fitted:
    """Two inputs: numbers are scaled, words become columns of one-hot, then a logistic regression over both."""
    import pandas

    x, _, y = data()
    frame = pandas.DataFrame({**{f"n{i}": x[:, i] for i in range(COLUMNS)}, "word": words()[:, 0]})
    chosen = compose.ColumnTransformer(
        [("numbers", preprocessing.StandardScaler(), [f"n{i}" for i in range(COLUMNS)]),
         ("words", preprocessing.OneHotEncoder(handle_unknown="ignore"), ["word"])]
    )  # fmt: skip
    estimator = pipeline.make_pipeline(chosen, linear_model.LogisticRegression(max_iter=500)).fit(frame[SEEN:], y[SEEN:])
    parts = [frame.iloc[end - n : end] for n, end in zip(BATCHES, np.cumsum(BATCHES), strict=True)]
    inputs = [[*(p[[f"n{i}"]].to_numpy() for i in range(COLUMNS)), p[["word"]].to_numpy().astype(str)] for p in parts]
    return estimator, inputs, [[estimator.predict(p), estimator.predict_proba(p).astype(np.float32)] for p in parts]


SEED: dict[str, Any] = {"random_state": 0}
MODELS: dict[str, Callable[[], Fitted]] = {
    "linear_regression": lambda: regress(linear_model.LinearRegression()),
    "logistic_regression": lambda: classify(linear_model.LogisticRegression(max_iter=500)),
    "logistic_binary": lambda: classify(linear_model.LogisticRegression(), classes=2),
    "sgd_classifier": lambda: classify(linear_model.SGDClassifier(loss="log_loss", alpha=0.1, **SEED)),
    "poisson_regressor": lambda: regress_positive(),
    "decision_tree": lambda: classify(tree.DecisionTreeClassifier(max_depth=4, **SEED)),
    "random_forest_classifier": lambda: classify(ensemble.RandomForestClassifier(8, max_depth=4, **SEED)),
    "random_forest_regressor": lambda: regress(ensemble.RandomForestRegressor(8, max_depth=4, **SEED)),
    "extra_trees_regressor": lambda: regress(ensemble.ExtraTreesRegressor(8, max_depth=4, **SEED)),
    "gradient_boosting_classifier": lambda: classify(ensemble.GradientBoostingClassifier(n_estimators=6, **SEED)),
    "gradient_boosting_regressor": lambda: regress(ensemble.GradientBoostingRegressor(n_estimators=10, **SEED)),
    "adaboost_classifier": lambda: classify(ensemble.AdaBoostClassifier(n_estimators=5, **SEED)),
    "voting_classifier": lambda: classify(ensemble.VotingClassifier(
        [("a", linear_model.LogisticRegression(max_iter=500)), ("b", tree.DecisionTreeClassifier(max_depth=3, **SEED))],
        voting="soft", flatten_transform=False)),
    "svc": lambda: classify(svm.SVC(decision_function_shape="ovr"), "decision_function"),
    "linear_svc": lambda: classify(svm.LinearSVC(**SEED), "decision_function"),
    "svr": lambda: regress(svm.SVR()),
    "nu_svr": lambda: regress(svm.NuSVR(kernel="poly", degree=2)),
    "kmeans": clusters,
    "knn_classifier": lambda: classify(neighbors.KNeighborsClassifier(4)),
    "knn_regressor": lambda: regress(neighbors.KNeighborsRegressor(3)),
    "gaussian_nb": lambda: classify(naive_bayes.GaussianNB()),
    "mlp_classifier": lambda: classify(neural_network.MLPClassifier((12, 8), max_iter=300, **SEED)),
    "mlp_regressor": lambda: regress(
        neural_network.MLPRegressor(hidden_layer_sizes=(12,), activation="tanh", max_iter=300, **SEED)),
    "scaler_pca": lambda: transform(pipeline.make_pipeline(preprocessing.StandardScaler(), decomposition.PCA(3, **SEED))),
    "robust_polynomial": lambda: transform(
        pipeline.make_pipeline(preprocessing.RobustScaler(), preprocessing.PolynomialFeatures(2), preprocessing.Normalizer())),
    "kbins": lambda: transform(preprocessing.KBinsDiscretizer(3, encode="onehot-dense", quantile_method="averaged_inverted_cdf")),
    "imputer": lambda: transform(pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.MinMaxScaler()), holes()),
    "select_binarize": lambda: transform(
        pipeline.make_pipeline(feature_selection.SelectKBest(k=3), preprocessing.Binarizer(threshold=0.3))),
    "one_hot_encoder": lambda: transform(preprocessing.OneHotEncoder(handle_unknown="ignore"), words()),
    "ordinal_encoder": lambda: transform(preprocessing.OrdinalEncoder(), words()),
    "mixed_columns": mixed,
    "count_vectorizer": lambda: transform(
        feature_extraction.text.CountVectorizer(ngram_range=(1, 2), lowercase=False), sentences()),
    "tfidf_vectorizer": lambda: transform(feature_extraction.text.TfidfVectorizer(lowercase=False), sentences()),
}  # fmt: skip


def regress_positive() -> Fitted:
    """A Poisson regression, whose target is positive."""
    x, y, _ = data()
    estimator = linear_model.PoissonRegressor().fit(x[SEEN:], np.exp(y[SEEN:] / 4))
    return estimator, [[b] for b in batches(x)], [[estimator.predict(b).reshape(-1, 1).astype(np.float32)] for b in batches(x)]


def export(name: str, folder: Path) -> Iterator[Path]:
    """Write the data of an estimator and its files."""
    warnings.simplefilter("ignore")
    estimator, inputs, outputs = MODELS[name]()
    path = folder / f"{name}.npz"
    keep_data(path, inputs, outputs)
    yield path
    types = [
        (
            f"x{i}" if len(inputs[0]) > 1 else "x",
            (StringTensorType if x.dtype.kind == "U" else FloatTensorType)([None, x.shape[1]]),
        )
        for i, x in enumerate(inputs[0])
    ]
    if name == "mixed_columns":
        types = [(column, kind) for column, (_, kind) in zip([*(f"n{i}" for i in range(COLUMNS)), "word"], types, strict=True)]
    classifier = hasattr(estimator, "classes_")
    options = {"raw_scores": True} if classifier and not hasattr(estimator, "predict_proba") else {}
    options |= {"zipmap": False} if classifier and not isinstance(estimator, svm.LinearSVC) else {}
    for opset, learning in ((12, 2), (21, 3)):
        target = {"": opset, "ai.onnx.ml": learning}
        model = to_onnx(estimator, initial_types=types, options={id(estimator): options}, target_opset=target)
        twin = _changed(copy.deepcopy(estimator))
        other = to_onnx(twin, initial_types=types, options={id(twin): options}, target_opset=target)
        tokenized = _split(model)
        model.opset_import.sort(key=lambda o: (o.domain, o.version))  # the exporter's own order changes from run to run
        if opset == 21 or not tokenized:
            path = folder / f"{name}-{'byhand' if tokenized else 'skl2onnx'}-{opset}.onnx"
            keep(path, model, other)
            yield path


MATRICES = ("coef_", "intercept_", "coefs_", "intercepts_", "components_", "cluster_centers_")
"""The fitted values that are weights: of linear models, networks, projections and clusters.  The others are statistics of the
data (means, scales, frequencies), votes and trees."""


def _changed(estimator: Any) -> Any:
    """The estimator, or all of a pipeline, with other weights."""
    for part in (*getattr(estimator, "estimators_", ()), *(s[1] for s in getattr(estimator, "steps", ()))):
        _changed(part)
    for name in MATRICES:
        found = getattr(estimator, "__dict__", {}).get(name)
        if isinstance(found, list):
            setattr(estimator, name, [_moved(a) for a in found])
        elif found is not None:
            setattr(estimator, name, _moved(found))
    return estimator


def _moved(a: Any) -> np.ndarray:
    rng = np.random.default_rng(2)
    made: np.ndarray = a + rng.uniform(0.01, 0.02, np.shape(a))
    return made


def _split(model: ModelProto) -> bool:
    """Put ONNX's StringSplit in place of a Tokenizer of com.microsoft, by which the exporter finds words; was there one?."""
    found = [node for node in model.graph.node if node.op_type == "Tokenizer"]
    for node in found:
        node.op_type, node.domain = "StringSplit", ""
        node.output.append(f"{node.output[0]}_count")
        del node.attribute[:]
    kept = [o for o in model.opset_import if o.domain != "com.microsoft"]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return bool(found)


if __name__ == "__main__":
    export_all(__doc__, "sklearn", MODELS, export)
