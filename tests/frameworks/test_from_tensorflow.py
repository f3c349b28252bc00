"""`sonnx.from_tensorflow`: Keras models and functions, in every form of inputs, in both modes, and training against Keras.

tox -e from-tensorflow     # TensorFlow is needed here and nowhere else
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from singa import opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput, UnsupportedModel

F = np.float32
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 8, 4)).astype(F)
SCALE = np.array([1.0, 2.0, 3.0], F)


def ours(model: Any, *inputs: Any) -> list[np.ndarray]:
    return [y.data for y in model.forward(*(Tensor(data=np.asarray(x), requires_grad=False) for x in inputs))]


def agree(found: Any, expected: Any) -> None:
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, np.asarray(e), rtol=1e-4, atol=1e-5)


def net(rate: float = 0.4) -> Any:
    """A grouped convolution, batch norm, dropout, a dense layer; fresh, so that biases and statistics are zeros and ones."""
    keras.utils.set_random_seed(0)
    x = image = keras.Input((8, 8, 4), name="image")
    x = layers.Conv2D(8, 3, groups=2, name="conv")(x)
    x = layers.BatchNormalization(momentum=0.7, name="norm")(x)
    x = layers.Dropout(rate, name="drop")(layers.ReLU()(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(3, name="head")(layers.Dense(8, name="middle")(x)))


def two() -> Any:
    """Two inputs, and outputs in a dict of lists."""
    x, scale = keras.Input((8, 8, 4), name="x"), keras.Input((3,), name="scale")
    y = layers.Dense(3)(layers.Flatten()(x)) * scale
    return keras.Model({"x": x, "scale": scale}, {"z": y, "a": [y * 2.0, layers.Softmax()(y)]})


@pytest.mark.parametrize("change", [tf.constant, np.array, lambda x: Tensor(data=x)], ids=["tensor", "array", "singa"])
@pytest.mark.parametrize("train", [False, True])
def test_inputs_of_every_kind(change: Callable[..., Any], train: bool) -> None:
    model = net()
    found = sonnx.from_tensorflow(model, change(X), train=train)
    assert [v.name for v in found.imported.graph.inputs] == ["input_0"]
    found.eval()
    agree(ours(found, X), [model(X)])
    np.testing.assert_allclose(ours(found, np.concatenate([X, X, X]))[0].shape, (6, 3))  # Keras leaves the batch open


def test_declared_inputs_and_nested_outputs_in_order() -> None:
    model = two()
    scale = np.stack([SCALE, SCALE])
    expected = model({"x": X, "scale": scale})
    values = {"x": X, "scale": scale}
    for inputs in (None, values):
        found = sonnx.from_tensorflow(model, inputs)
        assert {v.name for v in found.imported.graph.inputs} == {"x", "scale"}
        got = ours(found, *(values[v.name] for v in found.imported.graph.inputs))
        agree(got, [expected[k] if k == "z" else y for k in expected for y in (expected[k] if k == "a" else [None])])


def test_names_opset_and_open_sizes() -> None:
    @tf.function
    def f(a: Any, b: Any) -> Any:
        return tf.matmul(a, b), tf.shape(a)[0]

    a, b = RNG.standard_normal((2, 3)).astype(F), RNG.standard_normal((3, 4)).astype(F)
    assert [v.name for v in sonnx.from_tensorflow(f, (a, b)).imported.graph.inputs] == ["a", "b"]
    found = sonnx.from_tensorflow(f, (a, b), opset=11, input_names=["b", "output_1"], output_names=["input_0", "n"],
                                  dynamic_axes={"b": {0: "rows"}})  # fmt: skip
    graph = found.imported.graph
    assert [v.name for v in graph.inputs] == ["b", "output_1"] and [v.name for v in graph.outputs] == ["input_0", "n"]
    assert [o.version for o in found.onnx_model.opset_import if not o.domain] == [11]
    wide = np.concatenate([a, a, a])
    agree(ours(found, wide, b), [wide @ b, 6])


def test_functions_with_a_signature_and_by_keyword() -> None:
    signed = tf.function(lambda x: x * 2.0, input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    agree(ours(sonnx.from_tensorflow(signed), SCALE[None]), [2 * SCALE[None]])
    found = sonnx.from_tensorflow(lambda ids, by: by * tf.cast(ids + 1, by.dtype), {"by": SCALE, "ids": np.arange(3)})
    assert [v.name for v in found.imported.graph.inputs] == ["by", "ids"]
    agree(ours(found, SCALE, np.arange(3)), [SCALE * [1, 2, 3]])


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_left_as_it_was(train: bool) -> None:
    model = net()
    model.get_layer("head").trainable = False
    before = [np.asarray(v).copy() for v in model.variables]
    expected = np.asarray(model(X))
    found = sonnx.from_tensorflow(model, train=train)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
    assert not any("call" in layer.__dict__ for layer in model._flatten_layers())
    assert not model.get_layer("head").trainable and not tf.config.functions_run_eagerly()
    np.testing.assert_array_equal(np.asarray(model(X)), expected)
    assert found.training is train and not tape.training


def trained(model: Any) -> set[str]:
    return {n for n, p in model.get_params().items() if p.stores_grad}


def test_train_keeps_dropout_batch_norm_and_fresh_weights(mean_squares: Any) -> None:
    model = net()
    found = sonnx.from_tensorflow(model, train=True, model_class=mean_squares)
    kinds = [n.op_type for n in found.imported.graph.nodes]
    assert kinds.count("Dropout") == 1 and kinds.count("BatchNormalization") == 1
    assert trained(found) == {v.path for v in model.trainable_variables}
    assert len(found.imported.statistics) == 2
    found.eval()
    agree(ours(found, X), [model(X)])
    found.train()
    assert not np.array_equal(ours(found, X)[0], ours(found, X)[0])  # dropped at random


def test_dropout_before_its_ratio_was_an_input() -> None:
    found = sonnx.from_tensorflow(net(), train=True, opset=11)
    (drop,) = (n for n in found.onnx_model.graph.node if n.op_type == "Dropout")
    assert len(drop.input) == 1 and [a.name for a in drop.attribute] == ["ratio"]
    assert set(found.get_params()) == trained(found)  # nothing is held that nobody reads


def test_training_and_statistics_against_keras(mean_squares: Any) -> None:
    """Five steps of the same SGD, with a frozen layer: losses, weights and running statistics."""
    model = net(rate=0.0)
    model.get_layer("middle").trainable = False
    found = sonnx.from_tensorflow(model, train=True, model_class=mean_squares)
    found.optimizer = opt.SGD(lr=0.05)
    found.train()
    sgd = keras.optimizers.SGD(0.05)
    t = np.array([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]], F)
    still = np.asarray(model.get_layer("middle").kernel).copy()
    for _ in range(5):
        with tf.GradientTape() as g:
            loss = tf.reduce_mean((model(X, training=True) - t) ** 2)
        sgd.apply(g.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        got = found(Tensor(data=X), Tensor(data=t))[1]
        np.testing.assert_allclose(got.data.item(), float(loss), rtol=1e-4)
    params = found.get_params()
    for v in model.trainable_variables:
        np.testing.assert_allclose(params[v.path].data, np.asarray(v), rtol=1e-3, atol=1e-5, err_msg=v.path)
    np.testing.assert_array_equal(np.asarray(model.get_layer("middle").kernel), still)
    norm = model.get_layer("norm")
    for (name, ours_), theirs in zip(found.imported.statistics.items(), (norm.moving_mean, norm.moving_variance), strict=True):
        np.testing.assert_allclose(ours_.data, np.asarray(theirs), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_layer_that_is_used_twice_stays_one() -> None:
    x = keras.Input((6,))
    dense, norm = layers.Dense(6), layers.BatchNormalization(scale=False)
    model = keras.Model(x, norm(dense(norm(dense(x)))))
    found = sonnx.from_tensorflow(model, train=True)
    assert trained(found) == {v.path for v in (dense.kernel, dense.bias, norm.beta)}
    assert [n.op_type for n in found.imported.graph.nodes].count("BatchNormalization") == 2


class Text(keras.Model):
    """Words through an embedding, attention and a recurrent layer; it creates its weights when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = layers.Embedding(9, 8), layers.MultiHeadAttention(2, 4, dropout=0.5)
        self.norm, self.lstm, self.drop = layers.LayerNormalization(), layers.LSTM(5), layers.Dropout(0.5)

    def call(self, ids: Any, training: bool = False) -> Any:
        x = self.embed(ids)
        return self.lstm(self.drop(self.norm(x + self.attend(x, x, training=training)), training=training))


