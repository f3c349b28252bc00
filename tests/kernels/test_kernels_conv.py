"""Kernels of convolutions, poolings, normalizations of channels and resampling: equal to the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

F32 = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def node(op: str, *inputs: str, to: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs, [to], **attributes)


def model_of(nodes: Sequence[Any], given: dict[str, np.ndarray], known: dict[str, np.ndarray], opset: int) -> Any:
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()]
    result = helper.make_value_info(nodes[-1].output[0], helper.make_tensor_type_proto(TensorProto.UNDEFINED, None))
    result.ClearField("type")
    initializers = [numpy_helper.from_array(a, n) for n, a in known.items()]
    graph = helper.make_graph(list(nodes), "g", infos, [result], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def steps_of(rep: SingaRep) -> list[str]:
    assert rep._session._planner is not None
    return [s.kernel for p in rep._session._planner.plans.values() for g in p.segments for s in g.steps]


def same(actual: np.ndarray, expected: np.ndarray, exact: bool = False) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    largest = float(np.abs(expected[finite], dtype=np.float64).max(initial=0))
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=0 if exact else 1e-5 * largest)


def agree(
    nodes: Sequence[Any],
    given: dict[str, np.ndarray],
    known: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 22,
    uses: Sequence[str] = (),
    lacks: Sequence[str] = ("definition",),
    exact: bool = False,
    special: bool = True,
    threads: int = 1,
) -> SingaRep:
    """Compare the plan with the definitions: the run that traces it, a run with other data, with infinities, with NaN.

    Args:
        nodes: of the model.
        given: its inputs.
        known: its initializers.
        opset: its opset.
        uses: texts that must be in the names of the plan's kernels.
        lacks: texts that must not be in them.
        exact: whether no rounding is permitted.
        special: whether to run with infinities and NaN, too.
        threads: of the plan.
    """
    model = model_of(nodes, given, known or {}, opset)
    rep = SingaBackend.prepare(model, threads=threads)
    definition = SingaRep(rep.graph, rep.device, options=Options(level=0))
    names = list(given)
    runs = [[given[n] for n in names], [given[n][..., ::-1].copy() * np.asarray(-1).astype(given[n].dtype) for n in names]]
    for value in (np.inf, np.nan) if special else ():
        spoilt = [a.copy() for a in runs[1]]
        if spoilt[0].dtype.kind == "f":
            spoilt[0].reshape(-1)[:: max(1, spoilt[0].size // 3)] = value
            runs.append(spoilt)
    for inputs in runs:
        with np.errstate(all="ignore"):
            expected = definition.run(inputs)
        same(rep.run(inputs)[0], expected[0], exact)
    found = steps_of(rep)
    for text in uses:
        assert any(text in s for s in found), (text, found)
    for text in lacks:
        assert not any(text in s for s in found), (text, found)
    return rep


CONVOLUTIONS = [
    ((1, 3, 20, 20), (16, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 16, 9, 11), (8, 16, 1, 1), {}),
    ((2, 16, 9, 11), (8, 16, 1, 1), {"strides": [2, 3]}),
    ((1, 7, 12, 13), (5, 7, 3, 2), {"pads": [0, 2, 1, 0], "strides": [2, 1]}),
    ((1, 8, 15, 15), (8, 8, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((2, 12, 10, 10), (12, 1, 3, 3), {"group": 12, "pads": [1, 1, 1, 1]}),
    ((2, 12, 10, 10), (24, 1, 5, 5), {"group": 12, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 32, 8, 8), (64, 8, 3, 3), {"group": 4, "auto_pad": "SAME_LOWER"}),
    ((1, 9, 8, 8), (6, 3, 3, 3), {"group": 3, "auto_pad": "VALID"}),
    ((2, 4, 30), (6, 4, 5), {"pads": [2, 2], "strides": [3]}),
    ((1, 4, 6, 7, 8), (6, 4, 3, 2, 3), {"pads": [1, 0, 1, 1, 1, 1]}),
    ((1, 1, 5, 5), (1, 1, 5, 5), {}),
    ((1, 16, 1, 1), (16, 16, 1, 1), {}),
    ((1, 16, 3, 3), (16, 16, 3, 3), {"pads": [2, 2, 2, 2]}),
]


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVOLUTIONS, ids=str)
def test_convolutions(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], layout: str) -> None:
    known = {"w": normal(*w, seed=1), "b": normal(w[0], seed=2)}
    if layout == "plain":
        agree([node("Conv", "x", "w", "b", **attributes)], {"x": normal(*x)}, known, uses=["conv "])
        return
    rank = len(x)
    last = node("Transpose", "t", to="x", perm=[0, rank - 1, *range(1, rank - 1)])
    given = {"t": normal(x[0], *x[2:], x[1])}
    agree([last, node("Conv", "x", "w", **attributes)], given, known, uses=["conv "], lacks=["definition", "reorder", "copy"])


def test_weights_that_are_an_input_are_packed_in_each_run() -> None:
    agree([node("Conv", "x", "w")], {"x": normal(1, 16, 6, 6), "w": normal(24, 16, 3, 3)}, uses=["pack weights", "conv "])


def test_weights_are_packed_once_for_all_plans() -> None:
    model = model_of([node("Conv", "x", "w")], {"x": normal(1, 16, 6, 6)}, {"w": normal(24, 16, 3, 3)}, 22)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    rep = SingaBackend.prepare(model, threads=1)
    for n in (1, 6, 7, 2):  # one image has a plan of its own
        rep.run([normal(n, 16, 6, 6)])
    assert rep._session._planner is not None and len(rep._session._planner.plans) == 2
    assert sum(key[1][0] == "packed" for key in rep._session._planner.shared.kernels.derived if isinstance(key[1], tuple)) == 1


@pytest.mark.parametrize(
    "attributes",
    [{"strides": [0, 1]}, {"group": 5}, {"pads": [1, 1]}, {"kernel_shape": [2, 2]}, {"auto_pad": "NO"}, {"pads": [-1, 0, 0, 0]}],
    ids=str,
)
def test_what_is_not_valid_has_the_error_of_the_definition(attributes: dict[str, Any]) -> None:
    model = model_of([node("Conv", "x", "w", **attributes)], {"x": normal(1, 8, 6, 6)}, {"w": normal(8, 8, 3, 3)}, 22)
    rep = SingaBackend.prepare(model, threads=1)
    definition = SingaRep(rep.graph, rep.device, options=Options(level=0))
    errors = []
    for one in (rep, definition):
        with pytest.raises(Exception, match=r".") as error:
            one.run([normal(1, 8, 6, 6)])
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


ACTIVATIONS = [
    ("Relu", {}), ("LeakyRelu", {"alpha": 0.1}), ("Elu", {"alpha": 1.5}), ("Sigmoid", {}), ("Tanh", {}),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}), ("HardSwish", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}),
    ("Mish", {}), ("Abs", {}), ("Neg", {}), ("Swish", {"alpha": 1.5}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS, ids=str)
def test_activations_are_computed_by_the_convolution(op: str, attributes: dict[str, Any]) -> None:
    known = {"w": normal(24, 8, 3, 3, seed=1), "b": normal(24, seed=2)}
    nodes = [node("Conv", "x", "w", "b", to="c"), node(op, "c", **attributes)]
    rep = agree(nodes, {"x": normal(2, 8, 9, 9)}, known, opset=24, uses=["conv "])
    assert sum("reorder" not in s and "copy" not in s for s in steps_of(rep)) == 1


@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-0.5, None), (None, 0.25), (1.0, 1.0)], ids=str)
def test_clip_is_computed_by_the_convolution(bounds: tuple[float | None, float | None]) -> None:
    known = {"w": normal(24, 8, 3, 3, seed=1)}
    names = []
    for n, b in zip(("low", "high"), bounds, strict=True):
        names.append("" if b is None else n)
        if b is not None:
            known[n] = np.array(b, F32)
    rep = agree([node("Conv", "x", "w", to="c"), node("Clip", "c", *names)], {"x": normal(2, 8, 9, 9)}, known)
    assert sum("reorder" not in s and "copy" not in s for s in steps_of(rep)) == 1


OPERANDS = [(1, 24, 1, 1), (24, 1, 1), (2, 24, 7, 7), (), (1,), (24, 7, 7), (2, 24, 1, 1), (2, 1, 7, 7), (7,), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("op", "place"), [(o, p) for o in ("Add", "Mul", "Sub", "Div", "Max", "Min") for p in (0, 1) if (o, p) != ("Div", 1)]
)
@pytest.mark.parametrize("shape", OPERANDS, ids=str)
def test_operands_of_followers(op: str, shape: tuple[int, ...], place: int) -> None:
    """Constant ones; the result equals the definition's whether the operand is fused or not."""
    known = {"w": normal(24, 8, 3, 3, seed=1), "o": normal(*shape, seed=3).reshape(shape) + F32(3)}
    inputs = ["c", "o"] if place == 0 else ["o", "c"]
    agree([node("Conv", "x", "w", to="c"), node(op, *inputs)], {"x": normal(2, 8, 9, 9)}, known, uses=["conv "], special=False)


