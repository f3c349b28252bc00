"""Makes tests/frameworks/tensorflow: 10 image nets at reduced width and depth, exported from Keras by tf2onnx.

    tox -e frameworks-tensorflow     # TensorFlow is needed here and nowhere else

Each net is built as keras.applications builds its kind: channels last, `same` padding that is uneven, batch norms without
scale, preprocessing as layers, heads that keep the sizes of 1; weights are random and seeded.  NET-tf2onnx-11.onnx is in the
opset of old, NET-tf2onnx-17.onnx in a newer one.  tf2onnx orders some nodes and names differently from run to run: unlike
those of the other scripts, its files are not the same bytes when they are made anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from common import export_all, images, keep, keep_data
from keras import layers

Net = Callable[[Any], Any]


def norm(x: Any, act: Any = None, **options: Any) -> Any:
    """Batch norm, and an activation by its name or as a function."""
    x = layers.BatchNormalization(epsilon=1.001e-5, **options)(x)
    return layers.Activation(act)(x) if act else x


def conv(x: Any, o: int, k: Any = 3, s: int = 1, act: Any = "relu", padding: str = "same", **options: Any) -> Any:
    """Convolution without bias, batch norm, activation."""
    return norm(layers.Conv2D(o, k, s, padding, use_bias=False)(x), act, **options)


def depthwise(x: Any, k: int, s: int, act: Any) -> Any:
    """A filter for each channel; where it halves, padded ahead as Keras' mobile nets do."""
    if s == 2:
        x = layers.ZeroPadding2D(((k // 2 - 1, k // 2), (k // 2 - 1, k // 2)))(x)
    return norm(layers.DepthwiseConv2D(k, s, "same" if s == 1 else "valid", use_bias=False)(x), act)


def squeeze(x: Any, inner: int, act: Any = "relu", gate: Any = "sigmoid") -> Any:
    """Squeeze and excite, by a mean that keeps its sizes of 1."""
    c = x.shape[-1]
    y = layers.GlobalAveragePooling2D(keepdims=True)(x)
    y = layers.Conv2D(c, 1, activation=gate)(layers.Conv2D(inner, 1, activation=act)(y))
    return layers.Multiply()([x, y])


def scores(x: Any) -> Any:
    """Global mean and a softmax over 10 classes."""
    return layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))


def hard_sigmoid(x: Any) -> Any:
    """As keras.applications writes it: relu6(x + 3) / 6."""
    return layers.ReLU(6.0)(x + 3.0) * (1.0 / 6.0)


def hard_swish(x: Any) -> Any:
    """x times its hard sigmoid."""
    return layers.Multiply()([x, hard_sigmoid(x)])


def vggnet(x: Any) -> Any:
    """Pairs of 3x3 between pools, dense layers."""
    for o in (8, 12, 16):
        for _ in range(2):
            x = layers.Conv2D(o, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2, 2)(x)
    x = layers.Dropout(0.5)(layers.Dense(24, activation="relu")(layers.Flatten()(x)))
    return layers.Dense(10, activation="softmax")(x)


def resnet(x: Any) -> Any:
    """ResNet50: stem padded ahead, strides in the first 1x1, biased convolutions."""

    def block(x: Any, inner: int, s: int, project: bool) -> Any:
        beside = norm(layers.Conv2D(4 * inner, 1, s)(x)) if project else x
        y = norm(layers.Conv2D(inner, 1, s)(x), "relu")
        y = norm(layers.Conv2D(inner, 3, padding="same")(y), "relu")
        return layers.Activation("relu")(layers.Add()([beside, norm(layers.Conv2D(4 * inner, 1)(y))]))

    x = norm(layers.Conv2D(8, 7, 2)(layers.ZeroPadding2D(3)(x)), "relu")
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for inner, s, project in ((4, 1, True), (4, 1, False), (8, 2, True), (8, 1, False), (12, 2, True)):
        x = block(x, inner, s, project)
    return scores(x)


def resnetv2(x: Any) -> Any:
    """ResNet50V2: batch norm and relu before the convolutions, strides in the last block, a pooled shortcut."""

    def block(x: Any, inner: int, s: int, project: bool) -> Any:
        ready = norm(x, "relu")
        beside = layers.Conv2D(4 * inner, 1, s)(ready) if project else layers.MaxPooling2D(1, s)(x) if s > 1 else x
        y = conv(ready, inner, 1)
        y = layers.Conv2D(inner, 3, s, use_bias=False)(layers.ZeroPadding2D(1)(y))
        return layers.Add()([beside, layers.Conv2D(4 * inner, 1)(norm(y, "relu"))])

    x = layers.Conv2D(8, 7, 2)(layers.ZeroPadding2D(3)(x))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for inner, s, project in ((4, 1, True), (4, 2, False), (8, 1, True), (8, 2, False), (12, 1, True)):
        x = block(x, inner, s, project)
    return scores(norm(x, "relu"))


def mobilenetv1(x: Any) -> Any:
    """Depthwise and pointwise in turn, relu6; a convolution on a kept 1x1 as the classifier."""
    x = conv(x, 8, 3, 2, tf.nn.relu6)
    for o, s in ((12, 1), (16, 2), (16, 1), (24, 2), (32, 1)):
        x = conv(depthwise(x, 3, s, tf.nn.relu6), o, 1, act=tf.nn.relu6)
    x = layers.Conv2D(10, 1, padding="same")(layers.Dropout(1e-3)(layers.GlobalAveragePooling2D(keepdims=True)(x)))
    return layers.Activation("softmax")(layers.Reshape((10,))(x))


def inverted(x: Any, inner: int, o: int, k: int, s: int, act: Any, excite: Callable[[Any], Any] | None = None) -> Any:
    """Widen, filter each channel, perhaps squeeze and excite, narrow; added where shapes allow."""
    y = conv(x, inner, 1, act=act) if inner != x.shape[-1] else x
    y = depthwise(y, k, s, act)
    y = conv(excite(y) if excite else y, o, 1, act=None)
    return layers.Add()([x, y]) if s == 1 and x.shape[-1] == o else y


def mobilenetv2(x: Any) -> Any:
    """Inverted residuals with relu6."""
    x = conv(x, 8, 3, 2, tf.nn.relu6)
    for inner, o, s in ((8, 8, 1), (24, 12, 2), (32, 12, 1), (32, 16, 2), (48, 16, 1)):
        x = inverted(x, inner, o, 3, s, tf.nn.relu6)
    return scores(conv(x, 48, 1, act=tf.nn.relu6))


def mobilenetv3(x: Any) -> Any:
    """Hard swish in parts, squeeze and excite by hard sigmoid, images rescaled inside the net."""
    x = conv(layers.Rescaling(0.5, -0.1)(x), 8, 3, 2, hard_swish)
    for inner, o, k, s, act, excited in ((8, 8, 3, 2, "relu", True), (24, 12, 3, 1, "relu", False),
                                         (32, 16, 5, 2, hard_swish, True), (40, 16, 5, 1, hard_swish, True)):  # fmt: skip
        excite = (lambda y: squeeze(y, 8, "relu", hard_sigmoid)) if excited else None
        x = inverted(x, inner, o, k, s, act, excite)
    x = layers.GlobalAveragePooling2D(keepdims=True)(conv(x, 40, 1, act=hard_swish))
    x = layers.Dropout(0.2)(hard_swish(layers.Conv2D(48, 1)(x)))
    return layers.Activation("softmax")(layers.Flatten()(layers.Conv2D(10, 1)(x)))


def efficientnet(x: Any) -> Any:
    """MBConv with swish and squeeze and excite, images rescaled and normalised inside the net."""
    x = layers.Normalization(mean=[0.1, 0.0, -0.1], variance=[0.9, 1.0, 1.1])(layers.Rescaling(0.5)(x))
    x = norm(layers.Conv2D(8, 3, 2, use_bias=False)(layers.ZeroPadding2D(((0, 1), (0, 1)))(x)), "swish")
    for inner, o, k, s in ((8, 8, 3, 1), (32, 12, 3, 2), (48, 12, 3, 1), (48, 16, 5, 2), (48, 16, 5, 1)):
        ratio = max(1, x.shape[-1] // 4)
        x = inverted(x, inner, o, k, s, "swish", lambda y, ratio=ratio: squeeze(y, ratio, "swish"))
    return scores(conv(x, 48, 1, act="swish"))


def inceptionnet(x: Any) -> Any:
    """Inception v3: batch norms without scale, 1x7 and 7x1, means that do not count the padding, twins of 1x3 and 3x1."""

    def unit(x: Any, o: int, k: Any, s: int = 1, padding: str = "same") -> Any:
        return conv(x, o, k, s, padding=padding, scale=False)

    def mean(x: Any, o: int) -> Any:
        return unit(layers.AveragePooling2D(3, 1, "same")(x), o, 1)

    x = layers.MaxPooling2D(3, 2)(unit(unit(unit(x, 8, 3, 2, "valid"), 8, 3, padding="valid"), 12, 3))
    five, double = unit(unit(x, 6, 1), 8, 5), unit(unit(unit(x, 6, 1), 8, 3), 8, 3)
    x = layers.concatenate([unit(x, 8, 1), five, double, mean(x, 4)])
    double = unit(unit(unit(x, 8, 1), 8, 3), 8, 3, 2, "valid")
    x = layers.concatenate([unit(x, 12, 3, 2, "valid"), double, layers.MaxPooling2D(3, 2)(x)])
    seven = unit(unit(unit(x, 6, 1), 6, (1, 7)), 8, (7, 1))
    x = layers.concatenate([unit(x, 12, 1), seven, mean(x, 8)])
    split = unit(x, 8, 1)
    twins = layers.concatenate([unit(split, 6, (1, 3)), unit(split, 6, (3, 1))])
    return scores(layers.concatenate([unit(x, 12, 1), twins, mean(x, 8)]))


def densenet(x: Any) -> Any:
    """Every layer of a block sees the concatenation of all before it."""

    def block(x: Any, count: int) -> Any:
        for _ in range(count):
            y = layers.Conv2D(12, 1, use_bias=False)(norm(x, "relu"))
            y = layers.Conv2D(6, 3, padding="same", use_bias=False)(norm(y, "relu"))
            x = layers.Concatenate()([x, y])
        return x

    x = norm(layers.Conv2D(8, 7, 2, use_bias=False)(layers.ZeroPadding2D(3)(x)), "relu")
    x = block(layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x)), 3)
    x = layers.AveragePooling2D(2, 2)(layers.Conv2D(13, 1, use_bias=False)(norm(x, "relu")))
    return scores(norm(block(x, 4), "relu"))


