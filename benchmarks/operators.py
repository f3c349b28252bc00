"""Compares every operator's definition with onnx.reference.ReferenceEvaluator: one node, about 1e5 to 1e6 elements.

    tox -e benchmark-operators [-- --select Softmax --json benchmarks/operators.json --onnxruntime]

Both run in this process in turns, on the same inputs, for up to `--budget` seconds; a ratio is the reference's median over ours.
If one run of the reference takes longer, it is the only one; it is cancelled after `--patience` seconds.  A case's name has the
operator, the schema version and a note.  With --onnxruntime a third column has onnxruntime's best time in a child process,
including the copies of inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from singa_backend import SingaBackend
from singa_backend.doctor import processor
from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.io.files import write_text

Generator = np.random.Generator
Input = Callable[[Generator], Any]

# --- inputs -----------------------------------------------------------------------------------------------------------


def normal(*shape: int, dtype: Any = np.float32) -> Input:
    return lambda g: g.standard_normal(shape).astype(dtype)


def uniform(low: float, high: float, *shape: int, dtype: Any = np.float32) -> Input:
    return lambda g: g.uniform(low, high, shape).astype(dtype)


def integers(low: int, high: int, *shape: int, dtype: Any = np.int64) -> Input:
    return lambda g: g.integers(low, high, shape).astype(dtype)


def booleans(*shape: int) -> Input:
    return lambda g: g.integers(0, 2, shape).astype(bool)


def texts(*shape: int) -> Input:
    return lambda g: np.array([f"Word {n}" for n in g.integers(0, 1000, math.prod(shape))], object).reshape(shape)


def numbers(*shape: int) -> Input:
    return lambda g: np.array([f"{n:.3f}" for n in g.standard_normal(math.prod(shape))], object).reshape(shape)


def ints(*values: int) -> Input:
    return lambda _: np.array(values, np.int64)


def scalar(value: Any, dtype: Any = np.float32) -> Input:
    return lambda _: np.array(value, dtype)


def floats(*values: float) -> Input:
    return lambda _: np.array(values, np.float32)


def boxes(*shape: int) -> Input:
    """Draw corners y1 < y2, x1 < x2 in the unit square."""

    def make(g: Generator) -> Any:
        corner, size = g.uniform(0, 0.9, (*shape, 2)), g.uniform(0.01, 0.1, (*shape, 2))
        return np.concatenate([corner, corner + size], axis=-1).astype(np.float32)

    return make


absent: Input = lambda _: None  # noqa: E731

# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One node.  version: a schema version; the newest if None.  note: what distinguishes the case."""

    op: str
    inputs: list[Input]
    attributes: dict[str, Any] = field(default_factory=dict)
    version: int | None = None
    outputs: int = 1
    domain: str = ""
    note: str = ""

    @property
    def since(self) -> int:
        return self.version or int(defs.get_schema(self.op, domain=self.domain).since_version)

    @property
    def label(self) -> str:
        return f"{self.op}-{self.since}" + (f" {self.note}" if self.note else "")

    def build(self) -> tuple[ModelProto, dict[str, Any]]:
        """Return the model, and random inputs by name."""
        generator = np.random.default_rng(0)
        values = {f"x{i}": make(generator) for i, make in enumerate(self.inputs)}
        feeds = {n: v for n, v in values.items() if v is not None}
        declared = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()]
        given = [n if v is not None else "" for n, v in values.items()]
        made = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, given, made, domain=self.domain, **self.attributes)
        graph = helper.make_graph([node], "g", declared, [onnx.ValueInfoProto(name=n) for n in made])
        opsets = [helper.make_opsetid(self.domain, self.since)]
        if self.domain:
            opsets.append(helper.make_opsetid("", 22))
        return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def elementwise() -> list[Case]:
    x, y = normal(1000, 1000), normal(1000, 1000)
    i, j = integers(-1000, 1000, 1000, 1000), integers(1, 100, 1000, 1000)
    cases = [
        Case(op, [x])
        for op in (
            "Abs",
            "Neg",
            "Sign",
            "Ceil",
            "Floor",
            "Round",
            "Exp",
            "Reciprocal",
            "Sin",
            "Cos",
            "Tan",
            "Atan",
            "Sinh",
            "Cosh",
            "Tanh",
            "Asinh",
            "Erf",
            "IsNaN",
            "IsInf",
            "Relu",
            "LeakyRelu",
            "ThresholdedRelu",
            "Shrink",
            "HardSigmoid",
            "HardSwish",
            "Elu",
            "Celu",
            "Selu",
            "Sigmoid",
            "Softplus",
            "Softsign",
            "Mish",
            "Gelu",
            "Swish",
            "Identity",
        )
    ]
    cases += [Case(op, [uniform(0.01, 0.99, 1000, 1000)]) for op in ("Sqrt", "Log", "Asin", "Acos", "Atanh")]
    cases += [Case("Acosh", [uniform(1, 9, 1000, 1000)]), Case("Gelu", [x], {"approximate": "tanh"}, note="tanh")]
    cases += [
        Case(op, [x, y])
        for op in (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Max",
            "Min",
            "Sum",
            "Mean",
            "Greater",
            "Less",
            "Equal",
            "GreaterOrEqual",
            "LessOrEqual",
            "PRelu",
        )
    ]
    cases += [Case(op, [booleans(1000, 1000), booleans(1000, 1000)]) for op in ("And", "Or", "Xor")]
    cases += [Case(op, [i, j], note="int64") for op in ("Add", "Div", "Mod", "BitwiseAnd", "BitwiseOr", "BitwiseXor")]
    cases += [
        Case("Add", [x, normal(1000)], version=6, attributes={"broadcast": 1}),
        Case("PRelu", [x, normal(1000)], note="row"),
        Case("Relu", [normal(1000, 1000, dtype=np.float16)], note="float16"),
        Case("Add", [normal(1000, 1000, dtype=np.float16)] * 2, note="float16"),
        Case("SwiGLU", [x, y]),
        Case("Mod", [x, y], {"fmod": 1}, note="float"),
        Case("Pow", [uniform(0.1, 3, 1000, 1000), y]),
        Case("Pow", [x, scalar(2.0)], note="square"),
        Case("Pow", [x, ints(3)], note="cube by int64"),
        Case("Pow", [i, ints(3)], note="int64"),
        Case("Not", [booleans(1000, 1000)]),
        Case("BitwiseNot", [i]),
        Case("BitShift", [integers(0, 1 << 20, 1000, 1000, dtype=np.uint32), integers(0, 9, 1000, 1000, dtype=np.uint32)],
             {"direction": "LEFT"}),
        Case("Where", [booleans(1000, 1000), x, y]),
        Case("Clip", [x, scalar(-0.5), scalar(0.5)]),
        Case("Clip", [x], {"min": -0.5, "max": 0.5}, version=6),
    ]  # fmt: skip
    return cases


