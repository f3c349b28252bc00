"""Rules of products, normalizations, convolutions, poolings and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from .call import Dim, Type, TypedCall, Unsure, broadcast, covers, may_be
from .elementwise import OLDEST


@covers("Softmax", "LogSoftmax", "Hardmax")
def _softmax(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is not None:
        c.axis(c.integer("axis", 1 if c.version < 13 else -1), len(c.shapes[0]))
    return [(c.codes[0], c.shapes[0])]


@covers("Dropout")
def _dropout(c: TypedCall) -> Sequence[Type]:
    if c.version < 12 or any(c.has(i) and c.shape(i) != () for i in (1, 2)):
        raise Unsure
    return [(c.codes[0], c.shapes[0]), (int(TensorProto.BOOL), c.shapes[0])]


@covers("MatMul")
def _matmul(c: TypedCall) -> Sequence[Type]:
    if c.shapes[0] is None or c.shapes[1] is None:
        return [(c.codes[0], None)]
    a, b = c.shapes[0], c.shapes[1]
    if not a or not b:
        raise Unsure
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    if not may_be((left[-1],), (right[-2],)):
        raise Unsure
    rows, columns = left[-2:-1] if len(a) > 1 else (), right[-1:] if len(b) > 1 else ()
    return [(c.codes[0], (*broadcast([left[:-2], right[:-2]]), *rows, *columns))]


@covers("Gemm")
def _gemm(c: TypedCall) -> Sequence[Type]:
    a, b = c.shape(0), c.shape(1)
    if len(a) != 2 or len(b) != 2 or not {c.integer("transA", 0), c.integer("transB", 0)} <= {0, 1}:
        raise Unsure
    rows, inner = a[::-1] if c.integer("transA", 0) else a
    other, columns = b[::-1] if c.integer("transB", 0) else b
    if not may_be((inner,), (other,)):
        raise Unsure
    return [(c.codes[0], (rows, columns))]


@covers("BatchNormalization")
def _batch_normalization(c: TypedCall) -> Sequence[Type]:
    training = c.integer("training_mode", 0)
    if c.version <= OLDEST or training not in (0, 1) or (c.outputs != 1 and (c.outputs != 3 or not training)):
        raise Unsure
    first = c.shape(0)
    channels: Dim = first[1] if len(first) > 1 else 1
    for i in range(1, 5):
        shape = c.shape(i)
        if not may_be(shape, (channels,)):
            raise Unsure
        channels = shape[0] if channels is None or isinstance(shape[0], int) else channels
    return [(c.codes[0], first), (c.codes[3], (channels,)), (c.codes[4], (channels,))]


@covers("LayerNormalization")
def _layer_normalization(c: TypedCall) -> Sequence[Type]:
    if c.outputs != 1:
        raise Unsure
    c.axis(c.integer("axis", -1), len(c.shape(0)))
    return [(c.codes[0], c.shapes[0])]


@covers("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(c: TypedCall) -> Sequence[Type]:
    scores, labels = c.shape(0), c.shape(1)
    reduction = c.string("reduction", b"mean")
    weights = c.shape(2) if c.has(2) else scores[1:2]
    if len(scores) < 2 or not may_be((scores[0], *scores[2:]), labels) or reduction not in (b"none", b"mean", b"sum"):
        raise Unsure
    known = all(isinstance(d, int) for d in (*scores, *labels))
    if not may_be(weights, scores[1:2]) or (not known and (reduction == b"none" or c.outputs > 1)):
        raise Unsure
    return [(c.codes[0], labels if reduction == b"none" else ()), (c.codes[0], scores)][: len(c.form.outputs)]


@covers("LSTM", "GRU", "RNN")
def _recurrent(c: TypedCall) -> Sequence[Type]:
    x, hidden = c.shape(0), c.integer("hidden_size", 0)
    directions = {b"forward": 1, b"reverse": 1, b"bidirectional": 2}.get(c.string("direction", b"forward"))
    if c.version < 7 or len(x) != 3 or not 0 < hidden < 1 << 31 or directions is None or c.integer("layout", 0):
        raise Unsure
    last = (c.codes[0], (directions, x[1], hidden))
    return [(c.codes[0], (x[0], directions, x[1], hidden)), last, last][: len(c.form.outputs)]


@covers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(c: TypedCall) -> Sequence[Type]:
    shape = c.shape(0)
    if len(shape) < 3:
        raise Unsure
    return [(c.codes[0], (*shape[:2], *(1,) * (len(shape) - 2)))]


@dataclass
class _SpatialAttributes:
    """The attributes of a convolution or pooling, for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    reach: tuple[int, ...]  # the places that a kernel covers