@pytest.mark.parametrize("op", ["Add", "Mul", "Sub", "Max"])
@pytest.mark.parametrize("shape", [(2, 24, 7, 7), (1, 24, 1, 1), (1, 1, 1, 1)], ids=str)
def test_operands_that_are_inputs(op: str, shape: tuple[int, ...]) -> None:
    given = {"x": normal(2, 8, 9, 9), "o": normal(*shape, seed=3)}
    agree([node("Conv", "x", "w", to="c"), node(op, "c", "o")], given, {"w": normal(24, 8, 3, 3, seed=1)}, uses=["conv "])


def test_a_residual_is_added_in_place() -> None:
    known = {n: normal(16, 16, 3, 3, seed=i) for i, n in enumerate("uvw")}
    nodes = [
        node("Conv", "x", "u", to="a", pads=[1] * 4),
        node("Relu", "a", to="r"),
        node("Conv", "r", "v", to="b", pads=[1] * 4),
        node("Conv", "b", "w", to="c", pads=[1] * 4),
        node("Add", "c", "r", to="s"),
        node("Relu", "s"),
    ]
    rep = agree(nodes, {"x": normal(1, 16, 20, 20)}, known)
    assert [s.split()[0] for s in steps_of(rep)] == ["reorder", "conv", "conv", "conv"]
    steps = next(iter(rep._session._planner.plans.values())).segments[0].steps  # type: ignore[union-attr]
    assert steps[3].writes[0].buffer is steps[1].writes[0].buffer


