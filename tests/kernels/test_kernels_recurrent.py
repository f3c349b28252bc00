"""The kernels of RNN, GRU and LSTM against their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
KINDS = ["RNN", "GRU", "GRU-after", "LSTM"]
NAMES = ["x", "w", "r", "b", "lengths", "h", "c", "p"]
OUTPUTS = ["y", "yh", "yc"]
Arrays = dict[str, np.ndarray]


def operands(
    kind: str, time: int = 5, batch: int = 3, width: int = 7, hidden: int = 9, directions: int = 1, layout: int = 0, seed: int = 0
) -> Arrays:
    """Every operand of a layer."""
    rows = GATES[kind[:4].rstrip("-")] * hidden
    sizes = {
        "x": (batch, time, width) if layout else (time, batch, width),
        "w": (directions, rows, width),
        "r": (directions, rows, hidden),
        "b": (directions, 2 * rows),
        "h": (batch, directions, hidden) if layout else (directions, batch, hidden),
        "c": (batch, directions, hidden) if layout else (directions, batch, hidden),
        "p": (directions, 3 * hidden),
    }
    made = drawn(seed, **sizes)
    small = np.float32(1.5 / np.sqrt(hidden))  # larger weights of the state magnify rounding errors from step to step
    return {n: v if n == "x" else v * small for n, v in made.items()}


def layer(kind: str, given: set[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    """The node, with these operands and outputs."""
    op = "GRU" if kind == "GRU-after" else kind
    names = NAMES if op == "LSTM" else NAMES[:6]
    wanted = OUTPUTS if op == "LSTM" else OUTPUTS[:2]
    if kind == "GRU-after":
        attributes["linear_before_reset"] = 1
    return helper.make_node(
        op, [n if n in given else "" for n in names], [o if o in outputs else "" for o in wanted], **attributes
    )


def run(
    kind: str,
    given: str,
    outputs: str = "y yh yc",
    *,
    variable: str = "x h c",
    sizes: dict[str, int] | None = None,
    before: Any = (),
    opset: int = 22,
    change: Any = None,
    **attributes: Any,
) -> list[str]:
    """Compare a layer with its definition; `variable` names the operands that are inputs of the model."""
    present = {"x", "w", "r", *given.split()} - (set() if kind == "LSTM" else {"c", "p"})
    results = [o for o in outputs.split() if o != "yc" or kind == "LSTM"]
    sizes = dict(sizes or {})
    sizes["directions"] = 2 if attributes.get("direction") == "bidirectional" else 1
    sizes["layout"] = attributes.get("layout", 0)
    attributes.setdefault("hidden_size", sizes.get("hidden", 9))
    feeds, constants = [], {}
    for seed in (1, 2):
        values = {n: v for n, v in operands(kind, **sizes, seed=seed).items() if n in present}
        if change is not None:
            change(values)
        if "lengths" in present:
            values["lengths"] = np.full(sizes.get("batch", 3), sizes.get("time", 5), np.int32)
        constants = constants or {n: v for n, v in values.items() if n not in variable.split()}
        feeds.append({n: v for n, v in values.items() if n not in constants})
    model = model_of([*before, layer(kind, present, results, **attributes)], feeds[0], results, constants, opset)
    return check(model, feeds)


def is_fast(used: list[str], kind: str) -> bool:
    return used[-1].startswith((kind[:4].rstrip("-")).lower() + " ")


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_directions_and_layouts(kind: str, layout: int, direction: str) -> None:
    for time, batch in ((5, 3), (1, 1), (1, 4), (6, 1)):
        used = run(kind, "b h c", sizes={"time": time, "batch": batch}, direction=direction, layout=layout)
        assert is_fast(used, kind), used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variable", ["x", "x w", "x r b", "x w r b h c p"])
def test_operands(kind: str, variable: str) -> None:
    optional = ["b", "h", "c", "p"] if kind == "LSTM" else ["b", "h"]
    for n, direction in ((0, "forward"), (1, "reverse"), (2, "bidirectional"), (3, "forward"), (4, "bidirectional")):
        for given in itertools.combinations(optional, min(n, len(optional))):
            used = run(kind, " ".join(given), variable=variable, direction=direction, layout=n % 2)
            assert is_fast(used, kind), used
    assert is_fast(run(kind, "b h c", variable="h c"), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind: str) -> None:
    results = OUTPUTS if kind == "LSTM" else OUTPUTS[:2]
    for n in range(1, len(results) + 1):
        for wanted in itertools.combinations(results, n):
            for layout in (0, 1):
                assert is_fast(run(kind, "b h c", " ".join(wanted), direction="bidirectional", layout=layout), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 1, 1, 16), (3, 2, 33, 17), (4, 16, 16, 64), (7, 5, 40, 130), (20, 1, 128, 128)]
)
def test_sizes(kind: str, sizes: tuple[int, int, int, int]) -> None:
    named = dict(zip(("time", "batch", "width", "hidden"), sizes, strict=True))
    assert is_fast(run(kind, "b p" if kind == "LSTM" else "b", sizes=named), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads(kind: str) -> None:
    assert is_fast(run(kind, "b", sizes={"time": 2, "batch": 40, "width": 64, "hidden": 160}), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("perm", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1)])
def test_transposed_input(kind: str, perm: tuple[int, ...]) -> None:
    before = [helper.make_node("Transpose", ["x0"], ["x"], perm=perm)]

    def change(values: Arrays) -> None:
        values["x0"] = np.ascontiguousarray(values.pop("x").transpose(np.argsort(perm)))

    for layout in (0, 1):
        assert is_fast(run(kind, "b", variable="x0", before=before, change=change, layout=layout), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step, axis", [(2, 0), (-1, 0), (2, 1), (2, 2)])
def test_sliced_input(kind: str, step: int, axis: int) -> None:
    before = [helper.make_node("Slice", ["x0", "start", "end", "axis", "step"], ["x"])]
    last = np.iinfo(np.int64).max

    def change(values: Arrays) -> None:
        values["x0"] = np.repeat(values.pop("x"), abs(step), axis=axis)
        numbers = {"start": 0 if step > 0 else last, "end": last if step > 0 else -last, "axis": axis, "step": step}
        values |= {n: np.array([v], np.int64) for n, v in numbers.items()}

    assert is_fast(run(kind, "b", variable="x0", before=before, change=change), kind) or step < 0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kind", "place"), [(k, p) for k in KINDS for p in ("xwrbhcp" if k == "LSTM" else "xwrbh")])
def test_not_finite(kind: str, number: float, place: str) -> None:
    def change(values: Arrays) -> None:
        values[place].reshape(-1)[3] = number

    for batch in (1, 3):
        run(kind, "b h c p", variable=f"x {place}", sizes={"batch": batch}, change=change)
    run(kind, "b h c p", change=change, direction="bidirectional")


def test_relu() -> None:
    """Relu turns NaN into 0 in oneDNN."""

    def change(values: Arrays) -> None:
        values["x"].reshape(-1)[:2] = np.nan, np.inf

    assert is_fast(run("RNN", "b h", activations=["Relu"]), "RNN")
    run("RNN", "b h", activations=["Relu"], change=change)
    assert is_fast(run("RNN", "b", direction="bidirectional", activations=["Relu", "relu"]), "RNN")
    assert is_fast(run("RNN", "b", activations=["Tanh", "Tanh"]), "RNN")
    assert not is_fast(run("RNN", "b", direction="bidirectional", activations=["Relu", "Tanh"]), "RNN")


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("LSTM", {"clip": 0.5}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Tanh"]}),
        ("GRU", {"activations": ["Sigmoid", "Relu"]}),
        ("GRU", {"clip": 1.0}),
        ("RNN", {"activations": ["Sigmoid"]}),
        ("RNN", {"clip": 0.25}),
    ],
)
def test_what_oneDNN_does_not_have(kind: str, attributes: dict[str, Any]) -> None:
    assert not is_fast(run(kind, "b", **attributes), kind)


def test_default_activations_may_be_named() -> None:
    assert is_fast(run("LSTM", "b", activations=["sigmoid", "TANH", "Tanh"], clip=0.0), "LSTM")
    assert is_fast(run("GRU", "b", direction="bidirectional", activations=["Sigmoid", "Tanh"] * 2), "GRU")


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind: str) -> None:
    assert is_fast(run(kind, "b lengths h c", direction="bidirectional"), kind)
    assert not is_fast(run(kind, "b lengths", variable="x lengths"), kind)

    def shorter(values: Arrays) -> None:
        values["lengths"] = np.array([2, 5, 0], np.int32)

    values = operands(kind, seed=3)
    shorter(values)
    given = {n: values[n] for n in ("w", "r", "lengths")}
    model = model_of([layer(kind, {"x", *given}, ["y", "yh"], hidden_size=9)], {"x": values["x"]}, ["y", "yh"], given, 22)
    assert not is_fast(check(model, [{"x": values["x"]}, {"x": values["x"] * 2}]), kind)


@pytest.mark.parametrize("opset", [1, 3, 7, 14, 22])
def test_versions(opset: int) -> None:
    for kind in KINDS if opset >= 3 else ("RNN", "LSTM"):
        assert is_fast(run(kind, "b", opset=opset), kind)


def test_gru_1_with_its_default_direction() -> None:
    values = operands("GRU", seed=1)
    constants = {n: values[n] for n in ("w", "r", "b")}
    x = {"x": values["x"]}
    model = model_of([helper.make_node("GRU", ["x", "w", "r", "b"], ["y", "yh"], hidden_size=9)], x, ["y", "yh"], constants, 1)
    assert is_fast(check(model, [x, {"x": values["x"] * 2}]), "GRU")


def test_packed_weights_are_shared_by_plans() -> None:
    values = operands("LSTM", batch=4, seed=1)
    constants = {n: values[n] for n in ("w", "r", "b")}
    model = model_of([layer("LSTM", {"x", *constants}, ["y"], hidden_size=9)], {"x": values["x"]}, ["y"], constants, 22)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "time"
    prepared = SingaBackend.prepare(model)
    rep = SingaRep(prepared.graph, prepared.device, options=Options(threads=1))
    first = rep.run([values["x"]])[0]
    assert rep._session._planner is not None
    held = {
        k: id(v) for k, v in rep._session._planner.shared.kernels.derived.items() if isinstance(k, tuple) and "weights" in str(k)
    }
    second = rep.run([values["x"][:3]])[0]
    assert len(held) == 2 and len(rep._session._planner.plans) == 1
    again = {
        k: id(v) for k, v in rep._session._planner.shared.kernels.derived.items() if isinstance(k, tuple) and "weights" in str(k)
    }
    assert again == held
    np.testing.assert_allclose(second, first[:3], rtol=0, atol=1e-6)


def test_invalid_layers_are_refused_as_by_the_definition() -> None:
    values = operands("LSTM", seed=1)
    for name, broken in (("w", values["w"][:, :-1]), ("b", values["b"][:, :-1]), ("h", values["h"][:, :-1])):
        constants = {**{n: values[n] for n in ("w", "r", "b", "h")}, name: broken}
        node = layer("LSTM", {"x", *constants}, ["y"], hidden_size=9)
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info(n, 1, None) for n in ("x", *constants)],
            [helper.make_tensor_value_info("y", 1, None)],
        )
        prepared = SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
        errors = []
        for level in (0, 2):
            rep = SingaRep(prepared.graph, prepared.device, options=Options(level=level))
            with pytest.raises(Exception, match="shape") as raised:
                rep.run([values["x"], *constants.values()])
            errors.append((type(raised.value), str(raised.value)))
        assert errors[0] == errors[1]
