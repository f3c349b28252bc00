"""Models and files that mean harm, by class: each is written when it is needed, and says how it must be refused.

A case builds its file in an empty folder.  `code` is what the error must begin with ("SX603"), or "" where the model is
legal and must run.  `limits` are those of the call; what would not end (SX608) has a deadline of half a second.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

ML = "ai.onnx.ml"
F, I64 = np.float32, np.int64
MIB = 1 << 20
TIGHT = {"tensor_bytes": 8 * MIB, "live_bytes": 24 * MIB}
Feeds = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    build: Callable[[Path], Any]  # writes model.onnx into the folder, or returns what to write there
    code: str
    feeds: Feeds = dict
    limits: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The path of the model."""
        path = folder / "model.onnx"
        made = self.build(folder)
        if isinstance(made, ModelProto):
            path.write_bytes(made.SerializeToString())
        elif isinstance(made, bytes):
            path.write_bytes(made)
        return path


CASES: dict[str, Case] = {}


def case(group: str, name: str, code: str, build: Any, feeds: Feeds = dict, **limits: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, group, build if callable(build) else lambda folder: build, code, feeds, limits)


# --- how models are written -------------------------------------------------------------------------------------------

node, tensor = helper.make_node, numpy_helper.from_array


def proto_of(array: np.ndarray, name: str) -> TensorProto:
    """onnx's own conversion stores every string with the length of the longest."""
    if array.dtype != object:
        return tensor(array, name)
    texts = [s.encode() for s in array.reshape(-1)]
    return TensorProto(name=name, dims=array.shape, data_type=TensorProto.STRING, string_data=texts)


def net(nodes: Sequence[NodeProto], outputs: Sequence[str] = ("y",), inits: dict[str, Any] | None = None, inputs: Sequence[str] = (),
        opset: int = 24, functions: Sequence[FunctionProto] = ()) -> ModelProto:  # fmt: skip
    """A model whose inputs and outputs have no declared types; initializers by name."""
    infos = [[helper.make_empty_tensor_value_info(n) for n in names] for names in (inputs, outputs)]
    made = [a if isinstance(a, TensorProto) else proto_of(np.asarray(a), n) for n, a in (inits or {}).items()]
    for name, proto in zip(inits or {}, made, strict=True):
        proto.name = name
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(ML, 5), helper.make_opsetid("local", 1)]
    imports.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    graph = helper.make_graph(list(nodes), "g", *infos, made)
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def one(op: str, *values: Any, outputs: int = 1, opset: int = 24, domain: str = "", **attributes: Any) -> ModelProto:
    """A node whose inputs are initializers; None is an absent one."""
    names = ["" if v is None else f"x{i}" for i, v in enumerate(values)]
    inits = {n: v for n, v in zip(names, values, strict=True) if n}
    results = [f"y{i}" for i in range(outputs)]
    return net([node(op, names, results, domain=domain, name="evil", **attributes)], results, inits, opset=opset)


def ints(*values: int) -> np.ndarray:
    return np.array(values, I64)


def body(
    nodes: Sequence[NodeProto], inputs: Sequence[str], outputs: Sequence[str], inits: dict[str, Any] | None = None
) -> GraphProto:
    infos = [[helper.make_empty_tensor_value_info(n) for n in names] for names in (inputs, outputs)]
    return helper.make_graph(list(nodes), "body", *infos, [tensor(np.asarray(a), n) for n, a in (inits or {}).items()])


def loop(inner: GraphProto, trips: int | None, cond: bool | None = True, states: dict[str, Any] | None = None) -> ModelProto:
    states = states or {}
    inits = dict(states)
    names = ["" if trips is None else "M", "" if cond is None else "c"]
    inits |= ({} if trips is None else {"M": np.array(trips, I64)}) | ({} if cond is None else {"c": np.array(cond)})
    results = [f"y{i}" for i in range(len(inner.output) - 1)] or ["y"]
    return net([node("Loop", [*names, *states], results, body=inner, name="evil")], results, inits)


A = np.ones(4, F)
ROW, COLUMN = np.ones((1, 1 << 16), F), np.ones((1 << 16, 1), F)
HUGE, MOST = 1 << 40, (1 << 63) - 1


# --- sizes that come from values: nothing may be allocated ------------------------------------------------------------

S = "SX603"
for name, model in {
    "constant_of_shape": one("ConstantOfShape", ints(1 << 44)),
    "constant_of_shape_product": one("ConstantOfShape", ints(*[1 << 20] * 5)),
    "constant_of_shape_beyond_64_bits": one("ConstantOfShape", ints(MOST, MOST, MOST)),
    "expand": one("Expand", np.ones(1, F), ints(1 << 20, 1 << 20)),
    "tile": one("Tile", A, ints(HUGE)),
    "range": one("Range", np.array(0, I64), np.array(HUGE, I64), np.array(1, I64)),
    "range_of_floats": one("Range", np.array(0, F), np.array(1e12, F), np.array(1, F)),
    "one_hot": one("OneHot", ints(1, 2), np.array(HUGE, I64), np.array([0, 1], F)),
    "pad": one("Pad", A, ints(0, HUGE)),
    "pad_edge": one("Pad", A, ints(HUGE, HUGE), mode="edge"),
    "pad_wrap": one("Pad", A, ints(0, 1 << 36), mode="wrap"),
    "resize_sizes": one("Resize", np.ones((1, 1, 2, 2), F), None, None, ints(1, 1, 1 << 20, 1 << 20)),
    "resize_scales": one("Resize", np.ones((1, 1, 2, 2), F), None, np.array([1, 1, 1e30, 1e30], F)),
    "resize_cubic": one("Resize", np.ones((1, 1, 2, 2), F), None, None, ints(1, 1, 1, 1 << 32), mode="cubic"),
    "upsample": one("Upsample", np.ones((1, 1, 2, 2), F), np.array([1, 1, 1e6, 1e6], F), opset=9),
    "random_normal": one("RandomNormal", shape=[1 << 22, 1 << 22]),
    "random_uniform": one("RandomUniform", shape=[HUGE]),
    "multinomial": one("Multinomial", np.ones((1, 4), F), sample_size=HUGE),
    "dft": one("DFT", np.ones((1, 4, 1), F), np.array(HUGE, I64)),
    "hann_window": one("HannWindow", np.array(HUGE, I64)),
    "blackman_window": one("BlackmanWindow", np.array(MOST, I64)),
    "mel_weights": one("MelWeightMatrix", np.array(1 << 20, I64), np.array(1 << 21, I64), np.array(16000, I64), np.array(0, F), np.array(8000, F)),
    "center_crop_pad": one("CenterCropPad", A, ints(HUGE)),
    "col2im": one("Col2Im", np.ones((1, 1, 1), F), ints(HUGE), ints(1), strides=[HUGE]),
    "max_unpool": one("MaxUnpool", np.ones((1, 1, 2, 2), F), np.zeros((1, 1, 2, 2), I64), kernel_shape=[2, 2], strides=[1 << 24, 1 << 24]),
    "max_unpool_shape": one("MaxUnpool", np.ones((1, 1, 2), F), np.zeros((1, 1, 2), I64), ints(1, 1, HUGE), kernel_shape=[2]),
    "conv_transpose_stride": one("ConvTranspose", np.ones((1, 1, 2), F), np.ones((1, 1, 2), F), strides=[HUGE]),
    "conv_transpose_shape": one("ConvTranspose", np.ones((1, 1, 2), F), np.ones((1, 1, 2), F), output_shape=[HUGE]),
    "conv_pads": one("Conv", np.ones((1, 1, 4), F), np.ones((1, 1, 1), F), pads=[HUGE, HUGE]),
    "max_pool_pads": one("MaxPool", np.ones((1, 1, 4), F), kernel_shape=[2], pads=[HUGE, HUGE]),
    "affine_grid": one("AffineGrid", np.ones((1, 2, 3), F), ints(1, 1, 1 << 20, 1 << 20)),
    "roi_align": one("RoiAlign", np.ones((1, 1, 4, 4), F), np.ones((1, 4), F), ints(0), output_height=1 << 20, output_width=1 << 20),
    "roi_align_samples": one("RoiAlign", np.ones((1, 1, 4, 4), F), np.ones((1, 4), F), ints(0), sampling_ratio=1 << 30),
    "roi_align_extent": one("RoiAlign", np.ones((1, 1, 4, 4), F), np.array([[0, 0, 1e30, 1e30]], F), ints(0)),
    "max_roi_pool": one("MaxRoiPool", np.ones((1, 1, 4, 4), F), np.zeros((1, 5), F), pooled_shape=[1 << 20, 1 << 20]),
    "tf_idf_columns": one("TfIdfVectorizer", ints(1, 2), mode="TF", ngram_counts=[0], ngram_indexes=[HUGE], pool_int64s=[1],
                          min_gram_length=1, max_gram_length=1, max_skip_count=0),
    "feature_vectorizer": one("FeatureVectorizer", np.ones((1, 2), F), domain=ML, inputdimensions=[HUGE]),
    "linear_regressor_targets": one("TreeEnsembleRegressor", np.ones((1, 2), F), domain=ML, n_targets=HUGE, nodes_treeids=[0],
                                    nodes_nodeids=[0], nodes_modes=["LEAF"], nodes_featureids=[0], nodes_truenodeids=[0],
                                    nodes_falsenodeids=[0], nodes_values=[0.0], target_treeids=[0], target_nodeids=[0],
                                    target_ids=[0], target_weights=[1.0]),
    "quantize_blocks": one("ConstantOfShape", ints(1 << 31, 4), value=tensor(np.ones(1, np.uint8))),
}.items():  # fmt: skip
    case("size from values", name, S, model)