def xception(x: Any) -> Any:
    """Separable convolutions with the activation before, pools beside strided projections."""

    def separable(x: Any, o: int) -> Any:
        return norm(layers.SeparableConv2D(o, 3, padding="same", use_bias=False)(x))

    x = conv(conv(x, 8, 3, 2, padding="valid"), 12, 3, padding="valid")
    for o, active in ((16, False), (24, True)):
        beside = conv(x, o, 1, 2, None)
        y = separable(layers.Activation("relu")(x) if active else x, o)
        y = layers.MaxPooling2D(3, 2, "same")(separable(layers.Activation("relu")(y), o))
        x = layers.add([y, beside])
    y = x
    for _ in range(3):
        y = separable(layers.Activation("relu")(y), 24)
    x = layers.add([y, x])
    return scores(layers.Activation("relu")(separable(x, 40)))


NETS: dict[str, tuple[Net, int]] = {
    "vggnet": (vggnet, 32), "resnet": (resnet, 32), "resnetv2": (resnetv2, 32), "mobilenetv1": (mobilenetv1, 32),
    "mobilenetv2": (mobilenetv2, 32), "mobilenetv3": (mobilenetv3, 32), "efficientnet": (efficientnet, 32),
    "inceptionnet": (inceptionnet, 40), "densenet": (densenet, 32), "xception": (xception, 32),
}  # fmt: skip
"""Each net and the size of its images."""


