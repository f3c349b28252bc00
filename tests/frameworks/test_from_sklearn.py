"""`sonnx.from_sklearn`: estimators and pipelines of every kind, columns by name, and what cannot be exported.

tox -e from-sklearn     # scikit-learn's exporter is needed here and nowhere else
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas
import pytest
import sklearn
from sklearn import (
    base,
    calibration,
    cluster,
    compose,
    decomposition,
    ensemble,
    gaussian_process,
    linear_model,
    model_selection,
    multioutput,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

from singa import opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa._importers._common import ExporterFailure
from singa_backend import SingaBackend
from singa_backend.errors import InvalidInput, SonnxError

RNG = np.random.default_rng(3)
X = RNG.standard_normal((60, 5)).astype(np.float32)
TARGET = X @ [1.0, -0.5, 0.25, 0, 0.75] + np.sin(2 * X[:, 3])
CLASSES = np.digitize(TARGET, [-0.5, 0.5])
WORDS = np.array(["ape", "bee", "cat"])[CLASSES]

CLASSIFIERS = [
    linear_model.LogisticRegression(), tree.DecisionTreeClassifier(max_depth=4),
    ensemble.RandomForestClassifier(9, random_state=0),
    neighbors.KNeighborsClassifier(3), svm.LinearSVC(), svm.SVC(), naive_bayes.GaussianNB(),
    neural_network.MLPClassifier((8,), max_iter=50, random_state=0),
    pipeline.make_pipeline(preprocessing.StandardScaler(), decomposition.PCA(3), linear_model.LogisticRegression()),
    ensemble.StackingClassifier([("svm", svm.LinearSVC()), ("tree", tree.DecisionTreeClassifier(max_depth=2))]),
]  # fmt: skip
REGRESSORS = [
    linear_model.Ridge(), ensemble.GradientBoostingRegressor(n_estimators=9), svm.SVR(),
    neural_network.MLPRegressor(hidden_layer_sizes=(8,), max_iter=50),
]  # fmt: skip
TRANSFORMERS = [
    preprocessing.StandardScaler(),
    preprocessing.PolynomialFeatures(),
    decomposition.PCA(2),
    cluster.KMeans(3, n_init=1),
]


def ours(model: Any, *inputs: Any) -> list[Any]:
    return [np.asarray(y.data) for y in model.forward(*(Tensor(data=x, requires_grad=False) for x in inputs))]


def name(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("labels", [CLASSES, WORDS], ids=["numbers", "words"])
@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=name)
def test_classifiers(estimator: Any, labels: Any) -> None:
    fitted = base.clone(estimator).fit(X, labels)
    model = sonnx.from_sklearn(fitted, X[:8])
    found = ours(model, X)  # the number of samples is open
    np.testing.assert_array_equal(found[0], fitted.predict(X))
    if hasattr(fitted, "predict_proba"):
        np.testing.assert_allclose(found[1], fitted.predict_proba(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", REGRESSORS, ids=name)
def test_regressors(estimator: Any, dtype: Any) -> None:
    x = X.astype(dtype)
    fitted = base.clone(estimator).fit(x, TARGET)
    model = sonnx.from_sklearn(fitted, Tensor(data=x), tolerance=1e-4)
    np.testing.assert_allclose(ours(model, x)[0].ravel(), fitted.predict(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("estimator", TRANSFORMERS, ids=name)
def test_transformers(estimator: Any) -> None:
    fitted = base.clone(estimator).fit(X)
    np.testing.assert_allclose(ours(sonnx.from_sklearn(fitted, X), X)[-1], fitted.transform(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("framed", [False, True], ids=["dict", "frame"])
def test_columns_by_name(framed: bool) -> None:
    columns = {"size": X[:, 0], "kind": WORDS, "age": X[:, 1]}
    frame = pandas.DataFrame(columns)
    mixed = compose.ColumnTransformer([("scale", preprocessing.StandardScaler(), ["size", "age"]),
                                       ("code", preprocessing.OneHotEncoder(), ["kind"])])  # fmt: skip
    fitted = pipeline.make_pipeline(mixed, linear_model.LogisticRegression()).fit(frame, CLASSES)
    model = sonnx.from_sklearn(fitted, frame if framed else columns, input_names=["a", "b", "c"], output_names=["class", "p"])
    graph = model.imported.graph
    assert [v.name for v in graph.inputs] == ["a", "b", "c"] and [v.name for v in graph.outputs] == ["class", "p"]
    found = ours(model, *(np.asarray(c, object if c is WORDS else None).reshape(-1, 1) for c in columns.values()))
    np.testing.assert_array_equal(found[0], fitted.predict(frame))
    np.testing.assert_allclose(found[1], fitted.predict_proba(frame), rtol=1e-4, atol=1e-5)


HOLES = np.random.default_rng(7).random((200, 4)) < 0.15
GAPPED = np.where(HOLES, np.nan, np.random.default_rng(8).standard_normal((200, 4))).astype(np.float32)
LEVEL = np.nan_to_num(GAPPED[:, 0] + GAPPED[:, 1] * GAPPED[:, 2]) + 3 * HOLES[:, 0] - 2 * HOLES[:, 3]

WITH_GAPS = [
    tree.DecisionTreeClassifier(max_depth=6), tree.DecisionTreeRegressor(max_depth=6), tree.ExtraTreeClassifier(max_depth=6),
    tree.ExtraTreeRegressor(max_depth=6), ensemble.RandomForestClassifier(7), ensemble.RandomForestRegressor(7),
    ensemble.ExtraTreesClassifier(7), ensemble.ExtraTreesRegressor(7), ensemble.IsolationForest(n_estimators=7),
    ensemble.HistGradientBoostingClassifier(max_iter=5), ensemble.BaggingClassifier(tree.DecisionTreeClassifier(max_depth=4), 4),
    ensemble.BaggingRegressor(tree.DecisionTreeRegressor(max_depth=4), 4),
    ensemble.StackingRegressor([("a", tree.DecisionTreeRegressor(max_depth=4)), ("b", ensemble.RandomForestRegressor(4))],
                               tree.DecisionTreeRegressor(max_depth=3)),
    pipeline.make_pipeline(preprocessing.StandardScaler(), ensemble.RandomForestClassifier(4, max_depth=4)),
    model_selection.GridSearchCV(tree.DecisionTreeClassifier(), {"max_depth": [3, 4]}),
    multioutput.MultiOutputRegressor(tree.DecisionTreeRegressor(max_depth=4)),
    calibration.CalibratedClassifierCV(tree.DecisionTreeClassifier(max_depth=3)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", WITH_GAPS, ids=name)
def test_trees_that_are_fitted_with_missing_values(estimator: Any, dtype: Any) -> None:
    """They send each missing value as scikit-learn does, also if the samples of the import have none."""
    target = LEVEL if base.is_regressor(estimator) else np.digitize(LEVEL, [-1, 1])
    if isinstance(estimator, multioutput.MultiOutputRegressor):
        target = np.stack([LEVEL, -LEVEL], 1)
    x = GAPPED.astype(dtype)
    fitted = base.clone(estimator).set_params(**dict.fromkeys({"random_state"} & set(estimator.get_params()), 0)).fit(x, target)
    if isinstance(fitted, (ensemble.IsolationForest, calibration.CalibratedClassifierCV)) and dtype == np.float64:
        with pytest.raises(SonnxError):  # skl2onnx mixes float32 and float64
            sonnx.from_sklearn(fitted, np.nan_to_num(x[:8]))
        return
    found = ours(sonnx.from_sklearn(fitted, np.nan_to_num(x[:8])), x)
    expected = fitted.predict(x)
    np.testing.assert_allclose(found[0].reshape(expected.shape), expected, rtol=1e-3, atol=1e-4)
    if hasattr(fitted, "predict_proba"):
        np.testing.assert_allclose(found[1], fitted.predict_proba(x), rtol=1e-4, atol=1e-5)


def test_a_path_of_decisions_with_missing_values() -> None:
    fitted = tree.DecisionTreeRegressor(max_depth=4, random_state=0).fit(GAPPED, LEVEL)
    options = {id(fitted): {"decision_leaf": True}}
    found = ours(sonnx.from_sklearn(fitted, GAPPED[:8], options=options, check=False), GAPPED)
    np.testing.assert_allclose(found[0].ravel(), fitted.predict(GAPPED), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[1].ravel(), fitted.apply(GAPPED))


@pytest.mark.parametrize("opset", [None, 15])
def test_an_isolation_forest_is_imported_at_any_opset(opset: int | None) -> None:
    fitted = ensemble.IsolationForest(n_estimators=5, random_state=0).fit(X)
    found = ours(sonnx.from_sklearn(fitted, X, opset=opset), X)
    np.testing.assert_array_equal(found[0].ravel(), fitted.predict(X))


def test_the_hint_names_the_argument_of_this_call() -> None:
    with pytest.raises(ExporterFailure, match="target_opset") as caught:
        sonnx.from_sklearn(tree.DecisionTreeClassifier().fit(X, CLASSES), X, opset=99)
    assert caught.value.hint == "target_opset of the exporter is the argument opset of this call"


GAPS = np.random.default_rng(4).random((600, 5)) < 0.1
MIXED = np.random.default_rng(5).standard_normal((600, 5)).astype(np.float32)
MIXED[:, 1], MIXED[:, 3] = (np.random.default_rng(6).choice(v, 600) for v in ([3.0, 7.0, 7.5, -2.0, 11.0], range(40)))
SUMS = MIXED[:, 0] + 2 * (MIXED[:, 1] == 7) + MIXED[:, 3] % 5 / 2
MIXED[GAPS] = np.nan

BOOSTED = [
    (ensemble.HistGradientBoostingClassifier(max_iter=9), SUMS > 1.5),
    (ensemble.HistGradientBoostingClassifier(max_iter=9, categorical_features=[1, 3]), np.digitize(SUMS, [0.5, 1.5, 2.5])),
    (ensemble.HistGradientBoostingClassifier(max_iter=9, categorical_features=[3]), np.array(["no", "yes"])[(SUMS > 1) * 1]),
    (ensemble.HistGradientBoostingClassifier(max_iter=1, max_leaf_nodes=2), SUMS > 1.5),
    (ensemble.HistGradientBoostingRegressor(max_iter=9), SUMS),
    (ensemble.HistGradientBoostingRegressor(max_iter=9, categorical_features=[1, 3], loss="quantile", quantile=0.3), SUMS),
    (ensemble.HistGradientBoostingRegressor(max_iter=9, categorical_features=[3], loss="poisson"), np.abs(SUMS)),
    (ensemble.HistGradientBoostingRegressor(max_iter=9, loss="gamma"), np.abs(SUMS) + 0.1),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", range(len(BOOSTED)))
def test_histogram_gradient_boosting(case: int, dtype: Any) -> None:
    """Categories, missing and unknown values, thresholds that are values of the samples, and links."""
    estimator, target = BOOSTED[case]
    x = MIXED.astype(dtype)
    fitted = base.clone(estimator).fit(x, target)
    others = x[::-1].copy()
    others[:20, 1], others[20:30, 3], others[30, 0], others[31, 2] = 99, -7, np.inf, -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # kernels compute all of it
        model = sonnx.from_sklearn(fitted, x[:50], tolerance=1e-5)
    found = ours(model, others)
    if hasattr(fitted, "predict_proba"):
        np.testing.assert_array_equal(found[0], fitted.predict(others))
        np.testing.assert_allclose(found[1], fitted.predict_proba(others), rtol=0, atol=1e-6)
    else:
        np.testing.assert_allclose(found[0].ravel(), fitted.predict(others), rtol=1e-5, atol=1e-6)
        assert found[0].dtype == dtype


def test_histogram_gradient_boosting_of_integers_and_in_a_pipeline() -> None:
    whole = np.arange(400).reshape(100, 4) * 7 % 31
    fitted = ensemble.HistGradientBoostingRegressor(max_iter=5).fit(whole, whole[:, 0] + whole[:, 1])
    np.testing.assert_allclose(ours(sonnx.from_sklearn(fitted, whole), whole)[0].ravel(), fitted.predict(whole), rtol=1e-5)
    large = np.where(whole > 20, np.inf, whole).astype(np.float32)  # a threshold may be the largest float64
    fitted.fit(large, np.isinf(large[:, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(ours(sonnx.from_sklearn(fitted, large), large)[0].ravel(), fitted.predict(large), rtol=1e-5)
    wide = MIXED.astype(np.float64)
    joined = pipeline.make_pipeline(preprocessing.RobustScaler(), ensemble.HistGradientBoostingClassifier(max_iter=5))
    joined.fit(wide, SUMS > 1)
    model = sonnx.from_sklearn(joined, wide, options={id(joined[-1]): {"zipmap": False, "raw_scores": True}}, check=False)
    np.testing.assert_allclose(ours(model, wide)[1][:, 1], joined.decision_function(wide), rtol=1e-5, atol=1e-6)


def test_operators_that_run_by_definitions_are_named() -> None:
    """The warning has exactly the operators that a profile of the model shows."""
    cases: list[tuple[Any, set[str]]] = [
        (linear_model.LogisticRegression(), set()), (svm.SVC(), set()), (gaussian_process.GaussianProcessRegressor(), set()),
        (neighbors.KNeighborsClassifier(3), set()), (ensemble.HistGradientBoostingClassifier(max_iter=2), set()),
        (naive_bayes.GaussianNB(), {"ReduceLogSumExp"}),
    ]  # fmt: skip
    for estimator, expected in cases:
        fitted = base.clone(estimator).fit(X, CLASSES)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = sonnx.from_sklearn(fitted, X, tolerance=1e-3)
        told = [str(w.message) for w in caught if "by their definitions" in str(w.message)]
        named = {part.split(": ")[0] for t in told for part in t.split("is slow: ")[1].split("; ")}
        profile = SingaBackend.prepare(model.onnx_model).profile([X])
        slow = {o for s in profile.steps if s.kernel.startswith("definition") for o in s.operators}
        assert named == slow == expected, (estimator, told)


def test_options_and_opset() -> None:
    fitted = linear_model.LogisticRegression().fit(X, CLASSES)
    model = sonnx.from_sklearn(fitted, X, opset=12, options={"raw_scores": True, "zipmap": False}, check=False)
    assert {o.version for o in model.onnx_model.opset_import if not o.domain} == {12}
    np.testing.assert_allclose(ours(model, X)[1], fitted.decision_function(X), rtol=1e-4, atol=1e-4)


def test_a_network_trains_on(mean_squares: Any) -> None:
    fitted = neural_network.MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, random_state=0).fit(X, TARGET)
    model = sonnx.from_sklearn(fitted, X, model_class=mean_squares)
    assert not tape.training and not model.training
    model.optimizer = opt.SGD(lr=0.05)
    model.train()
    losses = [model(Tensor(data=X), Tensor(data=TARGET.astype(np.float32)[:, None]))[1].data.item() for _ in range(50)]
    np.testing.assert_allclose(losses[0], np.mean((fitted.predict(X) - TARGET) ** 2), rtol=1e-4)
    assert losses[-1] < 0.5 * losses[0]


def test_errors_of_the_exporter_name_it() -> None:
    class Own(base.BaseEstimator, base.TransformerMixin):
        def fit(self, x: Any, y: Any = None) -> Any:
            self.n_features_in_ = x.shape[1]
            return self

        def transform(self, x: Any) -> Any:
            return x

    with pytest.raises(sonnx.ExporterFailure, match=rf"scikit-learn {sklearn.__version__} \(skl2onnx .*could not export") as e:
        sonnx.from_sklearn(Own().fit(X), X)
    assert e.value.code == "SX910" and "Unable to find a shape calculator" in e.value.reason and e.value.__cause__ is not None
    with pytest.raises(sonnx.ExporterFailure, match="could not export"):
        sonnx.from_sklearn(linear_model.Ridge(), X)  # not fitted


def test_what_differs_is_an_error_that_check_can_switch_off() -> None:
    fitted = linear_model.Ridge().fit(X, TARGET)
    fitted.predict = lambda x: np.zeros(len(x))  # an estimator that is not what the exporter takes it for
    with pytest.raises(sonnx.ExporterFailure, match=r"exported a model with other outputs: output 0 'variable'.*differs by") as e:
        sonnx.from_sklearn(fitted, X)
    assert e.value.code == "SX911" and "check=False" in e.value.hint
    assert len(ours(sonnx.from_sklearn(fitted, X, check=False), X)[0]) == len(X)


def test_arguments_that_are_refused() -> None:
    fitted = linear_model.Ridge().fit(X, TARGET)
    with pytest.raises(InvalidInput, match="a matrix with a row for each sample"):
        sonnx.from_sklearn(fitted, X[0])
    with pytest.raises(InvalidInput, match="complex64"):
        sonnx.from_sklearn(fitted, X.astype(np.complex64))
    with pytest.raises(InvalidInput, match="output_names"):
        sonnx.from_sklearn(fitted, X, output_names=["a", "b"])