def _map_feed() -> dict[str, Any]:
    return {"x": {0: 1.0}}


case(
    "size from values",
    "cast_map",
    S,
    net([node("CastMap", ["x"], ["y"], domain=ML, map_form="SPARSE", max_map=HUGE)], inputs=["x"]),
    _map_feed,
)

# --- sizes that come from broadcasting and products -------------------------------------------------------------------

for op in ("Add", "Mul", "Equal", "Pow", "Less"):
    case("outer product", f"outer_{op.lower()}", S, one(op, ROW, COLUMN))
LINE, POLE = np.ones((1, 1, 1 << 12), F), np.ones((1 << 12, 1, 1), F)
for name, model in {
    "outer_of_three": one("Sum", LINE, POLE, LINE.transpose(0, 2, 1)),
    "outer_of_two_and_a_third_that_does_not_fit": one("Sum", ROW, COLUMN, np.ones(3, F)),
    "outer_scales": one("QLinearMatMul", np.ones((2, 1), np.uint8), np.ones(1 << 16, F), np.zeros(1, np.uint8), np.ones((1, 2), np.uint8),
                        np.ones(1 << 16, F), np.zeros(1, np.uint8), np.ones(1, F), np.zeros(1, np.uint8)),
    "outer_where": one("Where", np.ones((1, 1 << 16), bool), COLUMN, np.ones(1, F)),
    "outer_matmul": one("MatMul", COLUMN, ROW),
    "outer_matmul_integers": one("MatMul", COLUMN.astype(np.int32), ROW.astype(np.int32)),
    "outer_gemm": one("Gemm", ROW, ROW, transA=1),
    "outer_einsum": one("Einsum", ROW[0], ROW[0], equation="i,j->ij"),
    "outer_einsum_implicit": one("Einsum", ROW[0], ROW[0], equation="i,j"),
    "outer_einsum_dots": one("Einsum", ROW, COLUMN, equation="...,...->..."),
    "outer_gather": one("Gather", np.ones((2, 1 << 16), F), np.zeros(1 << 16, I64)),
    "outer_gather_nd": one("GatherND", np.ones((2, 1 << 16), F), np.zeros((1 << 16, 1), I64)),
    "outer_attention": one("Attention", np.ones((1, 1, 1 << 16, 1), F), np.ones((1, 1, 1 << 16, 1), F), np.ones((1, 1, 1 << 16, 1), F)),
    "outer_svm": one("SVMRegressor", np.ones((1 << 16, 1), F), domain=ML, n_supports=1 << 16, kernel_type="RBF",
                     support_vectors=[1.0] * (1 << 16), coefficients=[1.0] * (1 << 16), rho=[0.0], kernel_params=[1.0, 0.0, 0.0]),
    "outer_one_hot_encoder": one("OneHotEncoder", np.ones(1 << 16, I64), domain=ML, cats_int64s=list(range(1 << 15))),
    "outer_conv": one("Conv", np.ones((1, 1, 1 << 16), F), np.ones((1 << 16, 1, 1), F)),
    "outer_string_concat": one("StringConcat", np.full((1, 1 << 15), "a", object), np.full((1 << 15, 1), "b", object)),
    "outer_rnn": one("RNN", np.ones((1 << 16, 1, 1), F), np.ones((1, 1 << 15, 1), F), np.ones((1, 1 << 15, 0), F), hidden_size=0, outputs=2),
}.items():  # fmt: skip
    case(
        "outer product",
        name,
        "SX404" if name in ("outer_rnn", "outer_scales", "outer_of_two_and_a_third_that_does_not_fit") else S,
        model,
    )
case("outer product", "optimizer_broadcast", "SX404", one("Momentum", np.array(0.1, F), np.array(1, I64), ROW, COLUMN, ROW, outputs=2,
     domain="ai.onnx.preview.training", alpha=0.9, beta=0.9, mode="standard", norm_coefficient=0.1))  # fmt: skip

# --- growth: every node is small next to its inputs --------------------------------------------------------------------


def doubling(op: str, first: Any, count: int = 60, **attributes: Any) -> ModelProto:
    return net([node(op, [f"v{i}", f"v{i}"], [f"v{i + 1}"], **attributes) for i in range(count)], [f"v{count}"], {"v0": first})


case("growth", "concat_doubles", S, doubling("Concat", A, axis=0), **TIGHT)
case("growth", "strings_double", S, doubling("StringConcat", np.array(["abc"], object)), **TIGHT)
case("growth", "matrices_grow", S, net([node("Einsum", [f"v{i}", f"v{i}"], [f"v{i + 1}"], equation="...i,...j->...ij") for i in range(14)],
                                       ["v14"], {"v0": np.ones(3, F)}), **TIGHT)  # fmt: skip
case("growth", "many_tensors_live", "SX604", net([node("ConstantOfShape", ["s"], [f"v{i}"]) for i in range(64)]
                                                 + [node("Sum", [f"v{i}" for i in range(64)], ["y"])],
                                                 inits={"s": ints(1 << 20)}), **TIGHT)  # fmt: skip
case("growth", "sequence_doubles", "SX604", net(
    [node("SequenceConstruct", [f"t{i}", f"t{i}"], [f"s{i}"]) for i in range(40)]
    + [node("ConcatFromSequence", [f"s{i}"], [f"t{i + 1}"], axis=0) for i in range(40)], ["t40"], {"t0": np.ones(1 << 18, F)}),
    tensor_bytes=20 * MIB, live_bytes=24 * MIB)  # fmt: skip
grow = body([node("Identity", ["c"], ["d"]), node("Concat", ["x", "x"], ["z"], axis=0)], ["i", "c", "x"], ["d", "z"])
case("growth", "loop_doubles", S, loop(grow, 1000, True, {"x": A}), **TIGHT)
keep = body([node("Identity", ["c"], ["d"]), node("ConstantOfShape", ["s"], ["t"]), node("SequenceInsert", ["q", "t"], ["r"])],
            ["i", "c", "q"], ["d", "r"])  # fmt: skip
case("growth", "sequence_insert_loop", "SX604", net(
    [node("SequenceEmpty", [], ["q0"]), node("Loop", ["M", "t", "q0"], ["y"], body=keep)],
    inits={"M": np.array(10**6, I64), "t": np.array(True), "s": ints(1 << 16)}), **TIGHT)  # fmt: skip