def _windows(c: TypedCall, rank: int, kernel: tuple[int, ...] | None) -> _SpatialAttributes:
    if rank < 1 or kernel is None or c.string("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Unsure
    valid = c.string("auto_pad", b"NOTSET") == b"VALID"
    strides, dilations, pads = c.integers("strides"), c.integers("dilations"), c.integers("pads")
    strides = (1,) * rank if strides is None else strides
    dilations = (1,) * rank if dilations is None else dilations
    pads = (0,) * (2 * rank) if pads is None else pads
    if (len(kernel), len(strides), len(dilations), len(pads)) != (rank, rank, rank, 2 * rank):
        raise Unsure
    if valid and "pads" in c.attributes:
        raise Unsure
    numbers = (*kernel, *strides, *dilations)
    if min(numbers) < 1 or min(pads) < 0 or max((*numbers, *pads)) >= 1 << 31:
        raise Unsure
    return _SpatialAttributes(kernel, strides, pads, tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)))


def _placed(c: TypedCall, shape: tuple[Dim, ...], windows: _SpatialAttributes) -> list[Dim]:
    """The number of places of a window along each spatial axis."""
    made: list[Dim] = []
    rank = len(shape)
    for i, d in enumerate(shape):
        if not isinstance(d, int):
            made.append(None)
            continue
        room = d + windows.pads[i] + windows.pads[i + rank] - windows.reach[i]
        if room < 0:
            raise Unsure
        made.append(room // windows.strides[i] + 1)
    return made


def _grouped(c: TypedCall, channels: Dim, each: Dim) -> bool:
    """Whether the channels of a convolution can be split into its groups, with `each` in one of them if it is known."""
    group = c.integer("group", 1)
    if not 0 < group < 1 << 31:
        return False
    return not isinstance(channels, int) or (channels % group == 0 and (not isinstance(each, int) or channels == each * group))


@covers("Conv")
def _conv(c: TypedCall) -> Sequence[Type]:
    x, w = c.shape(0), c.shape(1)
    rank = len(x) - 2
    kernel = c.integers("kernel_shape")
    if len(w) != len(x) or rank < 1 or not _grouped(c, x[1], w[1]):
        raise Unsure
    if kernel is None:
        kernel = tuple(d for d in w[2:] if isinstance(d, int))
        if len(kernel) < rank:
            return [(c.codes[0], None)]
    windows = _windows(c, rank, kernel)
    return [(c.codes[0], (x[0], w[0], *_placed(c, x[2:], windows)))]


@covers("MaxPool", "AveragePool", "LpPool")
def _pool(c: TypedCall) -> Sequence[Type]:
    if c.integer("ceil_mode", 0):
        raise Unsure
    x = c.shape(0)
    rank = len(x) - 2
    windows = _windows(c, rank, c.integers("kernel_shape"))
    shape = (*x[:2], *_placed(c, x[2:], windows))
    return [(c.codes[0], shape), (int(TensorProto.INT64), shape)][: 2 if c.name == "MaxPool" else 1]


@covers("ConvTranspose")
def _conv_transpose(c: TypedCall) -> Sequence[Type]:
    x, w = c.shape(0), c.shape(1)
    rank, group = len(x) - 2, c.integer("group", 1)
    kernel = c.integers("kernel_shape")
    if len(w) != len(x) or "output_shape" in c.attributes or rank < 1 or not may_be(x[1:2], w[:1]) or not _grouped(c, x[1], None):
        raise Unsure
    if kernel is None:
        kernel = tuple(d for d in w[2:] if isinstance(d, int))
    windows = _windows(c, rank, kernel)
    padding = c.integers("output_padding")
    more = (0,) * rank if padding is None else padding
    if len(more) != rank or not all(0 <= m < 1 << 31 for m in more):
        raise Unsure
    made: list[Dim] = []
    for i, d in enumerate(x[2:]):
        if not isinstance(d, int):
            made.append(None)
            continue
        size = windows.strides[i] * (d - 1) + more[i] + windows.reach[i] - windows.pads[i] - windows.pads[i + rank]
        if size < 0:
            raise Unsure
        made.append(size)
    channels: Dim = w[1] * group if isinstance(w[1], int) else w[1] if group == 1 else None
    return [(c.codes[0], (x[0], channels, *made))]


@covers("Resize")
def _resize(c: TypedCall) -> Sequence[Type]:
    if c.version < 11 or not all(d is None for d in c.shape(0)) or c.has(3) or "axes" in c.attributes:
        raise Unsure
    scales = c.shape(2)
    if c.values[2] is not None and scales != (len(c.shape(0)),):
        raise Unsure
    return [(c.codes[0], c.shapes[0])]


@covers("DequantizeLinear")
def _dequantize(c: TypedCall) -> Sequence[Type]:
    if "output_dtype" in c.attributes:
        raise Unsure
    return [(c.codes[1], c.shapes[0])]


@covers("QuantizeLinear")
def _quantize(c: TypedCall) -> Sequence[Type]:
    if not c.has(2) or "output_dtype" in c.attributes:
        raise Unsure
    return [(c.codes[2], c.shapes[0])]
