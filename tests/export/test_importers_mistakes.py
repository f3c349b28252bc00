"""Frequent mistakes of ONNX importers, one case each: `sonnx.SONNXModel` against onnxruntime, and the model written again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import sonnx, tensor
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

F = np.float32
RNG = np.random.default_rng(7)


def f(*shape: int) -> Any:
    """Random floats."""
    return RNG.standard_normal(shape).astype(F)


def i(*values: int) -> Any:
    """A vector of int64."""
    return np.array(values, np.int64)


X4, X3 = f(2, 3, 5, 6), f(2, 3, 7)
FLOAT4, FLOAT3 = "float[a,b,c,d] x", "float[a,b,c] x"


def of(rank: int, nodes: str, more: str = "", out: str = "float[] y") -> str:
    """A graph of one float input `x` of some rank, more inputs, and the nodes."""
    sizes = ",".join("abcde"[:rank])
    return f"g (float[{sizes}] x{more}) => ({out}) {{ {nodes} }}"


SEMANTICS: dict[str, tuple[str, int, list[Any], dict[str, Any]]] = {
    # name: (graph, opset, inputs, initializers)
    "Min with a constant is an upper bound": (of(4, "y = Min(x, c)"), 13, [X4], {"c": F(0.5)}),
    "Max with a constant is a lower bound": (of(4, "y = Max(x, c)"), 13, [X4], {"c": F(0.5)}),
    "Reduce keeps axes by default": (of(4, "y = ReduceMax <axes = [1]>(x)"), 13, [X4], {}),
    "ReduceSum by an input": (of(4, "y = ReduceSum <keepdims = 1>(x, a)"), 13, [X4], {"a": i(1, -1)}),
    "ArgMax keeps its axis by default": (of(4, "y = ArgMax <axis = 2>(x)", out="int64[] y"), 13, [X4], {}),
    "ArgMin without it, the last of equals": (
        of(4, "r = Round(x) y = ArgMin <axis = -1, keepdims = 0, select_last_index = 1>(r)", out="int64[] y"), 13, [X4], {}
    ),
    "HardSigmoid defaults": (of(4, "y = HardSigmoid(x)"), 6, [X4 * 4], {}),
    "Split along the last axis": (of(4, "y, z = Split <axis = -1>(x, s)", out="float[] y, float[] z"), 13, [X4], {"s": i(2, 4)}),
    "Split by the attribute": (of(4, "y, z = Split <axis = 2, split = [1, 4]>(x)", out="float[] y, float[] z"), 11, [X4], {}),
    "Expand to a higher rank": (of(3, "y = Expand(x, s)"), 13, [f(3, 1, 2)], {"s": i(2, 1, 1, 4, 1)}),
    "Conv in one dimension": (of(3, "y = Conv <strides = [2], pads = [1, 2]>(x, w, b)"), 13, [X3],
                              {"w": f(4, 3, 3), "b": f(4)}),
    "Conv in three dimensions, by groups": (
        of(5, "y = Conv <group = 2, dilations = [1, 2, 1], pads = [0, 1, 0, 1, 0, 1]>(x, w)"), 13,
        [f(1, 4, 4, 5, 6)], {"w": f(6, 2, 2, 2, 3)}
    ),
    "Conv by groups": (of(4, "y = Conv <group = 3>(x, w)"), 13, [X4], {"w": f(6, 1, 3, 3)}),
    "ConvTranspose in one dimension": (
        of(3, "y = ConvTranspose <strides = [2], output_padding = [1]>(x, w)"), 13, [X3], {"w": f(3, 4, 3)}
    ),
    "ConvTranspose in three dimensions": (
        of(5, "y = ConvTranspose <strides = [1, 2, 1], pads = [1, 0, 0, 0, 1, 0]>(x, w)"), 13,
        [f(1, 2, 3, 4, 3)], {"w": f(2, 3, 2, 3, 2)}
    ),
    "pooling in one dimension": (of(3, "y = MaxPool <kernel_shape = [3], strides = [2]>(x)"), 12, [X3], {}),
    "pooling in three dimensions": (
        of(5, "y = AveragePool <kernel_shape = [2, 2, 3], pads = [0, 1, 1, 1, 0, 1]>(x)"), 13,
        [f(1, 2, 4, 5, 6)], {}
    ),
    "ceil_mode with averages": (
        of(4, "y = AveragePool <kernel_shape = [2, 3], strides = [2, 2], ceil_mode = 1>(x)"), 19, [X4], {}
    ),
    "averages that count the padding": (
        of(4, "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1>(x)"), 13,
        [X4], {}
    ),
    "indices of MaxPool": (
        of(4, "y, z = MaxPool <kernel_shape = [2, 2], strides = [2, 2], pads = [0, 1, 1, 0]>(x)", out="float[] y, int64[] z"),
        12, [X4], {}
    ),
    "Pad by reflection": (of(4, 'y = Pad <mode = "reflect">(x, p)'), 13, [X4], {"p": i(0, 0, 2, 1, 0, 0, 1, 3)}),
    "Pad by edges": (of(4, 'y = Pad <mode = "edge">(x, p)'), 13, [X4], {"p": i(0, 1, 2, 0, 1, 0, 0, 3)}),
    "Pad by negative amounts": (of(4, "y = Pad(x, p, v)"), 13, [X4],
                                {"p": i(0, -1, 2, -2, 0, 0, -1, 1), "v": F(3)}),
    "pads of one side": (of(4, "y = Conv <pads = [0, 1, 2, 0]>(x, w)"), 13, [X4], {"w": f(2, 3, 3, 3)}),
    "pads of one side, pooling": (
        of(4, "y = MaxPool <kernel_shape = [3, 3], pads = [2, 0, 0, 1]>(x)"), 12, [X4], {}
    ),
    "PRelu by broadcasting": (of(4, "y = PRelu(x, s)"), 16, [X4], {"s": f(3, 1, 1)}),
    "Constant as a float": (of(1, "c = Constant <value_float = 2.5>() y = Mul(x, c)"), 13, [f(4)], {}),
    "Constant as integers": (
        of(3, "c = Constant <value_ints = [3, -1]>() y = Reshape(x, c)"), 13, [f(2, 3, 7)], {}
    ),
    "Constant as floats": (of(1, "c = Constant <value_floats = [1.5, 2, 3, 4]>() y = Add(x, c)"), 13, [f(4)], {}),
    "Constant as an integer": (
        of(1, "c = Constant <value_int = 3>() d = Cast <to = 1>(c) y = Add(x, d)"), 13, [f(4)], {}
    ),
    "Constant as a tensor": (of(1, "c = Constant <value = float[2] {1, 2}>() y = Add(x, c)"), 13, [f(2)], {}),
    "Clip by attributes": (of(4, "y = Clip <min = -0.5, max = 0.25>(x)"), 10, [X4], {}),
    "Squeeze by an input": (of(3, "y = Squeeze(x, a1)"), 13, [f(1, 3, 1)], {"a1": i(0)}),
    "Unsqueeze by an input": (of(3, "y = Unsqueeze(x, a1)"), 13, [X3], {"a1": i(0, -1)}),
    "Softmax over one axis": (of(4, "y = Softmax <axis = 1>(x)"), 13, [X4], {}),
    "Softmax over all that follows": (of(4, "y = Softmax <axis = 1>(x)"), 11, [X4], {}),
}  # fmt: skip

COMPUTED: dict[str, tuple[str, int, list[Any], dict[str, Any]]] = {
    "Reshape": (of(4, "t = Neg(s) u = Neg(t) y = Reshape(x, u)", ", int64[2] s"), 13, [X4, i(6, -1)], {}),
    "Slice": (
        of(4, "t = Neg(s) y = Slice(x, t, e, a, st)", ", int64[n] s, int64[n] e"), 13,
        [X4, i(-1, 4), i(3, -6)], {"a": i(1, -1), "st": i(1, -2)}
    ),
    "Expand": (of(3, "s = Shape(x) t = Mul(s, k) y = Expand(x, t)"), 13, [f(2, 1, 3)], {"k": i(1, 4, 1)}),
    "Pad": (of(3, "t = Neg(p) y = Pad(x, t)", ", int64[6] p"), 13, [X3, i(0, -1, -2, 0, 0, 1)], {}),
    "Clip": (of(3, "m = ReduceMean <keepdims = 0>(x) n = Neg(m) l = Min(m, n) y = Clip(x, l)"), 13, [X3], {}),
    "Resize": (
        f"g ({FLOAT4}, int64[4] s) => (float[] y) {{ t = Neg(s) u = Neg(t) "
        'y = Resize <mode = "linear">(x, "", "", u) }', 13, [X4, i(2, 3, 9, 4)], {}
    ),
    "Range": ("g (float s, float e) => (float[] y) { d = Sub(e, s) h = Mul(d, q) y = Range(s, e, h) }", 13,
              [F(1), F(7)], {"q": F(0.25)}),
}  # fmt: skip


def elsewhere() -> Iterator[Any]:
    modes = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric", "tf_crop_and_resize")
    for mode in modes:
        for kind in ("nearest", "linear", "cubic"):
            region = "roi" if mode == "tf_crop_and_resize" else '""'
            opset = 19 if mode == "half_pixel_symmetric" else 13
            text = (f'g ({FLOAT4}) => (float[] y) {{ y = Resize <mode = "{kind}", coordinate_transformation_mode = "{mode}">'
                    f'(x, {region}, "", s) }}')  # fmt: skip
            held: dict[str, Any] = {"s": i(2, 3, 7, 9)}
            if mode == "tf_crop_and_resize":
                held["roi"] = F([0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9])
            yield pytest.param(text, opset, [X4], held, id=f"Resize {mode} {kind}")
    for kind, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            text = (f'g (float[t,n,k] x) => (float[] y, float[] h) {{ y, h = {kind} <hidden_size = 4, direction = "{direction}">'
                    "(x, w, r, b) }")  # fmt: skip
            held = {"w": f(d, gates * 4, 3), "r": f(d, gates * 4, 4), "b": f(d, gates * 8)}
            yield pytest.param(text, 14, [f(5, 2, 3)], held, id=f"{kind} {direction}")
    control = {
        "If": ("g (bool c, float[n] x) => (float[n] y) { y = If(c) <then_branch = a () => (float[n] p) { p = Neg(x) },"
               " else_branch = b () => (float[n] q) { q = Exp(x) }> }", [np.True_, f(3)]),
        "Loop": ("g (int64 n, bool c, float[k] x) => (float[k] y, float[m,k] s) { y, s = Loop(n, c, x) <body ="
                 " b (int64 j, bool d, float[k] v) => (bool e, float[k] w, float[k] u)"
                 " { e = Identity(d) w = Mul(v, v) u = Neg(v) }> }",
                 [np.int64(3), np.True_, f(2)]),
        "Scan": ("g (float[k] z, float[m,k] x) => (float[k] y, float[m,k] s) { y, s = Scan"
                 " <num_scan_inputs = 1, body = b (float[k] v, float[k] u) => (float[k] w, float[k] p)"
                 " { w = Add(v, u) p = Identity(w) }>(z, x) }", [f(2), f(4, 2)]),
    }  # fmt: skip
    for name, (text, fed) in control.items():
        yield pytest.param(text, 16, fed, {}, id=name)
    channels = {"s": f(3), "b": f(3), "m": f(3), "v": np.abs(f(3)) + F(0.5)}
    others: dict[str, tuple[str, int, list[Any], dict[str, Any]]] = {
        "Einsum": ('g (float[a,b] x, float[c,b] z) => (float[] y) { y = Einsum <equation = "ij, kj -> ki">(x, z) }', 13,
                   [f(2, 3), f(4, 3)], {}),
        "BatchNormalization": (of(4, "y = BatchNormalization(x, s, b, m, v)"), 15, [X4], channels),
        "InstanceNormalization": (of(4, "y = InstanceNormalization(x, s, b)"), 6, [X4],
                                  {k: channels[k] for k in "sb"}),
        "LayerNormalization": (of(4, "y = LayerNormalization <axis = -2>(x, s)"), 17, [X4], {"s": f(5, 6)}),
        "LpNormalization": (of(4, "y = LpNormalization <axis = 1, p = 1>(x)"), 1, [X4], {}),
        "LRN": (of(4, "y = LRN <size = 3, alpha = 0.1>(x)"), 13, [X4], {}),
        "MeanVarianceNormalization": (of(4, "y = MeanVarianceNormalization(x)"), 13, [X4], {}),
        "Dropout": (of(4, "y = Dropout(x, r)"), 13, [X4], {"r": F(0.5)}),
        "ConvTranspose": (of(4, "y = ConvTranspose <strides = [2, 3], pads = [1, 0, 0, 2], group = 3>(x, w)"),
                          13, [X4], {"w": f(3, 2, 3, 2)}),
    }  # fmt: skip
    for name, (text, opset, fed, held) in others.items():
        yield pytest.param(text, opset, fed, held, id=name)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle("onnxruntime", optimise=False) as made:
        yield made


def agree(oracle: Oracle, text: str, opset: int, inputs: list[Any], held: dict[str, Any]) -> None:
    model: ModelProto = parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in held.items())
    feeds = dict(zip((v.name for v in model.graph.input), (np.asarray(a) for a in inputs), strict=True))
    expected = oracle.run(model.SerializeToString(), feeds, timeout=60)
    imported = sonnx.SONNXModel(model)
    imported.eval()
    found = imported.forward(*(tensor.Tensor(data=a, requires_grad=False) for a in feeds.values()))
    again = sonnx.prepare(sonnx.export(imported), optimize=0).run(list(feeds.values()))
    for output, ours, written in zip(model.graph.output, found, again, strict=True):
        theirs, mine = expected[output.name], tensor.to_numpy(ours)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(written, mine)


@pytest.mark.row("I5")
@pytest.mark.parametrize("name", SEMANTICS)
def test_semantics(name: str, oracle: Oracle) -> None:
    agree(oracle, *SEMANTICS[name])


@pytest.mark.row("I6")
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_arguments(name: str, oracle: Oracle) -> None:
    agree(oracle, *COMPUTED[name])


@pytest.mark.row("I7")
@pytest.mark.parametrize(("text", "opset", "inputs", "held"), list(elsewhere()))
def test_what_importers_lack(text: str, opset: int, inputs: list[Any], held: dict[str, Any], oracle: Oracle) -> None:
    agree(oracle, text, opset, inputs, held)


def test_a_rank_that_only_values_say() -> None:
    """The length of a shape is open: with example inputs the model can be written, without them it says what is missing."""
    text = of(4, "t = Neg(s) u = Neg(t) y = Reshape(x, u)", ", int64[n] s")
    model = sonnx.SONNXModel(parser.parse_model(f'<ir_version: 9, opset_import: ["": 13]> {text}'))
    model.eval()
    with pytest.raises(InvalidInput, match="the rank of the output 'y' is not known"):
        sonnx.export(model)
    shape = i(6, -1)
    proto = sonnx.export(model, [tensor.Tensor(data=a, requires_grad=False) for a in (X4, shape)])
    np.testing.assert_array_equal(sonnx.prepare(proto).run([X4, shape])[0], X4.reshape(6, -1))