scanned = body(
    [node("Identity", ["c"], ["d"]), node("ConstantOfShape", ["s"], ["t"])], ["i", "c"], ["d", "t"], {"s": ints(1 << 16)}
)
case("growth", "scan_outputs_pile_up", "SX604", loop(scanned, 10**6), **TIGHT)
small = body([node("Identity", ["c"], ["d"]), node("Identity", ["i"], ["t"])], ["i", "c"], ["d", "t"])
case("growth", "small_scan_outputs_pile_up", "SX60", loop(small, 10**6), tensor_bytes=8 * MIB, live_bytes=MIB // 4)

# --- loops ------------------------------------------------------------------------------------------------------------

step = node("Neg", ["s"], ["t"])
same = body([node("Identity", ["c"], ["d"]), step], ["i", "c", "s"], ["d", "t"])
true = body([step], ["i", "c", "s"], ["d", "t"], {"d": np.array(True)})
asked = body([node("Not", ["c"], ["n"]), node("Not", ["n"], ["d"]), step], ["i", "c", "s"], ["d", "t"])
empty = body([], ["ii", "cc", "ss"], ["cc", "ss"])
around = [node("Identity", ["c"], ["d"]), node("Loop", ["m", "c", "s"], ["t"], body=body(
    [node("Identity", ["cc"], ["dd"]), node("Neg", ["ss"], ["tt"])], ["ii", "cc", "ss"], ["dd", "tt"]))]  # fmt: skip
for name, code, model in [
    ("loop_2_63", "SX606", loop(same, MOST, True, {"x": A})),
    ("loop_2_63_constant_condition", "SX606", loop(true, MOST, True, {"x": A})),
    ("loop_2_63_without_condition", "SX606", loop(same, MOST, None, {"x": A})),
    ("loop_without_end", "SX606", loop(same, None, True, {"x": A})),
    ("loop_without_anything", "SX606", loop(same, None, None, {"x": A})),
    ("loop_that_asks", "SX608", loop(asked, None, True, {"x": A})),
    ("loop_that_asks_2_63", "SX608", loop(asked, MOST, True, {"x": A})),
    ("loop_in_loop", "SX608", loop(body(around, ["i", "c", "s"], ["d", "t"], {"m": np.array(10**6, I64)}), 10**6, True, {"x": A})),
    ("loop_of_empty_bodies", "SX608", loop(body([node("Loop", ["m", "", "s"], ["t"], body=empty)], ["i", "c", "s"], ["c", "t"],
                                                {"m": np.array(10**6, I64)}), 10**6, True, {"x": A})),
    ("scan_2_40", "SX603", net([node("Scan", ["x"], ["y"], num_scan_inputs=1, body=body([node("Identity", ["e"], ["z"])], ["e"], ["z"]))],
                               inits={"x": np.zeros((HUGE, 0), F)})),
    ("scan_of_three_million", "SX606", net([node("Scan", ["x"], ["y"], num_scan_inputs=1,
                                           body=body([node("Identity", ["e"], ["z"])], ["e"], ["z"]))],
                                           inits={"x": np.zeros((3 * 10**6, 0), F)})),
    ("rnn_of_three_million_steps", "SX606", one("RNN", np.zeros((3 * 10**6, 0, 1), F), np.ones((1, 1, 1), F), np.ones((1, 1, 1), F),
                                                hidden_size=1, outputs=2)),
]:  # fmt: skip
    case("loops", name, code, model)
case("loops", "kernel_of_many_taps", "SX608", one("ConvTranspose", np.ones((1, 1, 1 << 15), F), np.ones((1, 1, 1 << 16), F)))
case("loops", "loop_over_the_iterations", "SX606", loop(asked, None, True, {"x": A}), iterations=1000)
case("loops", "executions", "SX605", loop(asked, 10**6, True, {"x": A}), executions=1000)
case("loops", "loop_at_the_limit_runs", "", loop(asked, 1000, True, {"x": A}), iterations=1000)
case("loops", "loop_with_no_round_runs", "", loop(same, MOST, False, {"x": A}))

# --- nesting and recursion --------------------------------------------------------------------------------------------


def function(name: str, calls: Sequence[NodeProto], attributes: Sequence[str] = ()) -> FunctionProto:
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["x"], ["y"], list(calls), imports, attributes=list(attributes))


def call(name: str, x: str, y: str, **attributes: Any) -> NodeProto:
    return node(name, [x], [y], domain="local", **attributes)


def called(functions: Sequence[FunctionProto], name: str) -> ModelProto:
    return net([call(name, "x", "y")], inits={"x": A}, functions=functions)


def nested(depth: int) -> ModelProto:
    inner = body([node("Neg", ["x"], ["y0"])], [], ["y0"])
    for i in range(depth):
        inner = body([node("If", ["t"], [f"y{i + 1}"], then_branch=inner, else_branch=body([node("Abs", ["x"], ["z"])], [], ["z"]))], [],
                     [f"y{i + 1}"])  # fmt: skip
    return net(inner.node, [f"y{depth}"], {"x": A, "t": np.array(True)})


def message(number: int, data: bytes) -> bytes:
    """A field of a Protocol Buffers message that holds a message."""
    length, size = len(data), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + data


def too_deep(depth: int) -> bytes:
    """`nested` beyond what the protobuf library itself would write."""
    inner = body([node("Neg", ["x"], ["y"])], [], ["y"]).SerializeToString()
    for _ in range(depth):
        data = node("If", ["t"], ["y"]).SerializeToString()
        for name in ("then_branch", "else_branch"):
            attribute = AttributeProto(name=name, type=AttributeProto.GRAPH).SerializeToString()
            data += message(
                5, attribute + message(6, inner if name == "then_branch" else body([], [], ["x"]).SerializeToString())
            )
        inner = body([], [], ["y"]).SerializeToString() + message(1, data)
    return net([], [], {"x": A, "t": np.array(True)}).SerializeToString() + message(7, inner)


def chain(n: int) -> list[FunctionProto]:
    return [function("f0", [node("Neg", ["x"], ["y"])]), *(function(f"f{i}", [call(f"f{i - 1}", "x", "y")]) for i in range(1, n))]


def doubled(n: int, leaf: Sequence[NodeProto]) -> list[FunctionProto]:
    return [
        function("f0", leaf),
        *(function(f"f{i}", [call(f"f{i - 1}", "x", "m"), call(f"f{i - 1}", "m", "y")]) for i in range(1, n)),
    ]


def varied(n: int) -> list[FunctionProto]:
    """Each function calls the next one with one more attribute bound, to 0 and to 1: 2**n different bodies."""
    made = []
    for i in range(n):
        names = [f"a{k}" for k in range(i)]
        if i == n - 1:
            made.append(function(f"g{i}", [node("Neg", ["x"], ["y"])], names))
            continue
        calls = [call(f"g{i + 1}", "x", "m", **{f"a{i}": 0}), call(f"g{i + 1}", "m", "y", **{f"a{i}": 1})]
        for c in calls:
            for name in names:
                c.attribute.append(AttributeProto(name=name, ref_attr_name=name, type=AttributeProto.INT))
        made.append(function(f"g{i}", calls, names))
    return made


def upward(n: int) -> ModelProto:
    """A chain of functions whose first caller is read first, so that none is read deep: only together are they deep."""
    return net([call(f"f{i}", f"x{i}", f"x{i + 1}") for i in range(n)], [f"x{n}"], {"x0": A}, functions=chain(n))


in_branch = node(
    "If", ["t"], ["y"], then_branch=body([call("f", "x", "z")], [], ["z"]), else_branch=body([call("f", "x", "w")], [], ["w"])
)
for name, code, model in [
    ("function_calls_itself", "SX103", called([function("f", [call("f", "x", "y")])], "f")),
    ("functions_call_each_other", "SX103", called([function("f", [call("g", "x", "y")]), function("g", [call("f", "x", "y")])], "f")),
    ("function_calls_itself_in_a_branch", "SX103", called(
        [function("f", [node("Constant", [], ["t"], value=tensor(np.array(True))), in_branch])], "f")),
    ("chain_of_functions", "SX602", called(chain(500), "f499")),
    ("chain_of_functions_from_below", "SX602", upward(600)),
    ("function_bomb", "SX608", called(doubled(40, [node("Neg", ["x"], ["y"])]), "f39")),
    ("function_bomb_of_nothing", "SX608", called(doubled(40, [node("Identity", ["x"], ["y"])]), "f39")),
    ("function_bomb_of_attributes", "SX608", called(varied(40), "g0")),
    ("function_defined_twice", "SX103", called([function("f", [node("Neg", ["x"], ["y"])])] * 2, "f")),
    ("function_is_missing", "SX202", called([], "f")),
    ("if_100_deep", "SX110", too_deep(100)),
    ("if_30_deep_runs", "", nested(30)),
]:  # fmt: skip
    case("nesting and recursion", name, code, model)