@pytest.mark.parametrize(("train", "use_graph"), [(False, False), (True, False), (True, True)])
def test_a_model_of_its_own_class(train: bool, use_graph: bool, mean_squares: Any) -> None:
    model, ids = Text(), np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    found = sonnx.from_tensorflow(model, ids, train=train, model_class=mean_squares)
    found.graph(use_graph)
    kinds = [n.op_type for n in found.imported.graph.nodes]
    assert kinds.count("Dropout") == (2 if train else 0)  # one of them within the attention
    found.eval()
    agree(ours(found, ids), [model(ids)])
    if train:
        assert trained(found) == {v.path for v in model.trainable_variables}
        before = {n: np.array(p.data) for n, p in found.get_params().items()}
        found.optimizer = opt.SGD(lr=0.1)
        found.train()
        found(Tensor(data=ids), Tensor(data=np.ones((2, 5), F)))
        assert not found.not_traceable
        moved = {n for n, p in found.get_params().items() if not np.array_equal(p.data, before[n])}
        assert moved | {n for n in before if n.endswith("key/bias")} == trained(found)  # softmax takes no notice of that one


def test_a_layer_for_every_kind_of_image() -> None:
    x = image = keras.Input((9, 9, 4))
    x = layers.DepthwiseConv2D(3, 2, "same")(x)
    x = layers.PReLU()(layers.SeparableConv2D(5, 3, dilation_rate=2, padding="same")(x))
    x = layers.SpatialDropout2D(0.5)(layers.Conv2DTranspose(4, 3, 2, "same")(x))  # drops maps; ONNX has no such operator
    model = keras.Model(image, layers.GroupNormalization(2)(layers.UpSampling2D(2, interpolation="bilinear")(x)))
    found = sonnx.from_tensorflow(model, train=True)
    assert trained(found) == {v.path for v in model.trainable_variables}
    assert "Dropout" not in [n.op_type for n in found.imported.graph.nodes]