def test_the_input_of_a_convolution_is_not_overwritten_by_its_residual() -> None:
    nodes = [node("Relu", "x", to="r"), node("Conv", "r", "w", to="c", pads=[1] * 4), node("Add", "c", "r")]
    agree(nodes, {"x": normal(1, 16, 20, 20)}, {"w": normal(16, 16, 3, 3)})


def test_a_residual_that_is_read_later_is_not_overwritten() -> None:
    known = {n: normal(16, 16, 3, 3, seed=i) for i, n in enumerate(("v", "w"))}
    nodes = [
        node("Conv", "x", "v", to="a", pads=[1] * 4),
        node("Conv", "a", "w", to="b", pads=[1] * 4),
        node("Add", "b", "a", to="s"),
        node("Mul", "s", "a"),
    ]
    agree(nodes, {"x": normal(1, 16, 10, 10)}, known)


def test_a_slope_for_each_channel_is_computed_by_the_convolution() -> None:
    known = {"w": normal(24, 8, 3, 3, seed=1), "s": normal(24, 1, 1, seed=2)}
    rep = agree([node("Conv", "x", "w", to="c"), node("PRelu", "c", "s")], {"x": normal(2, 8, 9, 9)}, known)
    assert sum("reorder" not in s and "copy" not in s for s in steps_of(rep)) == 1