case("nesting and recursion", "if_deeper_than_allowed", "SX602", nested(20), nesting=10)
case(
    "nesting and recursion",
    "executions_of_functions",
    "SX605",
    called(doubled(30, [node("Neg", ["x"], ["y"])]), "f29"),
    executions=500,
)


case("nesting and recursion", "function_bomb_of_attributes_and_nodes", "SX611", called(varied(40), "g0"), nodes=1000)

# --- graphs that are none ---------------------------------------------------------------------------------------------

neg = [node("Neg", ["x"], ["y"])]
for name, code, model in [
    ("cycle", "SX101", net([node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"])], ["b"], {"x": A})),
    ("node_feeds_itself", "SX101", net([node("Add", ["x", "y"], ["y"])], inits={"x": A})),
    ("cycle_through_a_branch", "SX101", net([node("If", ["t"], ["y"], then_branch=body([node("Neg", ["y"], ["a"])], [], ["a"]),
                                                else_branch=body([node("Neg", ["y"], ["b"])], [], ["b"]))], inits={"t": np.array(True)})),
    ("output_named_twice", "SX102", net([*neg, *neg], inits={"x": A})),
    ("outputs_of_one_node_named_twice", "SX102", net([node("Split", ["x"], ["y", "y"], num_outputs=2)], inits={"x": A})),
    ("input_named_twice", "SX102", net(neg, inputs=["x", "x"])),
    ("initializer_is_recomputed", "SX10", net([node("Neg", ["x"], ["x"])], ["x"], {"x": A})),
    ("nothing_defines_it", "SX101", net([node("Neg", ["nothing"], ["y"])])),
    ("output_is_not_computed", "SX101", net(neg, ["z"], {"x": A})),
    ("nameless_output", "SX101", net(neg, [""], {"x": A})),
    ("ten_thousand_unknown_names", "SX101", net([node("Neg", [f"nothing_{i}"], [f"something_{i}"]) for i in range(10**4)], ["something_0"])),
    ("ten_thousand_unknown_operators", "SX20", net([node(f"Relo{i}", ["x"], [f"y{i}"]) for i in range(10**4)], ["y0"], {"x": A})),
    ("a_long_unknown_operator", "SX202", net([node("R" * 10**6, ["x"], ["y"])], inits={"x": A})),
    ("two_thousand_overridable", "", net([node("Neg", ["x0"], ["y"])], inits={f"x{i}": np.ones(1, F) for i in range(2000)},
                                               inputs=[f"x{i}" for i in range(2000)])),
]:  # fmt: skip
    case("not a graph", name, code, model)

# --- tensors that contradict themselves -------------------------------------------------------------------------------


def damaged(code: str, name: str, **fields: Any) -> None:
    proto = TensorProto(**{"dims": [4], "data_type": TensorProto.FLOAT, "raw_data": bytes(16), **fields})
    case("damaged tensors", name, code, net(neg, inits={"x": proto}))


damaged("SX104", "negative_dim", dims=[-4])
damaged("SX104", "dims_that_cancel", dims=[-2, -2])
damaged("SX104", "too_few_bytes", raw_data=bytes(15))
damaged("SX104", "too_many_bytes", raw_data=bytes(17))
damaged("SX603", "huge_dims_and_no_data", dims=[1 << 31, 1 << 31], raw_data=b"")
damaged("SX104", "large_dims_and_no_data", dims=[1 << 14, 1 << 14], raw_data=b"")
damaged("SX603", "dims_beyond_64_bits", dims=[MOST, MOST])
damaged("SX603", "empty_and_huge", dims=[0, MOST], raw_data=b"")
damaged("SX104", "unknown_type", data_type=99)
damaged("SX104", "undefined_type", data_type=0)
damaged("SX104", "raw_strings", data_type=TensorProto.STRING)
damaged("SX104", "string_that_is_not_utf8", data_type=TensorProto.STRING, dims=[1], raw_data=None, string_data=[b"\xff\xfe"])
damaged("SX104", "values_in_the_wrong_field", raw_data=None, int64_data=[1, 2, 3, 4])
damaged("SX607", "rank_70", dims=[1] * 70, raw_data=bytes(4))
damaged("SX607", "rank_50000", dims=[1] * 50000, raw_data=bytes(4))
damaged("SX104", "half_of_a_4_bit_pair", data_type=TensorProto.INT4, dims=[3], raw_data=b"\x11")


def sparse(dims: Sequence[int], at: Any, values: Any = (1.0,)) -> ModelProto:
    proto = helper.make_sparse_tensor(tensor(np.array(values, F), "x"), tensor(np.array(at, I64), "i"), list(dims))
    model = net(neg)
    model.graph.sparse_initializer.append(proto)
    return model


for name, code, model in [
    ("sparse_bomb", "SX603", sparse([HUGE], [0])), ("sparse_index_outside", "SX104", sparse([4], [4])),
    ("sparse_index_negative", "SX104", sparse([4], [-1])), ("sparse_too_few_values", "SX104", sparse([4], [0, 1])),
    ("sparse_negative_dims", "SX104", sparse([-4], [0])),
]:  # fmt: skip
    case("damaged tensors", name, code, model)

# --- external data ----------------------------------------------------------------------------------------------------


def external(folder: Path, location: str = "data", dims: Sequence[int] = (4,), **entries: str) -> ModelProto:
    proto = TensorProto(name="x", dims=list(dims), data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        proto.external_data.add(key=key, value=value)
    return net(neg, inits={"x": proto})


def outside(folder: Path) -> Path:
    """A file next to the model's folder that must not be read."""
    secret = folder.parent / f"{folder.name}_secret"
    secret.mkdir(exist_ok=True)
    (secret / "data").write_bytes(bytes(16))
    return secret


def _plain(folder: Path) -> ModelProto:
    (folder / "data").write_bytes(bytes(16))
    return external(folder)


def _up(folder: Path) -> ModelProto:
    return external(folder, f"../{outside(folder).name}/data")


def _up_again(folder: Path) -> ModelProto:
    (folder / "a").mkdir()
    return external(folder, f"a/../../{outside(folder).name}/data")


def _absolute(folder: Path) -> ModelProto:
    return external(folder, str(outside(folder) / "data"))


def _link(folder: Path) -> ModelProto:
    (folder / "data").symlink_to(outside(folder) / "data")
    return external(folder)


def _inner_link(folder: Path) -> ModelProto:
    (folder / "real").write_bytes(bytes(16))
    (folder / "data").symlink_to("real")
    return external(folder)


def _linked_folder(folder: Path) -> ModelProto:
    (folder / "sub").symlink_to(outside(folder))
    return external(folder, "sub/data")


def _hard_link(folder: Path) -> ModelProto:
    os.link(outside(folder) / "data", folder / "data")
    return external(folder)


def _pipe(folder: Path) -> ModelProto:
    os.mkfifo(folder / "data")
    return external(folder)


def _folder(folder: Path) -> ModelProto:
    (folder / "data").mkdir()
    return external(folder)


def _device(folder: Path) -> ModelProto:
    (folder / "data").symlink_to("/dev/zero")
    return external(folder)


def _hole(folder: Path) -> ModelProto:
    """A file of a terabyte that takes no room on the disk."""
    with open(folder / "data", "wb") as file:
        file.truncate(1 << 40)
    return external(folder, dims=[1 << 38])


def with_data(size: int, *args: Any, **entries: Any) -> Callable[[Path], ModelProto]:
    def build(folder: Path) -> ModelProto:
        (folder / "data").write_bytes(bytes(size))
        return external(folder, *args, **entries)

    return build


def missing(*args: Any, **entries: Any) -> Callable[[Path], ModelProto]:
    return lambda folder: external(folder, *args, **entries)


for name, code, build in [
    ("external_plain_runs", "", _plain), ("external_up", "SX105", _up), ("external_down_and_up", "SX105", _up_again),
    ("external_absolute", "SX105", _absolute), ("external_link", "SX105", _link), ("external_inner_link", "SX105", _inner_link),
    ("external_linked_folder", "SX105", _linked_folder), ("external_hard_link", "SX105", _hard_link), ("external_pipe", "SX105", _pipe),
    ("external_folder", "SX105", _folder), ("external_device", "SX105", _device), ("external_device_itself", "SX105", missing("/dev/zero")),
    ("external_hole", "SX603", _hole), ("external_missing", "SX105", missing()), ("external_without_location", "SX105", missing("")),
    ("external_nul", "SX105", missing("data\0")), ("external_backslash", "SX105", missing("..\\data")),
    ("external_long_name", "SX105", missing("d" * 10**5)), ("external_many_parts", "SX105", missing("d/" * 10**5 + "d")),
    ("external_too_short", "SX105", with_data(15)), ("external_offset_negative", "SX105", with_data(32, offset="-16")),
    ("external_offset_beyond", "SX105", with_data(32, offset="17")), ("external_offset_huge", "SX105", with_data(32, offset=str(MOST))),
    ("external_offset_digits", "SX105", with_data(32, offset="9" * 10**5)), ("external_offset_word", "SX105", with_data(32, offset="1e1")),
    ("external_length_other", "SX105", with_data(32, length="32")), ("external_length_negative", "SX105", with_data(32, length="-16")),
    ("external_home", "SX105", missing("~/data")), ("external_address", "SX105", missing("http://localhost/data")),
]:  # fmt: skip
    case("external data", name, code, build)

# --- files ------------------------------------------------------------------------------------------------------------


def _as_pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.onnx")


def _as_folder(folder: Path) -> None:
    (folder / "model.onnx").mkdir()


def _as_device(folder: Path) -> None:
    (folder / "model.onnx").symlink_to("/dev/zero")


def _large(folder: Path) -> None:
    with open(folder / "model.onnx", "wb") as file:
        file.truncate((2 << 30) + 1)


def _deep_message(folder: Path) -> bytes:
    """Graph in attribute in node in graph, 5,000 times: no parser's stack may follow it down."""
    data = b""
    for _ in range(5000):
        data = message(1, message(5, message(6, data)))
    return message(7, data)


good = net(neg, inits={"x": A}).SerializeToString()
for name, code, build in [
    ("file_empty", "SX110", b""), ("file_of_text", "SX110", b"not a model"), ("file_of_ones", "SX110", b"\xff" * 1000),
    ("file_cut", "SX110", good[:-9]), ("file_without_graph", "SX110", ModelProto(ir_version=10).SerializeToString()),
    ("file_pipe", "SX110", _as_pipe), ("file_folder", "SX110", _as_folder), ("file_device", "SX110", _as_device),
    ("file_too_large", "SX610", _large), ("file_deep_message", "SX110", _deep_message), ("file_missing", "SX110", lambda folder: None),
    ("unknown_fields_are_ignored", "", good + b"\xfa\x3f\x04evil"),
    ("length_beyond_the_file", "SX110", b"\x3a\xff\xff\xff\xff\x07abc"),
]:  # fmt: skip
    case("files", name, code, build)
case("files", "file_larger_than_allowed", "SX610", good, model_bytes=64)

# --- names and versions -----------------------------------------------------------------------------------------------


def renamed(model: ModelProto, old: bytes) -> bytes:
    """The file with a name replaced by bytes that are not UTF-8."""
    data = model.SerializeToString()
    assert old in data
    return data.replace(old, b"\xff" * len(old))


for name, old, model in [
    ("node", b"evil", one("Neg", A)), ("value", b"something", net([node("Neg", ["x"], ["something"])], ["something"], {"x": A})),
    ("operator", b"Neg", net(neg, inits={"x": A})), ("domain", b"local", called([function("f", neg)], "f")),
    ("attribute", b"axis", one("Softmax", A, axis=0)), ("initializer", b"weight", net([node("Neg", ["weight"], ["y"])], inits={"weight": A})),
    ("string_attribute", b"LEFT", one("BitShift", ints(1).astype(np.uint8), ints(1).astype(np.uint8), direction="LEFT")),
    ("external_location", b"somewhere", external(Path(), "somewhere")), ("graph", b"body", loop(same, 1, True, {"x": A})),
]:  # fmt: skip
    case("names that are not UTF-8", f"bad_utf8_{name}", "SX1", renamed(model, old))


def imported(*versions: tuple[str, int], domain: str = "") -> ModelProto:
    model = net([node("Neg", ["x"], ["y"], domain=domain)], inits={"x": A})
    del model.opset_import[:]
    for d, v in versions:
        model.opset_import.append(helper.make_opsetid(d, v))
    return model


for name, code, model in [
    ("opset_0", "SX106", imported(("", 0))), ("opset_negative", "SX106", imported(("", -1))), ("opset_2_62", "SX203", imported(("", 1 << 62))),
    ("opset_twice", "SX106", imported(("", 20), ("", 21))), ("domain_not_imported", "SX106", imported(("", 20), domain="elsewhere")),
    ("domain_unknown", "SX202", imported(("", 20), ("elsewhere", 1), domain="elsewhere")),
    ("operator_before_its_time", "SX107", one("Gelu", A, opset=7)), ("no_imports_is_opset_1", "", imported()),
]:  # fmt: skip
    case("versions and domains", name, code, model)


# --- attributes that make no sense ------------------------------------------------------------------------------------

X3, W3 = np.ones((1, 1, 8), F), np.ones((1, 1, 3), F)
for name, code, model in [
    ("conv_stride_0", "SX4", one("Conv", X3, W3, strides=[0])), ("conv_stride_negative", "SX4", one("Conv", X3, W3, strides=[-1])),
    ("conv_group_0", "SX4", one("Conv", X3, W3, group=0)), ("conv_group_2_62", "SX4", one("Conv", X3, W3, group=1 << 62)),
    ("conv_dilation_2_62", "SX4", one("Conv", X3, W3, dilations=[1 << 62])), ("conv_pads_negative", "SX4", one("Conv", X3, W3, pads=[-4, -4])),
    ("conv_strides_of_other_rank", "SX4", one("Conv", X3, W3, strides=[1, 1])), ("conv_auto_pad", "SX4", one("Conv", X3, W3, auto_pad="EVIL")),
    ("pool_kernel_2_40", "SX4", one("MaxPool", X3, kernel_shape=[HUGE])), ("pool_kernel_0", "SX4", one("MaxPool", X3, kernel_shape=[0])),
    ("pool_kernel_and_pads_2_40", "", one("AveragePool", X3, kernel_shape=[HUGE], pads=[HUGE // 2, HUGE // 2])),
    ("lp_pool_p_0", "SX4", one("LpPool", X3, kernel_shape=[2], p=0)), ("axis_2_63", "SX408", one("Softmax", A, axis=MOST)),
    ("axis_negative_2_63", "SX408", one("Concat", A, A, axis=-MOST - 1)), ("perm_outside", "SX4", one("Transpose", X3, perm=[0, 1, 3])),
    ("perm_twice", "SX4", one("Transpose", X3, perm=[0, 0, 1])), ("split_negative", "SX4", one("Split", A, ints(-1, 5), outputs=2)),
    ("split_beyond_64_bits", "SX4", one("Split", A, ints(MOST, MOST), outputs=2)), ("split_0", "SX4", one("SplitToSequence", A, np.array(0, I64))),
    ("top_k_huge", "SX4", one("TopK", A, ints(1 << 62), outputs=2)), ("top_k_negative", "SX4", one("TopK", A, ints(-1), outputs=2)),
    ("slice_step_0", "SX4", one("Slice", A, ints(0), ints(4), ints(0), ints(0))),
    ("slice_to_the_ends_of_the_world_runs", "", one("Slice", A, ints(MOST), ints(-MOST - 1), ints(0), ints(-MOST - 1))),
    ("range_delta_0", "SX4", one("Range", np.array(0, I64), np.array(4, I64), np.array(0, I64))),
    ("range_delta_nan", "SX4", one("Range", np.array(0, F), np.array(4, F), np.array(np.nan, F))),
    ("range_to_infinity", "SX4", one("Range", np.array(0, F), np.array(np.inf, F), np.array(1, F))),
    ("resize_inf", "SX4", one("Resize", X3, None, np.array([1, 1, np.inf], F))), ("resize_nan", "SX4", one("Resize", X3, None, np.array([1, 1, np.nan], F))),
    ("resize_negative", "SX4", one("Resize", X3, None, np.array([1, 1, -1], F))), ("resize_sizes_negative", "SX4", one("Resize", X3, None, None, ints(1, 1, -8))),
    ("resize_tiny", "", one("Resize", X3, None, np.array([1, 1, 1e-30], F), mode="linear", antialias=1)),
    ("depth_to_space_0", "SX4", one("DepthToSpace", np.ones((1, 4, 1, 1), F), blocksize=0)),
    ("depth_to_space_2_40", "SX4", one("DepthToSpace", np.ones((1, 4, 1, 1), F), blocksize=HUGE)),
    ("col2im_block_2_40", "SX603", one("Col2Im", np.ones((1, 0, 1), F), ints(HUGE), ints(HUGE))),
    ("lrn_size_2_62", "", one("LRN", np.ones((1, 2, 2), F), size=1 << 62)), ("dft_length_0", "SX4", one("DFT", np.ones((1, 4, 1), F), np.array(0, I64))),
    ("dft_length_negative", "SX4", one("DFT", np.ones((1, 4, 1), F), np.array(-MOST, I64))),
    ("stft_step_0", "SX4", one("STFT", np.ones((1, 8, 1), F), np.array(0, I64), None, np.array(4, I64))),
    ("window_negative", "SX4", one("HannWindow", np.array(-5, I64))), ("dtype_unknown", "SX108", one("Cast", A, to=99)),
    ("dtype_negative", "SX108", one("RandomNormal", shape=[2], dtype=-1)), ("reshape_to_less_than_nothing", "SX4", one("Reshape", A, ints(-2, -2))),
    ("reshape_beyond_64_bits", "SX4", one("Reshape", A, ints(MOST, MOST))), ("expand_negative", "SX4", one("Expand", A, ints(-4))),
    ("tile_negative", "SX4", one("Tile", A, ints(-1))), ("one_hot_negative_depth", "SX4", one("OneHot", A, np.array(-4, I64), np.array([0, 1], F))),
    ("group_norm_0", "SX4", one("GroupNormalization", X3, np.ones(1, F), np.ones(1, F), num_groups=0)),
    ("attention_heads_0", "SX4", one("Attention", X3, X3, X3, q_num_heads=0, kv_num_heads=0)),
    ("lstm_hidden_2_40", "SX4", one("LSTM", np.ones((1, 1, 1), F), np.ones((1, 4, 1), F), np.ones((1, 4, 1), F), hidden_size=HUGE)),
    ("lstm_activation", "SX4", one("LSTM", np.ones((1, 1, 1), F), np.ones((1, 4, 1), F), np.ones((1, 4, 1), F), hidden_size=1, activations=["__import__"] * 3)),
    ("dropout_ratio_nan", "SX4", one("Dropout", A, np.array(np.nan, F), np.array(True))),
    ("multinomial_nan", "SX4", one("Multinomial", np.full((1, 4), np.nan, F))),
    ("quantize_block_2_62", "", one("QuantizeLinear", A, np.ones(1, F), np.zeros(1, np.uint8), axis=0, block_size=1 << 62)),
    ("attribute_of_another_type", "SX107", one("Softmax", A, axis="zero")), ("attribute_unknown", "SX107", one("Softmax", A, evil=1)),
    ("attribute_missing", "SX107", one("Cast", A)), ("scatter_reduction", "SX4", one("ScatterElements", A, ints(0), np.ones(1, F), reduction="evil")),
    ("clip_of_tensors", "SX4", one("Clip", A, A)), ("trilu_k_2_63_runs", "", one("Trilu", np.ones((2, 2), F), np.array(MOST, I64))),
    ("eye_like_k_2_63_runs", "", one("EyeLike", np.ones((2, 2), F), k=MOST)), ("cumsum_axis", "SX4", one("CumSum", A, np.array(9, I64))),
    ("affine_grid_negative", "SX4", one("AffineGrid", np.ones((1, 2, 3), F), ints(1, 1, -4, 4))),
    ("mel_sample_rate_0", "SX4", one("MelWeightMatrix", np.array(8, I64), np.array(16, I64), np.array(0, I64), np.array(0, F), np.array(8, F))),
]:  # fmt: skip
    case("attributes", name, code, model)

twice = one("Softmax", A, axis=0)
twice.graph.node[0].attribute.append(twice.graph.node[0].attribute[0])
case("attributes", "attribute_twice", "SX107", twice)
loose = one("Softmax", A)
loose.graph.node[0].attribute.append(AttributeProto(name="axis", ref_attr_name="outside", type=AttributeProto.INT))
case("attributes", "attribute_of_no_function", "SX107", loose)
lost = called([function("f", [node("Softmax", ["x"], ["y"])], ["a"])], "f")
lost.functions[0].node[0].attribute.append(AttributeProto(name="axis", ref_attr_name="b", type=AttributeProto.INT))
case("attributes", "attribute_that_the_function_lacks", "SX107", lost)

# --- the classes that an operator's own checks keep out ---------------------------------------------------------------

for i, equation in enumerate(
    ("->->", "i..j->i", "i,->", "ij,jk,kl->il", "i->j", "é->é", "i j k", "", "1->1", "[0]->", "ii...i->")
):
    case("einsum", f"einsum_garbage_{i}", "SX4", one("Einsum", A, equation=equation))
letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
case("einsum", "einsum_60_labels_runs", "", one("Einsum", np.ones([1] * 60, F), equation=(letters + "abcdefgh")))
case(
    "einsum",
    "einsum_52_labels_runs",
    "",
    one("Einsum", *[np.ones([2] * 13, F)] * 4, equation=",".join(letters[i : i + 13] for i in range(0, 52, 13)) + "->"),
)
case(
    "einsum",
    "einsum_100_terms",
    "SX",
    one(
        "Einsum",
        *[A] * 100,
        equation=",".join(["i"] * 100) + "->i",
    ),
)

words = np.array(["a" * 50000 + "!"], object)
for name, code, pattern in [
    ("regex_nested_quantifiers", "", "(a*)*b"), ("regex_many_quantifiers", "", "(a|aa|a?)*" * 20 + "b"), ("regex_huge_repeat", "SX404", "(a{1000}){1000}"),
    ("regex_not_re2", "SX404", r"(a)\1"), ("regex_open_bracket", "SX404", "["), ("regex_100000_brackets", "", "(" * 10**5 + ")" * 10**5),
]:  # fmt: skip
    case("regular expressions", name, code, one("RegexFullMatch", words, pattern=pattern))

strings = np.full((1 << 14,), "", object)
strings[0] = " ".join("a" * (1 << 14))
for name, code, model in [
    ("split_explodes", "SX603", one("StringSplit", strings, outputs=2)), ("cast_of_100000_digits", "SX4", one("Cast", np.array(["9" * 10**5], object), to=7)),
    ("cast_of_an_exponent", "SX4", one("Cast", np.array(["1e999999999"], object), to=7)), ("cast_of_no_number", "SX4", one("Cast", np.array(["__import__"], object), to=1)),
    ("cast_with_white_space_runs", "", one("Cast", np.array([" 1 "], object), to=1)), ("strings_that_are_added", "SX4", one("Add", words, words)),
    ("string_normalizer_rank", "SX4", one("StringNormalizer", np.full((2, 2), "a", object))), ("sort_of_strings", "SX406", one("TopK", words, ints(1), outputs=2)),
]:  # fmt: skip
    case("strings", name, code, model, **(TIGHT if name == "split_explodes" else {}))


def tree(true: Sequence[int], false: Sequence[int], modes: Sequence[str] | None = None, **over: Any) -> ModelProto:
    n = len(true)
    return one("TreeEnsembleRegressor", np.ones((4, 2), F), domain=ML, **{
        "n_targets": 1, "nodes_treeids": [0] * n, "nodes_nodeids": list(range(n)), "nodes_modes": list(modes or ["BRANCH_LEQ"] * (n - 1) + ["LEAF"]),
        "nodes_featureids": [0] * n, "nodes_truenodeids": list(true), "nodes_falsenodeids": list(false), "nodes_values": [0.5] * n,
        "target_treeids": [0], "target_nodeids": [n - 1], "target_ids": [0], "target_weights": [1.0], **over})  # fmt: skip


ring = 20000
places = {
    "tree_roots": [0], "nodes_featureids": [0, 0], "nodes_modes": tensor(np.zeros(2, np.uint8)), "nodes_splits": tensor(np.zeros(2, F)),
    "nodes_falsenodeids": [0, 0], "nodes_falseleafs": [1, 1], "leaf_targetids": [0], "leaf_weights": tensor(np.ones(1, F)), "n_targets": 1,
}  # fmt: skip
for name, code, model in [
    ("tree_cycle", "SX4", tree([1, 2, 1, 0], [3, 3, 3, 0])), ("tree_that_is_its_own_child", "SX4", tree([1, 1, 0], [2, 2, 0])),
    ("tree_without_root", "SX4", tree([1, 0, 0], [2, 2, 0])), ("tree_child_outside", "SX4", tree([9, 0], [1, 0])),
    ("tree_child_negative", "SX4", tree([-1, 0], [1, 0])), ("tree_feature_outside", "SX4", tree([1, 0], [1, 0], nodes_featureids=[1 << 62, 0])),
    ("tree_mode", "SX4", tree([1, 0], [1, 0], modes=["EVIL", "LEAF"])), ("tree_lengths", "SX4", tree([1, 0], [1, 0], nodes_values=[0.5])),
    ("tree_target_outside", "SX4", tree([1, 0], [1, 0], target_ids=[7])), ("tree_ids_2_63", "SX4", tree([1, 0], [1, 0], nodes_nodeids=[-MOST - 1, MOST])),
    ("tree_ring_of_20000", "SX4", tree([*range(1, ring), 1, 0], [*range(2, ring), ring, ring, 0])),
    ("tree_chain_of_1000_runs", "", tree([*range(1, 1000), 0], [999] * 999 + [0])),
    ("tree_ensemble_cycle", "SX4", one("TreeEnsemble", np.ones((1, 1), F), domain=ML, nodes_truenodeids=[1, 0], nodes_trueleafs=[0, 0], **places)),
    ("tree_ensemble_outside", "SX4", one("TreeEnsemble", np.ones((1, 1), F), domain=ML, nodes_truenodeids=[7, 0], nodes_trueleafs=[0, 0], **places)),
    ("tree_votes", "SX603", tree([1, 0], [1, 0], nodes_treeids=list(range(1 << 15)), nodes_nodeids=[0] * (1 << 15), nodes_modes=["LEAF"] * (1 << 15),
        nodes_featureids=[0] * (1 << 15), nodes_truenodeids=[0] * (1 << 15), nodes_falsenodeids=[0] * (1 << 15), nodes_values=[0.0] * (1 << 15),
        target_treeids=[0] * (1 << 15), target_nodeids=[0] * (1 << 15), target_ids=[0] * (1 << 15), target_weights=[1.0] * (1 << 15))),
    ("svm_lengths", "SX4", one("SVMRegressor", np.ones((1, 2), F), domain=ML, n_supports=1 << 40, coefficients=[1.0], support_vectors=[1.0], rho=[0.0])),
    ("svm_classes_negative", "SX4", one("SVMClassifier", np.ones((1, 2), F), domain=ML, outputs=2, vectors_per_class=[-1, 2], coefficients=[1.0],
        support_vectors=[1.0, 1.0], rho=[0.0], classlabels_ints=[0, 1])),
    ("linear_lengths", "SX4", one("LinearRegressor", np.ones((1, 2), F), domain=ML, coefficients=[1.0], targets=1 << 40)),
    ("labels_differ", "SX4", one("LabelEncoder", ints(1), domain=ML, keys_int64s=[1, 2], values_int64s=[1])),
    ("tf_idf_counts", "SX4", one("TfIdfVectorizer", ints(1, 2), mode="TF", ngram_counts=[5, -3], ngram_indexes=[0], pool_int64s=[1], min_gram_length=1,
        max_gram_length=2, max_skip_count=0)),
    ("tf_idf_index_negative", "SX4", one("TfIdfVectorizer", ints(1, 2), mode="TF", ngram_counts=[0], ngram_indexes=[-1], pool_int64s=[1], min_gram_length=1,
        max_gram_length=1, max_skip_count=0)),
    ("tf_idf_skip_2_62_runs", "", one("TfIdfVectorizer", ints(1, 2), mode="TF", ngram_counts=[0, 0], ngram_indexes=[0], pool_int64s=[1, 2], min_gram_length=2,
        max_gram_length=2, max_skip_count=1 << 62)),
    ("feature_outside", "SX401", one("ArrayFeatureExtractor", A, ints(4), domain=ML)),
]:  # fmt: skip
    case("machine learning", name, code, model, **({"tensor_bytes": 64 * MIB} if name == "tree_votes" else {}))

low = np.iinfo(np.int32).min
for name, code, model in [
    ("divide_by_zero", "SX403", one("Div", ints(1), ints(0))), ("modulo_zero", "SX403", one("Mod", ints(1), ints(0))),
    ("zero_to_minus_one", "SX403", one("Pow", ints(0), ints(-1))), ("mean_of_nothing", "SX4", one("ReduceMean", np.zeros((0,), I64), ints(0))),
    ("least_by_minus_one_runs", "", one("Div", np.array([low], np.int32), np.array([-1], np.int32))),
    ("least_by_minus_one_64_runs", "", one("Div", ints(-MOST - 1), ints(-1))),
    ("least_modulo_minus_one_runs", "", one("Mod", ints(-MOST - 1), ints(-1))), ("least_fmod_minus_one_runs", "", one("Mod", ints(-MOST - 1), ints(-1), fmod=1)),
    ("shift_by_200_runs", "", one("BitShift", np.ones(1, np.uint8), np.full(1, 200, np.uint8), direction="LEFT")),
    ("cast_nan_runs", "", one("Cast", np.array([np.nan, np.inf, -np.inf, 1e300]), to=7)), ("negated_least_runs", "", one("Neg", ints(-MOST - 1))),
]:  # fmt: skip
    case("arithmetic", name, code, model)

X22 = np.ones((2, 2), F)
for name, model in {
    "gather": one("Gather", A, ints(4)), "gather_below": one("Gather", A, ints(-5)), "gather_2_63": one("Gather", A, ints(MOST)),
    "gather_elements": one("GatherElements", A, ints(4)), "gather_nd": one("GatherND", X22, ints(0, 2)), "gather_nd_below": one("GatherND", X22, ints(-3, 0)),
    "scatter": one("ScatterElements", A, ints(4), np.ones(1, F)), "scatter_nd": one("ScatterND", A, np.array([[-5]], I64), np.ones(1, F)),
    "scatter_add": one("ScatterElements", A, ints(MOST), np.ones(1, F), reduction="add"),
    "tensor_scatter": one("TensorScatter", np.ones((1, 4, 1), F), np.ones((1, 2, 1), F), ints(3)), "max_unpool": one("MaxUnpool", X3, np.full((1, 1, 8), MOST, I64), kernel_shape=[1]),
    "roi_align": one("RoiAlign", np.ones((1, 1, 4, 4), F), np.ones((1, 4), F), ints(1)), "sequence_at": net([node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "i"], ["y"])], inits={"x": A, "i": np.array(MOST, I64)}),
    "loss": one("NegativeLogLikelihoodLoss", np.ones((1, 2), F), ints(2)), "reverse_sequence": one("ReverseSequence", X22, ints(3, -1)),
}.items():  # fmt: skip
    case("indices outside", f"index_{name}", "SX4", model)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def image(data: bytes, **limits: int) -> ModelProto:
    return one("ImageDecoder", np.frombuffer(data, np.uint8))


case("images", "image_of_50000_by_50000", S, image(png(50000, 50000)))
case("images", "image_beyond_the_limit", S, image(png(8000, 8000)), **TIGHT)
case("images", "image_that_is_none_runs", "", image(b"%!PS-Adobe-3.0 EPSF-3.0\n(evil) run\n"))
case("images", "image_cut_runs", "", image(png(16, 16)[:-20]))

for name, code, model in [
    ("reshape_to_70_axes", "SX607", one("Reshape", np.ones(1, F), ints(*[1] * 70))), ("unsqueeze_to_70_axes", "SX607", one("Unsqueeze", np.ones(1, F), ints(*range(69)))),
    ("expand_to_70_axes", "SX607", one("Expand", np.ones(1, F), ints(*[1] * 70))), ("zeros_of_70_axes", "SX607", one("ConstantOfShape", ints(*[1] * 70))),
    ("unsqueeze_by_chains", "SX607", net([node("Unsqueeze", [f"v{i}", "a"], [f"v{i + 1}"]) for i in range(70)], ["v70"], {"v0": A, "a": ints(0)})),
    ("a_million_axes", "SX", one("Reshape", np.ones(1, F), np.ones(10**6, I64))), ("gather_beyond_64_axes", "SX607", one("Gather", np.ones([1] * 40, F), np.zeros([1] * 40, I64))),
]:  # fmt: skip
    case("rank", name, code, model)
case("rank", "rank_9_where_8_are_allowed", "SX607", one("Reshape", np.ones(1, F), ints(*[1] * 9)), rank=8)
case("rank", "rank_8_runs", "", one("Reshape", np.ones(1, F), ints(*[1] * 8)), rank=8)

for name, code, model in [
    ("empty_rnn_2_40", "SX603", one("RNN", np.zeros((0, 1, 1), F), np.ones((1, 1, 1), F), np.ones((1, 1, 1), F), hidden_size=1, outputs=2)),
    ("reshape_empty_2_60", "SX603", one("Reshape", np.zeros(0, F), ints(0, 1 << 60), allowzero=1)), ("zeros_0_by_2_60", "SX603", one("ConstantOfShape", ints(0, 1 << 60))),
    ("expand_0_by_2_40", "SX603", one("Expand", np.zeros((0, 1), F), ints(1, HUGE))), ("max_of_nothing", "SX4", one("ArgMax", np.zeros((0,), F))),
    ("softmax_of_nothing_runs", "", one("Softmax", np.zeros((2, 0), F))), ("quantize_nothing", "SX4", one("DynamicQuantizeLinear", np.zeros(0, F), outputs=3)),
    ("concat_of_empty_sequence", "SX4", net([node("SequenceEmpty", [], ["s"]), node("ConcatFromSequence", ["s"], ["y"], axis=0)])),
]:  # fmt: skip
    if name != "empty_rnn_2_40":
        case("nothing", name, code, model)

for name, code, model in [
    ("add_of_a_sequence", "SX4", net([node("SequenceConstruct", ["x"], ["s"]), node("Add", ["s", "x"], ["y"])], inits={"x": A})),
    ("sequence_of_two_types", "SX406", net([node("SequenceConstruct", ["x", "i"], ["y"])], inits={"x": A, "i": ints(1)})),
    ("at_of_a_tensor", "SX4", one("SequenceAt", A, np.array(9, I64))), ("length_of_nothing", "SX4", net([node("Optional", [], ["o"], type=helper.make_optional_type_proto(
        helper.make_tensor_type_proto(1, [1]))), node("SequenceLength", ["o"], ["y"])])), ("element_of_nothing", "SX4", net([node("Optional", [], ["o"], type=helper.make_optional_type_proto(
        helper.make_tensor_type_proto(1, [1]))), node("OptionalGetElement", ["o"], ["y"])])), ("optional_of_nothing", "SX4", net([node("Optional", [], ["y"])])),
    ("erase_from_empty", "SX4", net([node("SequenceEmpty", [], ["s"]), node("SequenceErase", ["s"], ["y"])])),
    ("insert_far_off", "SX4", net([node("SequenceEmpty", [], ["s"]), node("SequenceInsert", ["s", "x", "i"], ["y"])], inits={"x": A, "i": np.array(MOST, I64)})),
    ("split_to_a_billion", "SX603", net([node("Expand", ["x", "s"], ["z"]), node("SplitToSequence", ["z"], ["y"])], inits={"x": np.ones(1, np.uint8), "s": ints(1 << 30)})),
]:  # fmt: skip
    case("sequences and optionals", name, code, model)

branch = body([node("Neg", ["x"], ["a"])], [], ["a"])
both = body([node("Neg", ["x"], ["b"]), node("Abs", ["x"], ["c"])], [], ["b", "c"])
for name, code, model in [
    ("branches_differ", "SX107", net([node("If", ["t"], ["y"], then_branch=branch, else_branch=both)], inits={"x": A, "t": np.array(True)})),
    ("condition_of_many", "SX4", net([node("If", ["t"], ["y"], then_branch=branch, else_branch=branch)], inits={"x": A, "t": np.ones(4, bool)})),
    ("body_of_no_inputs", "SX107", loop(body([], [], ["d"], {"d": np.array(True)}), 3)), ("body_of_no_outputs", "SX107", loop(body([], ["i", "c"], []), 3)),
    ("loop_condition_of_many", "SX4", loop(body([node("Expand", ["c", "s"], ["d"]), node("Neg", ["a"], ["e"])], ["i", "c", "a"], ["d", "e"], {"s": ints(4)}), 3, states={"x": A})),
    ("scan_of_other_lengths", "SX4", net([node("Scan", ["x", "z"], ["y"], num_scan_inputs=2, body=body([node("Add", ["a", "b"], ["c"])], ["a", "b"], ["c"]))],
                                         inits={"x": A, "z": np.ones(3, F)})),
    ("scan_inputs_2_62", "SX4", net([node("Scan", ["x"], ["y"], num_scan_inputs=1 << 62, body=body([node("Neg", ["a"], ["c"])], ["a"], ["c"]))], inits={"x": A})),
    ("scan_axis", "SX4", net([node("Scan", ["x"], ["y"], num_scan_inputs=1, scan_input_axes=[MOST], body=body([node("Neg", ["a"], ["c"])], ["a"], ["c"]))], inits={"x": A})),
    ("more_outputs_than_a_body", "SX107", net([node("If", ["t"], ["y", "z"], then_branch=branch, else_branch=branch)], ["y", "z"], inits={"x": A, "t": np.array(True)})),
    ("changing_scan_output", "SX4", loop(body([node("Identity", ["c"], ["d"]), node("Unsqueeze", ["i", "a"], ["u"]), node("ConstantOfShape", ["u"], ["z"])],
                                             ["i", "c"], ["d", "z"], {"a": ints(0)}), 3)),
]:  # fmt: skip
    case("control flow misused", name, code, model)

for name, code, shape, value in [
    ("input_of_another_type", "SX302", [4], np.ones(4)), ("input_of_another_shape", "SX303", [4], np.ones(5, F)), ("input_is_a_list", "SX30", [4], [A]),
    ("input_is_nothing", "SX302", [4], None), ("input_is_a_map", "SX302", [4], {"a": 1}), ("input_of_objects", "SX302", [4], np.array([object()] * 4)),
]:  # fmt: skip
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    fed = helper.make_model(
        helper.make_graph(neg, "g", [info], [helper.make_empty_tensor_value_info("y")]),
        opset_imports=[helper.make_opsetid("", 21)],
    )
    case("inputs", name, code, fed, lambda value=value: {"x": value})