def net(name: str) -> keras.Model:
    """A net with seeded weights, and batch norms whose statistics are not 0 and 1, so that a mistake in them shows."""
    make, size = NETS[name]
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    image = keras.Input((size, size, 3), name="image")
    made = keras.Model(image, make(image), name=name)
    rng = np.random.default_rng(1)
    for layer in made.layers:
        if isinstance(layer, layers.BatchNormalization):
            for weight in layer.weights:
                low, high = (0.5, 1.5) if "gamma" in weight.name or "variance" in weight.name else (-0.2, 0.2)
                weight.assign(rng.uniform(low, high, weight.shape))
        else:
            for weight in layer.weights:
                if "kernel" in weight.name:
                    inputs = np.prod(weight.shape[:2] if "depthwise" in weight.name else weight.shape[:-1])
                    weight.assign(rng.standard_normal(weight.shape) * (2 / inputs) ** 0.5)
                elif "bias" in weight.name:
                    weight.assign(rng.uniform(-0.2, 0.2, weight.shape))
    last = [layer for layer in made.layers if layer.weights][-1]
    z = keras.Model(made.input, last.input)(images(size, last=True)[1]).numpy().reshape(3, -1) @ last.kernel.numpy().reshape(
        -1, 10
    )
    gain = 1 / z.std(axis=0).max()  # a softmax of scores that are large is 0 and 1, of scores that are small 0.1, for any image
    last.kernel.assign(last.kernel * gain)
    last.bias.assign(last.bias - gain * z.mean(axis=0))
    return made


def _changed(made: keras.Model) -> keras.Model:
    """The same net with other values of its parameters, and the same statistics."""
    rng = np.random.default_rng(2)
    for weight in made.trainable_weights:
        weight.assign_add(rng.uniform(0.01, 0.02, weight.shape))
    return made


def export(name: str, folder: Path) -> Iterator[Path]:
    """Write the data of a net and its files."""
    made = net(name)
    batches = images(NETS[name][1], last=True)
    data = folder / f"{name}.npz"
    keep_data(data, [[x] for x in batches], [[made(x, training=False).numpy()] for x in batches])
    yield data
    for opset in (11, 17):
        path = folder / f"{name}-tf2onnx-{opset}.onnx"
        model, _ = tf2onnx.convert.from_keras(made, opset=opset)
        other, _ = tf2onnx.convert.from_keras(_changed(net(name)), opset=opset)
        keep(path, model, other)
        yield path


if __name__ == "__main__":
    export_all(__doc__, "tensorflow", NETS, export)