def along_an_axis() -> list[Case]:
    x, image, variance = normal(1000, 1000), normal(8, 32, 56, 56), uniform(0.5, 1, 32)
    cases = [Case(op, [x]) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")]
    cases += [Case(op, [normal(64, 128, 100)], {"axis": 1}, note="axis 1") for op in ("Softmax", "LogSoftmax", "Hardmax")]
    cases += [Case(op, [x], version=11) for op in ("Softmax", "LogSoftmax", "Hardmax")]
    cases += [Case("Softmax", [normal(1000, 1000, dtype=np.float16)], note="float16")]
    for op in (
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSum",
        "ReduceLogSumExp",
    ):
        cases += [Case(op, [uniform(0.9, 1.1, 100, 100, 100), ints(1)])]
        cases += [Case(op, [uniform(0.9, 1.1, 1000, 1000)], {"axes": [1]}, version=11)]
    cases += [Case("ReduceMean", [integers(0, 99, 1000, 1000), ints(1)], note="int64")]
    cases += [Case(op, [x], {"axis": axis}, note=f"axis {axis}") for op in ("ArgMax", "ArgMin") for axis in (0, 1)]
    cases += [
        Case("ArgMax", [x], {"axis": 1, "select_last_index": 1}, note="last"),
        Case("CumSum", [x, scalar(1, np.int64)]),
        Case("CumSum", [x, scalar(0, np.int64)], {"exclusive": 1, "reverse": 1}, note="exclusive reverse"),
        Case("CumProd", [x, scalar(1, np.int64)]),
        Case("TopK", [x, ints(10)], outputs=2, note="k 10"),
        Case("TopK", [x, ints(500)], outputs=2, note="k 500"),
        Case("TopK", [x, ints(10)], {"largest": 0, "axis": 0}, outputs=2, note="smallest, axis 0"),
        Case("TopK", [integers(0, 50, 1000, 1000), ints(10)], outputs=2, note="ties"),
        Case("Unique", [integers(0, 1000, 200000)], outputs=4),
        Case("Unique", [integers(0, 3, 20000, 4)], {"axis": 0}, outputs=4, note="rows"),
        Case("NonZero", [lambda g: (g.uniform(size=(1000, 1000)) < 0.1).astype(np.float32)]),
        Case("Compress", [x, booleans(1000)], {"axis": 0}),
        Case("LayerNormalization", [normal(64, 16, 768), normal(768), normal(768)]),
        Case("RMSNormalization", [normal(64, 16, 768), normal(768)]),
        Case("InstanceNormalization", [image, normal(32), normal(32)]),
        Case("GroupNormalization", [image, normal(32), normal(32)], {"num_groups": 8}),
        Case("BatchNormalization", [image, *[normal(32)] * 3, variance]),
        Case("BatchNormalization", [image, *[normal(32)] * 3, variance], {"training_mode": 1}, outputs=3, note="training"),
        Case("MeanVarianceNormalization", [image]),
        Case("LRN", [image], {"size": 5}),
        Case("SoftmaxCrossEntropyLoss", [normal(1000, 1000), integers(0, 1000, 1000)]),
        Case("NegativeLogLikelihoodLoss", [normal(1000, 1000), integers(0, 1000, 1000)]),
        Case("Dropout", [x]),
    ]  # fmt: skip
    return cases


def places() -> list[Case]:
    x = normal(1000, 1000)
    return [
        Case("Gather", [x, integers(-1000, 1000, 500)], note="rows"),
        Case("Gather", [x, integers(-1000, 1000, 500)], {"axis": 1}, note="columns"),
        Case("Gather", [normal(30000, 64), integers(0, 30000, 16, 512)], note="embedding"),
        Case("GatherElements", [x, integers(-1000, 1000, 1000, 1000)], {"axis": 1}),
        Case("GatherElements", [x, integers(-1000, 1000, 1000, 1000)], {"axis": 0}, note="axis 0"),
        Case("GatherND", [normal(100, 100, 64), integers(0, 100, 5000, 2)]),
        Case("GatherND", [normal(64, 100, 64), integers(0, 100, 64, 50, 1)], {"batch_dims": 1}, note="batch"),
        Case("ScatterElements", [x, integers(0, 1000, 500, 1000), normal(500, 1000)]),
        Case("ScatterElements", [x, integers(0, 1000, 500, 1000), normal(500, 1000)], {"reduction": "add"}, note="add"),
        Case("ScatterElements", [x, integers(0, 1000, 500, 1000), normal(500, 1000)], {"reduction": "max"}, note="max"),
        Case("ScatterND", [normal(1000, 256), integers(0, 1000, 2000, 1), normal(2000, 256)]),
        Case("ScatterND", [normal(1000, 256), integers(0, 1000, 2000, 1), normal(2000, 256)], {"reduction": "add"}, note="add"),
        Case("TensorScatter", [normal(16, 8, 256, 64), normal(16, 8, 4, 64), integers(0, 200, 16)]),
        Case("Concat", [x, x], {"axis": 1}),
        Case("Split", [x], {"num_outputs": 4, "axis": 1}, outputs=4),
        Case("Reshape", [x, ints(100, -1)]),
        Case("Transpose", [normal(100, 100, 100)], {"perm": [2, 0, 1]}),
        Case("Flatten", [normal(100, 100, 100)]),
        Case("Squeeze", [normal(1, 1000, 1000), ints(0)]),
        Case("Unsqueeze", [x, ints(0)]),
        Case("Expand", [normal(1000, 1), ints(1000, 1000)]),
        Case("Tile", [normal(100, 100), ints(10, 10)]),
        Case("Slice", [x, ints(10, 900), ints(900, 10), ints(0, 1), ints(2, -3)]),
        Case("Pad", [normal(8, 32, 56, 56), ints(0, 0, 2, 2, 0, 0, 2, 2)]),
        *[Case("Pad", [normal(8, 32, 56, 56), ints(0, 0, 2, 2, 0, 0, 2, 2)], {"mode": m}, note=m)
          for m in ("reflect", "edge", "wrap")],
        Case("DepthToSpace", [normal(8, 64, 40, 40)], {"blocksize": 2}),
        Case("SpaceToDepth", [normal(8, 16, 80, 80)], {"blocksize": 2}),
        Case("ReverseSequence", [normal(256, 64, 64), integers(1, 256, 64)]),
        Case("Trilu", [x]),
        Case("EyeLike", [x]),
        Case("OneHot", [integers(0, 1000, 1000), ints(1000), floats(0, 1)]),
        Case("Range", [scalar(0, np.int64), scalar(1000000, np.int64), scalar(1, np.int64)]),
        Case("ConstantOfShape", [ints(1000, 1000)]),
        Case("Shape", [x]),
        Case("Size", [x]),
        Case("CenterCropPad", [x, ints(500, 1500)]),
        Case("Cast", [x], {"to": TensorProto.FLOAT16}, note="to float16"),
        Case("Cast", [x], {"to": TensorProto.BFLOAT16}, note="to bfloat16"),
        Case("Cast", [x], {"to": TensorProto.DOUBLE}, note="to double"),
        Case("Cast", [x], {"to": TensorProto.INT32}, note="to int32"),
        Case("Cast", [x], {"to": TensorProto.INT64}, note="to int64"),
        Case("Cast", [x], {"to": TensorProto.BOOL}, note="to bool"),
        Case("Cast", [x], {"to": TensorProto.FLOAT8E4M3FN}, note="to float8"),
        Case("Cast", [normal(1000, 1000, dtype=np.float64)], {"to": TensorProto.FLOAT16}, note="double to float16"),
        Case("Cast", [integers(-99, 99, 1000, 1000)], {"to": TensorProto.FLOAT}, note="int64 to float"),
        Case("Cast", [normal(300, 300)], {"to": TensorProto.STRING}, note="to string"),
        Case("Cast", [numbers(300, 300)], {"to": TensorProto.FLOAT}, note="string to float"),
        Case("Cast", [lambda g: g.integers(0, 999, (300, 300)).astype(str).astype(object)], {"to": TensorProto.INT64},
             note="string to int64"),
        Case("CastLike", [x, scalar(0, np.float16)]),
        Case("BitCast", [x], {"to": TensorProto.INT32}),
    ]  # fmt: skip


def linear_algebra() -> list[Case]:
    bytes_ = integers(0, 255, 256, 512, dtype=np.uint8)
    point = [scalar(0.02), scalar(128, np.uint8)]
    weights = [integers(0, 255, 512, 256, dtype=np.uint8), scalar(0.01), scalar(120, np.uint8)]
    return [
        Case("MatMul", [normal(512, 512), normal(512, 512)]),
        Case("MatMul", [normal(16, 8, 128, 64), normal(16, 8, 64, 128)], note="batch"),
        Case("Gemm", [normal(512, 512), normal(512, 512), normal(512)], {"transB": 1, "alpha": 0.5}),
        Case("Einsum", [normal(16, 128, 64), normal(16, 64, 128)], {"equation": "bij,bjk->bik"}),
        Case("Einsum", [normal(8, 64, 8, 32), normal(8, 64, 8, 32)], {"equation": "bqhd,bkhd->bhqk"}, note="attention"),
        Case("Einsum", [normal(1000, 1000)], {"equation": "ij->i"}, note="sum"),
        Case("Einsum", [normal(100, 50), normal(50, 60), normal(60, 70)], {"equation": "ij,jk,kl->il"}, note="chain"),
        Case("Det", [normal(2000, 8, 8)]),
        Case("MatMulInteger", [bytes_, weights[0], scalar(128, np.uint8), scalar(120, np.uint8)]),
        Case("QLinearMatMul", [bytes_, *point, *weights, scalar(0.1), scalar(100, np.uint8)]),
        Case("QuantizeLinear", [normal(1000, 1000), *point]),
        Case("QuantizeLinear", [normal(1000, 1000), uniform(0.01, 0.1, 1000), integers(0, 9, 1000, dtype=np.int8)], {"axis": 1},
             note="per axis"),
        Case("DequantizeLinear", [integers(0, 255, 1000, 1000, dtype=np.uint8), *point]),
        Case("DynamicQuantizeLinear", [normal(1000, 1000)], outputs=3),
    ]  # fmt: skip


def images() -> list[Case]:
    x, w = normal(2, 32, 56, 56), normal(32, 32, 3, 3)
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    half = floats(1, 1, 0.5, 0.5)
    pixels: Input = lambda g: boxes(50)(g) * 56  # noqa: E731
    return [
        Case("Conv", [x, w, normal(32)], {"pads": [1, 1, 1, 1]}),
        Case("Conv", [x, normal(64, 32, 1, 1)], note="1x1"),
        Case("Conv", [x, normal(32, 1, 3, 3)], {"group": 32, "pads": [1, 1, 1, 1]}, note="depthwise"),
        Case("Conv", [normal(2, 16, 4000), normal(16, 16, 9)], note="1d"),
        Case("ConvTranspose", [normal(2, 16, 28, 28), normal(16, 16, 3, 3)], {"strides": [2, 2]}),
        Case("ConvInteger", [integers(0, 255, 1, 16, 28, 28, dtype=np.uint8), integers(0, 255, 16, 16, 3, 3, dtype=np.uint8),
                             scalar(128, np.uint8), scalar(120, np.uint8)]),
        Case("QLinearConv", [integers(0, 255, 1, 16, 28, 28, dtype=np.uint8), scalar(0.02), scalar(128, np.uint8),
                             integers(0, 255, 16, 16, 3, 3, dtype=np.uint8), scalar(0.01), scalar(120, np.uint8), scalar(0.5),
                             scalar(100, np.uint8)]),
        Case("DeformConv", [normal(1, 2, 12, 12), normal(2, 2, 3, 3), normal(1, 18, 10, 10)]),
        Case("MaxPool", [x], window),
        Case("MaxPool", [x], window, outputs=2, note="indices"),
        Case("AveragePool", [x], window),
        Case("LpPool", [x], window),
        *[Case(op, [x]) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")],
        Case("MaxUnpool", [normal(2, 16, 28, 28), lambda g: np.arange(2 * 16 * 28 * 28).reshape(2, 16, 28, 28) * 4],
             {"kernel_shape": [2, 2], "strides": [2, 2]}),
        Case("MaxRoiPool", [normal(1, 32, 56, 56), lambda g: np.hstack([np.zeros((50, 1), np.float32), pixels(g)])],
             {"pooled_shape": [7, 7]}),
        Case("RoiAlign", [normal(1, 32, 56, 56), pixels, lambda _: np.zeros(50, np.int64)],
             {"output_height": 7, "output_width": 7, "sampling_ratio": 2}),
        Case("NonMaxSuppression", [boxes(1, 1000), uniform(0, 1, 1, 20, 1000), ints(100), floats(0.5), floats(0.3)]),
        Case("GridSample", [normal(1, 16, 64, 64), uniform(-1.1, 1.1, 1, 64, 64, 2)]),
        Case("GridSample", [normal(1, 8, 32, 32), uniform(-1.1, 1.1, 1, 32, 32, 2)], {"mode": "cubic"}, note="cubic"),
        Case("GridSample", [normal(1, 16, 64, 64), uniform(-1.1, 1.1, 1, 64, 64, 2)], {"mode": "nearest"}, note="nearest"),
        Case("AffineGrid", [normal(2, 2, 3), ints(2, 3, 256, 256)]),
        *[Case("Resize", [normal(1, 3, 64, 64), absent, floats(1, 1, 2, 2)], {"mode": m}, note=m)
          for m in ("nearest", "linear", "cubic")],
        *[Case("Resize", [normal(1, 3, 64, 64), absent, half], {"mode": m, "antialias": 1}, note=f"{m} antialias")
          for m in ("linear", "cubic")],
        Case("Upsample", [normal(1, 3, 64, 64), floats(1, 1, 2, 2)], version=9),
        Case("Col2Im", [normal(2, 72, 1024), ints(34, 34), ints(3, 3)]),
        Case("DFT", [normal(64, 4096, 1)], version=17),
        Case("STFT", [normal(4, 16384, 1), scalar(128, np.int64), normal(512)]),
        *[Case(op, [scalar(100000, np.int64)]) for op in ("HannWindow", "HammingWindow", "BlackmanWindow")],
        Case("MelWeightMatrix", [*(scalar(n, np.int64) for n in (64, 1024, 16000)), scalar(0.0), scalar(8000.0)]),
    ]  # fmt: skip


def networks() -> list[Case]:
    hidden, width = 64, 64
    cases = []
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        weights = [normal(1, gates * hidden, n) for n in (width, hidden)]
        inputs = [normal(100, 16, width), *weights, normal(1, 2 * gates * hidden)]
        cases.append(Case(op, inputs, {"hidden_size": hidden}, outputs=2))
    q = normal(2, 8, 128, 64)
    step, x, squares = [scalar(0.1), scalar(1, np.int64)], normal(1000, 500), uniform(0, 1, 1000, 500)
    training = "ai.onnx.preview.training"
    momentum = {"alpha": 0.9, "beta": 0.9, "mode": "standard", "norm_coefficient": 0.0}
    cases += [
        Case("Attention", [q, q, q]),
        Case("Attention", [q, q, q], {"is_causal": 1}, note="causal"),
        Case("Attention", [normal(2, 128, 512)] * 3, {"q_num_heads": 8, "kv_num_heads": 8}, version=23),
        Case("RotaryEmbedding", [normal(2, 8, 128, 64), normal(512, 32), normal(512, 32), integers(0, 512, 2, 128)]),
        Case("Adagrad", [*step, x, x, squares], domain=training, outputs=2),
        Case("Momentum", [*step, x, x, x], momentum, domain=training, outputs=2),
        Case("Adam", [*step, x, x, x, squares], domain=training, outputs=3),
        Case("RandomNormal", [], {"shape": [1000, 500]}),
        Case("RandomUniform", [], {"shape": [1000, 500]}),
        Case("Bernoulli", [uniform(0, 1, 1000, 500)]),
        Case("Multinomial", [uniform(0, 1, 100, 100)], {"sample_size": 100}),
    ]  # fmt: skip
    return cases


def control_flow() -> list[Case]:
    def value(name: str, kind: int, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def body() -> GraphProto:
        nodes = [("Identity", ["c"], "d"), ("Add", ["s", "one"], "u"), ("Mul", ["u", "one"], "t")]
        return helper.make_graph(
            [helper.make_node(op, given, [made]) for op, given, made in nodes],
            "body",
            [value("i", 7, []), value("c", 9, []), value("s", 1, [4])],
            [value("d", 9, []), value("t", 1, [4])],
            [helper.make_tensor("one", 1, [4], [1.0] * 4)],
        )

    def step() -> GraphProto:
        return helper.make_graph(
            [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["y"])],
            "step",
            [value("s", 1, [16]), value("x", 1, [16])],
            [value("t", 1, [16]), value("y", 1, [16])],
        )

    def branch(x: float) -> GraphProto:
        return helper.make_graph([helper.make_node("Constant", [], ["z"], value_float=x)], "branch", [], [value("z", 1, [])])

    return [
        Case("Loop", [scalar(10000, np.int64), scalar(True, bool), normal(4)], {"body": body()}, note="10,000 rounds of 3 nodes"),
        Case("Scan", [normal(16), normal(5000, 16)], {"body": step(), "num_scan_inputs": 1}, outputs=2, note="5,000 rounds"),
        Case("If", [scalar(True, bool)], {"then_branch": branch(1.0), "else_branch": branch(2.0)}, note="of a constant"),
    ]  # fmt: skip


def text_and_trees() -> list[Case]:
    ml, x, g = "ai.onnx.ml", normal(1000, 20), np.random.default_rng(0)
    depth, count = 9, 17
    inner = (1 << depth) - 1
    nodes = 2 * inner + 1
    tree, own = np.repeat(np.arange(count), nodes), np.tile(np.arange(nodes), count)
    leaf = own >= inner
    leaves = leaf.sum()
    trees = {
        "nodes_treeids": tree, "nodes_nodeids": own, "nodes_featureids": np.where(leaf, 0, g.integers(0, 20, len(own))),
        "nodes_modes": np.where(leaf, "LEAF", "BRANCH_LEQ"), "nodes_values": np.where(leaf, 0, g.standard_normal(len(own))),
        "nodes_truenodeids": np.where(leaf, 0, 2 * own + 1), "nodes_falsenodeids": np.where(leaf, 0, 2 * own + 2),
    }  # fmt: skip
    trees = {n: v.tolist() for n, v in trees.items()}
    votes = {"treeids": tree[leaf].tolist(), "nodeids": own[leaf].tolist(), "weights": g.uniform(0, 1, leaves).tolist()}
    target = {f"target_{n}": v for n, v in votes.items()} | {"target_ids": [0] * leaves, "n_targets": 1}
    classes = {f"class_{n}": v for n, v in votes.items()} | {"class_ids": g.integers(0, 3, leaves).tolist()}
    roots = np.arange(count) * inner
    offset, child = np.repeat(roots, inner), np.tile(np.arange(inner), count)
    last = child >= inner // 2

    def way(k: int) -> tuple[list[int], list[int]]:
        to = 2 * child + k
        leaf = np.repeat(np.arange(count) * (inner + 1), inner) + to - inner
        return np.where(last, leaf, offset + to).tolist(), last.astype(int).tolist()

    (true, true_leaf), (false, false_leaf) = way(1), way(2)
    ensemble = {
        "tree_roots": roots.tolist(), "nodes_featureids": g.integers(0, 20, len(child)).tolist(),
        "nodes_modes": helper.make_tensor("m", TensorProto.UINT8, [len(child)], [0] * len(child)),
        "nodes_splits": helper.make_tensor("s", TensorProto.FLOAT, [len(child)], g.standard_normal(len(child))),
        "nodes_truenodeids": true, "nodes_trueleafs": true_leaf, "nodes_falsenodeids": false, "nodes_falseleafs": false_leaf,
        "leaf_targetids": [0] * (count * (inner + 1)),
        "leaf_weights": helper.make_tensor("w", TensorProto.FLOAT, [count * (inner + 1)], g.standard_normal(count * (inner + 1))),
        "n_targets": 1,
    }  # fmt: skip
    support = g.standard_normal((200, 20))
    regression = {"n_supports": 200, "coefficients": g.standard_normal(200).tolist(), "rho": [0.1]}
    classification = {"vectors_per_class": [70, 70, 60], "coefficients": g.standard_normal(400).tolist(), "rho": [0.1, 0.2, 0.3]}
    numbers_of_words = {"keys_strings": [f"Word {n}" for n in range(1000)], "values_int64s": list(range(1000))}
    grams = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": 2,
        "max_skip_count": 1,
        "ngram_counts": [0, 100],
        "ngram_indexes": list(range(200)),
        "pool_int64s": [*range(100), *range(200)],
    }
    svm = {"kernel_type": "RBF", "kernel_params": [0.05, 0.0, 3.0], "support_vectors": support.reshape(-1).tolist()}
    words = [f"Word {n}" for n in range(1000)]
    return [
        Case("TreeEnsembleRegressor", [normal(1, 20)], trees | target, version=3, domain=ml, note="1 row, 17,391 nodes"),
        Case("TreeEnsembleRegressor", [x], trees | target, version=3, domain=ml, note="1,000 rows"),
        Case("TreeEnsembleClassifier", [normal(1, 20)], trees | classes | {"classlabels_int64s": [0, 1, 2]}, version=3, domain=ml,
             outputs=2, note="1 row"),
        Case("TreeEnsembleClassifier", [x], trees | classes | {"classlabels_int64s": [0, 1, 2]}, version=3, domain=ml, outputs=2,
             note="1,000 rows"),
        Case("TreeEnsemble", [normal(1, 20)], ensemble, domain=ml, note="1 row"),
        Case("TreeEnsemble", [x], ensemble, domain=ml, note="1,000 rows"),
        Case("SVMRegressor", [x], svm | regression, domain=ml),
        Case("SVMClassifier", [x], svm | classification | {"classlabels_ints": [0, 1, 2]}, domain=ml, outputs=2),
        Case("LinearRegressor", [x], {"coefficients": support[:5].reshape(-1).tolist(), "targets": 5}, domain=ml),
        Case("LinearClassifier", [x], {"coefficients": support[:5].reshape(-1).tolist(), "classlabels_ints": list(range(5)),
             "post_transform": "SOFTMAX"}, domain=ml, outputs=2),
        Case("Scaler", [normal(10000, 20)], {"offset": [0.5] * 20, "scale": [2.0] * 20}, domain=ml),
        Case("Normalizer", [normal(10000, 20)], {"norm": "L2"}, domain=ml),
        Case("Imputer", [normal(10000, 20)], {"imputed_value_floats": [0.5] * 20, "replaced_value_float": math.nan}, domain=ml),
        Case("Binarizer", [normal(10000, 20)], {"threshold": 0.5}, domain=ml),
        Case("ArrayFeatureExtractor", [normal(10000, 20), integers(0, 20, 10)], domain=ml),
        Case("FeatureVectorizer", [normal(10000, 20), normal(10000, 10)], {"inputdimensions": [20, 10]}, domain=ml),
        Case("LabelEncoder", [integers(0, 9, 100000)], {"keys_int64s": [*range(9)], "values_int64s": [*range(9)]}, domain=ml),
        Case("LabelEncoder", [texts(20000)], numbers_of_words, domain=ml, note="strings"),
        Case("CategoryMapper", [texts(20000)], {"cats_strings": words, "cats_int64s": list(range(1000))}, domain=ml),
        Case("OneHotEncoder", [integers(0, 100, 10000)], {"cats_int64s": list(range(100))}, domain=ml),
        Case("StringNormalizer", [texts(50000)], {"case_change_action": "LOWER", "stopwords": words[:10]}),
        Case("StringConcat", [texts(50000), texts(50000)]),
        Case("StringSplit", [texts(50000)], outputs=2),
        Case("RegexFullMatch", [texts(50000)], {"pattern": "Word [0-9]*"}),
        Case("Equal", [texts(50000), texts(50000)], note="strings"),
        Case("TfIdfVectorizer", [integers(0, 200, 100, 500)], grams),
    ]  # fmt: skip


def cases() -> list[Case]:
    families = (elementwise, along_an_axis, places, linear_algebra, images, networks, control_flow, text_and_trees)
    return [case for family in families for case in family()]


# --- timing -----------------------------------------------------------------------------------------------------------


def timed(
    runs: list[Callable[[], Any]], budget: float, clock: Callable[[], float] = time.process_time, most: int = 25
) -> list[list[float]]:
    """Return the seconds of each function, run in turns: at least twice (if `most` allows), then while the budget lasts.

    The default clock is this process's CPU time, which excludes other load on the machine.
    """
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + budget
    for i in range(most):
        if i > 1 and time.perf_counter() > end:
            break
        for run, seconds in zip(runs, times, strict=True):
            start = clock()
            run()
            seconds.append(clock() - start)
    return times


def give_up(*_: Any) -> None:
    raise TimeoutError("the reference takes too long")


def measure(case: Case, budget: float, patience: float, oracle: Oracle | None) -> dict[str, Any]:
    """Return median seconds of ours and of the reference, if it supports the case; the minimum of onnxruntime's."""
    model, feeds = case.build()
    rep, values = SingaBackend.prepare(model), list(feeds.values())
    rep.run(values)
    row: dict[str, Any] = {}
    try:
        reference = ReferenceEvaluator(model)
        signal.setitimer(signal.ITIMER_REAL, patience)
        try:
            (first,) = timed([lambda: reference.run(None, feeds)], 0, most=1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if first[0] > budget:
            theirs, (ours,) = first, timed([lambda: rep.run(values)], budget)
        else:
            ours, theirs = timed([lambda: rep.run(values), lambda: reference.run(None, feeds)], budget)
        row = {"ours_s": statistics.median(ours), "reference_s": statistics.median(theirs)}
        row["ratio"] = row["reference_s"] / row["ours_s"]
    except Exception as error:  # unsupported cases, and TimeoutError
        (ours,) = timed([lambda: rep.run(values)], budget / 2)
        row = {"ours_s": statistics.median(ours), "reference": f"{type(error).__name__}: {str(error)[:80]}"}
    if oracle is not None:
        try:
            data = model.SerializeToString()
            oracle.run(data, feeds)
            row["onnxruntime_s"] = min(timed([lambda: oracle.run(data, feeds)], budget / 2, time.perf_counter)[0])
        except EngineFailure as error:
            row["onnxruntime"] = error.how
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.15, help="seconds for each case, after its first runs")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds after which a run of the reference is cancelled")
    parser.add_argument("--select", default="", help="only cases whose name contains this")
    parser.add_argument("--onnxruntime", action="store_true", help="time onnxruntime too")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, give_up)
    oracle = Oracle("onnxruntime") if options.onnxruntime else None
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'operator':44} {'ours':>11} {'reference':>11} {'ratio':>9}" + f" {'onnxruntime':>12}" * bool(oracle), flush=True)
    for case in cases():
        if options.select not in case.label:
            continue
        row = rows[case.label] = measure(case, options.budget, options.patience, oracle)
        reference = f"{row['reference_s'] * 1e3:9.2f}ms {row['ratio']:8.2f}x" if "ratio" in row else f"{'-':>11} {'':9}"
        other = f" {row['onnxruntime_s'] * 1e3:10.2f}ms" if "onnxruntime_s" in row else ""
        print(f"{case.label:44} {row['ours_s'] * 1e3:9.2f}ms {reference}{other}", flush=True)
    if oracle is not None:
        oracle.close()
    ratios = {label: row["ratio"] for label, row in rows.items() if "ratio" in row}
    if not ratios:
        return
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    least = min(ratios, key=lambda label: ratios[label])
    print(
        f"{len(rows)} cases, geometric mean {mean:.2f}x, minimum {ratios[least]:.2f}x ({least}), "
        f"{sum(r < 0.9 for r in ratios.values())} below 0.9x"
    )
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": processor(), "numpy": np.__version__, "onnx": onnx.__version__}
        document = {"machine": machine, "geometric_mean": mean, "least": ratios[least], "operators": rows}
        write_text(options.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