def test_an_input_of_several_convolutions_is_reordered_once() -> None:
    known = {n: normal(16, 16, 3, 3, seed=i) for i, n in enumerate("vw")}
    nodes = [node("Conv", "x", "v", to="a"), node("Conv", "x", "w", to="b"), node("Add", "a", "b")]
    rep = agree(nodes, {"x": normal(1, 16, 30, 30)}, known)
    assert sum("reorder" in s for s in steps_of(rep)) == 1


TRANSPOSED = [
    ((1, 8, 5, 5), (8, 6, 2, 2), {"strides": [2, 2]}),
    ((2, 8, 5, 6), (8, 6, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((1, 8, 5, 6), (8, 3, 3, 3), {"group": 2, "pads": [0, 1, 1, 0]}),
    ((1, 8, 5, 6), (8, 1, 3, 3), {"group": 8, "strides": [2, 1]}),
    ((1, 8, 5, 5), (8, 6, 3, 3), {"output_shape": [10, 10], "strides": [2, 2]}),
    ((1, 8, 5, 5), (8, 6, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 8, 5, 5), (8, 6, 3, 3), {"dilations": [2, 2]}),
    ((1, 8, 9), (8, 6, 4), {"strides": [3]}),
    ((1, 4, 3, 4, 5), (4, 6, 2, 2, 2), {"strides": [2, 2, 2]}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED, ids=str)
def test_transposed_convolutions(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    known = {"w": normal(*w, seed=1), "b": normal(w[1] * attributes.get("group", 1), seed=2)}
    nodes = [node("ConvTranspose", "x", "w", "b", to="c", **attributes), node("Relu", "c")]
    agree(nodes, {"x": normal(*x)}, known, uses=["conv "])


LARGE = [  # inputs, outputs, window, strides, padding, size
    (512, 16, (4, 4), (2, 2), 1, (8, 8)),
    (64, 8, (31, 31), (2, 2), 15, (8, 17)),
    (32, 32, (9, 9, 9), (2, 2, 2), 4, (4, 3, 3)),
]


@pytest.mark.parametrize(("channels", "outputs", "window", "strides", "pad", "size"), LARGE)
@pytest.mark.parametrize("follow", ["", "Relu", "Add", "HardSwish Add"])
def test_a_bias_is_added_once_if_the_window_exceeds_a_cache(
    channels: int, outputs: int, window: tuple[int, ...], strides: tuple[int, ...], pad: int, size: tuple[int, ...], follow: str
) -> None:
    nodes = [node("ConvTranspose", "x", "w", "b", to="c", strides=strides, pads=[pad] * 2 * len(size))]
    given, known = {"x": normal(2, channels, *size)}, {"w": normal(channels, outputs, *window), "b": normal(outputs)}
    shape = [(n - 1) * s + k - 2 * pad for n, s, k in zip(size, strides, window, strict=True)]
    for i, name in enumerate(follow.split()):
        nodes.append(node(name, nodes[-1].output[0], *["z"] * (name == "Add"), to=f"f{i}"))
    if "Add" in follow:
        given["z"] = normal(2, outputs, *shape)
    rep = agree(nodes, given, known, uses=("bias",), threads=2)
    kernels = [k.split()[0] for k in steps_of(rep)]
    assert kernels.index("conv") < kernels.index("bias") == len(kernels) - 1


@pytest.mark.parametrize("seed", range(40))
def test_transposed_convolutions_of_one_axis_interleave_the_cells_of_a_stride(seed: int) -> None:
    draws = np.random.default_rng(seed)
    n, c, m, length = (int(v) for v in draws.integers(1, 9, 4))
    stride = int(draws.integers(2, 6))
    kernel = stride + int(draws.integers(0, 9))
    begin, end = (int(draws.integers(0, min(kernel, (length - 1) * stride + kernel) // 2 + 1)) for _ in range(2))
    attributes = {"strides": [stride], "pads": [begin, end], "output_padding": [int(draws.integers(0, stride))]}
    known = {"w": normal(c, m, kernel, seed=seed), "b": normal(m, seed=seed + 1), "slope": normal(m, 1, seed=seed + 2)}
    nodes = [node("ConvTranspose", "x", "w", "b", to="c", **attributes), node("PRelu", "c", "slope")]
    agree(nodes, {"x": normal(n, c, length, seed=seed + 3)}, known)


def test_a_transposed_convolution_of_one_axis_is_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def searches_for_blocks(*_: Any, **__: Any) -> Any:
        raise AssertionError("for 0.2 s")

    monkeypatch.setattr(onednn, "deconvolution", searches_for_blocks)
    nodes = [node("ConvTranspose", "x", "w", to="c", strides=[4], pads=[2, 2]), node("LeakyRelu", "c")]
    agree(nodes, {"x": normal(1, 16, 700)}, {"w": normal(16, 8, 8)})


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 16, 9, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((2, 5, 9, 10), {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [0, 1, 1, 0]}),
        ((1, 16, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ((1, 16, 8, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((1, 16, 8, 9), {"kernel_shape": [4, 4], "strides": [3, 3], "auto_pad": "SAME_LOWER"}),
        ((1, 4, 20), {"kernel_shape": [3], "strides": [2]}),
        ((1, 4, 6, 7, 8), {"kernel_shape": [2, 3, 2]}),
    ],
    ids=str,
)
def test_poolings(op: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    agree([node(op, "x", **attributes)], {"x": normal(*shape)}, uses=["pooling"])


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 2, 0], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("size", [7, 8, 9])
def test_which_cells_an_average_counts(include: int, ceil: int, pads: list[int], size: int) -> None:
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "count_include_pad": include, "ceil_mode": ceil, "pads": pads}
    agree([node("AveragePool", "x", **attributes)], {"x": normal(1, 8, size, size)}, lacks=[])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_the_maximum_of_integers(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-100, 100, (1, 16, 9, 9)).astype(dtype)
    agree([node("MaxPool", "x", kernel_shape=[3, 3])], {"x": x}, exact=True, lacks=[])


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool"])
@pytest.mark.parametrize("shape", [(2, 16, 7, 7), (1, 5, 9), (1, 8, 3, 4, 5)], ids=str)
def test_global_poolings(op: str, shape: tuple[int, ...]) -> None:
    agree([node(op, "x", to="p"), node("Flatten", "p")], {"x": normal(*shape)}, lacks=[])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 7, 7), (3, 5, 9), (1, 8, 3, 4, 5), (6, 8)], ids=str)
def test_batch_normalization(shape: tuple[int, ...], relu: bool) -> None:
    known = {n: normal(shape[1], seed=i) for i, n in enumerate("sbm")} | {"v": np.abs(normal(shape[1], seed=4)) + F32(0.5)}
    nodes = [node("Abs", "x", to="a"), node("BatchNormalization", "a", *"sbmv", to="n", epsilon=1e-3)]
    rep = agree([*nodes, node("Relu" if relu else "Neg", "n")], {"x": normal(*shape)}, known, uses=["batch_normalization"])
    assert len(steps_of(rep)) <= 3 + (not relu)


def test_batch_normalization_far_from_zero() -> None:
    """The mean is subtracted first: a scale and a shift alone would lose the digits."""
    known = {"s": np.ones(8, F32), "b": np.zeros(8, F32), "m": np.full(8, 5e4, F32), "v": np.ones(8, F32)}
    x = F32(5e4) + normal(1, 8, 6, 6)
    model = model_of([node("BatchNormalization", "x", *"sbmv")], {"x": x}, known, 22)
    rep = SingaBackend.prepare(model, threads=1)
    same(rep.run([x])[0], SingaRep(rep.graph, rep.device, options=Options(level=0)).run([x])[0])
    assert any("batch_normalization" in s for s in steps_of(rep))


@pytest.mark.parametrize("shape", [(2, 16, 7, 7), (3, 5, 9), (1, 8, 3, 4, 5)], ids=str)
def test_instance_normalization(shape: tuple[int, ...]) -> None:
    known = {n: normal(shape[1], seed=i) for i, n in enumerate("sb")}
    nodes = [node("InstanceNormalization", "x", "s", "b", to="n"), node("Relu", "n")]
    agree(nodes, {"x": normal(*shape) + F32(3)}, known, lacks=[])


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(("shape", "groups"), [((2, 16, 7, 7), 4), ((1, 6, 9), 3), ((1, 8, 5, 5), 8), ((2, 8, 5, 5), 1)], ids=str)
def test_group_normalization(shape: tuple[int, ...], groups: int, opset: int) -> None:
    known = {n: normal(groups if opset == 18 else shape[1], seed=i) for i, n in enumerate("sb")}
    nodes = [node("GroupNormalization", "x", "s", "b", num_groups=groups)]
    agree(nodes, {"x": normal(*shape) + F32(3)}, known, opset=opset, uses=["group_normalization"])


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("shape", [(1, 16, 7, 7), (2, 32, 5, 6)], ids=str)
def test_local_response_normalization(shape: tuple[int, ...], size: int) -> None:
    library = onednn.library()
    fast = size == 5 or (library is not None and "avx512" in library.isa)  # oneDNN's other code is for 5 channels only
    nodes = [node("LRN", "x", size=size, alpha=2e-3, bias=2.0)]
    agree(nodes, {"x": normal(*shape) * F32(10)}, uses=["lrn"] if fast else [], lacks=["definition"] if fast else [])


def test_an_even_window_of_channels_is_not_symmetric() -> None:
    agree([node("LRN", "x", size=4, alpha=0.1)], {"x": normal(1, 16, 7, 7)}, lacks=[])


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_blocks_of_space(mode: str, last: bool, dtype: Any) -> None:
    x = np.arange(2 * 12 * 4 * 6).reshape(2, 12, 4, 6).astype(dtype)
    nodes, given = [], {"x": x}
    if last:
        nodes, given = [node("Transpose", "t", to="x", perm=[0, 3, 1, 2])], {"t": x.transpose(0, 2, 3, 1).copy()}
    agree([*nodes, node("DepthToSpace", "x", blocksize=2, mode=mode)], given, exact=True)
    agree([*nodes, node("SpaceToDepth", "x", blocksize=2)], given, exact=True)


@pytest.mark.parametrize("scales", [(2, 2), (2, 3), (1.5, 2.5), (0.5, 0.5), (1, 2), (0.7, 1.3)], ids=str)
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_by_scales(mode: str, coordinates: str, scales: tuple[float, float]) -> None:
    known = {"s": np.array([1, 1, *scales], F32)}
    for nearest in ("floor", "round_prefer_floor") if mode == "nearest" else ("floor",):
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
        agree([node("Resize", "x", "", "s", **attributes)], {"x": normal(1, 5, 6, 8)}, known, opset=19, exact=mode == "nearest")


@pytest.mark.parametrize("attributes", [{"antialias": 1}, {"exclude_outside": 1, "mode": "cubic"}, {"axes": [3, 2]}], ids=str)
def test_resize_by_sizes(attributes: dict[str, Any]) -> None:
    attributes = {"mode": "linear"} | attributes
    known = {"z": np.array([9, 3], np.int64)}
    attributes.setdefault("axes", [2, 3])
    agree([node("Resize", "x", "", "", "z", **attributes)], {"x": normal(1, 5, 6, 8)}, known, opset=19)


def test_upsample_and_the_old_resize() -> None:
    known = {"s": np.array([1, 1, 2, 2], F32)}
    for opset, op in ((9, "Upsample"), (10, "Resize")):
        for mode in ("nearest", "linear"):
            agree([node(op, "x", "s", mode=mode)], {"x": normal(1, 16, 6, 8)}, known, opset=opset, exact=mode == "nearest")


@pytest.mark.parametrize("shape", [(16, 1, 1), (1,), (1, 16, 40, 40)], ids=str)
def test_slopes_of_large_inputs(shape: tuple[int, ...]) -> None:
    agree([node("PRelu", "x", "s")], {"x": normal(1, 16, 40, 40)}, {"s": normal(*shape, seed=2)}, uses=["prelu"])


def test_activations_are_joined_with_their_channels_innermost() -> None:
    known = {n: normal(16, 16, 3, 3, seed=i) for i, n in enumerate("vw")}
    nodes = [
        node("Conv", "x", "v", to="a", pads=[1] * 4),
        node("Conv", "a", "w", to="b", pads=[1] * 4),
        node("Concat", "a", "b", "x", to="c", axis=1),
        node("MaxPool", "c", kernel_shape=[2, 2]),
    ]
    rep = agree(nodes, {"x": normal(1, 16, 24, 24)}, known, uses=["concat"])
    assert sum("reorder" in s for s in steps_of(rep)) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_are_weighted_by_what_was_pooled(batch: int) -> None:
    """The block of squeeze and excitation."""
    known = {"u": normal(32, 8, 3, 3), "v": normal(8, 32, 1, 1, seed=1), "w": normal(32, 8, 1, 1, seed=2)}
    nodes = [
        node("Conv", "x", "u", to="a"),
        node("GlobalAveragePool", "a", to="p"),
        node("Conv", "p", "v", to="q"),
        node("Relu", "q", to="r"),
        node("Conv", "r", "w", to="s"),
        node("Sigmoid", "s", to="t"),
        node("Mul", "a", "t"),
    ]
    agree(nodes, {"x": normal(batch, 8, 60, 60)}, known, uses=["binary jit"])


def test_large_activations_are_joined_by_copies() -> None:
    known = {"v": normal(64, 16, 1, 1)}
    nodes = [
        node("Conv", "x", "v", to="a"),
        node("Split", "a", to="b", axis=1, num_outputs=2),
        node("Concat", "a", "b", "c", "x", to="y", axis=1),
    ]
    nodes[1].output.append("c")
    rep = agree(nodes, {"x": normal(1, 16, 80, 80)}, known, special=False, threads=2)
    assert [s.split()[0] for s in steps_of(rep)] == ["reorder", "conv", *["reorder"] * 4]


def test_a_shuffle_of_channels_keeps_them_innermost() -> None:
    known = {
        "w": normal(16, 16, 1, 1),
        "five": np.array([0, 4, 4, 24, 24], np.int64),
        "four": np.array([0, 16, 24, 24], np.int64),
    }
    nodes = [
        node("Conv", "x", "w", to="a"),
        node("Reshape", "a", "five", to="b"),
        node("Transpose", "b", to="c", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "c", "four", to="d"),
        node("Conv", "d", "w"),
    ]
    rep = agree(nodes, {"x": normal(2, 16, 24, 24)}, known)
    assert [s.split()[0] for s in steps_of(rep)] == ["reorder", "conv", "reorder", "conv"]


def test_products_in_bfloat16_are_an_option() -> None:
    x, w = normal(1, 64, 16, 16), normal(64, 64, 3, 3, seed=1)
    rep = SingaBackend.prepare(model_of([node("Conv", "x", "w")], {"x": x}, {"w": w}, 22), threads=1)
    exact = SingaRep(rep.graph, rep.device, options=Options(level=0)).run([x])[0]
    rough = SingaRep(rep.graph, rep.device, options=Options(precision="bf16"))
    found = rough.run([x])[0]
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error <= 1e-2
    library = onednn.library()
    assert library is not None and (error > 1e-5) == ("amx" in library.isa)  # without AMX oneDNN computes in float32
