"""The kernels of Softmax, LogSoftmax, LayerNormalization and RMSNormalization against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.kernels import onednn

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [9, 11, 13, 24])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 7), -1), ((5, 1), 1), ((17,), 0), ((2, 3, 8, 33), 3), ((2, 3, 8, 33), 1), ((2, 3, 8, 33), 0), ((4, 300), 1)],
)
def test_softmax(shape: tuple[int, ...], axis: int, opset: int, name: str) -> None:
    feeds = [{"x": drawn(s, x=shape)["x"] * np.float32(9)} for s in (1, 2)]
    nodes = [node(name, ["x"], ["y"], axis=axis if axis >= 0 or opset > 9 else len(shape) + axis)]
    used = check(model_of(nodes, feeds[0], ["y"], opset=opset), feeds)
    assert used[-1] == f"numpy.{'log_' * (name == 'LogSoftmax')}softmax"


@pytest.mark.parametrize("perm", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("axis", [0, 3])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_of_a_view(name: str, axis: int, perm: tuple[int, ...]) -> None:
    feeds = [drawn(s, x=(2, 3, 8, 33)) for s in (1, 2)]
    nodes = [node("Transpose", ["x"], ["t"], perm=perm), node(name, ["t"], ["y"], axis=axis)]
    check(model_of(nodes, feeds[0], ["y"]), feeds)


def test_softmax_in_place_of_its_input() -> None:
    feeds = [drawn(s, x=(4, 60, 64)) for s in (1, 2)]
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Softmax", ["m"], ["s"]), node("MatMul", ["s", "w"], ["y"])]
    check(model_of(nodes, feeds[0], ["y"], drawn(3, w=(64, 64))), feeds)
    check(model_of(nodes, feeds[0], ["y", "m"], drawn(3, w=(64, 64))), feeds)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_softmax_of_what_is_not_finite(number: float, name: str) -> None:
    feeds = [drawn(s, x=(6, 40)) for s in (1, 2, 3)]
    feeds[1]["x"][2, 3] = number
    check(model_of([node(name, ["x"], ["y"])], feeds[0], ["y"]), feeds)
    mask = np.zeros((6, 40), np.float32)
    mask[0, 5:] = mask[3] = mask[4, 0] = number  # a constant is not checked at each run
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "k"], ["a"]), node(name, ["a"], ["y"])]
    check(model_of(nodes, feeds[0], ["y"], {"k": mask, **drawn(3, w=(40, 40))}), feeds)
    nodes = [node("Add", ["x", "k"], ["a"]), node(name, ["a"], ["y"])]
    check(model_of(nodes, feeds[0], ["y"], {"k": mask}), feeds)


@pytest.mark.parametrize("opset", [9, 11, 13])
@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (60, 5), (3, 40), (2, 3, 7)])
def test_softmax_of_what_may_not_be_finite(shape: tuple[int, ...], opset: int) -> None:
    """A logarithm may be infinite or NaN: NumPy computes the softmax, of few numbers without it."""
    feeds = [drawn(s, x=shape) for s in (1, 2, 3)]
    feeds[1]["x"].flat[::5] = 0
    axis = len(shape) - 1
    used = check(
        model_of([node("Log", ["x"], ["a"]), node("Softmax", ["a"], ["y"], axis=axis)], feeds[0], ["y"], opset=opset), feeds
    )
    assert used[-1] == "numpy.softmax"


@pytest.mark.parametrize(
    ("shape", "axis", "scale", "shift"),
    [
        ((2, 20, 768), -1, (768,), (768,)), ((2, 20, 768), 2, (768,), None), ((5, 33), 1, (1, 33), (33,)),
        ((2, 3, 4, 5), 2, (4, 5), (4, 5)),
        ((2, 3, 4, 5), 0, (2, 3, 4, 5), None), ((7,), 0, (7,), (7,)), ((5, 1), 1, (1,), (1,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("constant", [False, True])
def test_layer_normalization(shape: Any, axis: int, scale: Any, shift: Any, constant: bool) -> None:
    feeds = [drawn(s, x=shape, g=scale, **({} if shift is None else {"b": shift})) for s in (1, 2)]
    nodes = [node("LayerNormalization", list(feeds[0]), ["y"], axis=axis, epsilon=1e-3)]
    if constant:
        held = {n: v for n, v in feeds[0].items() if n != "x"}
        used = check(model_of(nodes, {"x": feeds[0]["x"]}, ["y"], held), [{"x": f["x"]} for f in feeds])
    else:
        used = check(model_of(nodes, feeds[0], ["y"]), feeds)
    assert used == [used[0]] and used[0].startswith("layer_normalization jit")


@pytest.mark.parametrize("case", ["mean", "scalar scale", "double", "no epsilon", "view"])
def test_layer_normalization_of_other_forms(case: str) -> None:
    dtype = np.float64 if case == "double" else np.float32
    feeds = [{"x": drawn(s, x=(4, 6, 32))["x"].astype(dtype)} for s in (1, 2)]
    scale = np.ones((1,) if case == "scalar scale" else (32,), dtype)
    name, nodes = "x", []
    if case == "view":
        feeds = [{"x": f["x"].transpose(1, 2, 0)} for f in feeds]
        name, nodes = "t", [node("Transpose", ["x"], ["t"], perm=[2, 0, 1])]
    outputs = ["y", "m"] if case == "mean" else ["y"]
    nodes.append(node("LayerNormalization", [name, "g"], outputs, epsilon=0.0 if case == "no epsilon" else 1e-5))
    used = check(model_of(nodes, feeds[0], outputs, {"g": scale}), feeds)
    assert any(u.startswith("layer_normalization") for u in used) == (case == "view")


def test_not_finite_values_spread_over_a_row() -> None:
    for number in (np.nan, np.inf):
        feeds = [drawn(s, x=(6, 40)) for s in (1, 2, 3)]
        feeds[1]["x"][2, 3] = number
        nodes = [node("LayerNormalization", ["x", "g"], ["y"])]
        check(model_of(nodes, feeds[0], ["y"], {"g": np.ones(40, np.float32)}), feeds)


@pytest.mark.parametrize(
    ("shape", "axis", "scale"),
    [((2, 20, 768), -1, (768,)), ((5, 33), 1, (1, 33)), ((2, 3, 4, 5), 2, (4, 5)), ((7,), 0, (7,)), ((5, 1), 1, (1,))],
)
def test_rms_normalization(shape: Any, axis: int, scale: Any) -> None:
    feeds = [drawn(s, x=shape) for s in (1, 2)]
    nodes = [node("RMSNormalization", ["x", "g"], ["y"], axis=axis, epsilon=1e-3)]
    used = check(model_of(nodes, feeds[0], ["y"], drawn(3, g=scale)), feeds)
    assert used[0] == "numpy.vecdot" and used[1].startswith("layer_normalization jit")
    nodes = [node("Transpose", ["x"], ["t"]), node("RMSNormalization", ["t", "g"], ["y"], axis=-1)]
    check(model_of(nodes, feeds[0], ["y"], drawn(3, g=shape[:1])), feeds)
    nodes = [node("Neg", ["x"], ["t"]), node("RMSNormalization", ["t", "g"], ["y"], axis=axis)]  # in place
    check(model_of(nodes, feeds[0], ["y"], drawn(3, g=scale)), feeds)
    for number in (np.nan, np.inf):
        feeds[1]["x"].reshape(-1)[-1] = number
        check(model_of(nodes, feeds[0], ["y"], drawn(3, g=scale)), feeds)
