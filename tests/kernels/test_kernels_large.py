"""The kernels of elementwise operators on large arrays against their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.kernels import onednn

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node
FUNCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Relu", {}), ("LeakyRelu", {"alpha": 0.2}), ("Elu", {"alpha": 0.7}), ("Sigmoid", {}), ("Tanh", {}), ("HardSigmoid", {}),
    ("HardSwish", {}), ("Swish", {"alpha": 1.5}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Mish", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attributes"), FUNCTIONS)
@pytest.mark.parametrize("perm", [None, (2, 0, 1)])
def test_functions(name: str, attributes: dict[str, Any], perm: Any) -> None:
    feeds = [{"x": drawn(s, x=(8, 64, 129))["x"] * np.float32(9)} for s in (1, 2)]
    nodes = [node(name, ["t" if perm else "x"], ["y"], **attributes)]
    if perm:
        nodes.insert(0, node("Transpose", ["x"], ["t"], perm=perm))
    (used,) = check(model_of(nodes, feeds[0], ["y"]), feeds)
    assert used.startswith("eltwise jit")


@pytest.mark.parametrize("name", ["Sigmoid", "Tanh"])
@pytest.mark.parametrize("size", [1, 3, 20, 70000])
def test_sigmoid_and_tanh_of_values_that_may_be_nan(name: str, size: int) -> None:
    feeds = [drawn(s, x=(size,)) for s in (1, 2, 3)]
    feeds[2]["x"][0] = np.inf
    nodes = [node("Sqrt", ["x"], ["s"]), node(name, ["s"], ["y"])]
    used = check(model_of(nodes, feeds[0], ["y"]), feeds)
    assert used[-1].startswith("eltwise jit") or (name == "Tanh" and size < 70000)


@pytest.mark.parametrize(("name", "attributes"), FUNCTIONS)
@pytest.mark.parametrize("size", [1, 3, 20])
def test_functions_of_few_elements(name: str, attributes: dict[str, Any], size: int) -> None:
    feeds = [drawn(s, x=(size,)) for s in (1, 2)]
    (used,) = check(model_of([node(name, ["x"], ["y"], **attributes)], feeds[0], ["y"]), feeds)
    assert used.startswith("numpy") == (name not in ("Sigmoid", "Swish"))


@pytest.mark.parametrize(("name", "attributes"), FUNCTIONS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_functions_of_what_is_not_finite(name: str, attributes: dict[str, Any], number: float) -> None:
    feeds = [drawn(s, x=(64, 129)) for s in (1, 2, 3)]
    feeds[1]["x"][3, 4] = number
    nodes = [node(name, ["x"], ["y"], **attributes)]
    check(model_of(nodes, feeds[0], ["y"]), feeds)
    held = drawn(4, c=(129,))
    held["c"][7] = number  # a constant is not checked at each run
    nodes = [node("Add", ["x", "c"], ["s"]), node(name, ["s"], ["y"], **attributes)]
    check(model_of(nodes, feeds[0], ["y"], held), [feeds[0], feeds[2]])


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div", "Sum"])
@pytest.mark.parametrize("shape", [(8, 64, 129), (129,), (64, 1), (8, 1, 1), (1, 64, 129), (1, 8, 64, 129), ()])
@pytest.mark.parametrize("after", ["", "Relu", "Sigmoid"])
def test_pairs(name: str, shape: tuple[int, ...], after: str) -> None:
    feeds = [drawn(s, a=(8, 64, 129), b=shape) for s in (1, 2)]
    for f in feeds:
        f["b"] = np.abs(f["b"]) + np.float32(0.5)
    for names in (["a", "b"], ["b", "a"]):
        if name == "Div" and names[0] == "b":
            continue
        nodes = [node(name, names, ["s" if after else "y"])]
        if after:
            nodes.append(node(after, ["s"], ["y"]))
        used = check(model_of(nodes, feeds[0], ["y"]), feeds)
        assert len(shape) != 3 or shape[0] == 1 or shape[-1] == 1 or used[0].startswith("binary jit")


def test_a_chain_is_one_pass() -> None:
    feeds = [drawn(s, a=(8, 64, 128), b=(8, 64, 128)) for s in (1, 2)]
    nodes = [
        node("Add", ["a", "b"], ["s"]),
        node("Mul", ["b", "s"], ["t"]),
        node("Mul", ["t", "h"], ["u"]),
        node("Relu", ["u"], ["y"]),
    ]
    (used,) = check(model_of(nodes, feeds[0], ["y"], {"h": np.float32(0.5)}), feeds)
    assert used.startswith("binary jit")
    nodes = [node("Transpose", [n], [n + "t"], perm=[1, 2, 0]) for n in "ab"] + [
        node("Add", ["at", "bt"], ["s"]),
        node("Relu", ["s"], ["y"]),
    ]
    (used,) = check(model_of(nodes, feeds[0], ["y"]), feeds)
    assert used.startswith("binary jit")


def test_in_place() -> None:
    feeds = [drawn(s, a=(300, 300)) for s in (1, 2)]
    nodes = [
        node("MatMul", ["a", "w"], ["m"]),
        node("MatMul", ["a", "v"], ["n"]),
        node("Sigmoid", ["m"], ["o"]),
        node("Mul", ["o", "n"], ["p"]),
        node("Add", ["p", "o"], ["q"]),
        node("Gelu", ["q"], ["y"]),
    ]
    check(model_of(nodes, feeds[0], ["y"], drawn(5, w=(300, 300), v=(300, 300))), feeds)
    check(model_of(nodes, feeds[0], ["y", "m", "p"], drawn(5, w=(300, 300), v=(300, 300))), feeds)


@pytest.mark.parametrize(
    "shape", [(64, 64, 1), (64, 64, 1, 1), (70, 3, 40, 1), (1, 4096, 1, 1), (64, 64, 2), (4096, 1, 1), (16, 16, 16, 1)]
)
@pytest.mark.parametrize("mask", list(itertools.product((0, 1), repeat=4)))
def test_an_operand_of_a_follower_for_every_set_of_axes(shape: tuple[int, ...], mask: tuple[int, ...]) -> None:
    wide = tuple(d if m else 1 for d, m in zip(shape, mask, strict=False))
    feeds = [drawn(s, x=shape, c=(1, shape[1], *[1] * (len(shape) - 2)), t=wide) for s in (1, 2)]
    check(model_of([node("Mul", ["x", "c"], ["p"]), node("Add", ["p", "t"], ["y"])], feeds[0], ["y"]), feeds)
    check(model_of([node("Add", ["x", "x"], ["p"]), node("Mul", ["p", "t"], ["y"])], feeds[0], ["y"]), feeds)