def test_what_differs_is_an_error_that_check_can_switch_off() -> None:
    def noisy(x: Any) -> Any:
        return x + tf.random.uniform(tf.shape(x))

    with pytest.raises(
        sonnx.ExporterFailure, match=rf"TensorFlow {tf.__version__}.*a model with other outputs.*'output_0'.*differs by"
    ) as e:
        sonnx.from_tensorflow(noisy, X)
    assert e.value.code == "SX911" and "check=False" in e.value.hint
    assert ours(sonnx.from_tensorflow(noisy, X, check=False), X)[0].shape == X.shape


def test_errors_of_the_exporter_name_it() -> None:
    with pytest.raises(sonnx.ExporterFailure, match="could not export") as e:
        sonnx.from_tensorflow(lambda x: tf.matmul(x, x), np.ones((2, 3), F))
    assert e.value.code == "SX910" and e.value.framework_version.startswith(tf.__version__) and "MatMul" in e.value.reason
    with pytest.raises(UnsupportedModel, match="SelfAdjointEigV2"):  # tf2onnx writes what it does not know by TensorFlow's name
        sonnx.from_tensorflow(lambda x: tf.linalg.eigh(x)[0], np.eye(3, dtype=F))


def test_arguments_that_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Keras 3"):
        sonnx.from_tensorflow(lambda x: x, X, train=True)
    with pytest.raises(InvalidInput, match="does not declare its inputs"):
        sonnx.from_tensorflow(Text())
    with pytest.raises(InvalidInput, match="input_names"):
        sonnx.from_tensorflow(net(), X, input_names=["a", "b"])
    with pytest.raises(InvalidInput, match="dynamic_axes names 'x'"):
        sonnx.from_tensorflow(net(), dynamic_axes={"x": {0: "n"}})
